//! The wire of Galaxy: generated gRPC code, its conversions to domain types, and what both sides
//! of every connection share: identities, channels, doors and typed faults.

pub mod channel;
pub mod convert;
pub mod door;
pub mod fault;
pub mod identity;
#[cfg(feature = "members")]
pub mod join;

/// Generated from `proto/galaxy/v1/*.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("galaxy.v1");
}

/// The protocol that this build speaks. Coordinator and workers must speak the same.
pub const PROTOCOL: u32 = 15;
/// Between two signs of life of a sequence that waits for the cluster or for room.
pub const WAITING: std::time::Duration = std::time::Duration::from_secs(2);
/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit of this build; "unknown" outside a checkout.
pub const COMMIT: &str = env!("GALAXY_COMMIT");
/// The largest gRPC message that either side takes; larger results travel in pieces.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// The ALPN of gRPC.
pub const ALPN_CONTROL: &[u8] = b"h2";
/// The ALPN of ring links.
pub const ALPN_RING: &[u8] = b"galaxy-ring/1";
/// The ALPN of machines that join a cluster: the one protocol that is spoken without a certificate.
pub const ALPN_JOIN: &[u8] = b"galaxy-join/1";

/// What `--version` prints: version, commit and protocol.
pub fn version_line() -> String {
    format!("{VERSION} (commit {COMMIT}, protocol {PROTOCOL})")
}
