//! What a device announces of itself when it joins, and at which of its addresses it was reached.

use super::malformed::Malformed;
use crate::v1;
use galaxy_common::Bytes;
use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

/// The most addresses that a device may name.
pub const MAX_ADDRESSES: usize = 8;
/// The most memory of a device, in bytes.
const MAX_MEMORY: u64 = 1 << 50;
/// The most threads of a device.
const MAX_THREADS: u32 = 1024;

/// What a device announces of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The port of its worker.
    pub port: NonZeroU16,
    /// The addresses of its machine.
    pub addresses: Vec<IpAddr>,
    /// The memory that it offers.
    pub memory: Bytes,
    /// Threads for kernels.
    pub threads: u16,
}

impl TryFrom<v1::JoinAnnounce> for Facts {
    type Error = Malformed;
    fn try_from(wire: v1::JoinAnnounce) -> Result<Self, Malformed> {
        let v1::JoinAnnounce { port, addresses, memory_bytes, threads } = wire;
        let size = |field| Malformed::Size { field };
        if addresses.len() > MAX_ADDRESSES {
            return Err(size("addresses"));
        }
        let port = u16::try_from(port).ok().and_then(NonZeroU16::new).ok_or(size("port"))?;
        let address = |text: String| text.parse::<IpAddr>().map_err(|_| Malformed::Address);
        if !(1..=MAX_MEMORY).contains(&memory_bytes) {
            return Err(size("memory"));
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(size("number of threads"));
        }
        Ok(Self {
            port,
            addresses: addresses.into_iter().map(address).collect::<Result<_, _>>()?,
            memory: Bytes(memory_bytes),
            threads: threads as u16,
        })
    }
}

impl From<Facts> for v1::JoinAnnounce {
    fn from(facts: Facts) -> Self {
        Self {
            port: u32::from(facts.port.get()),
            addresses: facts.addresses.iter().take(MAX_ADDRESSES).map(IpAddr::to_string).collect(),
            memory_bytes: facts.memory.0,
            threads: u32::from(facts.threads),
        }
    }
}

/// Whether a device was reached at one of its addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attempt {
    /// The address, with the worker's port.
    pub address: SocketAddr,
    /// The reason why it was not reached there; none if it was.
    pub error: Option<String>,
}

impl TryFrom<v1::JoinAttempt> for Attempt {
    type Error = Malformed;
    fn try_from(wire: v1::JoinAttempt) -> Result<Self, Malformed> {
        let address = wire.address.parse().map_err(|_| Malformed::Address)?;
        let error = Some(wire.error).filter(|error| !error.is_empty());
        Ok(Self { address, error })
    }
}

/// Addresses of this machine that others may reach: neither loopback nor of one link only. They are in the order in
/// which the system lists them. None where the system does not list them.
pub fn local_addresses() -> Vec<IpAddr> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let v4 = of_trie(&read("/proc/net/fib_trie")).into_iter().map(IpAddr::V4);
    let v6 = of_interfaces(&read("/proc/net/if_inet6")).into_iter().map(IpAddr::V6);
    v4.chain(v6).take(MAX_ADDRESSES).collect()
}

/// The host's own addresses in a routing table of Linux: each stands above a line `/32 host LOCAL`.
fn of_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found: Vec<Ipv4Addr> = Vec::new();
    let mut last: Option<Ipv4Addr> = None;
    for line in text.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = last
            && !address.is_loopback()
            && !address.is_link_local()
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    found
}

/// The addresses in `/proc/net/if_inet6`: 32 digits, and in the fourth column the scope, which is 00 of those that
/// reach further than one link.
fn of_interfaces(text: &str) -> Vec<Ipv6Addr> {
    let address = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (digits, scope) = (columns.first()?, columns.get(3)?);
        let bits = u128::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 32)?;
        (*scope == "00").then(|| Ipv6Addr::from(bits))
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_read_from_the_kernel_tables() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     +-- 127.0.0.0/8 2 0 2\n        |-- 127.0.0.1\n           /32 host LOCAL\n     |-- 192.168.1.0\n        /24 link UNICAST\n     |-- 192.168.1.20\n        /32 host LOCAL\nLocal:\n     |-- 192.168.1.20\n        /32 host LOCAL\n     |-- 192.168.1.255\n        /32 link BROADCAST\n";
        assert_eq!(of_trie(trie), [Ipv4Addr::new(192, 168, 1, 20)]);
        let interfaces = "00000000000000000000000000000001 01 80 10 80       lo\nfe80000000000000021122fffe334455 02 40 20 80     eth0\nfd000000000000000000000000000020 02 40 00 80     eth0\nnonsense\n";
        assert_eq!(
            of_interfaces(interfaces),
            ["fd00::20".parse::<Ipv6Addr>().unwrap_or(Ipv6Addr::UNSPECIFIED)]
        );
        assert!(of_trie("").is_empty() && of_interfaces("").is_empty());
    }
}
