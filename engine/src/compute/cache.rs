//! The KV cache: keys and values of sequences, in blocks of [`Cache::BLOCK`] rows.
//!
//! A block has keys and values of its rows in every layer of the device: layer after layer, keys and then values of the
//! device's heads. Values are `[rows, columns]`. Keys are `[groups, columns, GROUP]`: of [`GROUP`] neighbouring rows
//! each column stands together, so that the scores of a query with all of them are sums of vectors, column after
//! column, whatever the number of queries. In 8 bits each row has scales, one for each 32 columns of a head, which
//! stand as the columns do: those of keys and then those of values.
//!
//! Which blocks a sequence has, and in which order, is given when it begins ([`galaxy_common::BlockTables`]), for as
//! many rows as it may have: sequences may share blocks. A block takes memory from the first sequence that has it to
//! the last; nothing is allocated while a token is generated.

use super::{
    kernels::{
        area::{Area, Extent},
        eighths, vector,
    },
    op_error::OpError,
};
use galaxy_common::{Bytes, Cache, CacheType, Head, Span};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Rows of a block.
const ROWS: usize = Cache::BLOCK as usize;
/// Rows whose keys stand together, column after column.
pub(crate) const GROUP: usize = 16;

const _: () = assert!(ROWS.is_multiple_of(GROUP));

/// The cache of one device.
pub(crate) struct KvCache {
    /// Where each layer begins in a block, and how wide its rows are, both counted in values.
    layers: Vec<(usize, usize)>,
    /// The number of values of a block.
    block: usize,
    values: CacheType,
    head_width: usize,
    /// The blocks, by their numbers.
    blocks: Vec<Block>,
    tables: BTreeMap<u32, Arc<[u32]>>,
    /// Scratch space for one row, rounded to fewer bits before it is written to a block.
    narrow: Values,
}

/// A block of the cache: some rows of a sequence, in all layers.
struct Block {
    /// The keys and values; none where no sequence has the block.
    stored: Option<Values>,
    /// How many sequences have the block.
    users: u32,
}

/// Keys and values, in the type in which they are cached.
enum Values {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Q8 { codes: Vec<i8>, scales: Vec<f32> },
}

