//! What a plan is expected to take of each device, before it is lowered.
//!
//! Weights are counted by `galaxy_graph::budget`, exactly, in tables by heads, columns and words.
//! What programs work in is estimated; what lowering then finds is put right by a correction, and the
//! split is found again.

use crate::{
    closed::{ByRows, Means, Units, count},
    request::{Allowed, Request},
};
use galaxy_common::{Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Span};
use galaxy_graph::budget;
use galaxy_model::{HeadSpec, ModelSpec, NormPlace, Positions};

/// Weights of one layer and of what stands around them.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Memory {
    /// What every device holds.
    around: u64,
    /// What every device holds of each layer.
    layer: u64,
    /// All heads of a layer,
    attention: u64,
    /// and all columns.
    mlp: u64,
    width: u32,
}

/// Bytes by units.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Held {
    pub heads: Vec<u64>,
    pub columns: Vec<u64>,
    pub words: Vec<u64>,
}

/// The weights of a device that has so much of each layer.
fn weights(
    spec: &ModelSpec,
    width: u32,
    heads: Span<galaxy_common::Head>,
    columns: u32,
    words: u32,
) -> u64 {
    let part = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(spec.layers),
            heads,
            columns: Span::first(columns),
        }],
        row_weight: 1,
        vocabulary: Span::first(words),
    };
    let device = DevicePlan {
        name: DeviceName::new("any").expect("a DNS label"),
        budget: Bytes(0),
        threads: 1,
        prefill: part.clone(),
        decode: part,
    };
    budget::weights(spec, width, &device).0
}

impl Memory {
    pub fn new(request: &Request<'_>) -> Self {
        let (spec, width) = (request.spec, request.matrix_width);
        let none = ModelSpec { layers: 0, ..spec.clone() };
        let one = ModelSpec { layers: 1, ..spec.clone() };
        let around = weights(&none, width, Span::empty(), 0, 0);
        let bare = weights(&one, width, Span::empty(), 0, 0);
        Self {
            around,
            layer: bare - around,
            attention: weights(&one, width, Span::first(spec.heads), 0, 0) - bare,
            mlp: weights(&one, width, Span::empty(), spec.inner, 0) - bare,
            width,
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

    /// By units, in all layers that are cut by heads or columns, with what programs work in.
    pub fn curves(
        &self,
        spec: &ModelSpec,
        units: Units,
        means: Means,
        cut: ByRows,
        devices: usize,
        max_rows: u32,
    ) -> Held {
        let one = ModelSpec { layers: 1, ..spec.clone() };
        let bare = self.around + self.layer;
        let rows = u64::from(max_rows) * 4;
        let of = |all: u32, unit: u32, bytes: &dyn Fn(u32) -> u64| -> Vec<u64> {
            let sizes = (0..=count(all, unit)).map(|n| (n as u32).saturating_mul(unit).min(all));
            sizes.map(|size| if size == 0 { 0 } else { bytes(size) }).collect()
        };
        let width = u64::from(spec.head_width);
        let heads = of(spec.heads, units.heads, &|heads| {
            let kv = u64::from(Self::most_kv(spec, units.heads, heads));
            // The span of the most key-value heads is one that starts inside a group.
            let start = if kv > u64::from(heads.div_ceil(spec.group())) {
                (spec.group() - 1).min(spec.heads - heads)
            } else {
                0
            };
            let span = Span::new(start, start + heads);
            let layer = weights(&one, self.width, span, 0, 0) - bare;
            let heads = u64::from(heads);
            let runs = if means.tiles > 1 { u64::from(means.tiles) * devices as u64 } else { 1 };
            let active = if cut.attention > 0 { 1 } else { 0 };
            u64::from(cut.attention) * layer
                + active * rows * width * (heads + 2 * kv + heads.div_ceil(runs))
        });
        let columns = of(spec.inner, units.columns, &|columns| {
            let layer = weights(&one, self.width, Span::empty(), columns, 0) - bare;
            let active = if cut.mlp > 0 { 1 } else { 0 };
            u64::from(cut.mlp) * layer + active * rows * u64::from(columns)
        });
        let vocabulary = match spec.head {
            HeadSpec::Language { .. } => spec.vocabulary,
            _ => 0,
        };
        let words = of(vocabulary, units.words, &|words| {
            let held = weights(&one, self.width, Span::empty(), 0, words) - bare;
            // Logits, and the same on their way to the coordinator.
            held + 2 * rows * u64::from(words)
        });
        Held { heads, columns, words }
    }

    /// What a device takes whatever its part: the process, and what it works in if it owns rows.
    #[expect(clippy::too_many_arguments, reason = "all that a device's memory depends on")]
    pub fn fixed(
        &self,
        spec: &ModelSpec,
        means: Means,
        by_rows: ByRows,
        devices: usize,
        owner: bool,
        threads: u16,
        allowed: &Allowed,
    ) -> u64 {
        let rows = u64::from(allowed.max_rows);
        let row = u64::from(spec.hidden) * 4;
        let threads = u64::from(threads);
        let scratch = threads * (budget::THREAD_SCRATCH + 576 * u64::from(spec.head_width));
        let positions = match &spec.positions {
            Positions::Rotary { inverse_frequencies, .. } => {
                8 * inverse_frequencies.len() as u64 * rows
            }
            Positions::Learned { .. } => budget::POSITION_ROWS * row,
        };
        let d = devices as u64;
        let own = if owner { rows.div_ceil(d) } else { 0 };
        let live = if spec.norm_place == NormPlace::Pre { 4 } else { 2 };
        let runs = if means.tiles > 1 { d * u64::from(means.tiles) } else { 1 };
        // Gathered rows, partial sums, and tiles on their way.
        let (gathered, staged) = if devices == 1 {
            (1, 0)
        } else {
            (if runs == 1 { 2 } else { 3 }, 2 * u64::from(means.wire.width()))
        };
        let gathered = gathered * rows.div_ceil(runs) * row;
        let staging = staged * rows * u64::from(spec.hidden);
        let mut total = budget::PROCESS.0 + (1 << 20) + scratch + positions;
        total += self.around + u64::from(spec.layers) * self.layer;
        total += own * row * live + gathered + staging;
        match spec.head {
            HeadSpec::Language { .. } => total += rows * row,
            _ => total += own * row,
        }
        if owner {
            total += u64::from(by_rows.attention) * self.attention;
            total += u64::from(by_rows.mlp) * self.mlp;
            let queries = u64::from(spec.heads) * u64::from(spec.head_width) * 4;
            let keys = 2 * u64::from(spec.kv_heads) * u64::from(spec.head_width) * 4;
            if by_rows.attention > 0 {
                total += own * (2 * queries + keys) + rows * keys;
            }
            if by_rows.mlp > 0 {
                total += own * u64::from(spec.inner) * 4;
            }
        }
        total
    }
}
