//! Single decoders of what a coordinator answers, for the fuzz targets: no part of the interface.

use crate::{
    answer::{self, Report, Tensor},
    error::ClientError,
    generate::{self, Generated},
    pieces::Pieces,
};
use galaxy_proto::v1::{self, generate_event, run_event::Event};

/// The tensors of `count` sequences, from their pieces.
///
/// # Errors
/// When they are not complete, or do not fit together.
pub fn pieces(count: usize, events: Vec<Event>) -> Result<(Vec<Tensor>, Report), ClientError> {
    let mut pieces = Pieces::new(count);
    events.into_iter().try_for_each(|event| pieces.take(event))?;
    pieces.finish()
}

/// Little-endian bytes as `rows` rows of `width` values.
///
/// # Errors
/// When they are not exactly that many.
pub fn rows(bytes: &[u8], rows: usize, width: usize) -> Result<Vec<Vec<f32>>, ClientError> {
    answer::rows(bytes, rows, width)
}

/// What the parts of a call cost together.
pub fn reports(parts: Vec<v1::RequestReport>) -> Report {
    let mut report = Report::default();
    parts.into_iter().for_each(|part| report.absorb(part.into()));
    report
}

/// Decodes an event of a token stream.
///
/// # Errors
/// When the event is empty, or comes at the wrong time.
pub fn generated(event: Option<generate_event::Event>) -> Result<Generated, ClientError> {
    generate::generated(event)
}
