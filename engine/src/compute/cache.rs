//! Keys and values of texts that go on, in blocks of [`Cache::BLOCK`] rows.
//!
//! A block has keys and values of its rows in every layer of the device: layer after layer, row after row,
//! keys | values of the device's heads. Blocks are taken when a text begins, for as many rows as it may have,
//! and given back when it ends; nothing is taken while a token is made.

use super::{
    call::Misfit,
    kernels::{
        area::{Area, Extent},
        vector,
    },
};
use galaxy_common::{Bytes, Cache, Head, Span, WireType};
use std::collections::BTreeMap;

/// Rows of a block.
const ROWS: usize = Cache::BLOCK as usize;

/// The cache of one device.
pub(crate) struct KvCache {
    /// Where each layer begins in a block, and how wide its rows are; values.
    layers: Vec<(usize, usize)>,
    /// Values of a block.
    block: usize,
    values: WireType,
    /// Most blocks.
    limit: usize,
    taken: usize,
    texts: BTreeMap<u32, Vec<Block>>,
}

/// Some rows of a text, in all layers.
enum Block {
    F32(Vec<f32>),
    F16(Vec<u16>),
}

impl KvCache {
    /// A cache for a device with these key-value heads of `head_width` in its layers.
    pub(crate) fn new(
        cache: Cache,
        kv_heads: impl Iterator<Item = Span<Head>>,
        head_width: u32,
    ) -> Self {
        let mut block = 0;
        let layer = |heads: Span<Head>| {
            let width = 2 * heads.len() as usize * head_width as usize;
            let begin = block;
            block += width * ROWS;
            (begin, width)
        };
        let layers = kv_heads.map(layer).collect();
        let limit = cache.rows as usize / ROWS;
        Self { layers, block, values: cache.values, limit, taken: 0, texts: BTreeMap::new() }
    }

    /// Takes room for a text of `rows` rows, more than it has or none.
    pub(crate) fn reserve(&mut self, slot: u32, rows: u32) -> Result<(), Misfit> {
        let wanted = rows.div_ceil(Cache::BLOCK) as usize;
        let text = self.texts.entry(slot).or_default();
        let more = wanted.saturating_sub(text.len());
        if self.taken + more > self.limit {
            return Err(Misfit::Why("the cache has no room for its rows"));
        }
        let no_memory = |_| Misfit::Why("there is no memory for its keys and values");
        text.try_reserve_exact(more).map_err(no_memory)?;
        for _ in 0..more {
            text.push(Block::new(self.values, self.block).map_err(no_memory)?);
            self.taken += 1;
        }
        Ok(())
    }

    /// Gives back what a text has.
    pub(crate) fn release(&mut self, slot: u32) {
        self.taken -= self.texts.remove(&slot).map_or(0, |text| text.len());
    }

    /// Gives back what all texts have.
    pub(crate) fn clear(&mut self) {
        self.texts.clear();
        self.taken = 0;
    }

    /// What all texts have.
    pub(crate) fn held(&self) -> Bytes {
        Bytes(self.taken as u64 * self.block as u64 * u64::from(self.values.width()))
    }

    /// Writes keys | values of rows of a text, from row `first` of it on.
    pub(crate) fn keep(
        &mut self,
        slot: u32,
        layer: u32,
        first: u32,
        rows: Area<'_>,
    ) -> Result<(), Misfit> {
        let no_room = Misfit::Why("there is no room for the keys and values of its rows");
        let &(begin, width) =
            self.layers.get(layer as usize).ok_or(Misfit::Why("the model has no such layer"))?;
        let text = self.texts.get_mut(&slot);
        let (Some(text), true) = (text, width == rows.columns()) else { return Err(no_room) };
        for row in 0..rows.rows() {
            let at = first as usize + row;
            let Some(block) = text.get_mut(at / ROWS) else { return Err(no_room) };
            let place = begin + at % ROWS * width;
            match block {
                Block::F32(values) => {
                    values[place..place + width].copy_from_slice(rows.row(row));
                }
                Block::F16(bits) => {
                    vector::narrow_f16(rows.row(row), &mut bits[place..place + width]);
                }
            }
        }
        Ok(())
    }

    /// The first `rows` rows of a text.
    pub(crate) fn past(&self, slot: u32, layer: u32, rows: u32) -> Result<Past<'_>, Misfit> {
        let (begin, width) = self.layers.get(layer as usize).copied().unwrap_or_default();
        let blocks = self.texts.get(&slot).map_or(&[][..], Vec::as_slice);
        let rows = rows as usize;
        if blocks.len() * ROWS < rows {
            return Err(Misfit::Why("the rows before it are not kept"));
        }
        Ok(Past { blocks, begin, width, rows })
    }
}

