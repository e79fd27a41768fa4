//! Rectangles of row-major memory, and cutting them by rows or columns.
#![allow(unsafe_code)]

use std::{marker::PhantomData, ptr::NonNull, slice};

/// A rectangle of rows x columns that is read.
///
/// Row `r` is `values[r * stride..][..columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Area<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

/// A rectangle of rows x columns that is written.
///
/// It owns for its lifetime the values of its rows and columns, and no others: what lies between
/// the end of a row and the start of the next may belong to another area of the same buffer.
pub(crate) struct AreaMut<'a> {
    start: NonNull<f32>,
    rows: usize,
    columns: usize,
    stride: usize,
    values: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for exclusive references to f32, which may go to another thread.
unsafe impl Send for AreaMut<'_> {}

/// Where a rectangle lies in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) start: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) stride: usize,
}

impl Extent {
    /// The piece of a buffer of `len` values that it covers; nothing where it does not fit.
    fn covers(&self, len: usize) -> Option<std::ops::Range<usize>> {
        if self.columns > self.stride {
            return None;
        }
        let used = match self.rows {
            0 => 0,
            rows => (rows - 1).checked_mul(self.stride)?.checked_add(self.columns)?,
        };
        let end = self.start.checked_add(used)?;
        (end <= len).then_some(self.start..end)
    }
}

impl<'a> Area<'a> {
    pub(crate) fn new(buffer: &'a [f32], extent: Extent) -> Option<Self> {
        let Extent { rows, columns, stride, .. } = extent;
        Some(Self { values: &buffer[extent.covers(buffer.len())?], rows, columns, stride })
    }
    /// An area of one row.
    pub(crate) fn single(values: &'a [f32]) -> Self {
        Self { values, rows: 1, columns: values.len(), stride: values.len() }
    }
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }
    pub(crate) fn values(&self) -> &'a [f32] {
        self.values
    }
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.columns]
    }
    /// The part of `rows` rows from row `row` on, and of `columns` columns from column `column` on.
    pub(crate) fn part(&self, row: usize, rows: usize, column: usize, columns: usize) -> Self {
        assert!(row + rows <= self.rows && column + columns <= self.columns);
        let start = row * self.stride + column;
        Self::new(self.values, Extent { start, rows, columns, stride: self.stride })
            .expect("a part of what fits")
    }
}

impl<'a> AreaMut<'a> {
    pub(crate) fn new(buffer: &'a mut [f32], extent: Extent) -> Option<Self> {
        let Extent { rows, columns, stride, .. } = extent;
        let covers = extent.covers(buffer.len())?;
        let covered = &mut buffer[covers];
        Some(Self { start: first(covered), rows, columns, stride, values: PhantomData })
    }
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: row `row` of the rectangle lies inside the buffer that it was made from, which is
        // borrowed for 'a; its values belong to this area alone, and `self` is borrowed meanwhile.
        unsafe {
            slice::from_raw_parts_mut(self.start.as_ptr().add(row * self.stride), self.columns)
        }
    }
    /// All rows as one piece, where nothing lies between them.
    pub(crate) fn contiguous(&mut self) -> Option<&mut [f32]> {
        if self.columns != self.stride && self.rows > 1 {
            return None;
        }
        // SAFETY: as in `row`; the rows follow each other without a gap.
        Some(unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.rows * self.columns) })
    }
    /// The same rectangle for a shorter time.
    pub(crate) fn again(&mut self) -> AreaMut<'_> {
        AreaMut { values: PhantomData, ..*self }
    }
    /// The part of `rows` rows from row `row` on, and of `columns` columns from column `column` on.
    pub(crate) fn part(
        &mut self,
        row: usize,
        rows: usize,
        column: usize,
        columns: usize,
    ) -> AreaMut<'_> {
        assert!(row + rows <= self.rows && column + columns <= self.columns);
        let at = if rows == 0 || columns == 0 { 0 } else { row * self.stride + column };
        // SAFETY: `at` is the place of one of this area's own values, or 0.
        let start = unsafe { self.start.add(at) };
        AreaMut { start, rows, columns, stride: self.stride, values: PhantomData }
    }
    /// The first `at` columns, and the others: two threads may write them at the same time.
    pub(crate) fn cut_columns(self, at: usize) -> (Self, Self) {
        assert!(at <= self.columns);
        let offset = if self.rows == 0 || at == self.columns { 0 } else { at };
        // SAFETY: column `at` of the first row is one of this area's own values, or the offset 0.
        let start = unsafe { self.start.add(offset) };
        (Self { columns: at, ..self }, Self { start, columns: self.columns - at, ..self })
    }
}

