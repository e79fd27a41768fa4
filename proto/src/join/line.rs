//! The line of an invitation: `HOST:PORT[,HOST:PORT...].PIN.INVITATION.SECRET`.

use crate::identity::Role;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom, SystemRandom},
};
use rustls::pki_types::CertificateDer;
use std::{fmt, str::FromStr};

/// The most addresses of a line.
const MAX_ADDRESSES: usize = 8;
/// The most bytes of a line: eight long names of hosts, and the rest.
const MAX_LINE_BYTES: usize = 1024;

/// The first 128 bits of the SHA-256 of the authority's public key. Finding another key with the same ones takes
/// 2^128 tries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pin(pub [u8; 16]);

impl Pin {
    /// The pin of an authority, by its certificate; none if that is not one.
    pub fn of(authority: &CertificateDer<'_>) -> Option<Self> {
        let anchor = webpki::anchor_from_trusted_cert(authority).ok()?;
        let digest = digest(&SHA256, &anchor.subject_public_key_info);
        let mut pin = [0; 16];
        pin.copy_from_slice(&digest.as_ref()[..16]);
        Some(Self(pin))
    }
}

/// The public id of an invitation. Its first byte says what the invitation is for, so that a machine knows before it
/// joins; what holds is what the coordinator stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct InvitationId(pub [u8; 8]);

/// The bit in the first byte of an invitation that may be used more than once.
const SEVERAL: u8 = 0x80;
/// The bits of the first byte that hold the role.
const ROLE: u8 = 0x03;

/// The secret of an invitation.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The error of a system that gives no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random bytes")]
pub struct NoRandomness;

fn random<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(bytes)
}

impl InvitationId {
    /// A new id, for a role and one use, or several.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn random(role: Role, several: bool) -> Result<Self, NoRandomness> {
        let mut id: [u8; 8] = random()?;
        let role = match role {
            Role::Device => 0,
            Role::Client => 1,
            Role::Admin => 2,
            Role::Coordinator => 3,
        };
        id[0] = id[0] & !(SEVERAL | ROLE) | role | if several { SEVERAL } else { 0 };
        Ok(Self(id))
    }
    /// The role for which the invitation is.
    pub fn role(&self) -> Role {
        match self.0[0] & ROLE {
            0 => Role::Device,
            1 => Role::Client,
            2 => Role::Admin,
            _ => Role::Coordinator,
        }
    }
    /// Whether it may be used more than once.
    pub fn several(&self) -> bool {
        self.0[0] & SEVERAL != 0
    }
}
impl Secret {
    /// A new secret.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn random() -> Result<Self, NoRandomness> {
        random().map(Self)
    }
}

/// Text that is no line of an invitation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("that is no line of `galaxy invite`: {why}; copy all of it, from the address to the end")]
pub struct LineError {
    why: &'static str,
}

macro_rules! text_form {
    ($type:ident, $bytes:literal, $why:literal) => {
        impl FromStr for $type {
            type Err = LineError;
            fn from_str(text: &str) -> Result<Self, LineError> {
                let bytes = URL_SAFE_NO_PAD.decode(text).ok();
                let bytes = bytes.and_then(|bytes| <[u8; $bytes]>::try_from(bytes).ok());
                bytes.map(Self).ok_or(LineError { why: $why })
            }
        }
        impl $type {
            /// Its text form, of letters, digits, `-` and `_`.
            pub fn text(&self) -> String {
                URL_SAFE_NO_PAD.encode(self.0)
            }
        }
    };
}
text_form!(Pin, 16, "the pin of the authority has 22 characters");
text_form!(InvitationId, 8, "the name of the invitation has 11 characters");
text_form!(Secret, 16, "the secret at its end has 22 characters");

impl fmt::Display for InvitationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

/// What a machine needs to join: whoever has it may join.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JoinLine {
    /// The addresses at which the coordinator may be reached, as host:port; at least one.
    pub addresses: Vec<String>,
    /// The pin of the coordinator's authority.
    pub pin: Pin,
    /// The public id of the invitation.
    pub invitation: InvitationId,
    /// The secret of the invitation.
    pub secret: Secret,
}

impl JoinLine {
    /// The line as text.
    pub fn text(&self) -> String {
        let Self { addresses, pin, invitation, secret } = self;
        let addresses = addresses.join(",");
        format!("{addresses}.{}.{}.{}", pin.text(), invitation.text(), secret.text())
    }
}

impl FromStr for JoinLine {
    type Err = LineError;
    fn from_str(text: &str) -> Result<Self, LineError> {
        let wrong = |why| LineError { why };
        let text = text.trim();
        // People copy the whole command, too.
        let text = text.strip_prefix("galaxy join").map_or(text, str::trim_start);
        if text.len() > MAX_LINE_BYTES {
            return Err(wrong("it is too long"));
        }
        let mut parts = text.rsplitn(4, '.');
        let mut next = || parts.next().ok_or(wrong("parts of it are missing"));
        let (secret, invitation, pin, addresses) = (next()?, next()?, next()?, next()?);
        let (secret, invitation, pin) = (secret.parse()?, invitation.parse()?, pin.parse()?);
        let addresses: Vec<String> = addresses.split(',').map(str::to_owned).collect();
        let good = |address: &String| {
            let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0))
                && address.chars().all(|c| c.is_ascii_graphic())
        };
        if addresses.len() > MAX_ADDRESSES || !addresses.iter().all(good) {
            return Err(wrong("it begins with the coordinator's address, as host:port"));
        }
        Ok(Self { addresses, pin, invitation, secret })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_id_contains_its_role_and_whether_several_may_join() {
        for (role, several) in [(Role::Device, true), (Role::Client, false), (Role::Admin, true)] {
            let id = InvitationId::random(role, several).unwrap();
            assert_eq!((id.role(), id.several()), (role, several));
            assert_ne!(Ok(id), InvitationId::random(role, several));
        }
    }

    #[test]
    fn an_invitation_line_is_parsed_as_it_was_written() {
        let line = JoinLine {
            addresses: vec![
                "192.168.1.10:7000".into(),
                "[fd00::1]:7000".into(),
                "nuc.local:7000".into(),
            ],
            pin: Pin([7; 16]),
            invitation: InvitationId([255; 8]),
            secret: Secret([0; 16]),
        };
        let text = line.text();
        assert_eq!(text.parse(), Ok(line.clone()));
        assert_eq!(format!("  galaxy join {text}\n").parse(), Ok(line.clone()));
        let shown = format!("{line:?}");
        assert!(!shown.contains("0, 0"), "the secret is in {shown}");
        for bad in [
            "",
            "192.168.1.10:7000",
            &text[1..text.len() - 1],
            &text.replace(":7000", ""),
            &text.replace(":7000", ":0"),
            &text.replacen("192", "\u{1b}", 1),
            &"x".repeat(5000),
            &format!("{}{text}", "a:1,".repeat(6)),
        ] {
            assert!(bad.parse::<JoinLine>().is_err(), "{bad}");
        }
    }
}
