//! Shared air: devices whose links have one shaped medium for all of them, as those on one radio
//! channel have.
//!
//! A packet leaves its device by `eth0` into the namespace `hub`, goes from there through the one
//! shaped link, `air`, into the namespace `far`, and from there reaches the other device by `eth1`.
//! So all that any device sends, acknowledgements too, waits in one queue.

use crate::{
    namespaces::{inside, namespace},
    network::{CONGESTION, Link, Network, batch, configured, shape},
};
use anyhow::Result;
use std::fs;

/// The address of both routers as devices see them; no device has it.
const ROUTER: &str = "10.201.79.1";
/// The addresses of the shaped link's two ends.
const AIR: [&str; 2] = ["10.201.80.1", "10.201.80.2"];

/// Devices on shared air. Dropping the value removes them, and ends their processes.
#[derive(Debug)]
pub struct Air {
    testbed: String,
    places: Vec<String>,
}

impl Air {
    /// Makes the namespaces of `testbed` for these places, and the medium between them.
    ///
    /// # Errors
    /// Without root, or where the kernel lacks something.
    pub fn up(testbed: &str, places: &[String], link: Link) -> Result<Self> {
        Network::down(testbed)?;
        let air = Self { testbed: testbed.to_owned(), places: places.to_vec() };
        air.make(&link)?;
        Ok(air)
    }

    /// The address of place `i`.
    pub fn address(i: usize) -> String {
        format!("10.201.78.{}", i + 1)
    }

    /// Calls `call` on a thread inside place `i`.
    ///
    /// # Errors
    /// When it cannot be entered.
    pub fn inside<T: Send>(&self, i: usize, call: impl FnOnce() -> T + Send) -> Result<T> {
        inside(&self.namespace(&self.places[i]), call)
    }

    fn namespace(&self, place: &str) -> String {
        namespace(&self.testbed, place)
    }

    fn make(&self, link: &Link) -> Result<()> {
        let (hub, far) = (self.namespace("hub"), self.namespace("far"));
        let places = self.places.iter().map(|place| self.namespace(place));
        let all: Vec<String> = places.clone().chain([far.clone(), hub.clone()]).collect();
        let made: Vec<String> = all.iter().map(|name| format!("netns add {name}")).collect();
        batch("ip", &made)?;
        for name in &all {
            inside(name, || -> Result<()> {
                // A packet comes in by another interface than the answer goes out by.
                for of in ["all", "default"] {
                    fs::write(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter"), "0")?;
                }
                fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
                // Where the kernel leaves it to no namespace, it stays what it is.
                let _ = fs::write("/proc/sys/net/ipv4/tcp_congestion_control", CONGESTION);
                Ok(())
            })??;
        }
        let mut here = vec![
            format!("link add air type veth peer name air netns {far}"),
            configured("air", Some(link)),
            format!("addr add {}/30 dev air", AIR[0]),
            "link set air up".to_owned(),
            format!("route add default via {} dev air", AIR[1]),
        ];
        let mut there = vec![
            configured("air", Some(link)),
            format!("addr add {}/30 dev air", AIR[1]),
            "link set air up".to_owned(),
        ];
        for (i, inner) in places.enumerate() {
            for (router, ends) in [(&mut here, ("t", "eth0")), (&mut there, ("r", "eth1"))] {
                let port = format!("{}{i}", ends.0);
                router
                    .push(format!("link add {port} type veth peer name {} netns {inner}", ends.1));
                router.push(configured(&port, Some(link)));
                router.push(format!("addr add {ROUTER}/32 dev {port}"));
                router.push(format!("link set {port} up"));
            }
            there.push(format!("route add {}/32 dev r{i}", Self::address(i)));
        }
        inside(&far, || batch("ip", &["link set lo up".to_owned()]))??;
        inside(&hub, || batch("ip", &here[..1]))??;
        inside(&far, || batch("ip", &there))??;
        inside(&hub, || -> Result<()> {
            batch("ip", &here[1..])?;
            batch("tc", &shape("air", link, false))
        })??;
        for i in 0..self.places.len() {
            self.inside(i, || {
                let steps = [
                    configured("eth0", Some(link)),
                    configured("eth1", Some(link)),
                    "link set lo up".to_owned(),
                    format!("addr add {}/32 dev lo", Self::address(i)),
                    "link set eth0 up".to_owned(),
                    "link set eth1 up".to_owned(),
                    format!("route add {ROUTER}/32 dev eth0"),
                    format!("route add default via {ROUTER} dev eth0 src {}", Self::address(i)),
                ];
                batch("ip", &steps)
            })??;
        }
        Ok(())
    }
}

impl Drop for Air {
    fn drop(&mut self) {
        if let Err(error) = Network::down(&self.testbed) {
            eprintln!("something of testbed {} is left: {error:#}", self.testbed);
        }
    }
}
