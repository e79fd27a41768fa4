//! Names and numbers that tell things apart.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The longest device name; it must fit one DNS label with room for a role.
pub const MAX_NAME_BYTES: usize = 48;

/// The name of a device, as it stands in `cluster.toml` and in its certificate.
///
/// Lower-case letters, digits and `-`, 1 to 48 bytes, neither first nor last `-`:
/// one DNS label, because certificates carry it as one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

/// A name that cannot be a device's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is not a name: use 1 to {MAX_NAME_BYTES} lower-case letters, digits and '-', and no '-' at either end"
)]
pub struct NameError {
    /// The name that was given.
    pub name: String,
}

impl DeviceName {
    /// Parses a name.
    ///
    /// # Errors
    /// When it is no DNS label of the allowed length.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        let ok = (1..=MAX_NAME_BYTES).contains(&name.len())
            && !name.starts_with('-')
            && !name.ends_with('-')
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if ok { Ok(Self(name)) } else { Err(NameError { name }) }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for DeviceName {
    type Error = NameError;
    fn try_from(name: String) -> Result<Self, NameError> {
        Self::new(name)
    }
}
impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.0
    }
}
impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl fmt::Debug for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

number!(
    /// Grows with every new plan or new set of ring links; all traffic carries it.
    Epoch(u64)
);
number!(
    /// The place of a program in the order in which an epoch runs programs.
    SequenceNumber(u64)
);
number!(
    /// The number by which a client names its request, for `galaxy trace`.
    RequestId(u64)
);
number!(
    /// A device's place in the ring order of a plan.
    Rank(u16)
);

impl Epoch {
    /// The first epoch of a coordinator that starts so many seconds after 1970: above those of all that
    /// started before it.
    pub const fn starting(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1 << 20))
    }

    /// The epoch after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}
impl SequenceNumber {
    /// The sequence number after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
impl Rank {
    /// The rank as an index into the ring.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["pi-1", "a", "0"] {
            assert!(DeviceName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "Pi", "a.b", "ä", &"x".repeat(49)] {
            assert!(DeviceName::new(bad).is_err(), "{bad}");
        }
    }
}
