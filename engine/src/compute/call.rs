//! One operation with all that it refers to: shared by all engines.

use super::{
    Binding, Inputs,
    kernels::{
        attention,
        rotary::{self, RowPosition},
        wire::Tile,
    },
    op_error::{NO_OPERATOR, NOT_ITS_HEADS, OpError},
};
use crate::weights::Shard;
use galaxy_common::{Head, Row, Span};
use galaxy_graph::{
    operators::{Attention, Heads, OperatorId, Rotary},
    program::{Operation, Program, Region},
};
use galaxy_model::Patches;

/// One operation and all that it refers to.
pub(crate) struct Call<'a> {
    pub(crate) program: &'a Program,
    pub(crate) operation: &'a Operation,
    pub(crate) binding: &'a Binding,
}

impl<'a> Call<'a> {
    /// Checks that these are the first heads of the shard in an attention; and all of them where the batch
    /// sees cached rows, whose heads stand side by side.
    pub(crate) fn attends(
        &self,
        shard: &Shard,
        operator: OperatorId,
        (heads, kv_heads): (Span<Head>, Span<Head>),
    ) -> Result<(), OpError> {
        let attention = shard.graph.attention(operator).ok_or(NO_OPERATOR)?;
        let own = shard.heads(attention);
        let kept = self.binding.shape.segments().iter().any(|segment| segment.context_len > 0);
        let first = own.contains(heads) && own.start() == heads.start() && !kept;
        match (own == heads || first) && attention.kv_heads(heads) == kv_heads {
            true => Ok(()),
            false => Err(NOT_ITS_HEADS),
        }
    }

    pub(crate) fn reads(&self, at: usize) -> Result<&'a Region, OpError> {
        self.operation.reads.get(at).ok_or(OpError::Why("it reads too few regions"))
    }
    pub(crate) fn writes(&self, at: usize) -> Result<&'a Region, OpError> {
        self.operation.writes.get(at).ok_or(OpError::Why("it writes too few regions"))
    }
    /// The staged tile of region `at` of those that are read.
    pub(crate) fn tile<'s>(
        &self,
        staged: Option<&'s [u8]>,
        at: usize,
    ) -> Result<Tile<'s>, OpError> {
        let region = self.reads(at)?;
        let (rows, columns) = (region.rows.len() as usize, region.columns.len() as usize);
        staged
            .and_then(|bytes| Tile::new(bytes, self.program.wire, rows, columns))
            .ok_or(OpError::Why("the staged tile is not there, too short or not aligned"))
    }
    /// The regions that an attention operation reads, if they fit the batch and a device of so many
    /// heads.
    pub(crate) fn attended(
        &self,
        attention: &Attention,
        heads: u32,
        kv_heads: u32,
    ) -> Result<Attended, OpError> {
        let (queries, keys, context) = (*self.reads(0)?, *self.reads(1)?, self.writes(0)?);
        let columns = heads * attention.width;
        if (queries.columns.len(), keys.columns.len()) != (columns, 2 * kv_heads * attention.width)
        {
            return Err(OpError::Why("queries, keys and values are not those of the heads"));
        }
        if (context.rows.len(), context.columns.len()) != (queries.rows.len(), columns) {
            return Err(OpError::Why("rows and context do not fit together"));
        }
        let shape = &self.binding.shape;
        let mut covered = 0;
        for (own, seen) in attention::seen(shape, queries.rows, attention) {
            if !keys.rows.contains(seen) {
                return Err(OpError::Why("it does not read all rows that its queries see"));
            }
            covered += own.len();
        }
        if covered != queries.rows.len() {
            return Err(OpError::Why("its rows are not all of this batch"));
        }
        Ok(Attended { queries, keys })
    }

    /// The token ids of rows that are embedded.
    pub(crate) fn tokens(&self, rows: Span<Row>) -> Result<&'a [u32], OpError> {
        match &self.binding.inputs {
            Inputs::Tokens(tokens) | Inputs::Typed { tokens, .. } => {
                tokens.get(rows.range()).ok_or(OpError::Why("the batch has fewer tokens"))
            }
            Inputs::Patches { .. } => {
                Err(OpError::Why("it came with images, and the model takes text"))
            }
        }
    }

    /// The token types of rows that are embedded, each below `kinds`; none where all are 0.
    pub(crate) fn types(&self, rows: Span<Row>, kinds: u32) -> Result<Option<&'a [u8]>, OpError> {
        let Inputs::Typed { types, .. } = &self.binding.inputs else { return Ok(None) };
        let types = types.get(rows.range()).ok_or(OpError::Why("the batch has fewer types"))?;
        match types.iter().all(|kind| u32::from(*kind) < kinds) {
            true => Ok(Some(types)),
            false => Err(OpError::Why("a token has a type that the model does not have")),
        }
    }

    /// The image patches of rows that are embedded: `[rows, values]`.
    pub(crate) fn patches(&self, patches: Patches, rows: Span<Row>) -> Result<&'a [f32], OpError> {
        match &self.binding.inputs {
            Inputs::Patches { first, values } => {
                let width = patches.values() as usize;
                let from = rows.start().checked_sub(*first).map(|row| row as usize * width);
                let some =
                    from.and_then(|from| values.get(from..from + rows.len() as usize * width));
                some.ok_or(OpError::Why("the batch has fewer image patches"))
            }
            Inputs::Tokens(_) | Inputs::Typed { .. } => {
                Err(OpError::Why("it came with text, and the model takes images"))
            }
        }
    }

    /// Puts the place of each row that is written, and rotated, into `places`. `asked` gives the number of
    /// prompt tokens of the sequence in a slot.
    pub(crate) fn rotary_positions(
        &self,
        heads: &Heads,
        rotary: &Rotary,
        asked: impl Fn(u32) -> u32,
        places: &mut Vec<RowPosition>,
    ) -> Result<(), OpError> {
        let rows = self.writes(0)?.rows;
        rotary::places(&self.binding.shape, rows, asked, places);
        let beyond = |place: &RowPosition| place.position >= rotary.limit;
        if places.len() != rows.len() as usize || places.iter().any(beyond) {
            return Err(OpError::Why("rows lie beyond the batch or the model's positions"));
        }
        if 2 * rotary.inverse_frequencies.len() > heads.width as usize {
            return Err(OpError::Why("more columns are rotated than a head has"));
        }
        Ok(())
    }

    /// The number of query heads and of key heads among the columns that a product of queries, keys and
    /// values computes of a share: it computes all of them, or queries alone, or what follows them.
    pub(crate) fn heads_made(
        &self,
        of: &Heads,
        heads: Span<Head>,
    ) -> Result<(usize, usize), OpError> {
        let columns = self.writes(0)?.columns;
        let (heads, kv_heads) = (heads.len(), of.kv_heads(heads).len());
        let queries = heads * of.width;
        let all = queries + 2 * kv_heads * of.width;
        match (columns.start(), columns.end()) {
            (0, end) if end == all => Ok((heads as usize, kv_heads as usize)),
            (0, end) if end == queries => Ok((heads as usize, 0)),
            (start, end) if (start, end) == (queries, all) => Ok((0, kv_heads as usize)),
            _ => Err(OpError::Why("columns of queries, keys and values are cut within these")),
        }
    }
}

/// The regions that an attention operation reads.
pub(crate) struct Attended {
    pub(crate) queries: Region,
    /// Keys | values of all rows that the queries see.
    pub(crate) keys: Region,
}