impl KvCache {
    /// An empty cache for a device that has these key-value heads, of `head_width` columns, in its
    /// layers.
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
        let layers: Vec<_> = kv_heads.map(layer).collect();
        let widest = layers.iter().map(|(_, width)| *width).max().unwrap_or(0);
        let blocks = (0..cache.blocks()).map(|_| Block { stored: None, users: 0 }).collect();
        let (values, head_width) = (cache.values, (head_width as usize).max(1));
        let widest = if values == CacheType::F32 { 0 } else { widest };
        // Some kilobytes.
        let narrow = Values::new(values, widest, head_width).unwrap_or(Values::F32(Vec::new()));
        let tables = BTreeMap::new();
        Self { layers, block, values, head_width, blocks, tables, narrow }
    }

    /// The type in which keys and values are cached.
    pub(crate) fn value_type(&self) -> CacheType {
        self.values
    }

    /// Takes room for a sequence of `rows` rows in the blocks of `table`, in place of the table that its slot
    /// had.
    pub(crate) fn bind(&mut self, slot: u32, rows: u32, table: &Arc<[u32]>) -> Result<(), OpError> {
        if table.len() < rows.div_ceil(Cache::BLOCK) as usize {
            return Err(OpError::Why("its table has fewer blocks than its rows need"));
        }
        let limit = self.blocks.len();
        if table.len() > limit || table.iter().any(|block| *block as usize >= limit) {
            return Err(OpError::Why("the cache has no room for its rows"));
        }
        // The new ones first: blocks in both tables keep their rows.
        for (at, block) in table.iter().enumerate() {
            let block = &mut self.blocks[*block as usize];
            if block.stored.is_none() {
                let Ok(values) = Values::new(self.values, self.block, self.head_width) else {
                    self.unbind(&table[..at]);
                    return Err(OpError::Why("there is no memory for its keys and values"));
                };
                block.stored = Some(values);
            }
            block.users += 1;
        }
        if let Some(before) = self.tables.insert(slot, table.clone()) {
            self.unbind(&before);
        }
        Ok(())
    }

    fn unbind(&mut self, table: &[u32]) {
        for block in table {
            let block = &mut self.blocks[*block as usize];
            block.users -= 1;
            if block.users == 0 {
                block.stored = None;
            }
        }
    }

    /// Gives back the blocks of a sequence.
    pub(crate) fn release(&mut self, slot: u32) {
        if let Some(table) = self.tables.remove(&slot) {
            self.unbind(&table);
        }
    }

    /// Gives back the blocks of all sequences.
    pub(crate) fn clear(&mut self) {
        while let Some((_, table)) = self.tables.pop_first() {
            self.unbind(&table);
        }
    }

    /// Bytes of all blocks that sequences have.
    pub(crate) fn held(&self) -> Bytes {
        let taken = self.blocks.iter().filter(|block| block.stored.is_some()).count();
        let head = self.values.bytes(self.head_width as u32);
        Bytes(taken as u64 * (self.block / self.head_width) as u64 * head)
    }

    /// Writes keys | values of rows of a sequence in one layer, from its row `first` on.
    pub(crate) fn append(
        &mut self,
        slot: u32,
        layer: u32,
        first: u32,
        rows: Area<'_>,
    ) -> Result<(), OpError> {
        let no_room = || OpError::Why("there is no room for the keys and values of its rows");
        let &(begin, width) =
            self.layers.get(layer as usize).ok_or(OpError::Why("the model has no such layer"))?;
        let table = self.tables.get(&slot);
        let (Some(table), true) = (table, width == rows.columns()) else { return Err(no_room()) };
        for row in 0..rows.rows() {
            let at = first as usize + row;
            let block = table.get(at / ROWS).and_then(|block| self.blocks.get_mut(*block as usize));
            let stored = block.and_then(|block| block.stored.as_mut()).ok_or_else(no_room)?;
            let row = rows.row(row);
            match (stored, &mut self.narrow) {
                (Values::F32(values), _) => put(&mut values[begin..], at % ROWS, row),
                (Values::F16(bits), Values::F16(narrow)) => {
                    let narrow = &mut narrow[..width];
                    vector::narrow_f16(row, narrow);
                    put(&mut bits[begin..], at % ROWS, narrow);
                }
                (Values::Q8 { codes, scales }, Values::Q8 { codes: narrow, scales: of_row }) => {
                    let (narrow, first) = (&mut narrow[..width], scales_of(begin, self.head_width));
                    let of_row = &mut of_row[..scales_of(width, self.head_width)];
                    vector::narrow_heads(row, self.head_width, narrow, of_row);
                    put(&mut codes[begin..], at % ROWS, narrow);
                    put(&mut scales[first..], at % ROWS, of_row);
                }
                _ => return Err(no_room()),
            }
        }
        Ok(())
    }

    /// The first `rows` rows of a sequence, in one layer.
    pub(crate) fn cached_rows(
        &self,
        slot: u32,
        layer: u32,
        rows: u32,
    ) -> Result<CachedRows<'_>, OpError> {
        let (begin, width) = self.layers.get(layer as usize).copied().unwrap_or_default();
        let table = self.tables.get(&slot).map_or(&[][..], |table| table);
        let rows = rows as usize;
        if table.len() * ROWS < rows {
            return Err(OpError::Why("the rows before it are not cached"));
        }
        let (blocks, head_width) = (&self.blocks[..], self.head_width);
        let scales = Scales {
            begin: scales_of(begin, head_width),
            columns: scales_of(width / 2, head_width),
            of_head: scales_of(head_width, head_width),
        };
        Ok(CachedRows { blocks, table, begin, columns: width / 2, rows, head_width, scales })
    }
}

impl Values {
    /// Zeros for `len` values, in heads of `head_width` columns.
    fn new(
        values: CacheType,
        len: usize,
        head_width: usize,
    ) -> Result<Self, std::collections::TryReserveError> {
        Ok(match values {
            CacheType::F32 => Self::F32(zeros(len)?),
            CacheType::F16 => Self::F16(zeros(len)?),
            CacheType::Q8 => {
                Self::Q8 { codes: zeros(len)?, scales: zeros(scales_of(len, head_width))? }
            }
        })
    }
}

/// The number of scales for so many values of whole heads.
fn scales_of(values: usize, head_width: usize) -> usize {
    values / head_width * head_width.div_ceil(eighths::GROUP)
}

fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>, std::collections::TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len)?;
    values.resize(len, T::default());
    Ok(values)
}

/// Puts keys | values of a row where they belong in a layer of a block.
fn put<T: Copy>(layer: &mut [T], row: usize, from: &[T]) {
    let columns = from.len() / 2;
    let (keys, values) = from.split_at(columns);
    let group = &mut layer[row / GROUP * GROUP * columns..][..GROUP * columns];
    for (place, key) in group[row % GROUP..].iter_mut().step_by(GROUP).zip(keys) {
        *place = *key;
    }
    layer[columns * (ROWS + row)..][..columns].copy_from_slice(values);
}

/// Rows of a sequence that earlier programs cached, in one layer.
#[derive(Clone, Copy)]
pub(crate) struct CachedRows<'a> {
    blocks: &'a [Block],
    /// The blocks of the sequence, in order.
    table: &'a [u32],
    begin: usize,
    /// The columns of the keys of a row, which are as many as those of its values.
    columns: usize,
    rows: usize,
    head_width: usize,
    scales: Scales,
}

