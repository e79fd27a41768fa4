//! Half-open ranges that know what they count.

use serde::{Deserialize, Serialize};
use std::{fmt, marker::PhantomData, ops::Range};

/// What a [`Span`] counts. Only the marker types below implement it.
pub trait Unit: Copy + Ord + fmt::Debug + 'static {
    /// The plural of the unit, for messages.
    const NAME: &'static str;
}

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name {}
        impl Unit for $name {
            const NAME: &'static str = $text;
        }
    };
}
unit!(
    /// Rows of a batch: one for each token.
    Row, "rows"
);
unit!(
    /// Query heads of an attention block.
    Head, "heads"
);
unit!(
    /// Columns of an MLP block's intermediate size, or of a tensor.
    Column, "columns"
);
unit!(
    /// Entries of the vocabulary.
    Token, "tokens"
);
unit!(
    /// Layers of the model.
    Layer, "layers"
);
unit!(
    /// What an operator is cut by between devices: heads, columns or tokens.
    Share, "shares"
);
unit!(
    /// Pieces of a shard, as they are read from disk.
    Piece, "pieces"
);

/// A half-open range `start..end` of `U`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "(u32, u32)", into = "(u32, u32)")]
pub struct Span<U: Unit> {
    start: u32,
    end: u32,
    unit: PhantomData<U>,
}

impl<U: Unit> Default for Span<U> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<U: Unit> Span<U> {
    /// The span `start..end`.
    ///
    /// # Panics
    /// If `start > end`; text and bytes from outside go through serde, which refuses that.
    pub fn new(start: u32, end: u32) -> Self {
        assert!(start <= end, "span {start}..{end} of {} runs backwards", U::NAME);
        Self { start, end, unit: PhantomData }
    }
    /// The span `0..len`.
    pub fn first(len: u32) -> Self {
        Self::new(0, len)
    }
    /// The empty span at zero.
    pub fn empty() -> Self {
        Self::new(0, 0)
    }
    /// The first element.
    pub fn start(self) -> u32 {
        self.start
    }
    /// One past the last element.
    pub fn end(self) -> u32 {
        self.end
    }
    /// The number of elements.
    pub fn len(self) -> u32 {
        self.end - self.start
    }
    /// Whether it holds nothing.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }
    /// Whether `other` lies wholly inside; an empty span lies in every span.
    pub fn contains(self, other: Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }
    /// Whether `index` lies inside.
    pub fn has(self, index: u32) -> bool {
        self.start <= index && index < self.end
    }
    /// The elements that both hold.
    pub fn intersect(self, other: Self) -> Self {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        if start < end { Self::new(start, end) } else { Self::empty() }
    }
    /// The span from the first element of either to the last; an empty span adds nothing.
    pub fn hull(self, other: Self) -> Self {
        match (self.is_empty(), other.is_empty()) {
            (_, true) => self,
            (true, false) => other,
            (false, false) => Self::new(self.start.min(other.start), self.end.max(other.end)),
        }
    }
    /// Whether some element lies in both.
    pub fn overlaps(self, other: Self) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }
    /// The same range in another unit.
    pub fn of<V: Unit>(self) -> Span<V> {
        Span { start: self.start, end: self.end, unit: PhantomData }
    }
    /// The span as a range of indices.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
    /// The elements in ascending order.
    pub fn iter(self) -> Range<u32> {
        self.start..self.end
    }
    /// Cuts it into `parts` runs whose sizes differ by at most one; the longer ones come first.
    pub fn cut(self, parts: u32) -> impl Iterator<Item = Self> {
        let (size, extra) = (self.len() / parts.max(1), self.len() % parts.max(1));
        let mut at = self.start;
        (0..parts.max(1)).map(move |i| {
            let from = at;
            at += size + u32::from(i < extra);
            Self::new(from, at)
        })
    }
}

impl<U: Unit> TryFrom<(u32, u32)> for Span<U> {
    type Error = String;
    fn try_from((start, end): (u32, u32)) -> Result<Self, String> {
        if start <= end {
            Ok(Self::new(start, end))
        } else {
            Err(format!("span {start}..{end} of {} runs backwards", U::NAME))
        }
    }
}
impl<U: Unit> From<Span<U>> for (u32, u32) {
    fn from(span: Span<U>) -> Self {
        (span.start, span.end)
    }
}
impl<U: Unit> fmt::Debug for Span<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}
impl<U: Unit> fmt::Display for Span<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}..{}", U::NAME, self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cutting_a_span_gives_even_parts_in_order() {
        for (len, parts) in [(0, 3), (2, 5), (7, 3), (9, 3), (5, 1)] {
            let span = Span::<Row>::new(10, 10 + len);
            let cut: Vec<_> = span.cut(parts).collect();
            assert_eq!(cut.len(), parts as usize);
            assert_eq!(cut[0].start(), 10);
            assert_eq!(cut.last().map(|s| s.end()), Some(10 + len));
            for pair in cut.windows(2) {
                assert_eq!(pair[0].end(), pair[1].start());
                assert!(pair[0].len() >= pair[1].len() && pair[0].len() <= pair[1].len() + 1);
            }
        }
    }
}
