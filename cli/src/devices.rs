//! `galaxy devices`: lists the members of the cluster, those that were removed among them, and
//! removes members.

use super::{
    connection::Connection,
    failure::Failure,
    json, print, progress,
    table::{row, table},
};
use clap::{Args, Subcommand};
use galaxy_common::DeviceName;

/// Arguments of `galaxy devices`.
#[derive(Args, Debug)]
pub struct DevicesArgs {
    #[command(subcommand)]
    command: Option<DevicesCommand>,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Subcommand, Debug)]
enum DevicesCommand {
    /// Remove a device, a client or an admin for good.
    ///
    /// Its certificate is refused from now on, its connections end, and the cluster goes on without
    /// it. Its name is not given again.
    Remove {
        /// Name of the member to remove.
        #[arg(value_parser = |text: &str| DeviceName::new(text))]
        name: DeviceName,
    },
}

/// Runs `galaxy devices`.
pub async fn devices(args: DevicesArgs) -> Result<(), Failure> {
    let client = args.connection.open_admin().await?;
    match args.command {
        Some(DevicesCommand::Remove { name }) => {
            progress::watch("asking the coordinator", client.remove_member(&name)).await?;
            match args.json {
                true => print(&json(&serde_json::json!({ "removed": name }))?),
                false => print(&format!(
                    "{name} was removed: nobody of the cluster lets it in any more. Its name is not given again\n"
                )),
            }
        }
        None => {
            let members = client.list_members();
            let members = progress::watch("asking the coordinator", members).await?;
            if args.json {
                return print(&json(&serde_json::json!({ "members": members }))?);
            }
            let mut rows = vec![row(["name", "role", "state", "address", ""])];
            rows.extend(
                members.into_iter().map(|m| vec![m.name, m.role, m.state, m.address, m.detail]),
            );
            print(&table(&rows))
        }
    }
}
