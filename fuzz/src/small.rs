//! Frames, handshakes of links, faults, batch shapes, cluster files.

use super::{Input, good, said};
use galaxy_common::{
    BatchShape, DeviceName, FrameHeader, HEADER_BYTES, MAX_PAYLOAD_BYTES, plan::MAX_DEVICES,
    shape::MAX_ROWS,
};
use galaxy_coord::Cluster;
use galaxy_proto::{
    convert,
    fault::{from_status, to_status},
    identity::{Role, peer},
    join::{JoinLine, MAX_BYTES, Message, Request},
    v1,
};
use galaxy_worker::ring::handshake::{Greeting, HANDSHAKE_BYTES, HandshakeReply, WELCOME_BYTES};
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use std::path::Path;
use tonic::{Code, Status};

/// The header of a frame.
pub(crate) fn frame(bytes: &[u8]) {
    match FrameHeader::decode(bytes) {
        Ok(header) => {
            assert_eq!(header.encode(), bytes[..HEADER_BYTES]);
            assert!(header.payload <= MAX_PAYLOAD_BYTES);
        }
        Err(error) => said(&error),
    }
}

/// A handshake of a link, or the answer to one: the input is cut, or filled up with zeros.
pub(crate) fn handshake(bytes: &[u8]) {
    let mut handshake = [0; HANDSHAKE_BYTES];
    let length = bytes.len().min(HANDSHAKE_BYTES);
    handshake[..length].copy_from_slice(&bytes[..length]);
    match Greeting::decode(&handshake) {
        Ok(greeting) => {
            let again = match &greeting {
                Greeting::Ring(handshake) => handshake.encode(),
                Greeting::Probe(handshake) => handshake.encode(),
            };
            assert_eq!(Greeting::decode(&again), Ok(greeting));
        }
        Err(error) => said(&error),
    }
    let mut answer = [0; WELCOME_BYTES];
    answer.copy_from_slice(&handshake[..WELCOME_BYTES]);
    match HandshakeReply::decode(&answer) {
        Ok(answer) => assert_eq!(HandshakeReply::decode(&answer.encode()), Ok(answer)),
        Err(error) => said(&error),
    }
}

/// A certificate of any issuer: the name and the role in it.
pub(crate) fn certificate(bytes: &[u8]) {
    let certificate = CertificateDer::from(bytes);
    if let Some((name, role)) = good(peer(&[certificate])) {
        assert_eq!(DeviceName::new(name.as_str()), Ok(name));
        assert_eq!(role.to_string().parse::<Role>().ok(), Some(role));
    }
}

/// A message of the joining protocol, a request for a certificate, or the line of an invitation.
pub(crate) fn join(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.byte() % 3 {
        0 => {
            if let Some(message) = good(Message::decode(input.0)) {
                let again = message.encode();
                assert!(again.len() <= MAX_BYTES);
                assert_eq!(Message::decode(&again), Ok(message));
            }
        }
        1 => {
            if let Some(key) = good(Request::key_of(input.0)) {
                assert_eq!(key.info().len(), 91);
            }
        }
        _ => {
            let Ok(text) = std::str::from_utf8(input.0) else { return };
            if let Some(line) = good(text.parse::<JoinLine>()) {
                assert_eq!(line.text().parse(), Ok(line));
            }
        }
    }
}

/// A status of gRPC: its code, then its details.
pub(crate) fn fault(bytes: &[u8]) {
    let mut input = Input(bytes);
    let code = Code::from(i32::from(input.byte()));
    let status = Status::with_details(code, "it failed", input.0.to_vec().into());
    let fault = from_status(&status);
    assert!(!fault.code.is_empty());
    let shown = fault.to_string();
    let again = from_status(&to_status(code, fault.clone()));
    assert_eq!((&again, again.to_string()), (&fault, shown));
}

/// A batch shape: in postcard, in JSON, or as the segments of a message with a number of tokens.
pub(crate) fn shape(bytes: &[u8]) {
    let mut input = Input(bytes);
    let shape = match input.byte() % 3 {
        0 => postcard::from_bytes::<BatchShape>(input.0).map_err(|e| e.to_string()),
        1 => serde_json::from_slice(input.0).map_err(|e| e.to_string()),
        _ => {
            let tokens = input.long() as usize;
            let request = v1::ExecuteRequest::decode(input.0).map_err(|e| e.to_string());
            request.and_then(|r| convert::shape(r.segments, tokens).map_err(|e| e.to_string()))
        }
    };
    let shape = match shape {
        Ok(shape) => shape,
        Err(error) => return said(&error),
    };
    assert!((1..=MAX_ROWS).contains(&shape.rows()));
    let end = shape.placed().fold(0, |at, (rows, segment)| {
        assert_eq!((rows.start(), rows.len()), (at, segment.rows));
        rows.end()
    });
    assert_eq!(end, shape.rows());
    let wire = convert::segments(&shape);
    assert_eq!(convert::shape(wire, shape.rows() as usize).as_ref(), Ok(&shape));
    let bytes = postcard::to_stdvec(&shape).expect("a shape has a binary form");
    assert_eq!(postcard::from_bytes(&bytes), Ok(shape));
}

/// A cluster file.
pub(crate) fn cluster(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Cluster::parse(text, Path::new("/etc/galaxy")) {
        Ok(cluster) => {
            assert!((1..=MAX_DEVICES).contains(&cluster.devices.len()));
            assert!(cluster.devices.iter().all(|d| d.memory.0 > 0));
            assert!((1..=MAX_ROWS).contains(&cluster.max_rows));
            assert!(cluster.lengths.iter().all(|l| (1..=cluster.max_rows).contains(l)));
            assert!(!cluster.timeout.is_zero(), "a request without time");
            assert!(!cluster.wires().is_empty() && !cluster.links().is_empty());
        }
        Err(error) => said(&error),
    }
}
