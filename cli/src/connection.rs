//! The coordinator that a command asks, and its identity: by arguments, or as this machine has
//! joined.

use super::{duration, failure::Failure, progress};
use clap::Args;
use galaxy_client::Client;
use galaxy_proto::{
    channel::is_loopback,
    identity::Role,
    join::{Contact, home, identity_in},
};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

/// The address of the coordinator, where no argument names one and this machine has not joined a
/// cluster.
const DEFAULT_COORDINATOR: &str = "127.0.0.1:7000";
/// The name of the coordinator, where nothing names another; the guides use it.
const DEFAULT_NAME: &str = "coordinator";

/// Arguments that name the coordinator, and the identity to connect with.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Coordinator")]
pub(super) struct Connection {
    /// Address of the coordinator [default: that of the joined cluster, else 127.0.0.1:7000].
    #[arg(long, value_name = "HOST:PORT", env = "GALAXY_COORDINATOR")]
    coordinator: Option<String>,
    /// Directory of the identity to connect with [default: the one that this machine joined with].
    ///
    /// The default lies under $GALAXY_HOME or ~/.galaxy. Without an identity, only a coordinator on
    /// this machine can be reached.
    #[arg(long, value_name = "DIR", env = "GALAXY_IDENTITY")]
    identity: Option<PathBuf>,
    /// Name in the coordinator's certificate [default: that of the joined cluster, else
    /// coordinator].
    #[arg(long, value_name = "NAME")]
    coordinator_name: Option<String>,
    /// Time limit of each call, like 500ms, 60s or 5m.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    timeout: Duration,
    /// The coordinator's address where the arguments name none.
    #[arg(skip)]
    listens: Option<String>,
}

/// What to dial: addresses to try in order, the name in the certificate, and the identity to
/// connect with.
#[derive(Debug, PartialEq, Eq)]
struct ConnectionTarget {
    addresses: Vec<String>,
    name: String,
    identity: Option<PathBuf>,
}

impl Connection {
    /// The same connection, at this address unless the arguments name another.
    pub(super) fn or_at(self, address: String) -> Self {
        Self { listens: Some(address), ..self }
    }

    /// The same connection, at this address.
    pub(super) fn at(self, address: String) -> Self {
        Self { coordinator: Some(address), ..self }
    }

    /// Connects as a client.
    pub(super) async fn open(&self) -> Result<Client, Failure> {
        self.open_as(&[Role::Client, Role::Admin]).await
    }

    /// Connects as an admin.
    pub(super) async fn open_admin(&self) -> Result<Client, Failure> {
        self.open_as(&[Role::Admin]).await
    }

    async fn open_as(&self, roles: &[Role]) -> Result<Client, Failure> {
        let ConnectionTarget { addresses, name, identity } =
            self.target(home().as_deref(), roles)?;
        let mut failed = None;
        for address in addresses {
            let mut builder =
                Client::builder().address(&address).coordinator(&name).timeout(self.timeout);
            if let Some(identity) = &identity {
                builder = builder.identity(identity);
            }
            match progress::watch("connecting", builder.connect()).await {
                Ok(client) => return Ok(client),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // There is an address at least.
        Err(failed.map_or_else(|| Failure::new("no coordinator is known"), Failure::from))
    }

    fn target(&self, home: Option<&Path>, roles: &[Role]) -> Result<ConnectionTarget, Failure> {
        // A coordinator on this machine that is named without an identity is asked without one.
        let plain = self.coordinator.as_deref().is_some_and(is_loopback);
        let joined = || {
            let home = home.filter(|_| !plain)?;
            roles.iter().map(|role| identity_in(home, *role)).find(|dir| dir.exists())
        };
        let identity = self.identity.clone().or_else(joined);
        let contact = identity.as_deref().map(Contact::load).transpose();
        let contact = contact.map_err(|error| Failure::new(error.to_string()))?.flatten();
        let given = self.coordinator.clone().or_else(|| self.listens.clone());
        let given = given.map(|address| vec![address]);
        let (known, name) = contact.map(|contact| (contact.addresses, contact.name)).unzip();
        Ok(ConnectionTarget {
            addresses: given.or(known).unwrap_or_else(|| vec![DEFAULT_COORDINATOR.to_owned()]),
            name: self
                .coordinator_name
                .clone()
                .or(name.map(|name| name.to_string()))
                .unwrap_or_else(|| DEFAULT_NAME.to_owned()),
            identity,
        })
    }
}

/// The address at which this machine reaches a program of its own that listens at `listen`:
/// loopback, if that is all addresses.
pub(super) fn reachable(listen: &str) -> String {
    let Ok(mut address) = listen.parse::<SocketAddr>() else { return listen.to_owned() };
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address.to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::DeviceName;

    fn connection(coordinator: Option<&str>, identity: Option<&str>) -> Connection {
        Connection {
            coordinator: coordinator.map(str::to_owned),
            identity: identity.map(PathBuf::from),
            coordinator_name: None,
            timeout: Duration::from_secs(1),
            listens: None,
        }
    }

    #[test]
    fn a_wildcard_listen_address_is_reached_by_loopback() {
        for (listen, reached) in [
            ("0.0.0.0:7000", "127.0.0.1:7000"),
            ("[::]:7000", "[::1]:7000"),
            ("192.168.1.10:7000", "192.168.1.10:7000"),
            ("nuc.local:7000", "nuc.local:7000"),
        ] {
            assert_eq!(reachable(listen), reached);
        }
    }

    #[test]
    fn a_joined_machine_connects_without_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let home = Some(dir.path());
        let default = ConnectionTarget {
            addresses: vec![DEFAULT_COORDINATOR.to_owned()],
            name: DEFAULT_NAME.to_owned(),
            identity: None,
        };
        let roles = [Role::Client, Role::Admin];
        let target = |connection: Connection| connection.target(home, &roles).unwrap();
        assert_eq!(target(connection(None, None)), default);

        let client = identity_in(dir.path(), Role::Client);
        std::fs::create_dir_all(&client).unwrap();
        let name = DeviceName::new("nuc").unwrap();
        let addresses = vec!["192.168.1.10:7000".to_owned()];
        Contact { name, addresses: addresses.clone() }.save(&client).unwrap();
        let joined =
            ConnectionTarget { addresses, name: "nuc".to_owned(), identity: Some(client.clone()) };
        assert_eq!(target(connection(None, None)), joined);
        let here = target(connection(Some("127.0.0.1:7000"), None));
        assert_eq!(here, default, "on this machine without an identity, as was asked for");
        let other = target(connection(Some("10.0.0.1:7000"), None));
        assert_eq!(
            (other.addresses, other.identity),
            (vec!["10.0.0.1:7000".to_owned()], Some(client.clone()))
        );
        let named = target(connection(None, None).or_at("127.0.0.1:7001".to_owned()));
        assert_eq!(named.addresses, ["127.0.0.1:7001"]);
        assert_eq!(named.identity, Some(client), "an identity, as its cluster file asks for one");
        let own = target(connection(None, Some("keys/laptop")));
        assert_eq!((own.addresses, own.identity), (default.addresses, Some("keys/laptop".into())));
    }
}
