//! `galaxy invite`: makes an invitation, by which other machines join.

use super::{connection::Connection, duration, failure::Failure, json, print, progress};
use clap::Args;
use galaxy_client::Invitation;
use galaxy_common::DeviceName;
use galaxy_proto::identity::{Moment, Role};
use std::time::Duration;

/// Arguments of `galaxy invite`.
#[derive(Args, Debug)]
pub struct InviteArgs {
    /// Role of the machines that join: device, client or admin.
    #[arg(long, default_value = "device", value_parser = role)]
    role: Role,
    /// Number of machines that may join by the invitation.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    uses: u32,
    /// How long the invitation is valid, like 15m.
    #[arg(long = "for", value_name = "TIME", default_value = "15m", value_parser = duration)]
    lasts: Duration,
    /// Name that the machine joins with [default: its own choice, else its host name].
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

/// Runs `galaxy invite`.
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

/// An invitation with what to do with it, for people.
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
