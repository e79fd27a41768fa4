//! Addresses that guess secrets are slowed down, as a pure state machine. Nobody is shut out: 128
//! bits are not guessed, and a machine that shares an address with a guesser waits, and then joins.

use galaxy_proto::door::counted;
use std::{collections::HashMap, net::IpAddr, time::Duration};

/// The pause after the first failure, which doubles with each.
const FIRST: Duration = Duration::from_millis(500);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(30);
/// The time without a failure after which the failures of an address are forgotten.
const FORGIVEN: Duration = Duration::from_secs(600);
/// How many addresses are remembered.
const ADDRESSES: usize = 4096;

/// A point in time, as the duration since the start.
type Now = Duration;

#[derive(Debug, Clone, Copy)]
struct Record {
    failures: u32,
    last: Now,
}

impl Record {
    fn until(&self) -> Now {
        let pause = FIRST.saturating_mul(1 << self.failures.saturating_sub(1).min(10));
        self.last + pause.min(LONGEST)
    }
}

/// The failures of addresses that are remembered.
#[derive(Debug, Default)]
pub struct Slowness {
    records: HashMap<IpAddr, Record>,
}

impl Slowness {
    /// How long this address has to wait; none if it does not have to.
    pub fn wait(&self, now: Now, address: IpAddr) -> Option<Duration> {
        let until = self.records.get(&counted(address))?.until();
        until.checked_sub(now).filter(|wait| !wait.is_zero())
    }

    /// Notes that a request from this address has failed.
    pub fn failed(&mut self, now: Now, address: IpAddr) {
        let network = counted(address);
        if self.records.len() >= ADDRESSES && !self.records.contains_key(&network) {
            self.records.retain(|_, record| now < record.last + FORGIVEN);
            // A guesser with so many addresses is not stopped by this, but by the number of bits.
            if let Some(oldest) = self.records.iter().min_by_key(|(_, record)| record.last)
                && self.records.len() >= ADDRESSES
            {
                let oldest = *oldest.0;
                self.records.remove(&oldest);
            }
        }
        let record = self.records.entry(network).or_insert(Record { failures: 0, last: now });
        if now >= record.last + FORGIVEN {
            record.failures = 0;
        }
        *record = Record { failures: record.failures.saturating_add(1), last: now };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn seconds(s: f64) -> Now {
        Duration::from_secs_f64(s)
    }

    #[test]
    fn each_failure_doubles_the_wait_of_its_address_and_of_no_other() {
        let (bad, good) = (Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into());
        let mut slowness = Slowness::default();
        let mut now = seconds(0.0);
        let mut waits = Vec::new();
        for _ in 0..8 {
            slowness.failed(now, bad);
            let wait = slowness.wait(now, bad).unwrap_or_default();
            waits.push(wait.as_secs_f64());
            now += wait;
            assert_eq!(slowness.wait(now, bad), None, "then it may");
        }
        assert_eq!(waits, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]);
        assert_eq!(slowness.wait(now, good), None);
        slowness.failed(now + FORGIVEN, bad);
        assert_eq!(slowness.wait(now + FORGIVEN, bad), Some(FIRST));
    }

    #[test]
    fn failures_count_by_ipv6_network_and_remembered_addresses_are_bounded() {
        let of = |text: &str| text.parse::<IpAddr>().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let mut slowness = Slowness::default();
        slowness.failed(seconds(0.0), of("fd00::1"));
        assert!(slowness.wait(seconds(0.1), of("fd00::2")).is_some());
        assert!(slowness.wait(seconds(0.1), of("fd00:0:0:1::2")).is_none());
        slowness.failed(seconds(0.0), of("::ffff:10.0.0.1"));
        assert!(slowness.wait(seconds(0.1), of("10.0.0.1")).is_some());
        for i in 0..3 * ADDRESSES as u32 {
            slowness.failed(seconds(1.0), IpAddr::V4(i.into()));
        }
        assert!(slowness.records.len() <= ADDRESSES);
    }
}
