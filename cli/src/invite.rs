//! `galaxy invite`: a line by which other machines join.

use super::{connection::Connection, duration, failure::Failure, json, print, progress};
use clap::Args;
use galaxy_client::Invitation;
use galaxy_common::DeviceName;
use galaxy_proto::identity::{Moment, Role};
use std::time::Duration;

/// Arguments of `galaxy invite`.
#[derive(Args, Debug)]
pub struct InviteArgs {
    /// What who joins may do: device, client or admin.
    #[arg(long, default_value = "device", value_parser = role)]
    role: Role,
    /// How many may join by it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    uses: u32,
    /// For how long it holds, like 15m.
    #[arg(long = "for", value_name = "TIME", default_value = "15m", value_parser = duration)]
    lasts: Duration,
    /// The name of who joins [default: it chooses, or has that of its machine].
    #[arg(long, value_parser = |text: &str| DeviceName::new(text))]
    name: Option<DeviceName>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

fn role(text: &str) -> Result<Role, String> {
    match text.parse::<Role>() {
        Ok(Role::Coordinator) => Err("nobody joins as a coordinator".to_owned()),
        role => role.map_err(|error| error.to_string()),
    }
}

/// `galaxy invite`.
pub async fn invite(args: InviteArgs) -> Result<(), Failure> {
    let InviteArgs { role, uses, lasts, name, json: as_json, connection } = args;
    let client = connection.open_admin().await?;
    let invited = client.invite(role, uses, lasts, name.as_ref());
    let invitation = progress::watch("asking the coordinator", invited).await?;
    if as_json {
        return print(&json(&invitation)?);
    }
    print(&show(&invitation, role, uses))
}

/// What to do with an invitation.
pub(super) fn show(invitation: &Invitation, role: Role, uses: u32) -> String {
    let Invitation { line, until } = invitation;
    let until = Moment(*until);
    let who = match uses {
        1 => format!("one {role} may join"),
        uses => format!("{uses} machines may join, as {role}s,"),
    };
    let then = match role {
        Role::Device => "\n  galaxy-worker",
        _ => "",
    };
    format!(
        "{who} until {until}. There run this, and paste the line when it asks:\n\n  galaxy join{then}\n\n{line}\n"
    )
}
