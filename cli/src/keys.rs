//! `galaxy keys`: identities for devices, coordinators and clients.

use super::{failure::Failure, json, print};
use clap::{Args, Subcommand};
use galaxy_common::DeviceName;
use galaxy_proto::identity::{Authority, IdentityError, Role};
use std::{path::PathBuf, str::FromStr};

/// The authority's directory among those of identities.
const AUTHORITY: &str = "ca";

/// Arguments of `galaxy keys`.
#[derive(Args, Debug)]
pub struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Subcommand, Debug)]
enum KeysCommand {
    /// Create the authority of a cluster.
    ///
    /// Keep DIR/ca on one machine: whoever has its key is trusted.
    Init {
        /// Directory of the authority and of identities.
        #[arg(long, value_name = "DIR", default_value = "keys")]
        dir: PathBuf,
        /// Name of the cluster.
        #[arg(long, value_name = "NAME", default_value = "home")]
        cluster: String,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Issue an identity: a directory to copy to its machine.
    Issue {
        /// Name of the device, coordinator, client or admin.
        #[arg(value_parser = |text: &str| DeviceName::new(text))]
        name: DeviceName,
        /// Role of the identity: device, coordinator, client or admin.
        #[arg(long, value_parser = Role::from_str)]
        role: Role,
        /// Days for which the identity is valid.
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
        /// Directory of the authority and of identities.
        #[arg(long, value_name = "DIR", default_value = "keys")]
        dir: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// Runs `galaxy keys`.
pub fn keys(args: &KeysArgs) -> Result<(), Failure> {
    let failed = |error: IdentityError| Failure::new(error.to_string());
    match &args.command {
        KeysCommand::Init { dir, cluster, json: as_json } => {
            Authority::create(dir, cluster).map_err(failed)?;
            let authority = dir.join(AUTHORITY);
            if *as_json {
                return print(&json(
                    &serde_json::json!({ "cluster": cluster, "authority": authority }),
                )?);
            }
            print(&format!(
                "the authority of cluster {cluster:?} is in {}; keep it on this machine\n\
                 next: galaxy keys issue NAME --role device|coordinator|client --dir {}\n",
                authority.display(),
                dir.display()
            ))
        }
        KeysCommand::Issue { name, role, days, dir, json: as_json } => {
            if name.as_str() == AUTHORITY {
                return Err(Failure::usage(format!(
                    "{AUTHORITY:?} is where the authority itself lives"
                ))
                .todo("choose another name"));
            }
            let authority = Authority::open(dir).map_err(failed)?;
            let path = authority.issue(name, *role, *days).map_err(failed)?;
            if *as_json {
                return print(&json(&serde_json::json!({
                    "name": name,
                    "role": role.to_string(),
                    "days": days,
                    "identity": path,
                }))?);
            }
            print(&format!(
                "the identity of {role} {name:?} is in {}, valid for {days} days: \
                 copy that directory to its machine\n",
                path.display()
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_proto::identity::Identity;

    #[test]
    fn issued_identities_load() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().to_owned();
        let run = |command| keys(&KeysArgs { command });
        run(KeysCommand::Init { dir: dir.clone(), cluster: "home".into(), json: true }).unwrap();
        let name = DeviceName::new("laptop").unwrap();
        let role = Role::Client;
        run(KeysCommand::Issue { name, role, days: 1, dir: dir.clone(), json: false }).unwrap();
        assert_eq!(Identity::load(&dir.join("laptop")).unwrap().role(), Role::Client);
        let name = DeviceName::new(AUTHORITY).unwrap();
        let on_top = run(KeysCommand::Issue { name, role, days: 1, dir: dir.clone(), json: false });
        assert_eq!(on_top.unwrap_err().exit_code(), 2);
        let again = run(KeysCommand::Init { dir, cluster: "home".into(), json: false });
        assert_eq!(again.unwrap_err().exit_code(), 1);
    }
}
