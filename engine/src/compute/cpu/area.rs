//! Rectangles of row-major memory, and cutting them by rows.

/// Rows x columns that are read.
///
/// Row `r` is `values[r * stride..][..columns]`.
#[derive(Clone, Copy)]
pub(crate) struct Area<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

/// Rows x columns that are written.
pub(crate) struct AreaMut<'a> {
    values: &'a mut [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

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
    /// One row.
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
    /// `rows` rows from row `row`, `columns` columns from column `column`.
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
        Some(Self { values: &mut buffer[covers], rows, columns, stride })
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
    pub(crate) fn values(&mut self) -> &mut [f32] {
        self.values
    }
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.stride..][..self.columns]
    }
    /// All rows as one piece, where nothing lies between them.
    pub(crate) fn contiguous(&mut self) -> Option<&mut [f32]> {
        (self.columns == self.stride || self.rows <= 1).then_some(&mut *self.values)
    }
    /// The same rectangle for a shorter time.
    pub(crate) fn again(&mut self) -> AreaMut<'_> {
        AreaMut { values: self.values, rows: self.rows, columns: self.columns, stride: self.stride }
    }
    /// As [`Area::part`].
    pub(crate) fn part(
        &mut self,
        row: usize,
        rows: usize,
        column: usize,
        columns: usize,
    ) -> AreaMut<'_> {
        assert!(row + rows <= self.rows && column + columns <= self.columns);
        let start = row * self.stride + column;
        AreaMut::new(self.values, Extent { start, rows, columns, stride: self.stride })
            .expect("a part of what fits")
    }
}

/// What can be cut in two, so that two threads may write the halves.
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
        let Self { values, rows, columns, stride } = self;
        let (head, tail) = values.split_at_mut(at * stride);
        (
            Self { values: head, rows: at, columns, stride },
            Self { values: tail, rows: rows - at, columns, stride },
        )
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

/// A second rectangle of as many rows that may be there.
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
