//! What both sides prove: that they know the invitation's secret, on this channel, with these keys.
//!
//! A proof is HMAC-SHA-256 with the secret over the direction, the channel's exporter, the keys of both ends, the
//! request, and what is sent with it. Each part follows its length, so that no two lists of parts are the same bytes.

use super::{line::Secret, request::PublicKey};
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
