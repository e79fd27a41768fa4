//! A network that goes with its owner, and may be connected to this machine itself.

use super::{Network, NetworkNode, SUBNET, batch, run};
use crate::namespaces::{inside, namespace};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{ops::Deref, path::Path};

/// The beginning of the alias of an interface that connects this machine; the id of the process that made it
/// follows.
const OWNER: &str = "connected-by-";

impl Network {
    /// Like [`Network::up`], with a result that removes the network when it is dropped.
    ///
    /// # Errors
    /// As [`Network::up`].
    pub fn held(testbed: &str, places: &[NetworkNode]) -> Result<NetworkGuard> {
        Ok(NetworkGuard { network: Self::up(testbed, places)?, outside: None })
    }
}

/// A network that is removed when dropped.
#[derive(Debug)]
pub struct NetworkGuard {
    network: Network,
    outside: Option<String>,
}

impl NetworkGuard {
    /// Connects this machine itself to the bridge, with `address`. It is the only interface outside of the
    /// namespaces, and is named as the testbed. All testbeds have the same addresses: one that a killed
    /// process left connected would get what is meant for this one, so it is removed first.
    ///
    /// # Errors
    /// When the kernel refuses, or while another process has a testbed connected.
    pub fn joined(mut self, address: &str) -> Result<Self> {
        disconnect_abandoned()?;
        let name = self.testbed().to_owned();
        let hub = namespace(&name, "hub");
        let pair = format!("link add {name} type veth peer name outside netns {hub}");
        let owner = format!("link set {name} alias {OWNER}{}", std::process::id());
        batch("ip", &[pair, owner])?;
        self.outside = Some(name.clone());
        inside(&hub, || batch("ip", &["link set outside master br0 up".into()]))??;
        let steps = [format!("addr add {address} dev {name}"), format!("link set {name} up")];
        batch("ip", &steps)?;
        Ok(self)
    }
}

impl Deref for NetworkGuard {
    type Target = Network;
    fn deref(&self) -> &Network {
        &self.network
    }
}

impl Drop for NetworkGuard {
    fn drop(&mut self) {
        // It would vanish with the hub, but later, and until then its route leads nowhere.
        if let Some(name) = &self.outside {
            let _ = run("ip", &["link", "del", name]);
        }
        if let Err(error) = Network::down(self.testbed()) {
            eprintln!("something of testbed {} is left: {error:#}", self.testbed());
        }
    }
}

/// Removes the testbeds that are connected to this machine by processes that are gone, and names them.
///
/// # Errors
/// When one is connected by a process that lives.
fn disconnect_abandoned() -> Result<()> {
    #[derive(Deserialize)]
    struct Interface {
        // The lines of other interfaces are empty objects.
        #[serde(default)]
        ifname: String,
        #[serde(default)]
        ifalias: String,
    }
    let interfaces = |arguments: &[&str]| -> Result<Vec<Interface>> {
        serde_json::from_str(&run("ip", arguments)?).context("what `ip -j` says")
    };
    let subnet = format!("{SUBNET}.0/24");
    let found = interfaces(&["-j", "address", "show", "to", &subnet])?;
    for Interface { ifname, .. } in found.into_iter().filter(|one| !one.ifname.is_empty()) {
        // Only this form of the command shows the alias.
        let links = interfaces(&["-j", "link", "show", &ifname])?;
        let owner = links.iter().find_map(|link| link.ifalias.strip_prefix(OWNER));
        let owner = owner.with_context(|| {
            format!(
                "the interface {ifname} of this machine has an address in {subnet}, which test networks \
                 use: if it is a testbed's, `galaxy-testbed down {ifname}` removes it"
            )
        })?;
        ensure!(
            !Path::new("/proc").join(owner).exists(),
            "testbed {ifname} of process {owner} is connected to this machine, and has the addresses of \
             this one: wait until it ends, or remove it with `galaxy-testbed down {ifname}`"
        );
        eprintln!("testbed {ifname}, left by process {owner}, which is gone, is removed");
        run("ip", &["link", "del", &ifname])?;
        Network::down(&ifname)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::process::geteuid;
    use std::process::Command;

    #[test]
    fn a_network_that_a_killed_process_left_connected_is_removed() {
        if !geteuid().is_root() {
            eprintln!("skipped: namespaces need root");
            return;
        }
        let of = |what: &str, places: &[NetworkNode]| {
            Network::held(&format!("{what}{}", std::process::id()), places).unwrap()
        };
        let places = [NetworkNode { name: "d".to_owned(), link: None }];
        // In a namespace of its own, so that no other test's connection is in the way.
        let machine = of("machine", &[]);
        let tried = inside(&namespace(machine.testbed(), "hub"), || {
            let mut gone = Command::new("true").spawn().unwrap();
            gone.wait().unwrap();
            let old = of("old", &places);
            let (name, address) = (old.testbed(), format!("{SUBNET}.200/24"));
            let connect = |owner: u32| {
                let steps = [
                    format!("link add {name} type veth peer name out"),
                    format!("link set {name} alias {OWNER}{owner}"),
                    format!("address add {address} dev {name}"),
                ];
                batch("ip", &steps).unwrap();
            };
            connect(std::process::id());
            let error = disconnect_abandoned().unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("wait until it ends"), "{error}");
            run("ip", &["link", "del", name]).unwrap();
            connect(gone.id());
            let new = of("new", &places).joined(&address).unwrap();
            assert!(Network::open(name).unwrap().is_none(), "the old one is gone");
            assert!(Network::open(new.testbed()).unwrap().is_some());
        });
        tried.unwrap();
    }
}
