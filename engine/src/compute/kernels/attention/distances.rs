//! What distances between rows add to scores.

use galaxy_model::Distances as Spec;
use std::f32::consts::LOG2_E;

/// Lanes beyond the last row may be loaded with it.
const BEYOND: usize = 64;

/// For each head what each distance adds to a score, as far as a batch has needed it.
#[derive(Default)]
pub(crate) struct DistanceTable {
    /// Of each head, by how far the query is behind the key, from `1 - rows` to `rows - 1`; for weights
    /// that are powers of 2.
    values: Vec<f32>,
    rows: usize,
}

impl DistanceTable {
    /// Makes sure of texts of `rows` rows. `table`: `[buckets, heads]`.
    pub(crate) fn reach(&mut self, spec: Spec, table: &[f32], rows: usize) -> &Self {
        if rows <= self.rows || table.is_empty() {
            return self;
        }
        self.rows = rows;
        let heads = table.len() / (spec.buckets as usize).max(1);
        let most = rows as i64 - 1;
        // Buckets are of keys behind queries.
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

    /// Those of a head, for queries from row `row` of their text on.
    pub(super) fn of(&self, head: usize, row: usize) -> Distances<'_> {
        let values = &self.values[head * self.stride()..][..self.stride()];
        Distances { values, zero: row + self.rows - 1 }
    }
}

/// What is added to the scores of the queries of one head.
#[derive(Clone, Copy)]
pub(super) struct Distances<'a> {
    values: &'a [f32],
    /// Where that of the first query and the first key stands.
    zero: usize,
}

impl<'a> Distances<'a> {
    /// For the query rows from `row` on and one key.
    #[inline(always)]
    pub(super) fn from(&self, row: usize, key: usize) -> &'a [f32] {
        &self.values[self.zero + row - key..]
    }
}
