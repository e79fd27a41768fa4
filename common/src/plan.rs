//! The plan: which devices take part, in which ring order, and what each holds and computes.

mod cache;

pub use crate::{
    assignment::{Assignment, BlockAssignment, DevicePlan, Phase},
    extent::Extent,
};
use crate::{
    ids::{DeviceName, Rank},
    shape::MAX_ROWS,
    span::{Layer, Row, Span},
    streaming::Streaming,
};
pub use cache::{Cache, CacheType};
use serde::{Deserialize, Serialize};
use std::{fmt, num::NonZeroU64, str::FromStr};

/// How work is split over devices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// The strategy whose plan is predicted fastest.
    Auto,
    /// One device computes everything.
    Local,
    /// Tensor parallel blocks, an AllReduce after each, connective blocks replicated.
    Megatron,
    /// Tensor parallel blocks, sequence parallel connective blocks, ring AllGather and
    /// ReduceScatter in tiles (Galaxy, §III-B and §III-D).
    Galaxy,
    /// Rows are split everywhere, keys and values are gathered, every device holds all weights
    /// (the baseline SP of Galaxy, §IV-A).
    Sequence,
    /// Each device has a run of layers, one behind another.
    Pipeline,
}

impl Strategy {
    /// All strategies, in the order of their declaration.
    pub const ALL: [Self; 6] =
        [Self::Auto, Self::Local, Self::Megatron, Self::Galaxy, Self::Sequence, Self::Pipeline];

    /// Whether shares given by hand may split the work; the others split as they see fit.
    pub fn takes_shares(self) -> bool {
        matches!(self, Self::Local | Self::Megatron | Self::Galaxy)
    }

    /// The layout of its plans; [`Strategy::Auto`] takes any.
    pub fn layout(self) -> Layout {
        match self {
            Self::Auto | Self::Local | Self::Galaxy | Self::Sequence => Layout::Ring,
            Self::Megatron => Layout::Replicated,
            Self::Pipeline => Layout::Stages,
        }
    }
}

/// How devices share the layers: what a plan is lowered by, whichever strategy chose it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Every device owns a run of rows between blocks; each block is cut as its [`Mode`] says.
    Ring,
    /// Every device has all rows; partial sums are added by AllReduce.
    Replicated,
    /// Every device has all rows of a run of layers, in ring order. The last one owns the rows
    /// after the last layer, and so has the only row weight.
    Stages,
}

/// How one block of the layout [`Layout::Ring`] is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By heads or columns: all rows are gathered, partial sums are scattered.
    Tensor,
    /// By rows: every device that owns rows holds all heads or columns. Attention gathers keys and
    /// values, an MLP nothing.
    Sequence,
}

/// How the blocks of some layers are cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Modes {
    /// The run of layers that this entry is about.
    pub layers: Span<Layer>,
    /// How the attention blocks of these layers are cut.
    pub attention: Mode,
    /// How the MLP blocks of these layers are cut.
    pub mlp: Mode,
}

impl Modes {
    /// The modes of a model of so many layers whose blocks are all cut alike.
    pub fn uniform(layers: u32, mode: Mode) -> Vec<Self> {
        vec![Self { layers: Span::first(layers), attention: mode, mlp: mode }]
    }
}

/// The route that tiles of collectives take.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// From neighbour to neighbour: each cable carries each tile once each way.
    Ring,
    /// From owner to everyone at once: as many bytes on each cable, one hop instead of D - 1.
    Direct,
}

/// The transport of links.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkType {
    /// TCP, encrypted with TLS.
    Tls,
    /// TCP alone: for isolated networks, and for measuring.
    Plain,
    /// QUIC, which has TLS inside: for lossy networks and devices that move.
    Quic,
}

impl LinkType {
    /// All transports, in order of preference where nothing is measured.
    pub const ALL: [Self; 3] = [Self::Tls, Self::Quic, Self::Plain];
}

