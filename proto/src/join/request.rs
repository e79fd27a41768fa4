//! The request for a certificate: PKCS #10 (RFC 2986), in the one form that is taken.
//!
//! Of a request only the public key counts; name and role come from the invitation. So a request that asks for
//! anything more, a subject, names, or to be an authority, is refused for that, before anything is signed.

use crate::identity::fingerprint;
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData,
    SignatureAlgorithm,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};

/// The bytes that precede the point of a P-256 key in its SubjectPublicKeyInfo (RFC 5480).
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Bytes of a point that is not compressed.
const POINT: usize = 65;
/// The AlgorithmIdentifier of ecdsa-with-SHA256.
const ECDSA_SHA256: [u8; 10] = [0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
/// The most bytes of a request: a key, a signature, and what is around them take 220.
const MAX_REQUEST_BYTES: usize = 2048;

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;
const ATTRIBUTES: u8 = 0xa0;

/// A P-256 public key: the point, not compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PublicKey([u8; POINT]);

impl PublicKey {
    /// The key as a SubjectPublicKeyInfo.
    pub fn info(&self) -> Vec<u8> {
        [&P256[..], &self.0].concat()
    }
    /// The SHA-256 of the SubjectPublicKeyInfo.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint(&self.info())
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }
    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Why a request is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Bytes that are no PKCS #10 request in DER.
    #[error("it is no PKCS #10 request in DER")]
    Malformed,
    /// A request that names a subject.
    #[error("it names a subject: the name comes from the invitation")]
    Subject,
    /// A key that is not of the curve P-256.
    #[error("its key is not of the curve P-256")]
    Key,
    /// A request with attributes, among them the extensions of a certificate.
    #[error(
        "it asks for extensions, as names or the rights of an authority: only its key counts, and what the certificate says comes from the invitation"
    )]
    Attributes,
    /// A signature that does not prove that the sender has the key.
    #[error("it is not signed with its key by ECDSA and SHA-256")]
    Signature,
}

/// A key that this machine created, and the request for its certificate.
pub struct Request {
    key: KeyPair,
    der: Vec<u8>,
}

impl Request {
    /// Creates a key, and the request for it.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn new() -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let der = params.serialize_request(&key)?.der().to_vec();
        Ok(Self { key, der })
    }
    /// The public key.
    pub fn key(&self) -> PublicKey {
        let mut point = [0; POINT];
        let raw = self.key.public_key_raw();
        // Keys of P-256 have points of this size.
        let length = raw.len().min(POINT);
        point[..length].copy_from_slice(&raw[..length]);
        PublicKey(point)
    }
    /// The request, in DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }
    /// The private key, in PEM form.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// The public key of a request, if its sender has the private one.
    ///
    /// # Errors
    /// When the request is not in the one form that is taken. Never panics.
    pub fn key_of(der: &[u8]) -> Result<PublicKey, RequestError> {
        if der.len() > MAX_REQUEST_BYTES {
            return Err(RequestError::Malformed);
        }
        let mut outer = Der(der);
        let mut request = Der(outer.take(SEQUENCE)?.content);
        outer.end()?;
        let info = request.take(SEQUENCE)?;
        let algorithm = request.take(SEQUENCE)?.content;
        let signature = request.take(BIT_STRING)?.content;
        request.end()?;

        let mut fields = Der(info.content);
        if fields.take(INTEGER)?.content != [0] {
            return Err(RequestError::Malformed);
        }
        let subject = fields.take(SEQUENCE)?.content;
        let key = fields.take(SEQUENCE)?.whole;
        let attributes = fields.take(ATTRIBUTES)?.content;
        fields.end()?;
        if !subject.is_empty() {
            return Err(RequestError::Subject);
        }
        if !attributes.is_empty() {
            return Err(RequestError::Attributes);
        }
        let point = key.strip_prefix(&P256).and_then(|point| <[u8; POINT]>::try_from(point).ok());
        let point = point.filter(|point| point[0] == 4).ok_or(RequestError::Key)?;
        // No bits of the last byte are unused.
        let signature = signature.strip_prefix(&[0]).ok_or(RequestError::Malformed)?;
        let signed = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &point);
        let good = algorithm == ECDSA_SHA256 && signed.verify(info.whole, signature).is_ok();
        good.then_some(PublicKey(point)).ok_or(RequestError::Signature)
    }
}