fn first(values: &mut [f32]) -> NonNull<f32> {
    NonNull::from(values).cast()
}

/// Makes sure that a buffer has at least `len` values; it never shrinks.
pub(crate) fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0.0);
    }
}

/// Something that can be cut in two, so that two threads may write the halves.
pub(crate) trait Cut: Sized + Send {
    /// How many items it has.
    fn items(&self) -> usize;
    /// The first `at` items, and the others. `at` lies strictly inside.
    fn cut(self, at: usize) -> (Self, Self);
}

impl Cut for AreaMut<'_> {
    fn items(&self) -> usize {
        self.rows
    }
    fn cut(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows);
        let offset = if at == self.rows || self.columns == 0 { 0 } else { at * self.stride };
        // SAFETY: the first value of row `at` is one of this area's own, or the offset is 0.
        let start = unsafe { self.start.add(offset) };
        (Self { rows: at, ..self }, Self { start, rows: self.rows - at, ..self })
    }
}

impl Cut for &mut [f32] {
    fn items(&self) -> usize {
        self.len()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
}

/// Rows in wire format, `width` bytes each.
pub(crate) struct WireRows<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) width: usize,
}

impl Cut for WireRows<'_> {
    fn items(&self) -> usize {
        self.bytes.len().checked_div(self.width).unwrap_or(0)
    }
    fn cut(self, at: usize) -> (Self, Self) {
        let (head, tail) = self.bytes.split_at_mut(at * self.width);
        (Self { bytes: head, width: self.width }, Self { bytes: tail, width: self.width })
    }
}

/// A rectangle with a second one of as many rows, where there is one.
impl<A: Cut, B: Cut> Cut for (A, Option<B>) {
    fn items(&self) -> usize {
        self.0.items()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        let (head, tail) = self.0.cut(at);
        let (also_head, also_tail) = self.1.map(|b| b.cut(at)).unzip();
        ((head, also_head), (tail, also_tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_cover_every_value_once() {
        let mut buffer = vec![0.0; 7 * 11];
        let extent = Extent { start: 1, rows: 6, columns: 9, stride: 11 };
        let area = AreaMut::new(&mut buffer, extent).expect("it fits");
        let (above, below) = area.cut(2);
        let (left, right) = below.cut_columns(4);
        let mut pieces = [above, left, right];
        for (piece, value) in pieces.iter_mut().zip([1.0, 2.0, 3.0]) {
            for row in 0..piece.rows() {
                piece.row(row).iter_mut().for_each(|v| *v += value);
            }
        }
        for (at, value) in buffer.iter().enumerate() {
            let (row, column) = (at / 11, at % 11);
            let want = match (row, column) {
                (6, _) | (_, 0 | 10) => 0.0,
                (0..2, _) => 1.0,
                (_, 1..5) => 2.0,
                _ => 3.0,
            };
            assert_eq!(*value, want, "row {row} column {column}");
        }
    }

    #[test]
    fn empty_areas_can_be_cut() {
        let mut area = AreaMut::new(&mut [], Extent { start: 0, rows: 0, columns: 3, stride: 3 })
            .expect("no rows fit anywhere");
        assert_eq!(area.part(0, 0, 1, 2).columns(), 2);
        let (left, right) = area.cut_columns(1);
        assert_eq!((left.columns(), right.columns(), right.rows()), (1, 2, 0));
        let area = AreaMut::new(&mut [], Extent { start: 0, rows: 4, columns: 0, stride: 0 });
        let (above, below) = area.expect("no columns fit anywhere").cut(3);
        assert_eq!((above.rows(), below.rows()), (3, 1));
    }
}