/// The number type of activations on links.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireType {
    /// 32 bits, exact.
    F32,
    /// 16 bits: half the bytes, and lossy.
    F16,
    /// 8 bits with a scale in f32 for each 32 values of a row: 28% of the bytes, and lossier.
    Q8,
}

impl WireType {
    /// Values of a row that share a scale, where they have one. The last group of a row may be smaller.
    pub const GROUP: u64 = CacheType::GROUP as u64;

    /// Bytes of a row of so many values: scales precede them, and rows begin at multiples of four bytes.
    pub const fn row(self, values: u64) -> u64 {
        match self {
            Self::F32 => 4 * values,
            Self::F16 => 2 * values,
            Self::Q8 => 4 * (values.div_ceil(Self::GROUP) + values.div_ceil(4)),
        }
    }

    /// The number of values of a row that has at least so many bytes.
    pub const fn values(self, bytes: u64) -> u64 {
        match self {
            Self::F32 => bytes.div_ceil(4),
            Self::F16 => bytes.div_ceil(2),
            Self::Q8 => bytes,
        }
    }

    /// Bytes at whose multiples rows must begin.
    pub const fn alignment(self) -> usize {
        match self {
            Self::F32 | Self::Q8 => 4,
            Self::F16 => 2,
        }
    }
}

/// The values to which devices round the rows that they multiply with weights in blocks of few bits, 32 values at a
/// time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// Rows are rounded to 16 bits.
    #[default]
    A16,
    /// Rows are rounded to 8 bits: half as many products, and an error that is 257 times as large.
    A8,
    /// Rows stay f32, exact: weights in blocks are held as f32 too.
    F32,
}

macro_rules! named {
    ($type:ty, $what:literal, $($text:literal => $variant:expr),+) => {
        impl FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok($variant),)+
                    _ => Err(format!(concat!("{:?} is not a ", $what, ": known are ", $($text, " "),+), text).trim_end().to_owned()),
                }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(if *self == $variant { return f.write_str($text); })+
                Ok(())
            }
        }
    };
}
named!(Strategy, "strategy", "auto" => Strategy::Auto, "local" => Strategy::Local, "megatron" => Strategy::Megatron, "galaxy" => Strategy::Galaxy, "sequence" => Strategy::Sequence, "pipeline" => Strategy::Pipeline);
named!(Layout, "layout", "ring" => Layout::Ring, "replicated" => Layout::Replicated, "stages" => Layout::Stages);
named!(Mode, "mode", "tensor" => Mode::Tensor, "sequence" => Mode::Sequence);
named!(Exchange, "exchange", "ring" => Exchange::Ring, "direct" => Exchange::Direct);
named!(LinkType, "link", "tls" => LinkType::Tls, "plain" => LinkType::Plain, "quic" => LinkType::Quic);
named!(Activations, "type of activations", "a16" => Activations::A16, "a8" => Activations::A8, "f32" => Activations::F32);
named!(CacheType, "type of a cache", "f32" => CacheType::F32, "f16" => CacheType::F16, "q8" => CacheType::Q8);
named!(WireType, "wire type", "f32" => WireType::F32, "f16" => WireType::F16, "q8" => WireType::Q8);

/// A plan: computed once for a model, a cluster and a workload; small, serialisable, deterministic.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Name of the model's directory.
    pub model: String,
    /// Digest of what the model is; see `galaxy_model`.
    pub fingerprint: String,
    /// The strategy that the plan follows.
    pub strategy: Strategy,
    /// How devices share the layers.
    pub layout: Layout,
    /// How blocks are cut, by runs of layers, in order, together all layers. Other layouts than [`Layout::Ring`] cut
    /// no rows: all is [`Mode::Tensor`].
    pub modes: Vec<Modes>,
    /// The route that tiles take.
    pub exchange: Exchange,
    /// The transport of links.
    pub link: LinkType,
    /// The number type of activations on links.
    pub wire: WireType,
    /// The values to which rows are rounded that are multiplied with weights in blocks.
    pub activations: Activations,
    /// The number of tiles into which each device's rows are cut, 1 to [`MAX_TILES`]. 1 means that communication does
    /// not overlap with compute.
    pub tiles: u16,
    /// The most rows of one program; budgets hold for it.
    pub max_rows: u32,
    /// The KV cache for generation; budgets hold for it.
    pub cache: Cache,
    /// Devices in ring order.
    pub ring: Vec<DevicePlan>,
}

