//! Joining a cluster by a line of text, instead of copying keys.
//!
//! Who runs a cluster makes an *invitation*: a public id, a secret of 128 bits, a role, a number of uses, an end. Its
//! [`JoinLine`] says where the coordinator is, and a pin of the authority's key. The machine that joins makes its key
//! itself, and sends a request for a certificate over TLS 1.3 to a server whose chain ends in the pinned authority and
//! whose role is coordinator. Both sides prove that they know the secret over what only this channel has: its exporter,
//! and the keys of both ends. A proxy in the middle has another exporter, and a proof that was overheard is of no use.
//!
//! ```text
//! line.rs     the line of an invitation        vet.rs    is this the pinned cluster's coordinator?
//! message.rs  messages, decoded with bounds    guest.rs  the side that joins, as a state machine
//! request.rs  the request for a certificate    facts.rs  what a device says of itself when it comes
//! home.rs     where a machine keeps what it joined with
//! proof.rs    what both sides prove            dial.rs   the thin shell of sockets around guest and facts
//! malformed.rs      why bytes are no message
//! verified_join.rs  checks a request to join against the secret of its invitation
//! ```
//!
//! The coordinator's side is [`VerifiedJoin::check`], and what it keeps: `galaxy_coord::registry`.

mod dial;
mod facts;
mod guest;
mod home;
mod line;
mod malformed;
mod message;
mod proof;
mod request;
mod verified_join;
mod vet;
mod wire;

pub use dial::{Joined, announce, join};
pub use facts::{Attempt, Facts, MAX_ADDRESSES, local_addresses};
pub use guest::{Granted, Guest, JoinError, JoinStep};
pub use home::{Contact, StoreError, home, identity_in};
pub use line::{InvitationId, JoinLine, LineError, NoRandomness, Pin, Secret};
pub use malformed::{MAX_BYTES, Malformed};
pub use message::{Grant, Greeting, JoinRequest, Message, Refusal};
pub use proof::{Binding, EXPORTER, Proof};
pub use request::{PublicKey, Request, RequestError};
pub use verified_join::{AskError, VerifiedJoin};
pub use vet::{VetError, Vetted, vet};
pub use wire::{WireError, receive, send};
