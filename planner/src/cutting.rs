//! How work is cut: into which units, how tiles of it are carried, and which layers are cut by rows.

use galaxy_common::{Exchange, LinkType, WireType};
use galaxy_graph::holdings::Cuts;
use galaxy_model::ModelSpec;

/// The units in which work is given out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Units {
    /// Heads of a unit.
    pub heads: u32,
    /// Columns of the intermediate size in a unit.
    pub columns: u32,
    /// Tokens of the vocabulary in a unit.
    pub vocabulary: u32,
    /// How many units all rows are.
    pub rows: u32,
}

/// How many units of `size` hold `all`; the last may be smaller.
pub(crate) fn count(all: u32, size: u32) -> usize {
    all.div_ceil(size.max(1)) as usize
}

/// The most texts of which each is a unit of rows. With more texts, cuts between any rows lie near the end
/// of one.
const MOST_TEXTS: u32 = 96;

impl Units {
    /// How many units all rows are: one for each text where there are several, but not too many; else about
    /// 48, in equal numbers for all devices.
    pub fn of_texts(texts: u32, devices: u32) -> u32 {
        let rows = devices.max(1) * 48u32.div_ceil(devices.max(1));
        if (2..=MOST_TEXTS).contains(&texts) { texts } else { rows }
    }

    /// The units of a model, with rows in so many texts; with one text, cuts stand anywhere.
    pub fn new(spec: &ModelSpec, cuts: Cuts, devices: usize, texts: u32) -> Self {
        let devices = devices as u32;
        // Heads that share keys and values stay together where there are enough of them.
        let group = spec.group();
        let heads = if group > 1 && spec.kv_heads >= 2 * devices { group } else { 1 };
        let heads = (1..=cuts.heads).map(|n| n * heads).find(|n| n.is_multiple_of(cuts.heads));
        // Kernels multiply groups of 16 columns; no more than 256 groups are worth telling apart.
        let groups = |all: u32| {
            if all >= 256 { 16 * all.div_ceil(16 * 256) } else { (all / 16).max(1) }
        };
        let rows = Self::of_texts(texts, devices);
        Self {
            heads: heads.unwrap_or(cuts.heads),
            columns: groups(spec.intermediate).next_multiple_of(cuts.columns),
            vocabulary: groups(spec.vocabulary),
            rows,
        }
    }
}

/// How tiles of a plan are cut and carried, whoever does what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transport {
    pub tiles: u16,
    pub exchange: Exchange,
    pub wire: WireType,
    pub link: LinkType,
}

/// How many layers are cut by rows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct RowLayers {
    pub attention: u32,
    pub mlp: u32,
    /// Whether cuts stand between whole texts.
    pub whole: bool,
}

impl RowLayers {
    /// Of `layers` layers, how many are not cut by rows.
    pub fn others(self, layers: u32) -> Self {
        Self { attention: layers - self.attention, mlp: layers - self.mlp, whole: false }
    }
}

/// How the work of a ring is cut, whichever device takes which part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cutting {
    /// How many devices the ring has.
    pub devices: usize,
    /// The units in which the devices take work.
    pub units: Units,
    /// How rows and sums travel between the devices.
    pub means: Transport,
    /// The layers of which each device computes its own rows.
    pub by_rows: RowLayers,
}

impl Cutting {
    /// Into how many runs the rows of a product are cut: one for each tile of each device, or a single one where
    /// nothing overlaps.
    pub fn runs(self) -> u64 {
        let tiles = u64::from(self.means.tiles);
        if tiles > 1 { tiles * self.devices as u64 } else { 1 }
    }
}
