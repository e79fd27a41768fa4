//! A model in pieces, for devices without the model's directory to fetch and store.
//!
//! Only tensors that the spec uses are cut, so that nothing else ever travels. A tensor whose stored rows are split
//! over devices is cut by bytes. One of which every device needs all rows, but only a part of each (the second product
//! of a block, as `nn.Linear` stores it), is cut into tiles: all rows of a run of columns, row after row. So a device
//! that holds a part of a matrix fetches little besides.
//!
//! Pieces lie one after another in the *data*, in a fixed order of tensors: vectors, matrices by layer, tables. Both
//! ends derive it from config, names, shapes and types alone.

use crate::{
    Matrix, ModelDir, Table, Vector,
    error::ModelError,
    matrix::Storage,
    spec::{ModelSpec, Positions},
    store::Store,
};
use std::{collections::HashMap, ops::Range};

/// Bytes of a piece: small compared with any device's part, and about one head of a common model.
const PIECE_BYTES: u64 = 256 << 10;
/// The largest piece that is possible: a tile has all rows in a single piece.
pub const MAX_PIECE_BYTES: u64 = 4 << 20;
/// The narrowest run of a row in a tile, in bytes: with narrower ones, reading costs more than it spares.
const LEAST_RUN: u64 = 128;
/// The narrowest run of a row in a tile where values are in blocks, in values.
const BLOCKS_OF: u64 = 256;

/// The side of a matrix that is split over devices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    Inputs,
    Outputs,
}

/// A tensor of the data, and how it is cut.
#[derive(Clone, Debug)]
pub(crate) struct TensorData {
    pub(crate) name: String,
    /// Where the tensor begins in the data, in bytes.
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    /// Bytes of one stored row.
    row_bytes: u64,
    /// Bytes of a row in one tile; 0 where the tensor is cut by bytes.
    pub(crate) tile: u64,
    /// The number of its first piece.
    first: u32,
}

/// The most pieces of a model, enough for 4 TB.
const MOST_PIECES: u64 = 1 << 24;

/// How a model is cut into pieces.
#[derive(Clone, Debug)]
pub struct Pieces {
    cuts: Vec<TensorData>,
    places: HashMap<String, usize>,
    /// Where each piece begins in the data, in bytes, and where the last one ends.
    starts: Vec<u64>,
    /// The number of pieces stays below this.
    most: u64,
}

impl TensorData {
    /// The number of stored rows.
    fn rows(&self) -> u64 {
        self.bytes.checked_div(self.row_bytes).unwrap_or(0)
    }
    /// The piece that holds a byte of a tensor that is cut by bytes.
    fn piece(&self, byte: u64) -> u32 {
        self.first + (byte / PIECE_BYTES) as u32
    }
    /// The pieces that hold some bytes of the tensor, counted as in its file. For bytes in several rows of a tensor in
    /// tiles, these are all of its pieces.
    pub(crate) fn stored(&self, bytes: Range<u64>) -> Range<u32> {
        if self.tile == 0 || bytes.is_empty() {
            return self.run(bytes);
        }
        let (first, last) = (bytes.start / self.row_bytes, (bytes.end - 1) / self.row_bytes);
        let (from, to) = match first == last {
            true => (bytes.start % self.row_bytes, (bytes.end - 1) % self.row_bytes),
            false => (0, self.row_bytes - 1),
        };
        let of = |byte: u64| self.first + (byte / self.tile) as u32;
        of(from)..of(to) + 1
    }
    /// The pieces that hold some bytes of a tensor that is cut by bytes.
    fn run(&self, bytes: Range<u64>) -> Range<u32> {
        match bytes.is_empty() {
            true => self.first..self.first,
            false => self.piece(bytes.start)..self.piece(bytes.end - 1) + 1,
        }
    }
}

impl Pieces {
    fn new(most: u64) -> Self {
        Self { cuts: Vec::new(), places: HashMap::new(), starts: vec![0], most }
    }

