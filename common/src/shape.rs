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
    /// The next token, chosen on the devices from so many candidates of each.
    Token(Breadth),
    /// Nothing: its keys and values are kept, and more rows follow.
    Nothing,
}

impl Wanted {
    /// Whether logits of the last row, and only of that, are computed for it.
    pub fn is_of_last_row(self) -> bool {
        matches!(self, Self::LastLogits | Self::Token(_))
    }
}

/// How many candidates for the next token each device names. A choice that these do not prove is made
/// again from more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Breadth {
    /// What most choices need.
    Few,
    /// What flat distributions need.
    Many,
    /// Every token.
    All,
}

impl Breadth {
    /// Candidates that a device with `tokens` tokens of the vocabulary names.
    pub fn of(self, tokens: u32) -> u32 {
        match self {
            Self::Few => tokens.min(64),
            Self::Many => tokens.min(1024),
            Self::All => tokens,
        }
    }
    /// The next one; none where it was every token.
    pub fn wider(self) -> Option<Self> {
        match self {
            Self::Few => Some(Self::Many),
            Self::Many => Some(Self::All),
            Self::All => None,
        }
    }
}

/// Consecutive rows of a batch that belong to one sequence of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Segment {
    /// Which key-value slot the sequence lives in. Where nothing is kept: its index.
    pub slot: u32,
    /// Rows that earlier programs put into the slot. Bound at run time; no reason to lower again.
    pub past: u32,
    /// Whether keys and values of its rows are put into the slot, behind those of the past.
    pub kept: bool,
    /// Rows of this program, at least one.
    pub rows: u32,
    /// What is wanted.
    pub wanted: Wanted,
}

impl Segment {
    /// Whether it is the row behind the one row of another, of the same sequence.
    fn drafted_behind(&self, other: &Self) -> bool {
        let kept = self.kept && other.kept && self.slot == other.slot;
        kept && (self.rows, other.rows) == (1, 1) && self.past.checked_sub(1) == Some(other.past)
    }
}

/// Whether programs are the same for both.
fn alike(some: &[Segment], others: &[Segment]) -> bool {
    let alike =
        |(a, b): (&Segment, &Segment)| (a.kept, a.rows, a.wanted) == (b.kept, b.rows, b.wanted);
    some.len() == others.len() && some.iter().zip(others).all(alike)
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
    /// A past that is kept nowhere.
    #[error("text {index} continues an earlier one, and says that it keeps nothing")]
    Past {
        /// Which segment.
        index: usize,
    },
    /// Two segments that would write the same rows, or of which the second does not continue the first.
    #[error("slot {slot} stands twice in a batch")]
    Slot {
        /// Which.
        slot: u32,
    },
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
    /// When there is none, one is empty or has a past and keeps nothing, two keep the same slot, or
    /// there are more than [`MAX_ROWS`] rows. Single rows of a slot may stand one behind another: the last token of
    /// a sequence and a draft of those that follow it.
    pub fn new(segments: Vec<Segment>) -> Result<Self, ShapeError> {
        if segments.is_empty() {
            return Err(ShapeError::Empty);
        }
        if let Some(index) = segments.iter().position(|s| s.rows == 0) {
            return Err(ShapeError::NoRows { index });
        }
        if let Some(index) = segments.iter().position(|s| s.past > 0 && !s.kept) {
            return Err(ShapeError::Past { index });
        }
        let drafted = |at: usize| at > 0 && segments[at].drafted_behind(&segments[at - 1]);
        let kept = segments.iter().enumerate().filter(|(at, s)| s.kept && !drafted(*at));
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
    /// One text of `rows` tokens.
    ///
    /// # Errors
    /// As [`BatchShape::new`].
    pub fn single(rows: u32, wanted: Wanted) -> Result<Self, ShapeError> {
        Self::new(vec![Segment { slot: 0, past: 0, kept: false, rows, wanted }])
    }
    /// What programs are lowered for: the same, whichever slots and however long their past.
    pub fn unbound(&self) -> Self {
        let unbound = |(index, s): (usize, &Segment)| Segment { slot: index as u32, past: 0, ..*s };
        Self { segments: self.segments.iter().enumerate().map(unbound).collect() }
    }
    /// Whether it is lowered to the same programs as `other`.
    pub fn lowers_as(&self, other: &Self) -> bool {
        alike(&self.segments, &other.segments)
    }
    /// Binds other segments that lower to the same programs, without an allocation. False where these do not.
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
    /// The segments of which a token is wanted, in row order: the number of each among all, and how many
    /// candidates it is chosen from.
    pub fn choices(&self) -> impl Iterator<Item = (usize, &Segment, Breadth)> {
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
