//! What a plan is expected to take of each device, before it is lowered.
//!
//! Weights are counted by `galaxy_graph::budget`, exactly, in tables by heads, columns and vocabulary.
//! What programs work in is estimated; what lowering then finds is put right by a correction, and the
//! split is found again.

use crate::{
    cutting::{Cutting, Units, count},
    request::Request,
};
use galaxy_common::{Assignment, BlockAssignment, Head, Span};
use galaxy_graph::{budget, holdings, lower::farthest, operators::OperatorGraph};
use galaxy_model::{Formats, HeadSpec, ModelSpec, NormPlace, Positions};

/// Bytes of the weights of a layer, and of what stands around the layers.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Memory {
    /// Bytes that every device holds, whatever the layers.
    around: u64,
    /// Bytes that every device holds of a layer, in the mean of all layers.
    layer: u64,
    /// Bytes of all heads of a layer.
    attention: u64,
    /// Bytes of all columns of a layer's MLP.
    mlp: u64,
    /// Bytes of the whole vocabulary in the head.
    head: u64,
    layers: Layers,
    /// Bytes of one key-value head of a layer in the KV cache.
    kv_cache: u64,
}

/// Bytes that are held, by numbers of units.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct ShardBytes {
    pub heads: Vec<u64>,
    pub columns: Vec<u64>,
    pub vocabulary: Vec<u64>,
}

/// How much so many units hold, from none to all.
fn sizes(all: u32, unit: u32) -> impl Iterator<Item = u32> {
    (0..=count(all, unit)).map(move |n| (n as u32).saturating_mul(unit).min(all))
}

/// The layers of a model by their formats, which may differ from layer to layer.
#[derive(Clone, PartialEq, Debug)]
struct Layers {
    /// The formats of one layer, as those of a model of one layer, and how many layers have the same.
    kinds: Vec<(Formats, u64)>,
}

impl Layers {
    fn new(layers: u32, formats: &Formats) -> Self {
        let mut kinds: Vec<(Formats, u64)> = Vec::new();
        for layer in 0..layers.max(1) {
            let one = formats.of_layers([layer]);
            match kinds.iter_mut().find(|(known, _)| *known == one) {
                Some((_, count)) => *count += 1,
                None => kinds.push((one, 1)),
            }
        }
        Self { kinds }
    }

    /// The weights of a device that has this part of the only layer of a model, in the mean of all
    /// layers.
    fn weights(&self, graph: &OperatorGraph, heads: Span<Head>, columns: u32, words: u32) -> u64 {
        let columns = Span::first(columns);
        let part = Assignment {
            blocks: vec![BlockAssignment { layers: Span::first(1), heads, columns }],
            row_weight: 1,
            vocabulary: Span::first(words),
        };
        let bytes = |(formats, count): &(Formats, u64)| {
            (holdings::bytes(graph, formats, &part) * count, *count)
        };
        let each = self.kinds.iter().map(bytes);
        let (bytes, count) = each.fold((0, 0), |all, kind| (all.0 + kind.0, all.1 + kind.1));
        bytes.div_ceil(count)
    }
}

impl Memory {
    pub fn new(request: &Request<'_>) -> Self {
        let spec = request.spec;
        let layers = Layers::new(spec.layers, request.formats);
        let of = |layers| OperatorGraph::of(&ModelSpec { layers, ..spec.clone() });
        let (none, one) = (of(0), of(1));
        let around = layers.weights(&none, Span::empty(), 0, 0);
        let bare = layers.weights(&one, Span::empty(), 0, 0);
        Self {
            around,
            layer: bare - around,
            attention: layers.weights(&one, Span::first(spec.heads), 0, 0) - bare,
            mlp: layers.weights(&one, Span::empty(), spec.intermediate, 0) - bare,
            head: layers.weights(&none, Span::empty(), 0, spec.vocabulary) - around,
            layers,
            kv_cache: u64::from(request.allowed.cache.rows)
                * 2
                * request.allowed.cache.values.bytes(spec.head_width),
        }
    }