    /// Adds a tensor of stored rows, unless it is there already. With `tiled` it is cut into tiles where these fit,
    /// with runs of a row that are a multiple of so many bytes, and otherwise by bytes. False if there are too many
    /// bytes or pieces.
    fn add(&mut self, name: &str, rows: u64, row_bytes: u64, tiled: Option<u64>) -> bool {
        if self.places.contains_key(name) {
            return true;
        }
        let (at, first) = (self.total(), self.count());
        let Some(end) = rows.checked_mul(row_bytes).and_then(|bytes| at.checked_add(bytes)) else {
            return false;
        };
        let least = tiled.unwrap_or(LEAST_RUN).max(1);
        let run = (PIECE_BYTES / rows.max(1)).max(least) / least * least;
        let tiled = tiled.is_some() && run < row_bytes && rows * run <= MAX_PIECE_BYTES;
        let step = if tiled { rows * run } else { PIECE_BYTES };
        if self.starts.len() as u64 + (end - at) / step > self.most {
            return false;
        }
        self.starts.extend((1..).map(|n| at + n * step).take_while(|start| *start < end));
        if end > at {
            self.starts.push(end);
        }
        let tile = if tiled { run } else { 0 };
        self.places.insert(name.to_owned(), self.cuts.len());
        self.cuts.push(TensorData {
            name: name.to_owned(),
            at,
            bytes: end - at,
            row_bytes,
            tile,
            first,
        });
        true
    }

    /// The number of pieces.
    pub fn count(&self) -> u32 {
        // add() keeps it below u32::MAX.
        (self.starts.len() - 1) as u32
    }
    /// Bytes of the data.
    pub fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }
    /// The range of bytes of a piece in the data; empty where there is no such piece.
    pub fn span(&self, piece: u32) -> Range<u64> {
        let at = piece as usize;
        match self.starts.get(at..at + 2) {
            Some(&[start, end]) => start..end,
            _ => 0..0,
        }
    }
    /// The number of bytes of a piece.
    pub fn bytes(&self, piece: u32) -> u64 {
        let span = self.span(piece);
        span.end - span.start
    }
    /// The pieces that hold some bytes of the data.
    pub fn covering(&self, bytes: Range<u64>) -> Range<u32> {
        let before = |byte: u64| self.starts.partition_point(|start| *start <= byte) as u32;
        match bytes.is_empty() {
            true => 0..0,
            false => before(bytes.start) - 1..before(bytes.end - 1).min(self.count()),
        }
    }
    pub(crate) fn cuts(&self) -> &[TensorData] {
        &self.cuts
    }
    /// The tensor that a piece belongs to.
    pub(crate) fn holding(&self, piece: u32) -> Result<&TensorData, ModelError> {
        let place = self.cuts.partition_point(|cut| cut.first <= piece);
        let found = self.cuts[..place].iter().rfind(|cut| cut.bytes > 0);
        let found = found.filter(|_| piece < self.count());
        found.ok_or_else(|| ModelError::NotInModel { what: format!("piece {piece}") })
    }
    fn cut(&self, name: &str) -> Result<&TensorData, ModelError> {
        let found = self.places.get(name).and_then(|place| self.cuts.get(*place));
        found.ok_or_else(|| ModelError::NotInModel { what: format!("tensor {name:?} in pieces") })
    }
}

/// Which side of a matrix is split over devices.
fn split(matrix: Matrix) -> Split {
    match matrix {
        Matrix::AttentionOutput(_) | Matrix::Down(_) => Split::Inputs,
        _ => Split::Outputs,
    }
}

/// The tables that a model of this spec has.
fn tables(spec: &ModelSpec) -> impl Iterator<Item = Table> {
    let learned = matches!(spec.positions, Positions::Learned { .. });
    let word = spec.patches.is_none().then_some(Table::Word);
    word.into_iter().chain(learned.then_some(Table::Position))
}

impl ModelDir {
    /// How this model is cut into pieces.
    ///
    /// # Errors
    /// When it has more bytes or pieces than any model.
    pub fn pieces(&self) -> Result<Pieces, ModelError> {
        self.pieces_at_most(MOST_PIECES)
    }

