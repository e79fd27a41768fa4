//! Wire types to domain types and back. Wire types stop at the handlers.

mod generate;

pub use generate::{generate_options, generate_request, sequence_from_wire, sequence_to_wire};

use crate::v1;
use galaxy_common::{
    BatchShape, CandidateCount, Pooling, Segment, ShapeError, Wanted, shape::MAX_ROWS,
};

/// Why a message of the wire cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A wanted output that this build does not know.
    #[error("output {code} is unknown to this build")]
    Wanted {
        /// The number on the wire.
        code: i32,
    },
    /// A request that names no output.
    #[error("the request does not say which output it wants")]
    Unspecified,
    /// A prompt both as text and as token ids.
    #[error("the request has a prompt and ids: send one of them")]
    Prompt,
    /// A [`Sampling`](galaxy_common::Sampling) that cannot be written or read in binary form.
    #[error(
        "the sampling settings cannot be read: do coordinator and worker have the same version?"
    )]
    Sampling,
    /// Segments that form no batch.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// More segments than a batch may have rows.
    #[error("{segments} sequences are more than a batch of {rows} tokens can hold")]
    Segments {
        /// The number of segments.
        segments: usize,
        /// The most tokens that such a batch may have.
        rows: usize,
    },
}

impl TryFrom<v1::Wanted> for Wanted {
    type Error = ConvertError;
    fn try_from(wanted: v1::Wanted) -> Result<Self, ConvertError> {
        Ok(match wanted {
            v1::Wanted::Unspecified => return Err(ConvertError::Unspecified),
            v1::Wanted::Hidden => Self::Hidden,
            v1::Wanted::PooledCls => Self::Pooled(Pooling::Cls),
            v1::Wanted::PooledMean => Self::Pooled(Pooling::Mean),
            v1::Wanted::PooledMeanSqrtLen => Self::Pooled(Pooling::MeanSqrtLen),
            v1::Wanted::PooledMax => Self::Pooled(Pooling::Max),
            v1::Wanted::PooledLastToken => Self::Pooled(Pooling::LastToken),
            v1::Wanted::Classes => Self::Classes,
            v1::Wanted::LastLogits => Self::LastLogits,
            v1::Wanted::AllLogits => Self::AllLogits,
            v1::Wanted::TokenOfFew => Self::Token(CandidateCount::Few),
            v1::Wanted::TokenOfMany => Self::Token(CandidateCount::Many),
            v1::Wanted::TokenOfAll => Self::Token(CandidateCount::All),
            v1::Wanted::Nothing => Self::Nothing,
        })
    }
}

impl From<Wanted> for v1::Wanted {
    fn from(wanted: Wanted) -> Self {
        match wanted {
            Wanted::Hidden => Self::Hidden,
            Wanted::Pooled(Pooling::Cls) => Self::PooledCls,
            Wanted::Pooled(Pooling::Mean) => Self::PooledMean,
            Wanted::Pooled(Pooling::MeanSqrtLen) => Self::PooledMeanSqrtLen,
            Wanted::Pooled(Pooling::Max) => Self::PooledMax,
            Wanted::Pooled(Pooling::LastToken) => Self::PooledLastToken,
            Wanted::Classes => Self::Classes,
            Wanted::LastLogits => Self::LastLogits,
            Wanted::AllLogits => Self::AllLogits,
            Wanted::Token(CandidateCount::Few) => Self::TokenOfFew,
            Wanted::Token(CandidateCount::Many) => Self::TokenOfMany,
            Wanted::Token(CandidateCount::All) => Self::TokenOfAll,
            Wanted::Nothing => Self::Nothing,
        }
    }
}

/// The domain's wanted output for a wire number.
///
/// # Errors
/// When the number is unknown or stands for nothing.
pub fn wanted(code: i32) -> Result<Wanted, ConvertError> {
    v1::Wanted::try_from(code).map_err(|_| ConvertError::Wanted { code })?.try_into()
}

impl TryFrom<v1::Segment> for Segment {
    type Error = ConvertError;
    fn try_from(segment: v1::Segment) -> Result<Self, ConvertError> {
        let v1::Segment { slot, context_len, cached, rows, wanted: code } = segment;
        Ok(Self { slot, context_len, cached, rows, wanted: wanted(code)? })
    }
}

impl From<Segment> for v1::Segment {
    fn from(segment: Segment) -> Self {
        let Segment { slot, context_len, cached, rows, wanted } = segment;
        Self { slot, context_len, cached, rows, wanted: v1::Wanted::from(wanted).into() }
    }
}

/// The batch shape of a request of `tokens` tokens; `tokens` is 0 if it is one of images.
///
/// # Errors
/// When a segment or the whole cannot be run.
pub fn shape(segments: Vec<v1::Segment>, tokens: usize) -> Result<BatchShape, ConvertError> {
    if tokens > MAX_ROWS as usize {
        let error = ShapeError::TooManyRows { rows: tokens as u64, limit: MAX_ROWS };
        return Err(error.into());
    }
    let rows = if tokens > 0 { tokens } else { MAX_ROWS as usize };
    if segments.len() > rows {
        return Err(ConvertError::Segments { segments: segments.len(), rows });
    }
    let segments: Result<Vec<_>, _> = segments.into_iter().map(Segment::try_from).collect();
    Ok(BatchShape::new(segments?)?)
}

/// The f32 values of little endian bytes; bytes beyond whole values are left out.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// The little endian bytes of f32 values.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The wire form of a batch shape.
pub fn segments(shape: &BatchShape) -> Vec<v1::Segment> {
    shape.segments().iter().map(|s| (*s).into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wanted_output_survives_conversion() {
        for code in 1..=9 {
            let wanted = wanted(code).expect("known");
            assert_eq!(i32::from(v1::Wanted::from(wanted)), code);
        }
        assert_eq!(wanted(0), Err(ConvertError::Unspecified));
        assert_eq!(wanted(77), Err(ConvertError::Wanted { code: 77 }));
    }

    #[test]
    fn batch_shapes_survive_conversion_and_bad_ones_are_rejected() {
        let segment =
            Segment { slot: 1, context_len: 0, cached: false, rows: 3, wanted: Wanted::Hidden };
        let shape_in = BatchShape::new(vec![segment; 2]).expect("valid");
        assert_eq!(shape(segments(&shape_in), 6), Ok(shape_in.clone()));
        assert!(matches!(shape(segments(&shape_in), 1), Err(ConvertError::Segments { .. })));
        assert!(matches!(
            shape(segments(&shape_in), MAX_ROWS as usize + 1),
            Err(ConvertError::Shape(ShapeError::TooManyRows { .. }))
        ));
        assert_eq!(shape(vec![], 0), Err(ConvertError::Shape(ShapeError::Empty)));
    }
}