    /// The most key-value heads that a run of so many heads uses, wherever a multiple of `unit` it
    /// starts.
    pub fn most_kv(spec: &ModelSpec, unit: u32, heads: u32) -> u32 {
        let group = spec.group();
        if heads == 0 {
            return 0;
        }
        if unit.is_multiple_of(group) {
            return heads.div_ceil(group).min(spec.kv_heads);
        }
        ((heads - 1).div_ceil(group) + 1).min(spec.kv_heads)
    }

    /// Bytes of weights by units: of heads and of columns in one layer, and of the vocabulary.
    pub fn weights_by(&self, spec: &ModelSpec, units: Units) -> ShardBytes {
        let one = OperatorGraph::of(&ModelSpec { layers: 1, ..spec.clone() });
        let bare = self.around + self.layer;
        let of = |all: u32, unit: u32, bytes: &dyn Fn(u32) -> u64| -> Vec<u64> {
            sizes(all, unit).map(|size| if size == 0 { 0 } else { bytes(size) - bare }).collect()
        };
        let heads = of(spec.heads, units.heads, &|heads| {
            let kv = Self::most_kv(spec, units.heads, heads);
            // The run that uses the most key-value heads starts at the end of a group.
            let inside = kv > heads.div_ceil(spec.group());
            let start = if inside { (spec.group() - 1).min(spec.heads - heads) } else { 0 };
            let start = start / units.heads * units.heads;
            self.layers.weights(&one, Span::new(start, start + heads), 0, 0)
        });
        let columns = of(spec.intermediate, units.columns, &|columns| {
            self.layers.weights(&one, Span::empty(), columns, 0)
        });
        let vocabulary = of(spec.extent().vocabulary, units.vocabulary, &|vocabulary| {
            self.layers.weights(&one, Span::empty(), 0, vocabulary)
        });
        ShardBytes { heads, columns, vocabulary }
    }

    /// Bytes by units, in all layers that are cut by heads or columns, with what programs work in.
    pub fn held(
        &self,
        request: &Request<'_>,
        weights: &ShardBytes,
        cutting: Cutting,
    ) -> ShardBytes {
        let (spec, kept) = (request.spec, self.kv_cache);
        let (units, runs) = (cutting.units, cutting.runs());
        let cut = cutting.by_rows.others(spec.layers);
        let rows = u64::from(request.allowed.max_rows) * 4;
        let width = u64::from(spec.head_width);
        let (attention, mlp) = (u64::from(cut.attention), u64::from(cut.mlp));
        let sized = |of: &[u64], all: u32, unit: u32, bytes: &dyn Fn(u64, u32) -> u64| {
            let each = of.iter().zip(sizes(all, unit));
            each.map(|(&held, size)| if size == 0 { 0 } else { bytes(held, size) }).collect()
        };
        let heads = sized(&weights.heads, spec.heads, units.heads, &|held, heads| {
            let kv = u64::from(Self::most_kv(spec, units.heads, heads));
            let heads = u64::from(heads);
            // Queries, keys, values, and the context of one run of rows.
            let works = rows * width * (heads + 2 * kv + heads.div_ceil(runs));
            attention * (held + kept * kv) + if attention > 0 { works } else { 0 }
        });
        let columns =
            sized(&weights.columns, spec.intermediate, units.columns, &|held, columns| {
                mlp * held + if mlp > 0 { rows * u64::from(columns) } else { 0 }
            });
        // Logits, and the same on their way to the coordinator.
        let vocabulary = sized(
            &weights.vocabulary,
            spec.extent().vocabulary,
            units.vocabulary,
            &|held, vocabulary| held + 2 * rows * u64::from(vocabulary),
        );
        ShardBytes { heads, columns, vocabulary }
    }