    /// [`ModelDir::pieces`], if there are no more than so many.
    pub(crate) fn pieces_at_most(&self, pieces: u64) -> Result<Pieces, ModelError> {
        let mut pieces = Pieces::new(pieces.min(MOST_PIECES) + 1);
        let large = || ModelError::TooLarge { path: self.path().into(), bytes: u64::MAX, limit: 0 };
        for which in Vector::all(self.spec()) {
            let name = self.vector_name(which)?;
            let bytes = self.tensor_bytes(&name)?;
            pieces.add(&name, 1, bytes, None).then_some(()).ok_or_else(large)?;
        }
        for which in Matrix::all(self.spec()) {
            let source = self.matrix(which)?;
            // The file's bytes, whatever their format.
            let row_bytes = self.tensor_bytes(&source.name)? / source.height.max(1);
            let tiled = (source.storage == Storage::OutputRows) == (split(which) == Split::Inputs);
            // Tiles begin where panels of the engine do, and between blocks.
            let least = match source.stored.block() {
                Some(block) => u64::from(block.bytes) * BLOCKS_OF.div_ceil(block.values.into()),
                None => LEAST_RUN,
            };
            let least = tiled.then_some(least);
            let added = pieces.add(&source.name, source.height, row_bytes, least);
            added.then_some(()).ok_or_else(large)?;
        }
        for table in tables(self.spec()) {
            let (name, rows, _) = self.table(table)?;
            let row_bytes = self.tensor_bytes(&name)? / u64::from(rows.max(1));
            let added = pieces.add(&name, rows.into(), row_bytes, None);
            added.then_some(()).ok_or_else(large)?;
        }
        Ok(pieces)
    }

    /// The pieces that hold a part of a matrix, with little besides.
    ///
    /// # Errors
    /// When the model has no such matrix.
    pub fn matrix_pieces(
        &self,
        pieces: &Pieces,
        which: Matrix,
        inputs: Range<u32>,
        outputs: Range<u32>,
    ) -> Result<Range<u32>, ModelError> {
        let source = self.matrix(which)?;
        let cut = pieces.cut(&source.name)?;
        let first = source.first_output;
        let wide =
            |range: Range<u32>, by: u64| by + u64::from(range.start)..by + u64::from(range.end);
        // Rounding reads whole blocks.
        let inputs = source.whole_blocks(inputs);
        let (rows, columns) = match source.storage {
            Storage::OutputRows => (wide(outputs, first), wide(inputs, 0)),
            Storage::InputRows => (wide(inputs, 0), wide(outputs, first)),
        };
        if rows.is_empty() || columns.is_empty() {
            return Ok(cut.first..cut.first);
        }
        Ok(match cut.tile {
            0 => cut.run(rows.start * cut.row_bytes..rows.end * cut.row_bytes),
            tile => {
                // The byte at which a column begins, or the block that it is in.
                let byte = |column: u64| match source.stored.block() {
                    Some(block) => column / u64::from(block.values) * u64::from(block.bytes),
                    None => source.stored.bytes(1, column),
                };
                let of = |column: u64| cut.first + (byte(column) / tile) as u32;
                of(columns.start)..of(columns.end - 1) + 1
            }
        })
    }

    /// The pieces that hold a vector.
    ///
    /// # Errors
    /// When the model has no such vector.
    pub fn vector_pieces(&self, pieces: &Pieces, which: Vector) -> Result<Range<u32>, ModelError> {
        let cut = pieces.cut(&self.vector_name(which)?)?;
        Ok(cut.run(0..cut.bytes))
    }

    /// The pieces that hold the tables of the model, in full.
    ///
    /// # Errors
    /// When a table is missing, which an opened model rules out.
    pub fn table_pieces(&self, pieces: &Pieces) -> Result<Vec<Range<u32>>, ModelError> {
        let of = |table| {
            let cut = pieces.cut(&self.table(table)?.0)?;
            Ok(cut.run(0..cut.bytes))
        };
        tables(self.spec()).map(of).collect()
    }
}

