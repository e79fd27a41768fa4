//! Single decoders of what clients and workers send, for the fuzz targets: no part of the interface.

use crate::{
    RunOutput, api,
    error::RequestError,
    fleet::{Timeline, remote::execute},
    profile::links,
    session::GenerateEvent,
    trace::{Trace, TracedProgram},
};
use galaxy_common::{DeviceName, LinkProfile, LinkType, RequestId};
use galaxy_engine::generate;
use galaxy_model::{Formats, ModelSpec};
use galaxy_proto::v1;
use std::time::Duration;
use tonic::{Status, metadata::MetadataMap};

/// Decodes the output that a raw request asks for.
///
/// # Errors
/// The status that the call would give.
pub fn output(request: &v1::RunRequest) -> Result<RunOutput, Status> {
    api::output(request)
}

/// Decodes the time that a call may take.
///
/// # Errors
/// The status that the call would give.
pub fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    api::timeout(metadata)
}

/// Appends a piece of a result.
///
/// # Errors
/// When it does not fit.
pub fn take(
    values: &mut [Vec<f32>],
    sizes: &[usize],
    piece: &v1::OutputPiece,
) -> Result<(), Status> {
    execute::take(values, sizes, piece)
}

/// The profile of a link by what its sender measured.
pub fn link_profile(
    (from, to): (DeviceName, DeviceName),
    link: LinkType,
    reply: &v1::ProbeReply,
) -> LinkProfile {
    links::link_profile(from, to, link, reply)
}

/// A trace of what devices report that they did.
///
/// # Errors
/// The error that the call would give.
pub fn trace(
    spec: &ModelSpec,
    measured: Vec<(TracedProgram, Vec<Timeline>)>,
) -> Result<Trace, RequestError> {
    Trace::new((spec, &Formats::default()), RequestId(1), measured, 0)
}

/// The event that a client gets of a token, by what a device sends of it; the vocabulary has `vocabulary` tokens.
///
/// # Errors
/// When what the device sends is no token of the vocabulary.
pub fn token_event(token: &[u8], vocabulary: u32) -> Result<v1::GenerateEvent, Status> {
    let step = v1::GeneratedStep { counts: vec![1], tokens: token.to_vec().into() };
    let events = execute::token_events(&step, vocabulary, 1)?;
    Ok(api::generated(GenerateEvent::Token(generate::token(&events[0].1, String::new()))))
}
