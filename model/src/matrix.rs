//! A matrix of a checkpoint, of which any part can be read from its file straight to where it is wanted.
// Hot path of loading: no locks, no logging, no allocation but the caller's scratch.

mod rounded;

use crate::{
    blocks::{self, decode},
    error::ModelError,
    store::Store,
    widen::each_value,
};
use galaxy_common::{WeightBlock, WeightFormat};
use half::{bf16, f16};
use std::ops::Range;

/// The most bytes that are read at once.
const BUFFER_BYTES: u64 = 1 << 20;
/// The most bytes of one stored row that are read at once: 16 such rows fit in the buffer, so that a transposed block
/// fills whole cache lines of the destination.
const SEGMENT_BYTES: u64 = BUFFER_BYTES / BLOCK as u64;
/// Reading over a gap of this size costs less than another system call.
const GAP_BYTES: u64 = 16 << 10;
/// Stored rows that are transposed together: 16 f32 are one cache line.
const BLOCK: usize = 16;

/// How a checkpoint stores a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Storage {
    /// One stored row for each output (`nn.Linear`).
    OutputRows,
    /// One stored row for each input (GPT-2's `Conv1D`).
    InputRows,
}

/// A matrix of a checkpoint, mathematically `[inputs, outputs]` whatever its storage.
pub struct MatrixSource<'a> {
    pub(crate) store: &'a Store,
    pub(crate) name: String,
    pub(crate) shard: usize,
    pub(crate) format: WeightFormat,
    /// The format of the values in the file: `format`, unless they are rounded as they are read.
    pub(crate) stored: WeightFormat,
    pub(crate) storage: Storage,
    /// Where the tensor's first value is, in bytes from the start of its file.
    pub(crate) offset: u64,
    /// Values in a stored row of the whole tensor.
    pub(crate) pitch: u64,
    /// Stored rows of the whole tensor.
    pub(crate) height: u64,
    /// Values of a stored row that are in one tile; all rows of a tile stand before the next tile. Equal to `pitch`
    /// where there is a single tile.
    pub(crate) tile: u64,
    /// Outputs of a fused tensor before those of this matrix.
    pub(crate) first_output: u64,
    /// Heads whose rows are stored in pairs, one of the first half and one of the second in turns; 0 where rows are
    /// stored in order.
    pub(crate) paired: u64,
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
}

/// A part of a matrix: its inputs and its outputs.
pub type Area = (Range<u32>, Range<u32>);

