//! The batch shape: which texts, how many rows of each, and what is wanted of them.

use crate::span::{Row, Span};
use serde::{Deserialize, Serialize};

/// How the rows of a text become one vector.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The first row.
    Cls,
    /// The mean of all rows.
    Mean,
    /// The sum of all rows over the square root of their number.
    MeanSqrtLen,
    /// The largest value of each column.
    Max,
    /// The last row.
    LastToken,
}

/// What a segment's rows are run for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// Hidden states of every row, after the last norm.
    Hidden,
    /// One vector, before normalisation.
    Pooled(Pooling),
    /// The logits of the classes.
    Classes,
    /// The logits of the next token, after the last row.
    LastLogits,
    /// The logits of the next token after every row.
    AllLogits,
}

/// Consecutive rows of a batch that belong to one sequence of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Segment {
    /// Which key-value slot the sequence lives in. Without a cache: its index.
    pub slot: u32,
    /// Rows that earlier programs put into the slot. Bound at run time; no reason to lower again.
    pub past: u32,
    /// Rows of this program, at least one.
    pub rows: u32,
    /// What is wanted.
    pub wanted: Wanted,
}

/// A batch: segments one behind another, without padding.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<Segment>", into = "Vec<Segment>")]
pub struct BatchShape {
    segments: Vec<Segment>,
}

/// A batch that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// No segment at all.
    #[error("a batch needs at least one text")]
    Empty,
    /// A segment of no rows.
    #[error("text {index} has no tokens")]
    NoRows {
        /// Which segment.
        index: usize,
    },
    /// More rows than counters hold.
    #[error("a batch of {rows} rows is above the limit of {limit}")]
    TooManyRows {
        /// Rows asked for.
        rows: u64,
        /// Rows allowed.
        limit: u32,
    },
}

/// More rows than any program may have: bounds what a hostile peer can make us lower.
pub const MAX_ROWS: u32 = 1 << 20;

impl BatchShape {
    /// A batch of these segments.
    ///
    /// # Errors
    /// When there is none, one is empty, or there are more than [`MAX_ROWS`] rows.
    pub fn new(segments: Vec<Segment>) -> Result<Self, ShapeError> {
        if segments.is_empty() {
            return Err(ShapeError::Empty);
        }
        if let Some(index) = segments.iter().position(|s| s.rows == 0) {
            return Err(ShapeError::NoRows { index });
        }
        let rows: u64 = segments.iter().map(|s| u64::from(s.rows)).sum();
        if rows > u64::from(MAX_ROWS) {
            return Err(ShapeError::TooManyRows { rows, limit: MAX_ROWS });
        }
        Ok(Self { segments })
    }
    /// One text of `rows` tokens.
    ///
    /// # Errors
    /// As [`BatchShape::new`].
    pub fn single(rows: u32, wanted: Wanted) -> Result<Self, ShapeError> {
        Self::new(vec![Segment { slot: 0, past: 0, rows, wanted }])
    }
    /// The segments in row order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
    /// Rows of the whole batch.
    pub fn rows(&self) -> u32 {
        self.segments.iter().map(|s| s.rows).sum()
    }
    /// Each segment with the rows of the batch that are its own.
    pub fn placed(&self) -> impl Iterator<Item = (Span<Row>, &Segment)> {
        let mut at = 0;
        self.segments.iter().map(move |s| {
            let from = at;
            at += s.rows;
            (Span::new(from, at), s)
        })
    }
}

impl TryFrom<Vec<Segment>> for BatchShape {
    type Error = ShapeError;
    fn try_from(segments: Vec<Segment>) -> Result<Self, ShapeError> {
        Self::new(segments)
    }
}
impl From<BatchShape> for Vec<Segment> {
    fn from(shape: BatchShape) -> Self {
        shape.segments
    }
}