/// Where the scales of a layer begin in a block, how many there are for the keys of a row, and how many
/// for a head.
#[derive(Clone, Copy)]
struct Scales {
    begin: usize,
    columns: usize,
    of_head: usize,
}

/// A run of cached values, in the type in which they are cached.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    /// Floats of 32 bits.
    F32(&'a [f32]),
    /// Floats of 16 bits.
    F16(&'a [u16]),
    /// Codes of 8 bits with their scales, of whole heads.
    Q8 {
        codes: &'a [i8],
        scales: &'a [f32],
        /// The number of these heads.
        heads: usize,
        /// Whether the values are keys, of which each column of [`GROUP`] rows stands together.
        group: bool,
    },
}

impl<'a> CachedRows<'a> {
    /// No cached rows.
    pub(crate) const NONE: Self = Self {
        blocks: &[],
        table: &[],
        begin: 0,
        columns: 0,
        rows: 0,
        head_width: 1,
        scales: Scales { begin: 0, columns: 0, of_head: 0 },
    };

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// All rows, widened and copied together: `[rows, keys | values]`.
    #[cfg(feature = "burn")]
    pub(crate) fn values(&self) -> Vec<f32> {
        let columns = self.columns;
        let mut values = vec![0.0; self.rows * 2 * columns];
        let mut group = vec![0.0; GROUP * columns];
        for (row, out) in values.chunks_exact_mut((2 * columns).max(1)).enumerate() {
            let (keys, values) = out.split_at_mut(columns);
            if row % GROUP == 0 {
                self.keys(row / GROUP, 0, columns).widen(&mut group);
            }
            let of_row = group[row % GROUP..].iter().step_by(GROUP);
            keys.iter_mut().zip(of_row).for_each(|(key, from)| *key = *from);
            self.value(row, 0, columns).widen(values);
        }
        values
    }

    /// The values of the block that a row is in.
    #[inline(always)]
    fn of(&self, row: usize) -> &'a Values {
        let block = &self.blocks[self.table[row / ROWS] as usize];
        block.stored.as_ref().expect("a block that a text has")
    }

    /// Some heads of the keys of the rows from `group * GROUP` on: `[columns, GROUP]`. Rows that were not
    /// cached have arbitrary keys.
    #[inline(always)]
    pub(crate) fn keys(&self, group: usize, column: usize, columns: usize) -> Stored<'a> {
        let line = group % (ROWS / GROUP) * GROUP;
        self.some(group * GROUP, line, GROUP, (column, columns))
    }

    /// Some heads of the values of a row.
    #[inline(always)]
    pub(crate) fn value(&self, row: usize, column: usize, columns: usize) -> Stored<'a> {
        self.some(row, ROWS + row % ROWS, 1, (column, columns))
    }

    /// Columns of whole heads of `side` rows side by side, from line `line` of the layer on, in the
    /// block of a row.
    #[inline(always)]
    fn some(
        &self,
        row: usize,
        line: usize,
        side: usize,
        (column, columns): (usize, usize),
    ) -> Stored<'a> {
        let start = self.begin + self.columns * line + column * side;
        let count = columns * side;
        match self.of(row) {
            Values::F32(values) => Stored::F32(&values[start..start + count]),
            Values::F16(bits) => Stored::F16(&bits[start..start + count]),
            Values::Q8 { codes, scales } => {
                let codes = &codes[start..start + count];
                // For each row: more divisions, or wider ones, would be felt.
                let heads = |columns: usize| (columns as u32 / self.head_width as u32) as usize;
                let start = self.scales.begin + self.scales.columns * line;
                let start = start + heads(column) * self.scales.of_head * side;
                let heads = if columns == self.head_width { 1 } else { heads(columns) };
                let scales = &scales[start..][..heads * self.scales.of_head * side];
                Stored::Q8 { codes, scales, heads, group: side == GROUP }
            }
        }
    }

    /// Some columns of the values of rows of one block, where they are cached in 32 bits.
    #[inline(always)]
    pub(crate) fn area(
        &self,
        rows: Range<usize>,
        column: usize,
        columns: usize,
    ) -> Option<Area<'a>> {
        let Values::F32(values) = self.of(rows.start) else { return None };
        let start = self.begin + self.columns * (ROWS + rows.start % ROWS) + column;
        let extent = Extent { start, rows: rows.len(), columns, stride: self.columns };
        Some(Area::new(values, extent).expect("rows of a block"))
    }
}

