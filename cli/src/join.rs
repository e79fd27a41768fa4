//! `galaxy join`: this machine becomes a member of a cluster.

use super::{failure::Failure, json, print, progress, tell};
use clap::Args;
use galaxy_common::DeviceName;
use galaxy_proto::{
    identity::{Identity, Role},
    join::{JoinError, JoinLine, home, identity_in, join as join_by},
};
use std::{
    fs,
    io::{BufRead, IsTerminal},
    path::{Path, PathBuf},
    time::Duration,
};

/// The most bytes that are read of standard input, for the invitation.
const MAX_LINE: u64 = 4096;
/// How long to wait where the coordinator asks for it; after that its refusal is final.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `galaxy join`.
#[derive(Args, Debug)]
pub struct JoinArgs {
    /// The line of `galaxy invite` [default: read from standard input].
    ///
    /// A line that may be used several times is taken from standard input only, since everybody on this machine can
    /// read arguments.
    #[arg(value_name = "LINE")]
    line: Option<String>,
    /// Name to join with, unless the invitation has one [default: the host name].
    #[arg(long, value_parser = |text: &str| DeviceName::new(text))]
    name: Option<DeviceName>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs `galaxy join`.
pub async fn join(args: JoinArgs) -> Result<(), Failure> {
    let home = home().ok_or_else(|| {
        Failure::new("there is no place for an identity: this user has no home")
            .todo("set GALAXY_HOME")
    })?;
    let line = line(args.line)?;
    let into = identity_in(&home, line.invitation.role());
    unjoined(&into)?;
    let wish = args.name.or_else(name_of_machine);
    let joined = progress::watch("joining", patient(&line, wish.as_ref())).await?;
    let (granted, coordinator) = (&joined.granted, &joined.coordinator);
    let into = identity_in(&home, granted.role);
    private(&home)?;
    joined.store(&into).map_err(failure)?;
    if args.json {
        return print(&json(&serde_json::json!({
            "name": granted.name, "role": granted.role.to_string(), "identity": into,
            "coordinator": coordinator, "addresses": joined.addresses,
        }))?);
    }
    let next = match granted.role {
        Role::Device => "start it: galaxy-worker",
        _ => "ask it: galaxy status",
    };
    print(&format!(
        "joined as {} {}; the identity is in {}, and its key was made here\n{next}\n",
        granted.role,
        granted.name,
        into.display()
    ))
}

/// Joins, and tries again where the coordinator asks to wait.
async fn patient(
    line: &JoinLine,
    wish: Option<&DeviceName>,
) -> Result<galaxy_proto::join::Joined, Failure> {
    let mut waited = Duration::ZERO;
    loop {
        match join_by(line, wish).await {
            Err(JoinError::Refused(refusal)) if refusal.wait_s > 0 && waited < PATIENCE => {
                let wait = Duration::from_secs(u64::from(refusal.wait_s)).min(PATIENCE);
                tell(&refusal.message);
                tokio::time::sleep(wait).await;
                waited += wait;
            }
            joined => return joined.map_err(failure),
        }
    }
}

fn failure(error: JoinError) -> Failure {
    Failure::new(error.to_string())
}

/// Creates Galaxy's home directory, for its owner only.
pub(super) fn private(home: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(home);
    made.map_err(|error| Failure::new(format!("{} cannot be made: {error}", home.display())))
}

/// Fails if this machine has an identity in the directory `into` already.
fn unjoined(into: &Path) -> Result<(), Failure> {
    if !into.exists() {
        return Ok(());
    }
    let who = match Identity::load(into) {
        Ok(identity) => format!("{} {}", identity.role(), identity.name()),
        Err(error) => format!("an identity that is not in order ({error})"),
    };
    Err(Failure::new(format!("this machine has joined already, as {who}")).todo(format!(
        "have an admin run `galaxy devices remove NAME`, remove {}, and join again; or set GALAXY_HOME to another directory",
        into.display()
    )))
}

fn line(given: Option<String>) -> Result<JoinLine, Failure> {
    let parse = |text: &str| text.parse::<JoinLine>().map_err(|e| Failure::new(e.to_string()));
    if let Some(text) = given {
        let line = parse(&text)?;
        if line.invitation.several() {
            return Err(Failure::usage(
                "this line may be used more than once, and everybody on this machine can read arguments",
            )
            .todo("run `galaxy join` without it, and give it on standard input"));
        }
        return Ok(line);
    }
    let input = std::io::stdin();
    if input.is_terminal() {
        tell("paste the line of `galaxy invite`:");
    }
    let mut text = String::new();
    // Whole commands are pasted, too, and lines around it.
    let mut lines = std::io::Read::take(input.lock(), MAX_LINE);
    loop {
        text.clear();
        let read = lines.read_line(&mut text);
        let read = read.map_err(|e| Failure::new(format!("standard input cannot be read: {e}")))?;
        if read == 0 || !text.trim().is_empty() {
            return parse(&text);
        }
    }
}

/// The host name of this machine, as the name of a member; none if it cannot be one.
pub(super) fn name_of_machine() -> Option<DeviceName> {
    let host = fs::read_to_string(PathBuf::from("/proc/sys/kernel/hostname")).ok()?;
    named(&host)
}

fn named(host: &str) -> Option<DeviceName> {
    let first = host.trim().split('.').next()?.to_ascii_lowercase();
    let label: String =
        first.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(48).collect();
    DeviceName::new(label.trim_matches('-')).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn host_names_become_device_names() {
        let name = |host: &str| named(host).map(|name| name.to_string());
        assert_eq!(name("raspberrypi\n").as_deref(), Some("raspberrypi"));
        assert_eq!(name("Anna_s-MacBook.local").as_deref(), Some("anna-s-macbook"));
        assert_eq!(name("---"), None);
        assert_eq!(name(&"x".repeat(80)).map(|name| name.len()), Some(48));
    }

    #[test]
    fn an_invitation_for_several_uses_is_refused_as_an_argument() {
        let id = |several| galaxy_proto::join::InvitationId::random(Role::Device, several).unwrap();
        let text = |several| {
            let addresses = vec!["10.0.0.1:7000".to_owned()];
            let (pin, secret) =
                (galaxy_proto::join::Pin([1; 16]), galaxy_proto::join::Secret([2; 16]));
            JoinLine { addresses, pin, invitation: id(several), secret }.text()
        };
        assert!(line(Some(text(false))).is_ok());
        assert_eq!(line(Some(text(true))).unwrap_err().exit_code(), 2);
        assert_eq!(line(Some("10.0.0.1:7000".to_owned())).unwrap_err().exit_code(), 1);
    }

    #[test]
    fn a_machine_that_joined_cannot_join_again() {
        let dir = tempfile::tempdir().unwrap();
        assert!(unjoined(&dir.path().join("device")).is_ok());
        let failed = unjoined(dir.path()).unwrap_err().to_string();
        assert!(failed.contains("joined already") && failed.contains("remove"), "{failed}");
    }
}
