//! The order of operators that needs the least memory at its peak.
//!
//! A [`MemoryGraph`] says what each operator reads and makes, in buffers of known sizes. While an
//! operator runs, the buffers that are live, those that it makes and its workspace are all there. A
//! buffer lives from the operator that makes it to the last one that reads it; one that nobody reads
//! goes as soon as it is made, unless it is a result that is kept. Inputs are there from the
//! beginning. They may be freed and overwritten like other buffers, unless they are kept; one that
//! nobody reads stays to the end, since somebody put it there.
//!
//! [`MemoryGraph::least`] finds such an order and proves that none is better, or says by how much one
//! might be.

mod front;
mod indexed;
mod network;
mod orders;
mod search;
#[cfg(test)]
pub(crate) mod tests;

use front::Front;
use indexed::Indexed;

/// One operator, as far as memory is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryOperator {
    /// Buffers that it reads; one that stands here twice counts once.
    pub reads: Vec<usize>,
    /// Buffers that it makes.
    pub makes: Vec<usize>,
    /// Bytes that are there only while it runs, such as its kernel and scratch.
    pub workspace: u64,
    /// A buffer that it reads and one that it makes, which share their bytes if the two are of one
    /// size, this is the last reader of the former, and the former is not kept.
    pub in_place: Option<(usize, usize)>,
}

/// Operators and the buffers between them, both known by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryGraph {
    /// Bytes of each buffer.
    pub bytes: Vec<u64>,
    /// Buffers that are there at the beginning.
    pub inputs: Vec<usize>,
    /// Buffers that are never freed: results.
    pub kept: Vec<usize>,
    /// Operators in the order of the file that they come from.
    pub operators: Vec<MemoryOperator>,
}

/// The best order that a search found, and what it proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeastMemory {
    /// Operators in the order in which they run.
    pub order: Vec<usize>,
    /// Bytes at the order's peak.
    pub peak: u64,
    /// Bytes that every order needs at least; the peak itself where the order is proven best.
    pub bound: u64,
    /// Sets of operators that the search told apart; 0 if a simple order met the bound.
    pub states: usize,
}

impl LeastMemory {
    /// Whether the order is proven to be best.
    pub fn is_exact(&self) -> bool {
        self.peak == self.bound
    }
}

