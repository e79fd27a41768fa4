//! A device's side of ring links of every type, without a worker around it. Tests of other crates
//! include it by its path.

use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_RING,
    door::{Door, Hook, Peer},
    identity::{Authority, Identity, Role},
};
use galaxy_worker::ring::{PeerAddress, Ring, bind_quic};
use std::{net::UdpSocket, sync::Arc};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;

/// A device that takes ring links of every type.
pub struct RingDevice {
    pub ring: Ring,
    pub identity: Identity,
    pub at: PeerAddress,
    _door: tokio::task::JoinHandle<()>,
}

/// A port that is free for TCP and UDP, bound for both.
async fn both() -> (TcpListener, UdpSocket) {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Another test may have it.
        if let Ok(socket) = bind_quic(listener.local_addr().unwrap()) {
            return (listener, socket);
        }
    }
}

/// A device of this authority.
pub async fn device(authority: &Authority, who: &str) -> RingDevice {
    let name = DeviceName::new(who).unwrap();
    let identity = Identity::load(&authority.issue(&name, Role::Device, 30).unwrap()).unwrap();
    let ring = Ring::default();
    let (listener, socket) = both().await;
    ring.open_quic(socket, &identity).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let arriving = ring.clone();
    let hook: Hook = Arc::new(move |peer, stream| {
        tokio::spawn(arriving.clone().arrive(peer, stream));
    });
    let mut door = Door::open(listener, Some(&identity), Some((ALPN_RING, hook)));
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain_port = plain.local_addr().unwrap().port();
    let arriving = ring.clone();
    let door = tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = door.next() => {}
                accepted = plain.accept() => {
                    let (stream, address) = accepted.unwrap();
                    let peer = Peer { identity: None, address };
                    tokio::spawn(arriving.clone().arrive_plain(peer, stream));
                }
            }
        }
    });
    RingDevice { ring, identity, at: PeerAddress { address, plain_port }, _door: door }
}
