//! One operation and all that it refers to, and why it may not fit: what engines share.

use super::{Binding, ComputeError, kernels::wire::Tile};
use crate::weights::WeightError;
use galaxy_graph::program::{Operation, Program, Region};

/// Why an operation cannot be run.
pub(crate) enum Misfit {
    /// The program does not fit the shard or itself.
    Why(&'static str),
    /// A row of a table cannot be read.
    Weights(WeightError),
    /// The device failed, and says this.
    #[cfg(feature = "burn")]
    Device(String),
}

impl From<&'static str> for Misfit {
    fn from(why: &'static str) -> Self {
        Self::Why(why)
    }
}

impl Misfit {
    /// The error of an engine that ran `operation`.
    pub(crate) fn of(self, operation: &Operation) -> ComputeError {
        match self {
            Self::Why(why) => ComputeError::Operation {
                operation: format!("{:?}", operation.kind),
                why: why.to_owned(),
            },
            Self::Weights(error) => error.into(),
            #[cfg(feature = "burn")]
            Self::Device(why) => ComputeError::Device { why },
        }
    }
}

/// One operation and all that it refers to.
pub(crate) struct Call<'a> {
    pub(crate) program: &'a Program,
    pub(crate) operation: &'a Operation,
    pub(crate) binding: &'a Binding,
}

impl<'a> Call<'a> {
    pub(crate) fn reads(&self, at: usize) -> Result<&'a Region, Misfit> {
        self.operation.reads.get(at).ok_or(Misfit::Why("it reads too few regions"))
    }
    pub(crate) fn writes(&self, at: usize) -> Result<&'a Region, Misfit> {
        self.operation.writes.get(at).ok_or(Misfit::Why("it writes too few regions"))
    }
    /// The staged tile that stands at `at` of what is read.
    pub(crate) fn tile<'s>(&self, staged: Option<&'s [u8]>, at: usize) -> Result<Tile<'s>, Misfit> {
        let region = self.reads(at)?;
        let (rows, columns) = (region.rows.len() as usize, region.columns.len() as usize);
        staged
            .and_then(|bytes| Tile::new(bytes, self.program.wire, rows, columns))
            .ok_or(Misfit::Why("the staged tile is not there, too short or not aligned"))
    }
}
