//! The batch shape: which sequences, how many rows of each, and what is wanted of them.

use crate::span::{Row, Span};
use serde::{Deserialize, Serialize};

/// How the rows of a text become one vector.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The vector of the first row.
    Cls,
    /// The mean of all rows.
    Mean,
    /// The sum of all rows, divided by the square root of their number.
    MeanSqrtLen,
    /// The largest value of each column.
    Max,
    /// The vector of the last row.
    LastToken,
}

/// What a program computes for the rows of a segment.
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
    /// The next token, chosen on the devices from so many candidates of each.
    Token(CandidateCount),
    /// Nothing: keys and values go to the KV cache, and more rows follow.
    Nothing,
}

impl Wanted {
    /// Whether it needs logits of the last row, and only of that.
    pub fn is_of_last_row(self) -> bool {
        matches!(self, Self::LastLogits | Self::Token(_))
    }
}

/// How many candidates for the next token each device names. A choice that these do not prove is repeated with more
/// of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CandidateCount {
    /// As many candidates as most choices need: 64.
    Few,
    /// As many candidates as flat distributions need: 1024.
    Many,
    /// Every token of the device's vocabulary slice.
    All,
}

impl CandidateCount {
    /// Candidates that a device with `tokens` tokens of the vocabulary names.
    pub fn of(self, tokens: u32) -> u32 {
        match self {
            Self::Few => tokens.min(64),
            Self::Many => tokens.min(1024),
            Self::All => tokens,
        }
    }
    /// The next wider breadth; none after [`CandidateCount::All`].
    pub fn wider(self) -> Option<Self> {
        match self {
            Self::Few => Some(Self::Many),
            Self::Many => Some(Self::All),
            Self::All => None,
        }
    }
}

/// Consecutive rows of a batch that belong to one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Segment {
    /// The slot of the KV cache that belongs to the sequence. Where nothing is cached: the segment's index.
    pub slot: u32,
    /// The cached rows: those that earlier programs put into the slot. Bound at run time; no reason to lower again.
    pub context_len: u32,
    /// Whether keys and values of its rows are put into the slot, behind the cached rows.
    pub cached: bool,
    /// Rows of this program, at least one.
    pub rows: u32,
    /// What the program computes for these rows.
    pub wanted: Wanted,
}

impl Segment {
    /// Whether this segment is a single row that follows the single row of `other`, of the same sequence.
    fn drafted_behind(&self, other: &Self) -> bool {
        let kept = self.cached && other.cached && self.slot == other.slot;
        kept && (self.rows, other.rows) == (1, 1)
            && self.context_len.checked_sub(1) == Some(other.context_len)
    }
}

/// Whether both are lowered to the same programs.
fn alike(some: &[Segment], others: &[Segment]) -> bool {
    let alike =
        |(a, b): (&Segment, &Segment)| (a.cached, a.rows, a.wanted) == (b.cached, b.rows, b.wanted);
    some.len() == others.len() && some.iter().zip(others).all(alike)
}

/// A batch: segments one behind another, without padding.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<Segment>", into = "Vec<Segment>")]
pub struct BatchShape {
    segments: Vec<Segment>,
}

/// Why a batch cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// No segment at all.
    #[error("a batch needs at least one sequence")]
    Empty,
    /// A segment with cached rows that does not cache its own.
    #[error("sequence {index} continues an earlier one, but is not cached")]
    Context {
        /// The index of the segment.
        index: usize,
    },
    /// Two segments that would write the same rows, or of which the second does not continue the first.
    #[error("slot {slot} stands twice in a batch")]
    Slot {
        /// The number of the slot.
        slot: u32,
    },
    /// A segment of no rows.
    #[error("sequence {index} has no tokens")]
    NoRows {
        /// The index of the segment.
        index: usize,
    },
    /// More rows than counters hold.
    #[error("a batch of {rows} rows is above the limit of {limit}")]
    TooManyRows {
        /// Rows of the batch.
        rows: u64,
        /// The most rows that a batch may have.
        limit: u32,
    },
}

/// The most rows of a program: bounds what a hostile peer can make us lower.
pub const MAX_ROWS: u32 = 1 << 20;

impl BatchShape {
    /// A batch of these segments.
    ///
    /// # Errors
    /// When there is no segment, one has no rows or has cached rows and does not cache its own, two write the same
    /// slot, or there are more than [`MAX_ROWS`] rows. Single rows of a slot may stand one behind another: the last
    /// token of a sequence and a draft of those that follow it.
    pub fn new(segments: Vec<Segment>) -> Result<Self, ShapeError> {
        if segments.is_empty() {
            return Err(ShapeError::Empty);
        }
        if let Some(index) = segments.iter().position(|s| s.rows == 0) {
            return Err(ShapeError::NoRows { index });
        }
        if let Some(index) = segments.iter().position(|s| s.context_len > 0 && !s.cached) {
            return Err(ShapeError::Context { index });
        }
        let drafted = |at: usize| at > 0 && segments[at].drafted_behind(&segments[at - 1]);
        let kept = segments.iter().enumerate().filter(|(at, s)| s.cached && !drafted(*at));
        let mut slots: Vec<u32> = kept.map(|(_, s)| s.slot).collect();
        slots.sort_unstable();
        if let Some(pair) = slots.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ShapeError::Slot { slot: pair[0] });
        }
        let rows: u64 = segments.iter().map(|s| u64::from(s.rows)).sum();
        if rows > u64::from(MAX_ROWS) {
            return Err(ShapeError::TooManyRows { rows, limit: MAX_ROWS });
        }
        Ok(Self { segments })
    }
    /// A batch of one text of `rows` tokens, without a KV cache.
    ///
    /// # Errors
    /// As [`BatchShape::new`].
    pub fn single(rows: u32, wanted: Wanted) -> Result<Self, ShapeError> {
        Self::new(vec![Segment { slot: 0, context_len: 0, cached: false, rows, wanted }])
    }
    /// The shape that programs are lowered for: the same, whichever slots and however many cached rows.
    pub fn unbound(&self) -> Self {
        let unbound =
            |(index, s): (usize, &Segment)| Segment { slot: index as u32, context_len: 0, ..*s };
        Self { segments: self.segments.iter().enumerate().map(unbound).collect() }
    }
    /// Whether it is lowered to the same programs as `other`.
    pub fn lowers_as(&self, other: &Self) -> bool {
        alike(&self.segments, &other.segments)
    }
    /// Binds other segments that lower to the same programs, without an allocation. False where they do not.
    pub fn rebind(&mut self, segments: &[Segment]) -> bool {
        let same = alike(&self.segments, segments);
        if same {
            self.segments.copy_from_slice(segments);
        }
        same
    }
    /// The segments in row order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
    /// The segments of which a token is wanted, in row order: the index of each among all, and how many candidates it
    /// is chosen from.
    pub fn sampled(&self) -> impl Iterator<Item = (usize, &Segment, CandidateCount)> {
        self.segments.iter().enumerate().filter_map(|(index, segment)| match segment.wanted {
            Wanted::Token(breadth) => Some((index, segment, breadth)),
            _ => None,
        })
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
