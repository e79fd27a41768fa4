//! Connections that come over QUIC: their handshakes wait in a lobby, as over TCP.

use super::{Connection, QuicPipe};
use galaxy_proto::door::{Peer, Sampled, SharedLobby};
use quinn::{ConnectionError, Endpoint};
use std::{sync::Arc, time::Duration};
use tokio::{runtime::Handle, time::timeout};

/// Handshakes at one time; where there are so many, each new one sends another away.
pub(super) const HANDSHAKES: usize = 256;
/// With so many under way, callers first have to prove their address.
pub(super) const CROWD: usize = 16;
/// The time for a handshake and the stream after it.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Takes connections until the socket is closed, and hands their streams to `arrive`. Without 0-RTT: what comes with it could be sent
/// again by anybody who saw it.
pub(super) async fn accept<F: Future<Output = ()> + Send>(
    endpoint: Endpoint,
    arrive: impl Fn(Peer, QuicPipe) -> F + Clone + Send + 'static,
) {
    let lobby = SharedLobby::new(HANDSHAKES);
    let refusals = Arc::new(Sampled::default());
    while let Some(incoming) = endpoint.accept().await {
        let crowded = lobby.len() >= CROWD;
        if crowded && incoming.may_retry() && !incoming.remote_address_validated() {
            // The caller may be asked for that.
            drop(incoming.retry());
            continue;
        }
        let (stay, notice) = lobby.arrive(incoming.remote_address().ip());
        let (arrive, refusals) = (arrive.clone(), refusals.clone());
        tokio::spawn(async move {
            let address = incoming.remote_address();
            let shaken = tokio::select! {
                shaken = timeout(HANDSHAKE_DEADLINE, shake(incoming)) => shaken,
                () = notice.given() => return,
            };
            drop(stay);
            let why = match shaken {
                Ok(Ok((peer, pipe))) => return arrive(peer, pipe).await,
                Ok(Err(error)) => error.to_string(),
                Err(late) => late.to_string(),
            };
            if let Some(left_out) = refusals.take() {
                tracing::warn!(%address, why, left_out, "refused a connection over QUIC");
            }
        });
    }
}

/// Does the handshake, and waits for the first stream.
async fn shake(incoming: quinn::Incoming) -> Result<(Peer, QuicPipe), ConnectionError> {
    let address = incoming.remote_address();
    let inner = incoming.accept()?.await?;
    let connection = Connection { inner, runtime: Handle::current() };
    let pipe = connection.accept().await?;
    Ok((Peer { identity: connection.identity(), address }, pipe))
}
