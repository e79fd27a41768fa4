//! Why bytes are no message of the join protocol.

/// The most bytes of a message: a certificate has 600, and a device eight addresses.
pub const MAX_BYTES: usize = 8 << 10;

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// More bytes than a message may have.
    #[error("a message of more than {MAX_BYTES} bytes")]
    Long,
    /// Not in the wire format, or none of the known messages.
    #[error("it does not speak Galaxy's join protocol")]
    Wire,
    /// A field that has not the bytes that it must have, or more than it may.
    #[error("a message with a {field} of a wrong size")]
    Size {
        /// The name of the field.
        field: &'static str,
    },
    /// A name that is not valid.
    #[error("that is no name: use lower-case letters, digits and hyphens")]
    Name,
    /// A role that is not known.
    #[error("a role that is not known")]
    Role,
    /// An address that is not valid.
    #[error("an address that is not known")]
    Address,
}
