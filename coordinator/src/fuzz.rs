//! Single decoders of what clients and workers send, for the fuzz targets: no part of the interface.

use crate::{
    RunOutput, api,
    error::RequestError,
    fleet::{Timeline, remote::execute},
    profile::links,
    session::Said,
    trace::{Trace, TracedProgram},
};
use galaxy_common::{DeviceName, LinkProfile, LinkType, RequestId};
use galaxy_engine::generate;
use galaxy_model::{Formats, ModelSpec};
use galaxy_proto::v1;
use std::time::Duration;
use tonic::{Status, metadata::MetadataMap};

/// What a raw request asks for.
///
/// # Errors
/// As the call.
pub fn output(request: &v1::RunRequest) -> Result<RunOutput, Status> {
    api::output(request)
}

/// The time that a call may take.
///
/// # Errors
/// As the call.
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

/// A trace of what devices say that they did.
///
/// # Errors
/// As the call.
pub fn trace(
    spec: &ModelSpec,
    measured: Vec<(TracedProgram, Vec<Timeline>)>,
) -> Result<Trace, RequestError> {
    Trace::new((spec, &Formats::default()), RequestId(1), measured, 0)
}

/// What a client is told of a token, by what a device says of it; the vocabulary has so many.
///
/// # Errors
/// As the program that made it.
pub fn told(token: &[u8], vocabulary: u32) -> Result<v1::GenerateEvent, Status> {
    let step = v1::GeneratedStep { counts: vec![1], tokens: token.to_vec().into() };
    let told = execute::told(&step, vocabulary, 1)?;
    Ok(api::generated(Said::Token(generate::token(&told[0].1, String::new()))))
}
