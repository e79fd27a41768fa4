//! The relative position bias: what is added to scores by how far rows are apart.

use galaxy_model::RelativeBias as Spec;
use std::f32::consts::LOG2_E;

/// Lanes beyond the last row may be loaded with it.
const BEYOND: usize = 64;

/// The relative position bias of each head and each distance, as far as a batch has needed it.
#[derive(Default)]
pub(crate) struct BiasTable {
    /// The bias of each head by how far the query is behind the key, from `1 - rows` to `rows - 1`, times
    /// log2(e): for weights that are powers of 2.
    values: Vec<f32>,
    rows: usize,
}

impl BiasTable {
    /// Makes sure of the distances within a sequence of `rows` rows. `table` is `[buckets, heads]`.
    pub(crate) fn reach(&mut self, spec: Spec, table: &[f32], rows: usize) -> &Self {
        if rows <= self.rows || table.is_empty() {
            return self;
        }
        self.rows = rows;
        let heads = table.len() / (spec.buckets as usize).max(1);
        let most = rows as i64 - 1;
        // Buckets are by how far keys are behind queries.
        let buckets: Vec<usize> =
            (-most..=most).map(|behind| spec.bucket(-behind) as usize).collect();
        self.values.clear();
        self.values.reserve_exact(heads * self.stride());
        for head in 0..heads {
            let value = |&bucket: &usize| table[bucket * heads + head] * LOG2_E;
            self.values.extend(buckets.iter().map(value));
            self.values.extend([0.0; BEYOND]);
        }
        self
    }

    fn stride(&self) -> usize {
        2 * self.rows - 1 + BEYOND
    }

    /// The biases of a head, for queries from row `row` of their sequence on.
    pub(super) fn of(&self, head: usize, row: usize) -> HeadBias<'_> {
        let values = &self.values[head * self.stride()..][..self.stride()];
        HeadBias { values, zero: row + self.rows - 1 }
    }
}

/// The relative position bias of the queries of one head.
#[derive(Clone, Copy)]
pub(super) struct HeadBias<'a> {
    values: &'a [f32],
    /// The index of the bias of the first query and the first key.
    zero: usize,
}

impl<'a> HeadBias<'a> {
    /// The biases of the query rows from `row` on with one key.
    #[inline(always)]
    pub(super) fn from(&self, row: usize, key: usize) -> &'a [f32] {
        &self.values[self.zero + row - key..]
    }
}