/// The most tiles of a device's rows: more cost more than any overlap gives back.
pub const MAX_TILES: u16 = 64;
/// The most devices of a ring: no ring on one network carries more.
pub const MAX_DEVICES: usize = 128;

/// Why a plan is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No devices, or absurdly many.
    #[error("a plan has 1 to {MAX_DEVICES} devices, not {devices}")]
    Devices {
        /// How many there are.
        devices: usize,
    },
    /// A name stands twice in the ring.
    #[error("device {name} stands twice in the ring")]
    Twice {
        /// The device that is named twice.
        name: DeviceName,
    },
    /// Weights that cannot come from disk in this way.
    #[error("device {name} cannot read its weights from disk as planned: {why}")]
    Streaming {
        /// The device with these weights.
        name: DeviceName,
        /// What is wrong, for people.
        why: &'static str,
    },
    /// A tile count out of range.
    #[error("tiles must be 1 to {MAX_TILES}, not {tiles}")]
    Tiles {
        /// The tile count of the plan.
        tiles: u16,
    },
    /// A `max_rows` of zero, or beyond what any program may have.
    #[error("max_rows must be 1 to {MAX_ROWS}, not {rows}")]
    Rows {
        /// The plan's `max_rows`.
        rows: u32,
    },
    /// Nobody has rows, so nobody can own a result.
    #[error("no device has a row weight above zero")]
    NoRows,
    /// Parts that leave something out or take something twice.
    #[error(
        "{what} of layer {layer} are not covered exactly once: {at} is where the parts of the devices part"
    )]
    Cover {
        /// What is split: heads, columns or tokens.
        what: &'static str,
        /// The layer; 0 for the vocabulary, which belongs to no layer.
        layer: u32,
        /// The first index that is left out or taken twice.
        at: u32,
    },
    /// Runs of layers that are out of order or meet, or parts of what the model does not have.
    #[error("the blocks of device {name} from layer {layer} on are not those of a plan: {why}")]
    Blocks {
        /// The device with these blocks.
        name: DeviceName,
        /// The layer from which on they are wrong.
        layer: u32,
        /// What is wrong, for people.
        why: &'static str,
    },
    /// Modes that leave layers out, or cut rows where the layout has none to cut.
    #[error("the modes of layer {layer} are not those of a plan: {why}")]
    Modes {
        /// The first layer that is wrong.
        layer: u32,
        /// What is wrong, for people.
        why: &'static str,
    },
    /// A device that does not hold all of a block of which it computes whole rows.
    #[error(
        "device {name} owns rows of layer {layer}, which is cut by rows, and does not hold all {what}"
    )]
    Partial {
        /// The device that owns the rows.
        name: DeviceName,
        /// The layer of the block.
        layer: u32,
        /// What it does not hold all of: heads or columns.
        what: &'static str,
    },
    /// A layer that does not belong whole to one stage.
    #[error("layer {layer} does not stand whole on one device, in ring order")]
    Stage {
        /// The layer, by its number.
        layer: u32,
    },
    /// Rows after the last layer on a device that does not have that layer.
    #[error(
        "device {name} owns rows after the last layer, which stands on another device: in the layout stages only the last stage has a row weight"
    )]
    Last {
        /// The device that owns the rows.
        name: DeviceName,
    },
    /// More than one device where the strategy takes one.
    #[error("strategy local takes one device, and the plan has {devices}")]
    Local {
        /// The number of devices in the plan.
        devices: usize,
    },
}

