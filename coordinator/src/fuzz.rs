//! Single decoders of what clients and workers send, for the fuzz targets: no part of the interface.

use crate::{
    RunOutput, api,
    error::RequestError,
    fleet::{Timeline, remote::execute},
    profile::measure,
    trace::{Trace, TracedProgram},
};
use galaxy_common::{DeviceName, LinkProfile, LinkType, RequestId};
use galaxy_model::ModelSpec;
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
    idle: &v1::ProbeReply,
    busy: &v1::ProbeReply,
) -> LinkProfile {
    measure::link_profile(from, to, link, idle, busy)
}

/// A trace of what devices say that they did.
///
/// # Errors
/// As the call.
pub fn trace(
    spec: &ModelSpec,
    measured: Vec<(TracedProgram, Vec<Timeline>)>,
) -> Result<Trace, RequestError> {
    Trace::new(spec, RequestId(1), measured, 0)
}
