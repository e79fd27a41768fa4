//! A shard's weights as tensors of a device: f32, row-major.

use crate::weights::{Shard, ShardMatrix};
use burn::{Device, Int, Tensor, TensorData};
use galaxy_common::{Head, Span};
use galaxy_graph::operators::{Attention, Operator, OperatorId, WeightId, Within};
use std::{collections::HashMap, ops::Range};

/// All weights of a shard.
pub(super) struct Weights {
    /// The products, by the number of their operator.
    products: Vec<Product>,
    /// The vectors and tables, by the number of their weight: a vector is `[1, values]`, a table has as
    /// many rows as it has.
    vectors: Vec<Option<Tensor<2>>>,
    /// The key-value head of each query head of an attention, both counted on this device; absent where they
    /// are the same.
    kv_of_heads: HashMap<OperatorId, Tensor<1, Int>>,
    /// Bytes of all of them.
    pub(super) bytes: u64,
}

/// The part of a product that a device holds. The matrix is `[inputs, outputs]`, the bias `[1,
/// outputs]`.
#[derive(Clone, Default)]
pub(super) struct Product {
    pub(super) matrix: Option<Tensor<2>>,
    pub(super) bias: Option<Tensor<2>>,
}

impl Product {
    /// The inputs and columns of the product that `within` names.
    pub(super) fn part(&self, within: &Within) -> Self {
        let range = |range: &Range<u32>| range.start as usize..range.end as usize;
        let columns = |of: &Tensor<2>, rows: Range<usize>| {
            let runs = within.columns.iter();
            let runs = runs.map(|run| of.clone().slice([rows.clone(), range(run)]));
            Tensor::cat(runs.collect(), 1)
        };
        let matrix = self.matrix.as_ref().map(|matrix| columns(matrix, range(&within.inputs)));
        Self { matrix, bias: self.bias.as_ref().map(|bias| columns(bias, 0..1)) }
    }
}

impl Weights {
    /// Moves the weights out of a shard to the device, one by one: no more than one matrix is there
    /// twice. Tables of relative position bias stay: they are small, and the host reads them.
    pub(super) fn take(shard: &mut Shard, device: &Device) -> Self {
        let mut mover = Mover { device, bytes: 0 };
        let mut products = Vec::with_capacity(shard.products.len());
        for held in &mut shard.products {
            let matrix = mover.matrix(std::mem::take(&mut held.matrices));
            let bias = held.bias.take().map(|bias| mover.table(bias, 1));
            products.push(Product { matrix, bias });
        }
        let graph = shard.graph.clone();
        let stays = |id: WeightId| {
            let of =
                |(_, attention): (_, &Attention)| attention.relative_bias.map(|(_, table)| table);
            graph.attentions().next().and_then(of) == Some(id)
        };
        let types = match graph.get(graph.embed) {
            Some(Operator::Embed(embed)) => embed.types,
            _ => None,
        };
        let rows =
            |id| types.filter(|(table, _)| *table == id).map_or(1, |(_, rows)| rows as usize);
        let mut vectors = Vec::with_capacity(shard.vectors.len());
        for (id, vector) in (0..).map(WeightId).zip(&mut shard.vectors) {
            let vector = if stays(id) { None } else { vector.take() };
            vectors.push(vector.map(|values| mover.table(values, rows(id))));
        }
        let mut kv_of_heads = HashMap::new();
        for (id, attention) in graph.attentions() {
            kv_of_heads
                .extend(mover.kv_of_head(attention, shard.heads(attention)).map(|kv| (id, kv)));
        }
        Self { products, vectors, kv_of_heads, bytes: mover.bytes }
    }

    pub(super) fn product(&self, id: OperatorId) -> Option<&Product> {
        self.products.get(id.0 as usize)
    }

    pub(super) fn vector(&self, id: WeightId) -> Option<&Tensor<2>> {
        self.vectors.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn kv_of_heads(&self, id: OperatorId) -> Option<&Tensor<1, Int>> {
        self.kv_of_heads.get(&id)
    }
}

struct Mover<'a> {
    device: &'a Device,
    bytes: u64,
}

impl Mover<'_> {
    fn tensor(&mut self, values: Vec<f32>, shape: [usize; 2]) -> Tensor<2> {
        self.bytes += size_of_val(values.as_slice()) as u64;
        Tensor::from_data(TensorData::new(values, shape), self.device)
    }

    /// One matrix of several that stand side by side; none where there are none.
    fn matrix(&mut self, matrices: Vec<ShardMatrix>) -> Option<Tensor<2>> {
        let one = |matrix: ShardMatrix| {
            let (values, shape) = (matrix.wide(), [matrix.inputs, matrix.outputs]);
            drop(matrix);
            self.tensor(values, shape)
        };
        let mut all: Vec<_> = matrices.into_iter().map(one).collect();
        if all.len() > 1 { Some(Tensor::cat(all, 1)) } else { all.pop() }
    }

    fn table(&mut self, values: Vec<f32>, rows: usize) -> Tensor<2> {
        let shape = [rows, values.len() / rows.max(1)];
        self.tensor(values, shape)
    }

    fn kv_of_head(&self, attention: &Attention, heads: Span<Head>) -> Option<Tensor<1, Int>> {
        let kv_heads = attention.kv_heads(heads);
        let kv = |head: u32| (head / attention.group.max(1) - kv_heads.start()) as i32;
        let of_head: Vec<i32> = heads.iter().map(kv).collect();
        let same = of_head.iter().copied().eq(0..kv_heads.len() as i32);
        (!same).then(|| {
            let count = of_head.len();
            Tensor::from_data(TensorData::new(of_head, [count]), self.device)
        })
    }
}