impl Block {
    fn new(values: WireType, len: usize) -> Result<Self, std::collections::TryReserveError> {
        Ok(match values {
            WireType::F32 => Self::F32(zeros(len)?),
            WireType::F16 => Self::F16(zeros(len)?),
        })
    }
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>, std::collections::TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len)?;
    values.resize(len, T::default());
    Ok(values)
}

/// Rows of a text that earlier programs kept, in one layer.
#[derive(Clone, Copy)]
pub(crate) struct Past<'a> {
    blocks: &'a [Block],
    begin: usize,
    width: usize,
    rows: usize,
}

/// Rows of the past that lie together: some columns of them.
#[derive(Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// As they are.
    F32(Area<'a>),
    /// 16 bits each, row after row.
    F16 {
        /// From the first of these columns of the first row on.
        bits: &'a [u16],
        /// From row to row.
        stride: usize,
    },
}

impl<'a> Past<'a> {
    /// No rows.
    pub(crate) const NONE: Self = Self { blocks: &[], begin: 0, width: 0, rows: 0 };

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// All rows, widened and copied together: `[rows, width]`.
    #[cfg(feature = "burn")]
    pub(crate) fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.width];
        for (row, out) in values.chunks_exact_mut(self.width.max(1)).enumerate() {
            match self.piece(row, 1, 0, self.width) {
                Piece::F32(area) => out.copy_from_slice(area.row(0)),
                Piece::F16 { bits, .. } => vector::widen_f16(&bits[..self.width], out),
            }
        }
        values
    }

    /// Up to `most` rows from `first` on, as many as lie together.
    #[inline]
    pub(crate) fn together(&self, first: usize, most: usize) -> usize {
        most.min(ROWS - first % ROWS).min(self.rows - first)
    }

    /// `count` rows from `first` on that lie [`together`](Past::together).
    #[inline]
    pub(crate) fn piece(
        &self,
        first: usize,
        count: usize,
        column: usize,
        columns: usize,
    ) -> Piece<'a> {
        let start = self.begin + first % ROWS * self.width + column;
        match &self.blocks[first / ROWS] {
            Block::F32(values) => {
                let extent = Extent { start, rows: count, columns, stride: self.width };
                Piece::F32(Area::new(values, extent).expect("rows of a block"))
            }
            Block::F16(bits) => Piece::F16 { bits: &bits[start..], stride: self.width },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::kernels::testing::*;

    #[test]
    fn rows_come_back_and_blocks_are_given_back() {
        let heads = [Span::new(0, 2), Span::new(1, 1), Span::new(0, 1)];
        for values in [WireType::F32, WireType::F16] {
            let mut cache = KvCache::new(Cache { rows: 4 * 192 + 5, values }, heads.into_iter(), 3);
            assert_eq!(cache.held(), Bytes(0));
            assert!(cache.reserve(7, 200).is_ok());
            assert!(cache.reserve(9, 3 * 192).is_err(), "one block more than there are");
            assert!(cache.reserve(9, 1).is_ok());
            let per_row = u64::from(values.width()) * (2 * 2 + 2) * 3;
            assert_eq!(cache.held(), Bytes(3 * 192 * per_row));
            let rows: Vec<f32> = (0..20 * 6).map(|value| value as f32 / 4.0).collect();
            assert!(cache.keep(7, 2, 185, whole(&rows, 20, 6)).is_ok());
            assert!(cache.keep(7, 2, 380, whole(&rows, 20, 6)).is_err(), "beyond its blocks");
            assert!(cache.keep(7, 0, 0, whole(&rows, 20, 6)).is_err(), "another width");
            assert!(cache.keep(8, 2, 0, whole(&rows, 20, 6)).is_err(), "no such text");
            let past = cache.past(7, 2, 205).ok().expect("kept");
            assert_eq!(past.together(185, 64), 7);
            assert_eq!(past.together(192, 64), 13);
            for (first, count) in [(185, 7), (192, 13)] {
                for row in 0..count {
                    let want = &rows[(first - 185 + row) * 6 + 3..][..3];
                    let got = match past.piece(first, count, 3, 3) {
                        Piece::F32(area) => area.row(row).to_vec(),
                        Piece::F16 { bits, stride } => {
                            let mut wide = [0.0; 3];
                            vector::widen_f16(&bits[row * stride..][..3], &mut wide);
                            wide.to_vec()
                        }
                    };
                    assert_eq!(got, want);
                }
            }
            assert!(cache.past(7, 2, 385).is_err());
            cache.release(7);
            cache.release(7);
            assert_eq!(cache.held(), Bytes(192 * per_row));
            assert!(cache.past(7, 2, 1).is_err());
            cache.clear();
            assert_eq!(cache.held(), Bytes(0));
        }
    }
}
