//! Attention of query rows over the rows of their segments, a few query rows at a time.

use crate::compute::{cache::KvCache, kernels::attention::seen};
use burn::{Device, Int, Tensor, TensorData, activation};
use galaxy_common::{BatchShape, Head, Row, Span};
use galaxy_graph::operators::Attention;
use galaxy_model::RelativeBias;

/// Query rows of one step: bounds the scores, which are these times the rows that they see for
/// every head.
const STEP: u32 = 256;
/// Added to the score of a key that a row does not see: its exponential is 0, and it is a number
/// for shaders that have no infinity.
const HIDDEN: f32 = -1e38;

/// Queries, keys and values of a device's heads.
pub(super) struct Sources<'a> {
    /// The queries, `[rows, heads * width]`.
    pub(super) queries: Tensor<2>,
    /// The row of the batch that is row 0 of the queries.
    pub(super) first_query: u32,
    /// Keys and values, `[rows, 2 * kv_heads * width]`: keys | values.
    pub(super) keys: Tensor<2>,
    /// The row of the batch that is row 0 of the keys.
    pub(super) first_key: u32,
    pub(super) of: &'a Attention,
    /// The query heads of the device.
    pub(super) heads: Span<Head>,
    /// The key-value head of each query head, both counted on this device; none where they are the
    /// same.
    pub(super) kv_of_heads: Option<&'a Tensor<1, Int>>,
    /// The relative position bias that is added to scores, and its table: `[buckets, all heads]`.
    pub(super) relative_bias: Option<(RelativeBias, &'a [f32])>,
    pub(super) device: &'a Device,
    /// The KV cache, which has the earlier rows of sequences.
    pub(super) cache: &'a KvCache,
}

impl Sources<'_> {
    /// `softmax(queries x keys' * scale) x values` of the query rows `rows`, all of which have
    /// a segment.
    ///
    /// # Shapes
    /// `[rows, heads * width]`.
    pub(super) fn attend(&self, shape: &BatchShape, rows: Span<Row>) -> Tensor<2> {
        let mut context = Vec::new();
        let segments = shape.placed().filter(|(segment, _)| segment.overlaps(rows));
        for ((own, _), (segment, text)) in seen(shape, rows, self.of).zip(segments) {
            let past = self.cache.cached_rows(text.slot, self.of.layer, text.context_len);
            let past = past.ok().filter(|past| past.rows() > 0).map(|past| {
                let values = past.values();
                let shape = [past.rows(), values.len() / past.rows()];
                Tensor::<2>::from_data(TensorData::new(values, shape), self.device)
            });
            for own in own.cut(own.len().div_ceil(STEP)) {
                context.push(self.step((own, self.of.sees(own, segment)), segment, past.as_ref()));
            }
        }
        Tensor::cat(context, 0)
    }

    fn step(
        &self,
        (own, seen): (Span<Row>, Span<Row>),
        text: Span<Row>,
        past: Option<&Tensor<2>>,
    ) -> Tensor<2> {
        let (heads, kv_heads) = (self.heads.len(), self.of.kv_heads(self.heads).len());
        let of_keys = |head| {
            let here = self.part(&self.keys, self.first_key, seen, head, kv_heads);
            let Some(past) = past else { return here };
            let before = Span::first(past.dims()[0] as u32);
            Tensor::cat(vec![self.part(past, 0, before, head, kv_heads), here], 1)
        };
        let queries = self.part(&self.queries, self.first_query, own, 0, heads);
        let (keys, values) = (self.shared(of_keys(0)), self.shared(of_keys(kv_heads)));
        let mut scores = queries.matmul(keys.swap_dims(1, 2)) * self.of.scale;
        if let Some(most) = self.of.cap {
            scores = (scores / most).tanh() * most;
        }
        if let Some((distances, table)) = self.relative_bias {
            scores = scores + self.relative_bias(distances, table, own, seen);
        }
        let masked =
            self.of.window_after.is_some() && own.len() > 1 || self.of.window_before.is_some();
        if masked {
            let kept = past.map_or(0, |past| past.dims()[0]);
            scores = scores + self.mask((own, seen), text, kept);
        }
        let context = activation::softmax(scores, 2).matmul(values).swap_dims(0, 1);
        context.reshape([own.len() as usize, heads as usize * self.of.width as usize])
    }

    /// The heads from `first` on, `heads` of them, of some rows of a tensor whose row 0 is `first_row`: `[heads, rows,
    /// width]`.
    fn part(
        &self,
        of: &Tensor<2>,
        first_row: u32,
        rows: Span<Row>,
        first: u32,
        heads: u32,
    ) -> Tensor<3> {
        let (first, heads, width) = (first as usize, heads as usize, self.of.width as usize);
        let from = (rows.start() - first_row) as usize;
        let range = from..from + rows.len() as usize;
        let part = of.clone().slice([range, first * width..(first + heads) * width]);
        part.reshape([rows.len() as usize, heads, width]).swap_dims(0, 1)
    }

    /// The keys or values of each query head.
    fn shared(&self, of_kv_heads: Tensor<3>) -> Tensor<3> {
        match self.kv_of_heads {
            Some(kv) => of_kv_heads.select(0, kv.clone().narrow(0, 0, self.heads.len() as usize)),
            None => of_kv_heads,
        }
    }

    /// The relative position bias of these rows: `[heads, own, seen]`.
    fn relative_bias(
        &self,
        spec: RelativeBias,
        table: &[f32],
        own: Span<Row>,
        seen: Span<Row>,
    ) -> Tensor<3> {
        let all = table.len() / spec.buckets as usize;
        let heads = self.heads;
        let mut values = Vec::with_capacity((heads.len() * own.len() * seen.len()) as usize);
        for head in heads.iter() {
            for row in own.iter() {
                let bucket = |key: u32| spec.bucket(i64::from(key) - i64::from(row)) as usize;
                values.extend(seen.iter().map(|key| table[bucket(key) * all + head as usize]));
            }
        }
        let shape = [heads.len() as usize, own.len() as usize, seen.len() as usize];
        Tensor::from_data(TensorData::new(values, shape), self.device)
    }

    /// The mask that hides from each row the keys that it does not see: `[1, own, kept + seen]`.
    fn mask(&self, (own, seen): (Span<Row>, Span<Row>), text: Span<Row>, kept: usize) -> Tensor<3> {
        // Rows are counted within their sequence.
        let at = |row: u32| i64::from(row - text.start()) + kept as i64;
        let keys: Vec<i64> = (0..kept as i64).chain(seen.iter().map(at)).collect();
        let far = |rows: Option<u32>| rows.map_or(i64::MAX / 2, i64::from);
        let (behind, ahead) = (far(self.of.window_before), far(self.of.window_after));
        let sees = |row: i64, key: i64| row - behind <= key && key <= row + ahead;
        let of = |row: i64, key: i64| if sees(row, key) { 0.0 } else { HIDDEN };
        let row = |row: i64| keys.iter().map(move |key| of(row, *key)).collect::<Vec<f32>>();
        let values: Vec<f32> = own.iter().map(at).flat_map(row).collect();
        let shape = [1, own.len() as usize, keys.len()];
        Tensor::from_data(TensorData::new(values, shape), self.device)
    }
}
