//! Announces to the coordinator where this device is: at the start, and whenever nothing has come from it for a
//! while. So a device that joined, or has moved to another address, is found.

use crate::core::Core;
use galaxy_common::Bytes;
use galaxy_engine::measure::free_memory;
use galaxy_proto::join::{self, Attempt, Contact, Facts, JoinError, local_addresses};
use std::{
    net::SocketAddr,
    num::NonZeroU16,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::sleep;

/// A coordinator that has asked nothing for so long does not know where this device is. It asks twice a second.
const SILENCE: Duration = Duration::from_secs(10);
/// The time between two checks of that silence.
const LOOK: Duration = Duration::from_secs(2);
/// The pause before the second attempt; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// The memory that is offered where the system does not say what is free.
const MEMORY: Bytes = Bytes(1 << 30);

/// Announces the worker that listens at `at`, until the worker ends.
pub(crate) async fn announce(core: Weak<Core>, contact: Contact, at: SocketAddr) {
    let Some(port) = NonZeroU16::new(at.port()) else { return };
    let (mut pause, mut said) = (RETRY_MIN, String::new());
    let mut first = true;
    loop {
        let Some(core) = core.upgrade() else { return };
        if first || core.silent_for() >= SILENCE {
            first = false;
            let told = tell(&core, &contact, at, port).await;
            let now = match told {
                Ok(attempts) => outcome(&attempts, port),
                Err(error) => format!("the coordinator is not told where this device is: {error}"),
            };
            if now != said {
                tracing::info!("{now}");
                said = now;
            }
            drop(core);
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        } else {
            pause = RETRY_MIN;
            drop(core);
            sleep(LOOK).await;
        }
    }
}

/// Announces to the coordinator at the first of its addresses that answers.
async fn tell(
    core: &Arc<Core>,
    contact: &Contact,
    at: SocketAddr,
    port: NonZeroU16,
) -> Result<Vec<Attempt>, JoinError> {
    let addresses = match at.ip() {
        ip if ip.is_unspecified() => local_addresses(),
        ip => vec![ip],
    };
    let memory = free_memory().unwrap_or(MEMORY);
    let facts = Facts { port, addresses, memory, threads: core.grant.threads };
    let mut failed = None;
    for address in &contact.addresses {
        match join::announce(&core.identity, (address, &contact.name), facts.clone()).await {
            Ok(attempts) => return Ok(attempts),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    // A contact has addresses.
    failed.map_or_else(|| Ok(Vec::new()), Err)
}

/// What the coordinator found, as a line for people.
fn outcome(attempts: &[Attempt], port: NonZeroU16) -> String {
    if let Some(reached) = attempts.iter().find(|attempt| attempt.error.is_none()) {
        return format!("the coordinator reaches this device at {}", reached.address);
    }
    let tried = attempts.iter().map(|attempt| {
        format!("{} ({})", attempt.address, attempt.error.as_deref().unwrap_or_default())
    });
    format!(
        "the coordinator cannot reach this device: open port {port} (TCP, and UDP for QUIC) in its firewall. Tried: {}",
        tried.collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_address_gives_a_hint_to_open_the_port() {
        let attempt = |address: &str, error: Option<&str>| Attempt {
            address: address.parse().unwrap(),
            error: error.map(str::to_owned),
        };
        let port = NonZeroU16::new(7100).unwrap();
        let all = [attempt("10.0.0.1:7100", Some("timed out")), attempt("[fd00::1]:7100", None)];
        assert!(outcome(&all, port).ends_with("at [fd00::1]:7100"));
        let none = outcome(&all[..1], port);
        assert!(none.contains("open port 7100") && none.contains("timed out"), "{none}");
    }
}