impl Stored<'_> {
    /// Copies the values to `out`, widened to 32 bits.
    #[inline(always)]
    pub(crate) fn widen(self, out: &mut [f32]) {
        match self {
            Self::F32(values) => out.copy_from_slice(values),
            Self::F16(bits) => vector::widen_f16(bits, out),
            Self::Q8 { codes, scales, heads: 1, group } => widen_head(codes, scales, group, out),
            Self::Q8 { codes, scales, heads, group } => {
                let (width, each) = (codes.len() / heads.max(1), scales.len() / heads.max(1));
                for head in 0..heads {
                    let place = head * width..(head + 1) * width;
                    let scales = &scales[head * each..][..each];
                    widen_head(&codes[place.clone()], scales, group, &mut out[place]);
                }
            }
        }
    }
}

/// Widens the codes of one head, of which each column of [`GROUP`] rows may stand together.
#[inline(always)]
fn widen_head(codes: &[i8], scales: &[f32], group: bool, out: &mut [f32]) {
    match group {
        true => eighths::widen_side_by_side::<GROUP>(codes, scales, out),
        false => eighths::widen(codes, scales, out),
    }
}

/// Rounds the columns of a head to what a cache of this type gives back.
#[inline(always)]
pub(crate) fn round(kept: CacheType, head: &mut [f32]) {
    match kept {
        CacheType::F32 => {}
        CacheType::F16 => vector::round_f16(head),
        CacheType::Q8 => eighths::round(head),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::kernels::testing::*;

    #[test]
    fn kv_cache_returns_appended_rows_and_frees_released_blocks() {
        let heads = [Span::new(0, 2), Span::new(1, 1), Span::new(0, 1)];
        for values in [CacheType::F32, CacheType::F16, CacheType::Q8] {
            let mut cache = KvCache::new(Cache { rows: 4 * 192 + 5, values }, heads.into_iter(), 3);
            assert_eq!(cache.held(), Bytes(0));
            let table = |blocks: &[u32]| Arc::<[u32]>::from(blocks);
            assert!(cache.bind(7, 200, &table(&[3, 0])).is_ok());
            assert!(cache.bind(9, 200, &table(&[1])).is_err(), "fewer blocks than rows need");
            assert!(cache.bind(9, 1, &table(&[4])).is_err(), "no such block");
            assert!(cache.bind(9, 1, &table(&[1; 5])).is_err(), "more blocks than there are");
            assert!(cache.bind(9, 1, &table(&[2])).is_ok());
            let per_row = values.bytes(3) * (2 * 2 + 2);
            assert_eq!(cache.held(), Bytes(3 * 192 * per_row));
            let rows: Vec<f32> = (0..20 * 6).map(|value| value as f32 / 4.0).collect();
            let kept = |row: &[f32]| {
                let mut row = row.to_vec();
                row.chunks_mut(3).for_each(|head| round(values, head));
                row
            };
            assert!(cache.append(7, 2, 185, whole(&rows, 20, 6)).is_ok());
            assert!(cache.append(7, 2, 380, whole(&rows, 20, 6)).is_err(), "beyond its blocks");
            assert!(cache.append(7, 0, 0, whole(&rows, 20, 6)).is_err(), "another width");
            assert!(cache.append(8, 2, 0, whole(&rows, 20, 6)).is_err(), "no such text");
            let cached = cache.cached_rows(7, 2, 205).ok().expect("kept");
            for row in 185..205 {
                let want = kept(&rows[(row - 185) * 6..][..6]);
                let (mut group, mut value) = ([0.0; 3 * GROUP], [0.0; 3]);
                cached.keys(row / GROUP, 0, 3).widen(&mut group);
                cached.value(row, 0, 3).widen(&mut value);
                let keys = [0, 1, 2].map(|column| group[column * GROUP + row % GROUP]);
                assert_eq!((&keys[..], &value[..]), want.split_at(3), "{row}");
            }
            assert!(cache.cached_rows(7, 2, 385).is_err());
            // Another sequence has the first block, too, and keeps it.
            assert!(cache.bind(5, 190, &table(&[3])).is_ok());
            assert!(cache.bind(7, 400, &table(&[3, 0, 1])).is_ok());
            assert_eq!(cache.held(), Bytes(4 * 192 * per_row));
            cache.release(7);
            cache.release(7);
            assert_eq!(cache.held(), Bytes(2 * 192 * per_row));
            let mut value = [0.0; 3];
            cache.cached_rows(5, 2, 190).ok().expect("kept").value(185, 0, 3).widen(&mut value);
            assert_eq!(value[..], kept(&rows[3..6]));
            cache.release(5);
            assert_eq!(cache.held(), Bytes(192 * per_row));
            assert!(cache.cached_rows(7, 2, 1).is_err());
            cache.clear();
            assert_eq!(cache.held(), Bytes(0));
        }
    }
}