impl MatrixSource<'_> {
    /// The number of inputs.
    pub fn rows(&self) -> u32 {
        self.inputs
    }
    /// Whether the checkpoint stores a row for each input (GPT-2), so that a few outputs are a small piece of every
    /// stored row.
    pub fn stores_inputs_as_rows(&self) -> bool {
        self.storage == Storage::InputRows
    }
    /// The number of outputs.
    pub fn columns(&self) -> u32 {
        self.outputs
    }
    /// The format in which values are read: that of the file, or the one to which they are rounded.
    pub fn format(&self) -> WeightFormat {
        self.format
    }
    /// The name of the tensor that holds the matrix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads `inputs` x `outputs` of the matrix, widened to f32.
    ///
    /// # Shapes
    /// `out` is row-major `[inputs.len(), stride]`; its columns `at..at + outputs.len()` are written, and nothing else.
    /// The last row may end there.
    ///
    /// # Errors
    /// When a range or `out` does not fit, or the file cannot be read. `scratch` grows to 1 MiB at most.
    pub fn read_f32(
        &self,
        (inputs, outputs): Area,
        out: &mut [f32],
        stride: usize,
        at: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let window = self.window(inputs.clone(), outputs.clone(), out.len(), stride, at)?;
        match self.rounds() && !window.rows.is_empty() && !window.columns.is_empty() {
            true => self.rounded_f32((inputs, outputs), out, stride, at, scratch),
            false => self.read_window(window, out, scratch),
        }
    }

    /// Fills a window with the values of the file, not rounded.
    fn read_window(
        &self,
        window: Window,
        out: &mut [f32],
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        each_value!(
            self.stored,
            widen => self.read_paired(window, out, scratch, widen),
            self.read_blocks(window, out, scratch)
        )
    }

    /// Reads `inputs` x `outputs` of the matrix as they are in the file, `W` bytes for each value. Otherwise as
    /// [`MatrixSource::read_f32`].
    ///
    /// # Errors
    /// As for `read_f32`, and [`ModelError::Width`] when a value does not have `W` bytes, or is in a block.
    pub fn read_raw<const W: usize>(
        &self,
        (inputs, outputs): Area,
        out: &mut [[u8; W]],
        stride: usize,
        at: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        if self.format.block().is_some() || self.format.bytes(1, 1) != W as u64 {
            return Err(ModelError::Width { tensor: self.name.clone(), format: self.format });
        }
        let window = self.window(inputs, outputs, out.len(), stride, at)?;
        self.read_paired(window, out, scratch, |bytes: [u8; W]| bytes)
    }

    /// Reads the blocks of one output as they are in the file: all that hold some of `inputs`, so that they may begin
    /// before these and end behind them.
    ///
    /// # Errors
    /// When a range does not fit, `out` has another size than the blocks, the values are not in blocks, or the file
    /// cannot be read.
    pub fn read_raw_blocks(
        &self,
        inputs: Range<u32>,
        output: u32,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        let part = self.part(inputs.clone(), output..output.saturating_add(1))?;
        let (need, have) = (part.bytes, out.len() as u64);
        if need != have {
            return Err(ModelError::Area { tensor: self.name.clone(), need, have });
        }
        if self.rounds() {
            return self.rounded_rows(inputs, output..output + 1, out);
        }
        self.read_row(part.rows.start, &part.blocks, out)
    }

    /// Reads the blocks of several outputs, one output after another, each as [`MatrixSource::read_raw_blocks`] does.
    /// Blocks that are next to one another in the file are read in one go. `out` is resized to what was read.
    ///
    /// # Errors
    /// As for `read_raw_blocks`.
    pub fn read_raw_rows(
        &self,
        inputs: Range<u32>,
        outputs: Range<u32>,
        out: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let part = self.part(inputs.clone(), outputs.clone())?;
        let rows = part.rows.end - part.rows.start;
        out.resize((rows * part.bytes) as usize, 0);
        if out.is_empty() {
            return Ok(());
        }
        if self.rounds() {
            return self.rounded_rows(inputs, outputs, out);
        }
        let pitch = self.format.bytes(self.pitch, 1);
        if self.paired == 0 && part.bytes == pitch && self.tile == self.pitch {
            return self.store.read_at(self.shard, out, self.offset + part.rows.start * pitch);
        }
        for (row, out) in part.rows.zip(out.chunks_exact_mut(part.bytes as usize)) {
            self.read_row(row, &part.blocks, out)?;
        }
        Ok(())
    }

    /// Reads some blocks of a row, which may lie in several tiles.
    fn read_row(&self, row: u64, blocks: &Range<u64>, out: &mut [u8]) -> Result<(), ModelError> {
        let Some(WeightBlock { values, bytes: size, .. }) = self.format.block() else {
            return Ok(());
        };
        let (values, size, row) = (u64::from(values), u64::from(size), self.place(row));
        let (of_tile, all) = ((self.tile / values).max(1), self.pitch / values);
        let (mut from, mut out) = (blocks.start, out);
        while from < blocks.end {
            let begin = from / of_tile * of_tile;
            let end = all.min(begin + of_tile);
            let to = blocks.end.min(end);
            // All rows of a tile stand before the next tile.
            let place = begin * self.height + row * (end - begin) + (from - begin);
            let (some, rest) = out.split_at_mut(((to - from) * size) as usize);
            self.store.read_at(self.shard, some, self.offset + place * size)?;
            (from, out) = (to, rest);
        }
        Ok(())
    }

    /// The blocks that hold some inputs of some outputs.
    fn part(&self, inputs: Range<u32>, outputs: Range<u32>) -> Result<BlockRun, ModelError> {
        let Some(block) = self.format.block() else {
            return Err(ModelError::Width { tensor: self.name.clone(), format: self.format });
        };
        self.check(&inputs, &outputs)?;
        let first = u64::from(inputs.start / block.values);
        let end = if inputs.is_empty() { first } else { inputs.end.div_ceil(block.values).into() };
        let (of_output, bytes) = (self.first_output, u64::from(block.bytes));
        Ok(BlockRun {
            blocks: first..end,
            bytes: (end - first) * bytes,
            rows: of_output + u64::from(outputs.start)..of_output + u64::from(outputs.end),
        })
    }

    /// Checks that the matrix has these inputs and outputs.
    fn check(&self, inputs: &Range<u32>, outputs: &Range<u32>) -> Result<(), ModelError> {
        let sides = [("inputs", inputs, self.inputs), ("outputs", outputs, self.outputs)];
        for (what, range, have) in sides {
            if range.start > range.end || range.end > have {
                return Err(ModelError::Range {
                    tensor: self.name.clone(),
                    what,
                    start: range.start,
                    end: range.end,
                    have,
                });
            }
        }
        Ok(())
    }

    fn window(
        &self,
        inputs: Range<u32>,
        outputs: Range<u32>,
        area: usize,
        stride: usize,
        at: usize,
    ) -> Result<Window, ModelError> {
        self.check(&inputs, &outputs)?;
        let (rows, columns) = (inputs.len() as u64, outputs.len() as u64);
        let (stride, at) = (stride as u64, at as u64);
        if rows > 0 && columns > 0 {
            let too_small =
                |need| ModelError::Area { tensor: self.name.clone(), need, have: area as u64 };
            let width = at.saturating_add(columns);
            let need = (rows - 1).saturating_mul(stride).saturating_add(width);
            if width > stride || need > area as u64 {
                return Err(too_small(need.max(rows.saturating_mul(width))));
            }
        }
        let first = self.first_output;
        let outputs = first + u64::from(outputs.start)..first + u64::from(outputs.end);
        let inputs = u64::from(inputs.start)..u64::from(inputs.end);
        let (rows, columns) = match self.storage {
            Storage::OutputRows => (outputs, inputs),
            Storage::InputRows => (inputs, outputs),
        };
        Ok(Window { rows, columns, stride: stride as usize, at: at as usize })
    }

    /// The place of a row in the file, where rows of heads are stored in pairs.
    fn place(&self, row: u64) -> u64 {
        if self.paired == 0 {
            return row;
        }
        let width = (self.height / self.paired).max(1);
        row / width * width + interleaved_rows(row % width, width)
    }

    /// Reads the rows of a window, each from its place in the file.
    fn read_paired<const W: usize, T>(
        &self,
        window: Window,
        out: &mut [T],
        scratch: &mut Vec<u8>,
        convert: impl Fn([u8; W]) -> T + Copy,
    ) -> Result<(), ModelError> {
        if self.paired == 0 {
            return self.read(window, out, scratch, convert);
        }
        for (at, row) in (window.at..).zip(window.rows.clone()) {
            let place = self.place(row);
            let one = Window { rows: place..place + 1, at, ..window.clone() };
            self.read(one, out, scratch, convert)?;
        }
        Ok(())
    }

    /// Reads the blocks that a window touches, and writes those of their values that are in it.
    fn read_blocks(
        &self,
        window: Window,
        out: &mut [f32],
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let Some(WeightBlock { values, bytes, .. }) = self.format.block() else { return Ok(()) };
        let (values, size) = (u64::from(values), u64::from(bytes));
        let Window { rows, columns, stride, at } = window;
        if rows.is_empty() || columns.is_empty() {
            return Ok(());
        }
        let most = (BUFFER_BYTES / size).max(1);
        let (first, end) = (columns.start / values, columns.end.div_ceil(values));
        let mut wide = [0.0; blocks::MOST_VALUES];
        for (place, row) in (at..).zip(rows) {
            for block in (first..end).step_by(most as usize) {
                let count = most.min(end - block);
                scratch.resize(scratch.len().max((count * size) as usize), 0);
                let bytes = &mut scratch[..(count * size) as usize];
                self.read_row(row, &(block..block + count), bytes)?;
                for (block, bytes) in (block..).zip(bytes.chunks_exact(size as usize)) {
                    decode(self.format, bytes, &mut wide[..values as usize]);
                    let begin = block * values;
                    for column in begin.max(columns.start)..(begin + values).min(columns.end) {
                        let value = wide[(column - begin) as usize];
                        out[(column - columns.start) as usize * stride + place] = value;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads a window in pieces of the size of the buffer, and copies each to its place.
    fn read<const W: usize, T>(
        &self,
        window: Window,
        out: &mut [T],
        scratch: &mut Vec<u8>,
        convert: impl Fn([u8; W]) -> T + Copy,
    ) -> Result<(), ModelError> {
        let width = W as u64;
        let Window { rows, columns, stride, at } = window;
        if rows.is_empty() || columns.is_empty() {
            return Ok(());
        }
        let mut from = columns.start;
        while from < columns.end {
            let begin = from - from % self.tile;
            let end = self.pitch.min(begin + self.tile);
            let row_bytes = (end - begin) * width;
            let tile = self.offset + begin * self.height * width;
            let to = columns.end.min(end).min(from + SEGMENT_BYTES / width);
            let segment = (to - from) * width;
            // One read over all rows of a piece where the gaps are small, or else one for each row.
            let together = row_bytes - segment < GAP_BYTES && row_bytes <= BUFFER_BYTES;
            let pitch = if together { row_bytes } else { segment };
            let most = ((BUFFER_BYTES - segment) / pitch + 1).min(rows.end - rows.start);
            // Whole blocks, so that only the last piece ends inside one.
            let most = if most > BLOCK as u64 { most - most % BLOCK as u64 } else { most };
            let mut row = rows.start;
            while row < rows.end {
                let count = most.min(rows.end - row);
                let bytes = ((count - 1) * pitch + segment) as usize;
                if scratch.len() < bytes {
                    scratch.reserve_exact(bytes - scratch.len());
                    scratch.resize(bytes, 0);
                }
                let piece = &mut scratch[..bytes];
                let start = tile + row * row_bytes + (from - begin) * width;
                if together {
                    self.store.read_at(self.shard, piece, start)?;
                } else {
                    for (i, part) in piece.chunks_exact_mut(segment as usize).enumerate() {
                        self.store.read_at(self.shard, part, start + i as u64 * row_bytes)?;
                    }
                }
                let place = PieceInWindow {
                    rows: count as usize,
                    columns: (to - from) as usize,
                    pitch: pitch as usize,
                    first_row: (row - rows.start) as usize,
                    first_column: (from - columns.start) as usize,
                    stride,
                    at,
                };
                match self.storage {
                    Storage::InputRows => place.copy(piece, out, convert),
                    Storage::OutputRows => place.transpose(piece, out, convert),
                }
                row += count;
            }
            from = to;
        }
        Ok(())
    }
}

/// The place of value `at` of `width` values that are stored in pairs, one of the first half and one of the second in
/// turns.
pub(crate) fn interleaved_rows(at: u64, width: u64) -> u64 {
    let half = (width / 2).max(1);
    at % half * 2 + at / half
}

/// Blocks of several stored rows.
struct BlockRun {
    /// The range of blocks within each row.
    blocks: Range<u64>,
    /// The bytes that these blocks of one row take.
    bytes: u64,
    rows: Range<u64>,
}

/// What is read, in stored rows and columns, and where it is written.
#[derive(Clone)]
struct Window {
    rows: Range<u64>,
    columns: Range<u64>,
    stride: usize,
    at: usize,
}

/// A piece in the buffer, and its place in the window.
struct PieceInWindow {
    rows: usize,
    columns: usize,
    /// Bytes from one row to the next in the buffer.
    pitch: usize,
    first_row: usize,
    first_column: usize,
    stride: usize,
    at: usize,
}

impl PieceInWindow {
    fn copy<const W: usize, T>(&self, piece: &[u8], out: &mut [T], convert: impl Fn([u8; W]) -> T) {
        for row in 0..self.rows {
            let source = &piece[row * self.pitch..][..self.columns * W];
            let target = (self.first_row + row) * self.stride + self.at + self.first_column;
            let target = &mut out[target..][..self.columns];
            for (value, bytes) in target.iter_mut().zip(source.as_chunks::<W>().0) {
                *value = convert(*bytes);
            }
        }
    }

    fn transpose<const W: usize, T>(
        &self,
        piece: &[u8],
        out: &mut [T],
        convert: impl Fn([u8; W]) -> T,
    ) {
        for block in (0..self.rows).step_by(BLOCK) {
            let count = BLOCK.min(self.rows - block);
            // Bytes of each row of the block; those beyond `count` stay empty.
            let mut sources: [&[[u8; W]]; BLOCK] = [&[]; BLOCK];
            for (i, source) in sources.iter_mut().take(count).enumerate() {
                *source = piece[(block + i) * self.pitch..][..self.columns * W].as_chunks::<W>().0;
            }
            for column in 0..self.columns {
                let target =
                    (self.first_column + column) * self.stride + self.at + self.first_row + block;
                let target = &mut out[target..][..count];
                for (value, source) in target.iter_mut().zip(&sources) {
                    *value = convert(source[column]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