impl Plan {
    /// Checks that the parts cover the model exactly.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self, extent: Extent) -> Result<(), PlanError> {
        if self.ring.is_empty() || self.ring.len() > MAX_DEVICES {
            return Err(PlanError::Devices { devices: self.ring.len() });
        }
        if self.strategy == Strategy::Local && self.ring.len() != 1 {
            return Err(PlanError::Local { devices: self.ring.len() });
        }
        if !(1..=MAX_TILES).contains(&self.tiles) {
            return Err(PlanError::Tiles { tiles: self.tiles });
        }
        if !(1..=MAX_ROWS).contains(&self.max_rows) {
            return Err(PlanError::Rows { rows: self.max_rows });
        }
        for (i, device) in self.ring.iter().enumerate() {
            if self.ring[..i].iter().any(|d| d.name == device.name) {
                return Err(PlanError::Twice { name: device.name.clone() });
            }
            let streams = device.streaming.as_ref().map_or(Ok(()), Streaming::validate);
            streams.map_err(|why| PlanError::Streaming { name: device.name.clone(), why })?;
        }
        let mut next = 0;
        for run in &self.modes {
            if run.layers.start() != next || run.layers.is_empty() {
                let why = "its runs do not follow one another";
                return Err(PlanError::Modes { layer: next, why });
            }
            next = run.layers.end();
        }
        if next != extent.layers {
            let why = "its runs do not end with the last layer";
            return Err(PlanError::Modes { layer: next, why });
        }
        for phase in [Phase::Prefill, Phase::Decode] {
            let parts: Vec<_> = self.ring.iter().map(|d| d.assignment(phase)).collect();
            if parts.iter().all(|p| p.row_weight == 0) {
                return Err(PlanError::NoRows);
            }
            for (device, part) in self.ring.iter().zip(&parts) {
                part.fits(extent).map_err(|(layer, why)| {
                    let name = device.name.clone();
                    PlanError::Blocks { name, layer, why }
                })?;
            }
            for layer in 0..extent.layers {
                self.covers_layer(&parts, layer, extent)?;
            }
            if self.layout == Layout::Stages {
                let last = |part: &Assignment| {
                    extent.layers.checked_sub(1).is_none_or(|l| !part.block(l).heads.is_empty())
                };
                let wrong = |part: &&Assignment| part.row_weight > 0 && !last(part);
                if let Some(at) = parts.iter().position(wrong) {
                    return Err(PlanError::Last { name: self.ring[at].name.clone() });
                }
            }
            covers(parts.iter().map(|p| p.vocabulary), extent.vocabulary, "tokens", 0)?;
        }
        Ok(())
    }

    fn covers_layer(
        &self,
        parts: &[&Assignment],
        layer: u32,
        extent: Extent,
    ) -> Result<(), PlanError> {
        let blocks: Vec<_> = parts.iter().map(|p| p.block(layer)).collect();
        let modes = self.modes(layer).ok_or(PlanError::Modes { layer, why: "it has none" })?;
        let rows = [modes.attention, modes.mlp].contains(&Mode::Sequence);
        if rows && self.layout != Layout::Ring {
            let why = "only the layout ring cuts rows";
            return Err(PlanError::Modes { layer, why });
        }
        let all = (Span::first(extent.heads), Span::first(extent.intermediate));
        if self.layout == Layout::Stages {
            let whole = |b: &BlockAssignment| b.heads == all.0 && b.columns == all.1;
            let here = blocks.iter().position(whole).ok_or(PlanError::Stage { layer })?;
            let earlier = |p: &&Assignment| p.blocks.iter().any(|b| b.layers.start() < layer);
            if parts[here + 1..].iter().any(earlier) {
                return Err(PlanError::Stage { layer });
            }
        }
        // Who owns rows of a block that is cut by rows holds all of it.
        for (at, block) in blocks.iter().enumerate().filter(|(at, _)| parts[*at].row_weight > 0) {
            let what = if modes.attention == Mode::Sequence && block.heads != all.0 {
                "heads"
            } else if modes.mlp == Mode::Sequence && block.columns != all.1 {
                "columns"
            } else {
                continue;
            };
            return Err(PlanError::Partial { name: self.ring[at].name.clone(), layer, what });
        }
        if modes.attention == Mode::Tensor {
            covers(blocks.iter().map(|b| b.heads), extent.heads, "heads", layer)?;
        }
        if modes.mlp == Mode::Tensor {
            covers(blocks.iter().map(|b| b.columns), extent.intermediate, "columns", layer)?;
        }
        Ok(())
    }

    /// Whether a row has the same results in programs of both phases, to the bit: devices compute the same parts in
    /// both, their partial sums are added in one order, and links carry values as they are.
    pub fn computes_alike(&self) -> bool {
        let alone = self.ring.len() == 1 || self.layout == Layout::Stages;
        // Around a ring of three the order depends on which device owns the row. On links of 16 or 8 bits the rows of
        // others are rounded, and those of a device itself are not.
        let one_order = self.exchange == Exchange::Direct || self.ring.len() < 3;
        let exact = alone || one_order && self.wire == WireType::F32;
        exact && self.ring.iter().all(DevicePlan::computes_alike)
    }

    /// How the blocks of a layer are cut; none for a layer that the modes leave out.
    pub fn modes(&self, layer: u32) -> Option<Modes> {
        self.modes.iter().copied().find(|m| m.layers.has(layer))
    }

    /// Whether a block of some layer is cut by rows.
    pub fn any_sequence(&self) -> bool {
        self.modes.iter().any(|m| [m.attention, m.mlp].contains(&Mode::Sequence))
    }

    /// The ring's devices with their ranks.
    pub fn ranked(&self) -> impl Iterator<Item = (Rank, &DevicePlan)> {
        self.ring.iter().enumerate().map(|(i, d)| (Rank(i as u16), d))
    }

    /// The rank of a device by its name.
    pub fn rank_of(&self, name: &DeviceName) -> Option<Rank> {
        self.ranked().find(|(_, d)| d.name == *name).map(|(rank, _)| rank)
    }
}

