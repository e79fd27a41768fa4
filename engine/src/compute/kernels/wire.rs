//! Rows in wire format: writing, reading and adding them.
// Hot path: no locks, no logging, no allocation.

use super::{
    area::{Area, AreaMut, WireRows},
    eighths,
    threads::Threads,
    vector,
};
use galaxy_common::WireType;

#[cfg(target_endian = "big")]
compile_error!("tiles are little endian, and are used where they lie");

/// Values of a row that are widened at a time, on the stack.
const PIECE: usize = 256;

const _: () = assert!(PIECE.is_multiple_of(eighths::GROUP));

/// Rows in wire format, `columns` values each.
#[derive(Clone, Copy)]
pub(crate) enum Tile<'a> {
    F32 {
        values: &'a [f32],
        columns: usize,
    },
    F16 {
        bits: &'a [u16],
        columns: usize,
    },
    /// Codes of 8 bits: of each row the scales of its groups, then its values.
    Q8 {
        bytes: &'a [u8],
        columns: usize,
    },
}

impl<'a> Tile<'a> {
    /// The first `rows` rows of a staging buffer; none if it is too short or not aligned.
    pub(crate) fn new(
        bytes: &'a [u8],
        wire: WireType,
        rows: usize,
        columns: usize,
    ) -> Option<Self> {
        let bytes = bytes.get(..tile_bytes(wire, rows, columns)?)?;
        match wire {
            WireType::F32 => {
                let values = bytemuck::try_cast_slice(bytes).ok()?;
                Some(Self::F32 { values, columns })
            }
            WireType::F16 => {
                let bits = bytemuck::try_cast_slice(bytes).ok()?;
                Some(Self::F16 { bits, columns })
            }
            WireType::Q8 => aligned(wire, bytes).then_some(Self::Q8 { bytes, columns }),
        }
    }
}

impl Tile<'_> {
    /// The number of rows, and of columns.
    pub(crate) fn shape(&self) -> (usize, usize) {
        let (len, each, columns) = match *self {
            Self::F32 { values, columns } => (values.len(), columns, columns),
            Self::F16 { bits, columns } => (bits.len(), columns, columns),
            Self::Q8 { bytes, columns } => (bytes.len(), row_bytes(WireType::Q8, columns), columns),
        };
        (len.checked_div(each).unwrap_or(0), columns)
    }
}

/// Bytes of rows in wire format; none where there are more than can be counted.
pub(crate) fn tile_bytes(wire: WireType, rows: usize, columns: usize) -> Option<usize> {
    rows.checked_mul(columns)?.checked_mul(4)?;
    rows.checked_mul(row_bytes(wire, columns))
}

fn row_bytes(wire: WireType, columns: usize) -> usize {
    wire.row(columns as u64) as usize
}

/// The scales and the values of a row of 8 bits.
fn eight(row: &[u8], columns: usize) -> (&[f32], &[i8]) {
    let (scales, values) = row.split_at(4 * columns.div_ceil(eighths::GROUP));
    (bytemuck::cast_slice(scales), &bytemuck::cast_slice(values)[..columns])
}

fn eight_mut(row: &mut [u8], columns: usize) -> (&mut [f32], &mut [i8]) {
    let (scales, values) = row.split_at_mut(4 * columns.div_ceil(eighths::GROUP));
    (bytemuck::cast_slice_mut(scales), &mut bytemuck::cast_slice_mut(values)[..columns])
}

/// Runs `work` on pieces of a row of the tile: (first column, values).
fn pieces(tile: Tile<'_>, row: usize, mut work: impl FnMut(usize, &[f32])) {
    match tile {
        Tile::F32 { values, columns } => work(0, &values[row * columns..][..columns]),
        Tile::F16 { bits, columns } => {
            let mut wide = [0.0; PIECE];
            for (at, bits) in bits[row * columns..][..columns].chunks(PIECE).enumerate() {
                let wide = &mut wide[..bits.len()];
                vector::widen_f16(bits, wide);
                work(at * PIECE, wide);
            }
        }
        Tile::Q8 { bytes, columns } => {
            let mut wide = [0.0; PIECE];
            let width = row_bytes(WireType::Q8, columns);
            let (scales, codes) = eight(&bytes[row * width..][..width], columns);
            let scales = scales.chunks(PIECE / eighths::GROUP);
            for ((at, codes), scales) in codes.chunks(PIECE).enumerate().zip(scales) {
                let wide = &mut wide[..codes.len()];
                eighths::widen(codes, scales, wide);
                work(at * PIECE, wide);
            }
        }
    }
}

/// Adds a row of a tile: out += tile.
pub(crate) fn add_tile(out: &mut [f32], tile: Tile<'_>, row: usize) {
    pieces(tile, row, |at, values| vector::add(&mut out[at..at + values.len()], values));
}

/// Adds the sum of a partial row and a row of a tile: out += (partial + tile).
pub(crate) fn add_sum(out: &mut [f32], partial: &[f32], tile: Tile<'_>, row: usize) {
    pieces(tile, row, |at, values| {
        for (at, values) in values.chunks(PIECE).enumerate().map(|(i, v)| (at + i * PIECE, v)) {
            let mut sum = [0.0; PIECE];
            let sum = &mut sum[..values.len()];
            sum.copy_from_slice(&partial[at..at + values.len()]);
            vector::add(sum, values);
            vector::add(&mut out[at..at + values.len()], sum);
        }
    });
}

/// Copies the rows of a tile: rows = tile.
pub(crate) fn import(threads: &Threads, tile: Tile<'_>, out: AreaMut<'_>) {
    let values = out.rows() * out.columns();
    threads.each(out, 1, values, |first, mut out| {
        for at in 0..out.rows() {
            let row = out.row(at);
            pieces(tile, first + at, |at, values| {
                row[at..at + values.len()].copy_from_slice(values);
            });
        }
    });
}