/// The rest of some DER that is not read yet.
struct Der<'a>(&'a [u8]);

/// An element of DER: with its tag and length, and without.
struct Element<'a> {
    whole: &'a [u8],
    content: &'a [u8],
}

impl<'a> Der<'a> {
    /// The next element, which must have this tag.
    fn take(&mut self, tag: u8) -> Result<Element<'a>, RequestError> {
        let (header, length) = match *self.0 {
            [has, short, ..] if has == tag && short < 0x80 => (2, usize::from(short)),
            [has, 0x81, long, ..] if has == tag && long >= 0x80 => (3, usize::from(long)),
            [has, 0x82, high, low, ..] if has == tag && high > 0 => {
                (4, usize::from(u16::from_be_bytes([high, low])))
            }
            _ => return Err(RequestError::Malformed),
        };
        let (whole, rest) =
            self.0.split_at_checked(header + length).ok_or(RequestError::Malformed)?;
        self.0 = rest;
        Ok(Element { whole, content: &whole[header..] })
    }

    fn end(self) -> Result<(), RequestError> {
        if self.0.is_empty() { Ok(()) } else { Err(RequestError::Malformed) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, DnType, IsCa, KeyUsagePurpose, PKCS_ED25519};

    fn asked(change: impl FnOnce(&mut CertificateParams)) -> Result<PublicKey, RequestError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        change(&mut params);
        Request::key_of(params.serialize_request(&key).unwrap().der())
    }

    #[test]
    fn only_the_key_is_taken_from_a_certificate_request() {
        let request = Request::new().unwrap();
        let key = Request::key_of(request.der()).unwrap();
        assert_eq!(key.info(), request.key.subject_public_key_info());
        assert_eq!(key, request.key());
    }

    #[test]
    fn a_certificate_request_for_more_than_a_key_is_rejected() {
        let authority = asked(|p| p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
        assert_eq!(authority, Err(RequestError::Attributes));
        let named = |dns: &str| {
            let names = CertificateParams::new(vec![dns.to_owned()]).unwrap().subject_alt_names;
            asked(|p| p.subject_alt_names = names)
        };
        assert_eq!(named("pi-1.device.galaxy"), Err(RequestError::Attributes));
        assert_eq!(named("coordinator.coordinator.galaxy"), Err(RequestError::Attributes));
        let usages = asked(|p| p.key_usages = vec![KeyUsagePurpose::KeyCertSign]);
        assert_eq!(usages, Err(RequestError::Attributes));
        let subject = asked(|p| p.distinguished_name.push(DnType::CommonName, "pi-1"));
        assert_eq!(subject, Err(RequestError::Subject));
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let other = params.serialize_request(&key).unwrap();
        assert_eq!(Request::key_of(other.der()), Err(RequestError::Key));
    }

    #[test]
    fn a_changed_certificate_request_is_rejected() {
        let request = Request::new().unwrap();
        for at in 0..request.der().len() {
            let mut changed = request.der().to_vec();
            changed[at] ^= 1;
            assert!(Request::key_of(&changed).is_err(), "byte {at}");
            assert!(Request::key_of(&request.der()[..at]).is_err(), "the first {at} bytes");
        }
        let other = Request::new().unwrap();
        let mut mixed = request.der().to_vec();
        let at = mixed.windows(P256.len()).position(|bytes| bytes == P256).unwrap() + P256.len();
        let point = Request::key_of(other.der()).unwrap().0;
        mixed[at..at + POINT].copy_from_slice(&point);
        assert_eq!(Request::key_of(&mixed), Err(RequestError::Signature));
    }
}
