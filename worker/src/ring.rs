//! Ring links: how the devices of a plan find each other, and what carries their tiles.
//!
//! Each link of a plan goes one way; the sender dials. Both ends check that the other is the
//! device that the plan names, by its certificate, and that both were placed with the same plan.

pub mod handshake;

mod arrival;
mod closed;
mod dial;
mod error;
mod form;
mod quic;
mod stream;
mod tcp;

pub(crate) use arrival::ProbeArrival;
pub use arrival::Ring;
pub use dial::PeerAddress;
pub use error::RingError;
pub use form::Formation;
pub use quic::bind as bind_quic;
pub(crate) use stream::{Duplex, Stream};