impl Store {
    /// Reads a piece from the files, without comparing it with a manifest.
    pub(crate) fn read_raw_piece(
        &self,
        pieces: &Pieces,
        piece: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let cut = pieces.holding(piece)?;
        let span = pieces.span(piece);
        out.clear();
        // No piece is larger than MAX_PIECE_BYTES.
        out.resize((span.end - span.start) as usize, 0);
        let tensor = self.listed(&cut.name)?.0;
        let (shard, offset) = (tensor.shard, tensor.offset);
        if cut.tile == 0 {
            return self.read_raw(shard, out, offset + (span.start - cut.at));
        }
        let begin = u64::from(piece - cut.first) * cut.tile;
        let run = cut.tile.min(cut.row_bytes - begin) as usize;
        for (row, out) in (0..cut.rows()).zip(out.chunks_exact_mut(run)) {
            self.read_raw(shard, out, offset + row * cut.row_bytes + begin)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::golden;
    use proptest::prelude::*;

    #[test]
    fn a_tensor_is_cut_into_pieces_once_by_bytes_or_by_tiles() {
        let mut pieces = Pieces::new(MOST_PIECES);
        assert!(pieces.add("a", 1, 100, None));
        assert!(pieces.add("rows", 1024, 4096, None));
        assert!(pieces.add("tiles", 1024, 4096, Some(LEAST_RUN)));
        assert!(pieces.add("a", 5, 5, Some(LEAST_RUN)), "there already");
        assert!(
            pieces.add("none", 0, 12, Some(LEAST_RUN))
                && pieces.add("narrow", 3, 100, Some(LEAST_RUN))
        );
        assert_eq!(pieces.count(), 1 + 16 + 16 + 1);
        assert_eq!(pieces.cut("rows").unwrap().tile, 0);
        assert_eq!(pieces.cut("tiles").unwrap().tile, 256);
        assert_eq!(pieces.cut("narrow").unwrap().tile, 0, "one piece anyway");
        assert_eq!(pieces.bytes(3), 256 << 10);
        assert!(!pieces.add("absurd", u64::MAX, 2, None));
        assert!(!pieces.add("absurd", 1 << 30, 1 << 30, None));
        assert_eq!(pieces.span(99), 0..0);
    }

    #[test]
    fn a_weight_slice_needs_only_its_own_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let shape = crate::shape::Shape::bert(1, 1024, 16);
        shape.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let model = ModelDir::open(dir.path()).unwrap();
        let pieces = model.pieces().unwrap();
        let of = |which, inputs, outputs| {
            let range = model.matrix_pieces(&pieces, which, inputs, outputs).unwrap();
            range.map(|piece| pieces.bytes(piece)).sum::<u64>()
        };
        let (hidden, inner) = (1024, 4096);
        // A quarter of a matrix takes a quarter of its bytes, whichever side is split.
        assert_eq!(of(Matrix::Query(0), 0..hidden, 256..512), 1 << 20);
        assert_eq!(of(Matrix::AttentionOutput(0), 256..512, 0..hidden), 1 << 20);
        assert_eq!(of(Matrix::Up(0), 0..hidden, 0..1024), 4 << 20);
        assert_eq!(of(Matrix::Down(0), 1024..2048, 0..hidden), 4 << 20);
        assert_eq!(of(Matrix::Down(0), 0..inner, 0..hidden), 16 << 20);
        assert_eq!(of(Matrix::Down(0), 5..5, 0..hidden), 0);
    }

    proptest! {
        #[test]
        fn pieces_cover_all_bytes_without_gap_or_overlap(
            sizes in prop::collection::vec((0u64..3000, 0u64..5000, any::<bool>()), 1..6),
        ) {
            let mut pieces = Pieces::new(MOST_PIECES);
            for (i, (rows, row_bytes, tiled)) in sizes.iter().enumerate() {
                prop_assert!(pieces.add(&i.to_string(), *rows, *row_bytes, tiled.then_some(LEAST_RUN)));
            }
            let total: u64 = sizes.iter().map(|(rows, bytes, _)| rows * bytes).sum();
            prop_assert_eq!(pieces.total(), total);
            let mut end = 0;
            for piece in 0..pieces.count() {
                let span = pieces.span(piece);
                prop_assert!(span.start == end && span.end > end);
                prop_assert!(span.end - span.start <= MAX_PIECE_BYTES);
                prop_assert_eq!(pieces.covering(span.clone()), piece..piece + 1);
                end = span.end;
            }
            prop_assert_eq!(end, total);
        }
    }

    #[test]
    fn all_golden_models_can_be_cut_into_pieces() {
        for name in
            ["bert", "llama-tied-bf16", "gpt2", "distilbert", "gptj", "mpnet", "qwen3", "vit"]
        {
            let model = ModelDir::open(&golden(name)).unwrap();
            let pieces = model.pieces().unwrap();
            let mut out = Vec::new();
            for piece in 0..pieces.count() {
                model.read_piece(&pieces, piece, &mut out).unwrap();
                assert_eq!(out.len() as u64, pieces.bytes(piece), "{name}: {piece}");
            }
            assert!(model.read_piece(&pieces, pieces.count(), &mut out).is_err());
        }
    }
}
