//! The KV cache of a plan.

use serde::{Deserialize, Serialize};

/// The number type of keys and values in the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheType {
    /// 32 bits, exact.
    F32,
    /// 16 bits: half the bytes, and lossy.
    F16,
    /// 8 bits, and a scale in f32 for each 32 columns of a head: hardly more than a quarter, and lossy.
    Q8,
}

impl CacheType {
    /// Columns of a head that share a scale, where there are scales. The last group may be smaller.
    pub const GROUP: u32 = 32;

    /// The number of scales of so many columns of a head in a row.
    pub const fn scales(self, columns: u32) -> u32 {
        match self {
            Self::F32 | Self::F16 => 0,
            Self::Q8 => columns.div_ceil(Self::GROUP),
        }
    }

    /// Bytes of so many columns of a head in a row, scales included.
    pub const fn bytes(self, columns: u32) -> u64 {
        let each = match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q8 => 1,
        };
        each * columns as u64 + 4 * self.scales(columns) as u64
    }
}

/// The KV cache of a plan: keys and values that devices hold between programs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Cache {
    /// Rows of all sequences together; 0 for no cache.
    pub rows: u32,
    /// The number type of the values.
    pub values: CacheType,
}

impl Cache {
    /// Rows of a KV block, the unit in which the cache is handed out. Kernels take as many, or a part of them.
    pub const BLOCK: u32 = 192;
    /// A cache without rows.
    pub const NONE: Self = Self { rows: 0, values: CacheType::F32 };

    /// The number of whole blocks that it has.
    pub fn blocks(self) -> u32 {
        self.rows / Self::BLOCK
    }

    /// Rows that are taken for a sequence of `rows`: whole blocks.
    pub fn taken(rows: u32) -> u32 {
        rows.div_ceil(Self::BLOCK).saturating_mul(Self::BLOCK)
    }
}
