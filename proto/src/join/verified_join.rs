//! A request to join whose sender proved that it knows the secret of its invitation.

use super::{
    line::Secret,
    malformed::Malformed,
    message::JoinRequest,
    proof::{Binding, Proof},
    request::{PublicKey, Request, RequestError},
};
use galaxy_common::DeviceName;

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
    fn a_join_proof_holds_for_one_secret_channel_key_and_name() {
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