fn covers<U: crate::span::Unit>(
    parts: impl Iterator<Item = Span<U>>,
    total: u32,
    what: &'static str,
    layer: u32,
) -> Result<(), PlanError> {
    let mut parts: Vec<_> = parts.filter(|p| !p.is_empty()).collect();
    parts.sort_unstable();
    let mut at = 0;
    for part in parts {
        if part.start() != at {
            return Err(PlanError::Cover { what, layer, at: at.min(part.start()) });
        }
        at = part.end();
    }
    if at == total { Ok(()) } else { Err(PlanError::Cover { what, layer, at: at.min(total) }) }
}

/// Splits `total` by `weights` into runs in order, by largest remainder; ties go to the earlier.
///
/// A weight of zero gets nothing. All weights zero gives all to the first.
pub fn apportion<U: crate::span::Unit>(total: u32, weights: &[u32]) -> Vec<Span<U>> {
    let sum: u64 = weights.iter().map(|&w| u64::from(w)).sum();
    let mut sizes: Vec<u32> = vec![0; weights.len()];
    match NonZeroU64::new(sum) {
        None => {
            if let Some(first) = sizes.first_mut() {
                *first = total;
            }
        }
        Some(sum) => {
            let product = |w: u32| u64::from(total) * u64::from(w);
            for (size, &w) in sizes.iter_mut().zip(weights) {
                *size = (product(w) / sum) as u32;
            }
            let mut order: Vec<usize> = (0..weights.len()).collect();
            order.sort_by_key(|&i| std::cmp::Reverse(product(weights[i]) % sum));
            let left = total - sizes.iter().sum::<u32>();
            for &i in order.iter().take(left as usize) {
                sizes[i] += 1;
            }
        }
    }
    let mut at = 0;
    sizes
        .into_iter()
        .map(|size| {
            at += size;
            Span::new(at - size, at)
        })
        .collect()
}

/// The rows of each device of a batch of `rows`, by row weight.
pub fn own_rows(plan: &Plan, phase: Phase, rows: u32) -> Vec<Span<Row>> {
    let weights: Vec<u32> = plan.ring.iter().map(|d| d.assignment(phase).row_weight).collect();
    apportion(rows, &weights)
}

#[cfg(test)]
mod tests;