/// Why a [`MemoryGraph`], or an order of its operators, makes no sense. It is the caller's fault, and
/// a retry does not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// An operator names a buffer that the graph does not have.
    #[error("operator {operator} names buffer {buffer}, but there are {buffers} buffers")]
    UnknownBuffer {
        /// The operator that names it.
        operator: usize,
        /// The buffer's number.
        buffer: usize,
        /// How many buffers there are.
        buffers: usize,
    },
    /// An input or a kept buffer is none that the graph has.
    #[error("buffer {buffer} is an input or kept, but there are {buffers} buffers")]
    UnknownEnd {
        /// The buffer's number.
        buffer: usize,
        /// How many buffers there are.
        buffers: usize,
    },
    /// A buffer is made by two operators, or twice by one.
    #[error("buffer {buffer} is made by operator {first} and again by operator {second}")]
    MadeTwice {
        /// The buffer that is made twice.
        buffer: usize,
        /// The operator that makes it first.
        first: usize,
        /// The operator that makes it again.
        second: usize,
    },
    /// An operator makes a buffer that is there at the beginning.
    #[error("operator {operator} makes buffer {buffer}, which is an input")]
    MakesInput {
        /// The operator that makes it.
        operator: usize,
        /// The buffer that it makes.
        buffer: usize,
    },
    /// An input is listed twice.
    #[error("buffer {buffer} is listed as an input twice")]
    InputTwice {
        /// The buffer that is listed twice.
        buffer: usize,
    },
    /// An operator reads a buffer that is no input and that no operator makes.
    #[error("operator {operator} reads buffer {buffer}, which is no input and which nothing makes")]
    NeverMade {
        /// The operator that reads it.
        operator: usize,
        /// The buffer that it reads.
        buffer: usize,
    },
    /// A result is no input, and no operator makes it.
    #[error("buffer {buffer} is to be kept, but is no input, and nothing makes it")]
    KeptNeverMade {
        /// The buffer that nothing makes.
        buffer: usize,
    },
    /// An operator works in place from a buffer that it does not read, or into one that it does not make.
    #[error("operator {operator} works in place on buffers that it does not read and make")]
    InPlace {
        /// The operator that names them.
        operator: usize,
    },
    /// Two operators wait for each other, or one for itself.
    #[error("operators {operator} and {other} need each other's results")]
    Cycle {
        /// An operator on the cycle.
        operator: usize,
        /// One before it on the cycle, whose result it reads.
        other: usize,
    },
    /// The bytes of all buffers and workspaces have a sum that does not fit a number of 64 bits.
    #[error("all buffers and workspaces have more bytes than 64 bits can count")]
    TooManyBytes,
    /// An order does not have as many operators as the graph.
    #[error("the order has {given} operators, but the graph has {operators}")]
    OrderLength {
        /// Operators in the order.
        given: usize,
        /// Operators in the graph.
        operators: usize,
    },
    /// An order names an operator that the graph does not have.
    #[error("the order names operator {operator}, but there are {operators} operators")]
    UnknownOperator {
        /// The operator's number.
        operator: usize,
        /// How many operators there are.
        operators: usize,
    },
    /// An order runs an operator twice.
    #[error("the order runs operator {operator} twice")]
    RunTwice {
        /// The operator that the order has twice.
        operator: usize,
    },
    /// An order runs an operator before another that makes what it reads.
    #[error("the order runs operator {operator} before buffer {buffer}, which it reads, is made")]
    TooEarly {
        /// The operator that runs too early.
        operator: usize,
        /// The first buffer that it misses.
        buffer: usize,
    },
}

impl MemoryGraph {
    /// Bytes at the peak of an order, which must have each operator once and each after those whose
    /// results it reads.
    pub fn peak(&self, order: &[usize]) -> Result<u64, MemoryError> {
        let indexed = self.indexed()?;
        let during = indexed.timeline(order)?;
        Ok(during.into_iter().fold(indexed.at_start, u64::max))
    }

    /// The graph with what replays and searches look up, if it makes sense.
    pub(crate) fn indexed(&self) -> Result<Indexed, MemoryError> {
        Indexed::new(self)
    }

    /// Bytes that are there while each operator of an order runs.
    pub fn timeline(&self, order: &[usize]) -> Result<Vec<u64>, MemoryError> {
        self.indexed()?.timeline(order)
    }

    /// The order with the least peak, and a proof, or if it takes more than about `limit` states to
    /// prove, the best order found and how low another one could be.
    ///
    /// A state is a set of operators that have run; it takes a few hundred bytes, and some
    /// microseconds for each operator that can run next.
    /// The order is never worse than that of the file, where that one is possible.
    pub fn least(&self, limit: usize) -> Result<LeastMemory, MemoryError> {
        Ok(search::least(&self.indexed()?, limit))
    }
}

impl Indexed {
    /// Replays an order: the bytes during each operator's run.
    pub(crate) fn timeline(&self, order: &[usize]) -> Result<Vec<u64>, MemoryError> {
        let operators = self.operators.len();
        if order.len() != operators {
            return Err(MemoryError::OrderLength { given: order.len(), operators });
        }
        let mut front = Front::new(self);
        let step = |&operator: &usize| {
            if operator >= operators {
                return Err(MemoryError::UnknownOperator { operator, operators });
            }
            if front.has_run(operator) {
                return Err(MemoryError::RunTwice { operator });
            }
            if let Some(buffer) = front.missing(operator) {
                return Err(MemoryError::TooEarly { operator, buffer });
            }
            let during = front.during(operator);
            front.run(operator);
            Ok(during)
        };
        order.iter().map(step).collect()
    }
}
