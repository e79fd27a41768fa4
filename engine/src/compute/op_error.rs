//! Why an operation cannot be run.

use super::ComputeError;
use crate::weights::WeightError;
use galaxy_graph::program::Operation;

/// Why an operation cannot be run.
pub(crate) enum OpError {
    /// The program does not fit the shard or itself.
    Why(&'static str),
    /// The mask of the sequence in this slot leaves no token to choose.
    NoToken(u32),
    /// A row of a table cannot be read.
    Weights(WeightError),
    /// The device failed, and says this.
    #[cfg(feature = "burn")]
    Device(String),
}

impl OpError {
    /// The error of an engine that ran `operation`.
    pub(crate) fn of(self, operation: &Operation) -> ComputeError {
        match self {
            Self::Why(why) => ComputeError::Operation {
                operation: format!("{:?}", operation.kind),
                why: why.to_owned(),
            },
            Self::NoToken(slot) => ComputeError::NoToken { slot },
            Self::Weights(error) => error.into(),
            #[cfg(feature = "burn")]
            Self::Device(why) => ComputeError::Device { why },
        }
    }
}

/// The operation names an operator that the graph does not have.
pub(crate) const NO_OPERATOR: OpError = OpError::Why("the model has no such operator");

/// The operation names a matrix that the shard does not have.
pub(crate) const NO_MATRIX: OpError = OpError::Why("the shard has no such matrix");

/// The operation names heads that are not those of the shard.
pub(crate) const NOT_ITS_HEADS: OpError = OpError::Why("the heads are not those of the shard");

/// The operation names tokens that are not those of the shard.
pub(crate) const NOT_ITS_TOKENS: OpError =
    OpError::Why("the slice of the vocabulary is not that of the shard");