    /// Bytes of the process, of what kernels work in, and of what every device holds.
    fn base(&self, spec: &ModelSpec, threads: u16, max_rows: u32) -> u64 {
        let each = budget::of_thread(spec, u64::from(max_rows)) + 576 * u64::from(spec.head_width);
        let positions = match &spec.positions {
            Positions::Rotary { .. } => budget::angle_bytes(spec) * u64::from(max_rows),
            Positions::Learned { .. } => budget::POSITION_ROWS * u64::from(spec.hidden) * 4,
        };
        let distances = spec.relative_bias.map_or(0, |_| 8 * u64::from(max_rows * spec.heads));
        let pixels = spec.patches.map_or(0, |p| 8 * u64::from(max_rows * p.values()));
        let scratch =
            budget::SHARED_SCRATCH + u64::from(threads) * each + positions + distances + pixels;
        budget::PROCESS.0 + scratch + self.around + u64::from(spec.layers) * self.layer
    }

    /// Bytes that a device takes whatever its part: the process, and what it works in if it owns rows.
    pub fn fixed(&self, request: &Request<'_>, cutting: Cutting, owner: bool, threads: u16) -> u64 {
        let (spec, allowed) = (request.spec, request.allowed);
        let Cutting { devices, means, by_rows, .. } = cutting;
        let rows = u64::from(allowed.max_rows);
        let row = u64::from(spec.hidden) * 4;
        let d = devices as u64;
        let mut own = if owner { rows.div_ceil(d) } else { 0 };
        if by_rows.attention > 0 && devices > 1 {
            own += u64::from(farthest(own as u32));
        }
        let live = if spec.norm_place == NormPlace::Pre { 4 } else { 2 };
        let runs = cutting.runs();
        // Gathered rows, partial sums, and tiles on their way.
        let (gathered, staged) = if devices == 1 {
            (1, 0)
        } else {
            (if runs == 1 { 2 } else { 3 }, 2 * means.wire.row(spec.hidden.into()))
        };
        let gathered = gathered * rows.div_ceil(runs) * row;
        let staging = staged * rows;
        let mut total = self.base(spec, threads, allowed.max_rows);
        total += own * row * live + gathered + staging;
        match spec.head {
            HeadSpec::Language { .. } => total += rows * row,
            _ => total += own * row,
        }
        if owner {
            let kept = self.kv_cache * u64::from(spec.kv_heads);
            total += u64::from(by_rows.attention) * (self.attention + kept);
            total += u64::from(by_rows.mlp) * self.mlp;
            let queries = u64::from(spec.heads) * u64::from(spec.head_width) * 4;
            let keys = 2 * u64::from(spec.kv_heads) * u64::from(spec.head_width) * 4;
            if by_rows.attention > 0 {
                total += own * (2 * queries + keys) + rows * keys;
            }
            if by_rows.mlp > 0 {
                total += own * u64::from(spec.intermediate) * 4;
            }
        }
        total
    }

    /// Bytes of the weights that all devices together must hold.
    pub fn whole(&self, spec: &ModelSpec) -> u64 {
        self.around + u64::from(spec.layers) * (self.layer + self.attention + self.mlp)
    }

    /// Bytes of a stage: what it takes whatever its layers, and what each of them takes. Every stage
    /// holds the norms of all layers.
    pub fn stage(&self, spec: &ModelSpec, max_rows: u32, threads: u16, last: bool) -> (u64, u64) {
        let rows = u64::from(max_rows) * 4;
        let width = u64::from(spec.head_width);
        let hidden = u64::from(spec.hidden);
        let qkv = u64::from(2 * spec.heads + 2 * spec.kv_heads) * width;
        let mut fixed = self.base(spec, threads, max_rows);
        // Residual, normed rows, sums, and what goes in and out.
        fixed += rows * (5 * hidden + qkv + u64::from(spec.intermediate));
        if let (true, HeadSpec::Language { .. }) = (last, &spec.head) {
            let words = u64::from(spec.vocabulary);
            fixed += self.head;
            fixed += rows * (2 * words + hidden);
        }
        // In causal models each layer keeps its queries, keys and values from part to part.
        let kept = u64::from(spec.heads + 2 * spec.kv_heads) * width * rows;
        let cache = self.kv_cache * u64::from(spec.kv_heads);
        (fixed, self.attention + self.mlp + cache + if spec.causal { kept } else { 0 })
    }
}
