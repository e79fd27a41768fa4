//! A shard's weights as tensors of a device: f32, row-major.

use crate::weights::{HeldMatrix, LayerShard, NormVectors, Shard};
use burn::{Device, Int, Tensor, TensorData};
use galaxy_common::{Head, Span};

/// All weights of a shard.
pub(super) struct Weights {
    pub(super) layers: Vec<Layer>,
    pub(super) patch: Option<PatchTensors>,
    pub(super) embedding_norm: Option<NormTensors>,
    /// `[types, hidden]`
    pub(super) token_types: Option<Tensor<2>>,
    pub(super) final_norm: Option<NormTensors>,
    pub(super) language: Option<Tensor<2>>,
    pub(super) language_bias: Option<Tensor<2>>,
    /// `[buckets, heads]`, of all heads, on the host: there are few.
    pub(super) distances: Option<Vec<f32>>,
    pub(super) classes: Option<Classes>,
    /// Bytes of all of them.
    pub(super) bytes: u64,
}

/// As [`LayerShard`]. Matrices are `[inputs, outputs]`, biases `[1, outputs]`.
pub(super) struct Layer {
    pub(super) heads: Span<Head>,
    pub(super) kv_heads: Span<Head>,
    /// For each query head the key-value head that it uses, both counted on this device; none where
    /// they are the same.
    pub(super) kv_of_head: Option<Tensor<1, Int>>,
    pub(super) qkv: Option<Tensor<2>>,
    pub(super) qkv_bias: Option<Tensor<2>>,
    pub(super) attention_output: Option<Tensor<2>>,
    pub(super) attention_output_bias: Option<Tensor<2>>,
    pub(super) up: Option<Tensor<2>>,
    pub(super) up_bias: Option<Tensor<2>>,
    pub(super) down: Option<Tensor<2>>,
    pub(super) down_bias: Option<Tensor<2>>,
    pub(super) attention_norm: NormTensors,
    pub(super) mlp_norm: Option<NormTensors>,
    pub(super) head_norms: Option<[NormTensors; 2]>,
}

/// As [`crate::weights::PatchShard`].
pub(super) struct PatchTensors {
    pub(super) matrix: Tensor<2>,
    pub(super) bias: Tensor<2>,
    pub(super) class_row: Tensor<2>,
}

/// As [`NormVectors`], each `[1, columns]`.
pub(super) struct NormTensors {
    pub(super) weight: Tensor<2>,
    pub(super) bias: Option<Tensor<2>>,
}

/// As [`crate::weights::ClassShard`].
pub(super) struct Classes {
    pub(super) dense: Option<(Tensor<2>, Tensor<2>)>,
    pub(super) output: Tensor<2>,
    pub(super) bias: Option<Tensor<2>>,
}

impl Weights {
    /// Moves the weights out of a shard to the device, one by one: no more than one matrix is there
    /// twice. `group` query heads share a key-value head.
    pub(super) fn take(shard: &mut Shard, group: u32, device: &Device) -> Self {
        let mut mover = Mover { device, bytes: 0 };
        let layers = std::mem::take(&mut shard.layers);
        let layers = layers.into_iter().map(|layer| mover.layer(layer, group)).collect();
        let patch = shard.patch.take().map(|patch| PatchTensors {
            matrix: mover.whole(patch.matrix),
            bias: mover.vector(patch.bias),
            class_row: mover.vector(patch.class_row),
        });
        let embedding_norm = shard.embedding_norm.take().map(|norm| mover.norm(norm));
        let types = shard.spec().token_types as usize;
        let token_types = shard.token_types.take();
        let token_types = token_types.map(|values| mover.table(values, types));
        let final_norm = shard.final_norm.take().map(|norm| mover.norm(norm));
        let language = mover.matrix(shard.language.take());
        let language_bias = mover.row(shard.language_bias.take());
        let distances = shard.distances.take();
        let classes = shard.classes.take().map(|classes| Classes {
            dense: classes.dense.map(|(dense, bias)| (mover.whole(dense), mover.vector(bias))),
            output: mover.whole(classes.output),
            bias: mover.row(classes.bias),
        });
        let bytes = mover.bytes;
        Self {
            layers,
            patch,
            embedding_norm,
            token_types,
            final_norm,
            language,
            language_bias,
            distances,
            classes,
            bytes,
        }
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

    fn whole(&mut self, matrix: HeldMatrix) -> Tensor<2> {
        let (values, shape) = (matrix.wide(), [matrix.inputs, matrix.outputs]);
        drop(matrix);
        self.tensor(values, shape)
    }

    fn matrix(&mut self, matrix: Option<HeldMatrix>) -> Option<Tensor<2>> {
        matrix.map(|matrix| self.whole(matrix))
    }

    fn table(&mut self, values: Vec<f32>, rows: usize) -> Tensor<2> {
        let shape = [rows, values.len() / rows.max(1)];
        self.tensor(values, shape)
    }

    fn vector(&mut self, values: Vec<f32>) -> Tensor<2> {
        let shape = [1, values.len()];
        self.tensor(values, shape)
    }

    fn row(&mut self, values: Option<Vec<f32>>) -> Option<Tensor<2>> {
        values.map(|values| self.vector(values))
    }

    fn norm(&mut self, norm: NormVectors) -> NormTensors {
        NormTensors { weight: self.vector(norm.weight), bias: self.row(norm.bias) }
    }

    fn layer(&mut self, held: LayerShard, group: u32) -> Layer {
        let first = held.kv_heads.start();
        let kv = |head: u32| (head / group.max(1)).saturating_sub(first) as i32;
        let of_head: Vec<i32> = held.heads.iter().map(kv).collect();
        let same = of_head.iter().copied().eq(0..held.kv_heads.len() as i32);
        let kv_of_head = (!same).then(|| {
            let count = of_head.len();
            Tensor::from_data(TensorData::new(of_head, [count]), self.device)
        });
        Layer {
            heads: held.heads,
            kv_heads: held.kv_heads,
            kv_of_head,
            qkv: self.matrix(held.qkv),
            qkv_bias: self.row(held.qkv_bias),
            attention_output: self.matrix(held.attention_output),
            attention_output_bias: self.row(held.attention_output_bias),
            up: self.matrix(held.up),
            up_bias: self.row(held.up_bias),
            down: self.matrix(held.down),
            down_bias: self.row(held.down_bias),
            attention_norm: self.norm(held.attention_norm),
            mlp_norm: held.mlp_norm.map(|norm| self.norm(norm)),
            head_norms: held.head_norms.map(|norms| norms.map(|norm| self.norm(norm))),
        }
    }
}
