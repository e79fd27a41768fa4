//! What tensors of programs hold, in terms of the graph: what the verifier's rules are about.

use super::{OperatorId, ValueId};
use galaxy_common::{Share, Span};
use std::{fmt, rc::Rc};

/// The terms of a sum: shares of operators that are cut by their inputs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sums(Rc<[(OperatorId, Span<Share>)]>);

impl Sums {
    /// A sum of one term.
    pub fn one(operator: OperatorId, share: Span<Share>) -> Self {
        Self(Rc::new([(operator, share)]))
    }

    /// The terms of both sums together; none where a share is in both.
    pub fn plus(&self, other: &Self) -> Option<Self> {
        let mut all: Vec<_> = self.0.iter().chain(&*other.0).copied().collect();
        all.sort_unstable();
        let mut terms: Vec<(OperatorId, Span<Share>)> = Vec::with_capacity(all.len());
        for (operator, share) in all {
            match terms.last_mut().filter(|(of, _)| *of == operator) {
                Some((_, last)) if share.start() < last.end() => return None,
                Some((_, last)) if share.start() == last.end() => {
                    *last = Span::new(last.start(), share.end());
                }
                _ => terms.push((operator, share)),
            }
        }
        Some(Self(terms.into()))
    }

    /// Whether it has all shares of these operators, of which there are so many, and nothing else.
    pub fn is_whole(&self, of: &[(OperatorId, u32)]) -> bool {
        let whole = |&(operator, count): &(OperatorId, u32)| {
            count == 0 || self.0.contains(&(operator, Span::first(count)))
        };
        let known = |(operator, _): &(OperatorId, _)| of.iter().any(|(of, _)| of == operator);
        of.iter().all(whole) && self.0.iter().all(known)
    }
}

/// What a tensor holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A value, whole in those of its columns that are there.
    Value(ValueId),
    /// A sum that may lack terms.
    Sums(Sums),
    /// Candidates for the next tokens of a batch, of the devices whose bits are set.
    Candidates(u128),
    /// A piece of the device's shard, by its number.
    Weights(u32),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => write!(f, "value {}", value.0),
            Self::Sums(sums) => {
                write!(f, "sums over")?;
                for (operator, share) in &*sums.0 {
                    write!(f, " shares {}..{}", share.start(), share.end())?;
                    write!(f, " of operator {}", operator.0)?;
                }
                Ok(())
            }
            Self::Candidates(who) => write!(f, "candidates from devices {who:b}"),
            Self::Weights(piece) => write!(f, "piece {piece} of the shard"),
        }
    }
}

/// The error of an operation that reads something else than its operator reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OperandMismatch {
    /// The place of the value among those that are read.
    pub at: usize,
    /// What it should be, for people.
    pub want: String,
}

impl OperandMismatch {
    /// Something else than `want` is read at `at`.
    pub fn new(at: usize, want: impl fmt::Display) -> Self {
        Self { at, want: want.to_string() }
    }

    /// An error unless the value that is read at `at` is this one.
    pub(super) fn unless(read: &[Option<Content>], at: usize, value: ValueId) -> Result<(), Self> {
        let want = Content::Value(value);
        match read.get(at).and_then(Option::as_ref) {
            Some(have) if *have == want => Ok(()),
            _ => Err(Self::new(at, want)),
        }
    }
}