/// Adds the rows of a tile to others: out = rows + tile.
pub(crate) fn add(threads: &Threads, rows: Area<'_>, tile: Tile<'_>, out: AreaMut<'_>) {
    let values = out.rows() * out.columns();
    threads.each(out, 1, values, |first, mut out| {
        for at in 0..out.rows() {
            let row = out.row(at);
            row.copy_from_slice(rows.row(first + at));
            add_tile(row, tile, first + at);
        }
    });
}

/// Writes rows in wire format, with those of a staged tile added where there is one: tile' = rows (+
/// tile).
///
/// # Panics
/// When `out` is not aligned for its values; [`aligned`] says whether it is.
pub(crate) fn export(
    threads: &Threads,
    rows: Area<'_>,
    staged: Option<Tile<'_>>,
    wire: WireType,
    out: &mut [u8],
) {
    let (columns, width) = (rows.columns(), row_bytes(wire, rows.columns()));
    let values = rows.rows() * rows.columns();
    threads.each(WireRows { bytes: out, width }, 1, values, |first, out| {
        for (at, out) in out.bytes.chunks_exact_mut(width.max(1)).enumerate() {
            let source = first + at;
            let row = rows.row(source);
            match wire {
                WireType::F32 => {
                    let out: &mut [f32] = bytemuck::cast_slice_mut(out);
                    out.copy_from_slice(row);
                    if let Some(tile) = staged {
                        add_tile(out, tile, source);
                    }
                }
                WireType::F16 => {
                    let out: &mut [u16] = bytemuck::cast_slice_mut(out);
                    let Some(tile) = staged else {
                        vector::narrow_f16(row, out);
                        continue;
                    };
                    pieces(tile, source, |at, values| {
                        let mut sum = [0.0; PIECE];
                        let sum = &mut sum[..values.len()];
                        sum.copy_from_slice(&row[at..at + values.len()]);
                        vector::add(sum, values);
                        vector::narrow_f16(sum, &mut out[at..at + values.len()]);
                    });
                }
                WireType::Q8 => {
                    let (scales, codes) = eight_mut(out, columns);
                    let Some(tile) = staged else {
                        eighths::narrow(row, codes, scales);
                        continue;
                    };
                    pieces(tile, source, |at, values| {
                        let mut sum = [0.0; PIECE];
                        let sum = &mut sum[..values.len()];
                        sum.copy_from_slice(&row[at..at + values.len()]);
                        vector::add(sum, values);
                        let codes = &mut codes[at..at + values.len()];
                        eighths::narrow(sum, codes, &mut scales[at / eighths::GROUP..]);
                    });
                }
            }
        }
    });
}

/// Whether a staging buffer can be used in place.
pub(crate) fn aligned(wire: WireType, bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(wire.alignment())
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};

    #[test]
    fn exported_tiles_are_imported_and_added_in_every_wire_format() {
        let mut random = Random::default();
        for wire in [WireType::F32, WireType::F16, WireType::Q8] {
            for (rows, columns) in [(1, 1), (1, 7), (5, 300), (64, 513)] {
                let threads = Threads::new(2);
                let (values, more) = (random.values(rows * columns), random.values(rows * columns));
                let bytes = tile_bytes(wire, rows, columns).expect("small");
                let mut first = vec![0.0_f32; bytes.div_ceil(4)];
                let mut second = first.clone();
                let first: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut first)[..bytes];
                let second: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut second)[..bytes];
                export(&threads, whole(&values, rows, columns), None, wire, first);
                let tile = Tile::new(first, wire, rows, columns).expect("a tile");
                assert_eq!(tile.shape(), (rows, columns));
                export(&threads, whole(&more, rows, columns), Some(tile), wire, second);
                let tile = Tile::new(second, wire, rows, columns).expect("a tile");
                let mut out = vec![f32::NAN; rows * columns];
                import(&threads, tile, whole_mut(&mut out, rows, columns));
                let round = |values: &[f32]| -> Vec<f32> {
                    let mut values = values.to_vec();
                    match wire {
                        WireType::F32 => {}
                        WireType::F16 => vector::round_f16(&mut values),
                        WireType::Q8 => values.chunks_mut(columns).for_each(eighths::round),
                    }
                    values
                };
                // To the bit: what is on the wire is rounded once for each export.
                let sums: Vec<f32> = round(&values).iter().zip(&more).map(|(v, m)| m + v).collect();
                let sums = round(&sums);
                assert_eq!(out, sums, "{wire} {rows}x{columns}");
                let first = whole(&more, rows, columns);
                add(&threads, first, tile, whole_mut(&mut out, rows, columns));
                let added: Vec<f32> = more.iter().zip(&sums).map(|(m, s)| m + s).collect();
                assert_eq!(out, added, "{wire} {rows}x{columns}");
            }
        }
    }

    #[test]
    fn tiles_refuse_short_and_misaligned_buffers() {
        let room = [0.0_f32; 8];
        let bytes: &[u8] = bytemuck::cast_slice(&room);
        assert!(Tile::new(bytes, WireType::F32, 2, 4).is_some());
        assert!(Tile::new(bytes, WireType::F32, 3, 3).is_none());
        assert!(Tile::new(bytes, WireType::F32, usize::MAX, 3).is_none());
        assert!(Tile::new(&bytes[1..], WireType::F32, 1, 4).is_none());
        assert!(Tile::new(&bytes[1..], WireType::F16, 1, 4).is_none());
        assert!(!aligned(WireType::F32, &bytes[2..]) && aligned(WireType::F16, &bytes[2..]));
    }
}
