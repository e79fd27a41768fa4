//! What both sides prove: that they know the invitation's secret, on this channel, with these keys.
//!
//! A proof is HMAC-SHA-256 with the secret over the direction, the channel's exporter, the keys of both ends, the
//! request, and what is sent with it. Each part follows its length, so that no two lists of parts are the same bytes.

use super::{
    line::Secret,
    message::{JoinRequest, Malformed},
    request::{PublicKey, Request, RequestError},
};
use galaxy_common::DeviceName;
use ring::hmac;

/// The label of the channel's exporter (RFC 8446, section 7.5).
pub const EXPORTER: &[u8] = b"EXPORTER-galaxy-join";

/// What binds a proof to one channel: only its two ends know or show it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The exporter of the channel.
    pub exporter: [u8; 32],
    /// The server's public key, as a SubjectPublicKeyInfo.
    pub server: Vec<u8>,
}

/// A proof that its sender knows the secret of an invitation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof(pub [u8; 32]);

impl Proof {
    /// The proof of a machine that joins: `wish` is the name that it asks for.
    pub fn of_guest(
        secret: &Secret,
        binding: &Binding,
        request: &[u8],
        key: &PublicKey,
        wish: &str,
    ) -> Self {
        let signed = sign(secret, b"joins", binding, request, key, wish.as_bytes());
        let mut proof = [0; 32];
        proof.copy_from_slice(signed.as_ref());
        Self(proof)
    }

    /// The proof of the coordinator, with the certificate that it gives.
    pub fn of_host(
        secret: &Secret,
        binding: &Binding,
        request: &[u8],
        key: &PublicKey,
        certificate: &[u8],
    ) -> Self {
        let signed = sign(secret, b"grants", binding, request, key, certificate);
        let mut proof = [0; 32];
        proof.copy_from_slice(signed.as_ref());
        Self(proof)
    }

    /// Whether two proofs are the same; takes the same time whatever they are.
    pub(super) fn is(&self, other: &Self) -> bool {
        let differs = self.0.iter().zip(&other.0).fold(0, |differs, (a, b)| differs | (a ^ b));
        std::hint::black_box(differs) == 0
    }
}

fn sign(
    secret: &Secret,
    direction: &[u8],
    binding: &Binding,
    request: &[u8],
    key: &PublicKey,
    said: &[u8],
) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &secret.0));
    let parts: [&[u8]; 7] = [
        b"galaxy-join/1",
        direction,
        &binding.exporter,
        &binding.server,
        &key.info(),
        request,
        said,
    ];
    for part in parts {
        // No part has 2^32 bytes.
        context.update(&(part.len() as u32).to_be_bytes());
        context.update(part);
    }
    context.sign()
}

/// An ask whose sender knows the secret and has the key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerifiedJoin {
    /// The key that is to be certified.
    pub key: PublicKey,
    /// The name that its sender asks for, if any.
    pub wish: Option<DeviceName>,
}

/// Why an ask is not taken, before anything is looked up but the secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// The proof is of another secret, or of another channel.
    #[error("the secret is not that of the invitation, or the proof is of another connection")]
    Proof,
    /// The request for a certificate is not taken.
    #[error("the request for a certificate is not taken: {0}")]
    Request(#[from] RequestError),
    /// The name that is asked for is not valid.
    #[error(transparent)]
    Name(#[from] Malformed),
}

impl VerifiedJoin {
    /// Checks an ask against the secret of its invitation, on its channel.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(ask: &JoinRequest, secret: &Secret, binding: &Binding) -> Result<Self, AskError> {
        let key = Request::key_of(&ask.request)?;
        let proof = Proof::of_guest(secret, binding, &ask.request, &key, &ask.wish);
        if !proof.is(&ask.proof) {
            return Err(AskError::Proof);
        }
        let wish = match ask.wish.as_str() {
            "" => None,
            wish => Some(DeviceName::new(wish).map_err(|_| Malformed::Name)?),
        };
        Ok(Self { key, wish })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::join::line::InvitationId;

    fn ask(secret: &Secret, binding: &Binding, wish: &str) -> JoinRequest {
        let request = Request::new().unwrap();
        let key = Request::key_of(request.der()).unwrap();
        let proof = Proof::of_guest(secret, binding, request.der(), &key, wish);
        let (invitation, request) = (InvitationId([1; 8]), request.der().to_vec());
        JoinRequest { invitation, wish: wish.to_owned(), request, proof }
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_channel_one_key_and_one_name() {
        let secret = Secret([3; 16]);
        let binding = Binding { exporter: [5; 32], server: vec![6; 91] };
        let good = ask(&secret, &binding, "pi-1");
        let wish = VerifiedJoin::check(&good, &secret, &binding).unwrap().wish;
        assert_eq!(wish, Some(DeviceName::new("pi-1").unwrap()));

        let check = |ask: &JoinRequest, secret: &Secret, binding: &Binding| {
            VerifiedJoin::check(ask, secret, binding).map(|_| ())
        };
        assert_eq!(check(&good, &Secret([4; 16]), &binding), Err(AskError::Proof), "secret");
        // A proxy ends TLS on both sides: its channels have other exporters.
        let other = Binding { exporter: [7; 32], ..binding.clone() };
        assert_eq!(check(&good, &secret, &other), Err(AskError::Proof), "another channel");
        let other = Binding { server: vec![8; 91], ..binding.clone() };
        assert_eq!(check(&good, &secret, &other), Err(AskError::Proof), "another server");
        let renamed = JoinRequest { wish: "pi-2".to_owned(), ..good.clone() };
        assert_eq!(check(&renamed, &secret, &binding), Err(AskError::Proof), "another name");
        let request = ask(&secret, &binding, "pi-1").request;
        let replaced = JoinRequest { request, ..good.clone() };
        assert_eq!(check(&replaced, &secret, &binding), Err(AskError::Proof), "another key");
        let echoed = Request::key_of(&good.request).unwrap();
        let echoed = Proof::of_host(&secret, &binding, &good.request, &echoed, b"pi-1");
        let echoed = JoinRequest { proof: echoed, ..good };
        assert_eq!(check(&echoed, &secret, &binding), Err(AskError::Proof), "another direction");
        let odd = ask(&secret, &binding, "../pi");
        assert_eq!(check(&odd, &secret, &binding), Err(AskError::Name(Malformed::Name)));
    }
}
