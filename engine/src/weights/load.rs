//! Loading: the matrices of a shard, out of the shard that is there and the model's files.
// Hot path of loading: no logging, no allocation but the matrices and two bounded buffers.

use super::{
    PANEL, Progress, Shard, ShardMatrix, ShardProduct, WeightError,
    matrix::{Layout, Window},
};
use crate::compute::kernels::{
    blocks::{GROUP, place::BlockLayout},
    lines::{Lines, NoMemory},
    micro::{Format, each_format},
};
use galaxy_common::{Assignment, BlockAssignment, Bytes, Span, Token, WeightBlock, WeightFormat};
use galaxy_graph::{
    holdings::{self, ProductRebuild, Run, WeightSlice},
    operators::{Operator, OperatorGraph, Product, Weight},
    pieces::Piece,
};
use galaxy_model::{Matrix, MatrixSource, ModelDir, ModelError, Vector};
use std::{
    ops::{ControlFlow, Range},
    sync::Arc,
};

/// Where a piece of a matrix goes: columns from `at` of rows `stride` apart.
struct Destination<'a, T> {
    out: &'a mut [T],
    stride: usize,
    at: usize,
}

/// Values of a block of rows that wait to be spread over panels: 1 MB in f32.
const SPREAD: usize = 1 << 18;
/// Panels of outputs whose values are rounded together, where a checkpoint has a row for each input.
const PANELS: usize = 16;

/// Fills the window of a matrix from `input` and `column` on with `part`.
///
/// A checkpoint that stores a row for each output is read panel by panel, straight to its place.
/// One that stores a row for each input (GPT-2) is read by blocks of whole rows and spread, since
/// a panel of it would be a small piece of every row.
fn fill<T: bytemuck::Pod>(
    source: &MatrixSource<'_>,
    part: &WeightSlice,
    (input, column): (usize, usize),
    layout: Layout,
    values: &mut [T],
    mut read: impl FnMut(Range<u32>, Range<u32>, Destination<'_, T>) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let (inputs, width) = (part.inputs.len(), part.outputs.len());
    if source.stores_inputs_as_rows() {
        let height = (SPREAD / width.max(1)).clamp(1, inputs);
        let mut block = vec![T::zeroed(); height * width];
        for row in (0..inputs).step_by(height) {
            let height = height.min(inputs - row);
            let from = part.inputs.start + row as u32;
            let place = Destination { out: &mut block[..height * width], stride: width, at: 0 };
            read(from..from + height as u32, part.outputs.clone(), place)?;
            for strip in layout.strips(column..column + width) {
                for at in 0..height {
                    let to = strip.panel + (input + row + at) * PANEL + strip.at;
                    let from = at * width + (strip.column - column);
                    values[to..to + strip.width].copy_from_slice(&block[from..from + strip.width]);
                }
            }
        }
    } else {
        for strip in layout.strips(column..column + width) {
            let out = &mut values[strip.panel + input * PANEL..][..PANEL * inputs];
            let from = part.outputs.start + (strip.column - column) as u32;
            let place = Destination { out, stride: PANEL, at: strip.at };
            read(part.inputs.clone(), from..from + strip.width as u32, place)?;
        }
    }
    Ok(())
}

/// [`fill`] with values in blocks: panel by panel, as the file has them.
fn fill_blocks(
    source: &MatrixSource<'_>,
    part: &WeightSlice,
    (input, column): (usize, usize),
    (layout, blocks, block): (Layout, BlockLayout, WeightBlock),
    values: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), ModelError> {
    let in_block = block.values as usize;
    let skip = part.inputs.start as usize % in_block / GROUP;
    let count =
        (part.inputs.end as usize).div_ceil(in_block) - part.inputs.start as usize / in_block;
    let to = input / GROUP..(input + part.inputs.len()) / GROUP;
    // As in `fill`: of a checkpoint with a row for each input, which is rounded, a panel would be a small piece.
    let together = if source.stores_inputs_as_rows() { PANELS } else { 1 };
    let strips: Vec<_> = layout.strips(column..column + part.outputs.len()).collect();
    for strips in strips.chunks(together) {
        let (Some(first), Some(last)) = (strips.first(), strips.last()) else { continue };
        let output = |column_of: usize| part.outputs.start + (column_of - column) as u32;
        let outputs = output(first.column)..output(last.column + last.width);
        source.read_raw_rows(part.inputs.clone(), outputs, scratch)?;
        let mut rows = scratch.chunks_exact(count * block.bytes as usize);
        for strip in strips {
            let (panel, lane) = layout.lane(strip);
            for (lane, row) in (lane..lane + strip.width).zip(&mut rows) {
                blocks.place(row, skip, to.clone(), (panel, lane), values);
            }
        }
    }
    Ok(())
}

/// What a shard has already of a product.
#[derive(Default)]
struct Before<'a> {
    parts: &'a [WeightSlice],
    runs: &'a [Run],
    matrices: &'a [ShardMatrix],
    /// The part of each new slice that stays, in the order of the new slices; none where nothing does.
    kept: &'a [Option<WeightSlice>],
}

impl<'a> Before<'a> {
    /// What stays of the new part `at`: the matrix that has it, where in that, and what of the part it is.
    fn keeps(&self, at: usize) -> Option<(&'a ShardMatrix, Window, &'a WeightSlice)> {
        let (kept, old) = (self.kept.get(at)?.as_ref()?, self.parts.get(at)?);
        let mut runs = self.runs.iter().zip(self.matrices);
        let (run, matrix) = runs.find(|(run, _)| run.slices.contains(&at))?;
        let before = &self.parts[run.slices.start..at];
        let first: usize = before.iter().map(|part| part.outputs.len()).sum();
        let window = Window {
            input: (kept.inputs.start - old.inputs.start) as usize,
            inputs: kept.inputs.len(),
            column: first + (kept.outputs.start - old.outputs.start) as usize,
            columns: kept.outputs.len(),
        };
        Some((matrix, window, kept))
    }
}

/// Makes matrices and vectors, and counts what it reads for them.
pub(super) struct Loader<'a> {
    dir: &'a ModelDir,
    /// The buffer that file bytes pass through; it grows to the read limit of `galaxy_model` and no
    /// further.
    scratch: Vec<u8>,
    read: u64,
    total: u64,
    progress: Progress<'a>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(dir: &'a ModelDir, total: Bytes, progress: Progress<'a>) -> Self {
        Self { dir, scratch: Vec::new(), read: 0, total: total.0, progress }
    }

    /// A shard of what every device holds, and of nothing else, for `graph`. Its layer `n` is
    /// `layer(n)` of the model.
    pub(super) fn common(
        &mut self,
        dir: Arc<ModelDir>,
        graph: Arc<OperatorGraph>,
        layer: &dyn Fn(u32) -> u32,
    ) -> Result<Shard, WeightError> {
        let mut vectors = vec![None; graph.weights.len()];
        for (id, vector) in graph.vectors() {
            vectors[id.0 as usize] = Some(self.vector(vector.at(layer))?);
        }
        let mut products = Vec::with_capacity(graph.operators.len());
        for operator in &graph.operators {
            products.push(match operator {
                Operator::Product(product) if product.cut.is_none() => {
                    self.whole(&graph, product, &mut vectors)?
                }
                _ => ShardProduct::default(),
            });
        }
        let assignment = holdings::nothing();
        Ok(Shard { dir, graph, products, vectors, streamed: None, assignment })
    }

    /// Makes the matrices of `shard` that differ in `new`, one after another: beside a new one
    /// stands the old one, and nothing else that is no longer wanted.
    pub(super) fn change(
        &mut self,
        shard: &mut Shard,
        new: &Assignment,
    ) -> Result<(), WeightError> {
        self.has_head(&shard.graph, new.vocabulary)?;
        for step in holdings::steps(&shard.graph, &shard.assignment, new) {
            self.step(shard, &step, &|layer| layer)?;
        }
        shard.take_shares(new);
        Ok(())
    }

    /// Makes the matrices of the layers of `shard`: of each, a part of some layer of the model.
    pub(super) fn sample(
        &mut self,
        shard: &mut Shard,
        blocks: &[(u32, BlockAssignment)],
        vocabulary: Span<Token>,
    ) -> Result<(), WeightError> {
        self.has_head(&shard.graph, vocabulary)?;
        let block = |(at, &(_, block)): (u32, &(u32, BlockAssignment))| BlockAssignment {
            layers: Span::new(at, at + 1),
            ..block
        };
        let blocks_here = (0..).zip(blocks).map(block).collect();
        let shares = Assignment { blocks: blocks_here, vocabulary, ..holdings::nothing() };
        for step in holdings::steps(&shard.graph, &holdings::nothing(), &shares) {
            self.step(shard, &step, &|at| blocks[at as usize].0)?;
        }
        shard.take_shares(&shares);
        Ok(())
    }

    /// Refuses tokens of a model without a language head, by the error of its files.
    fn has_head(&mut self, graph: &OperatorGraph, asked: Span<Token>) -> Result<(), WeightError> {
        match asked.is_empty() || graph.language.is_some() {
            true => Ok(()),
            false => Ok(self.dir.matrix(Matrix::LanguageHead).map(|_| ())?),
        }
    }

    /// Makes the matrix of a product, with its bias. A layer of the shard is layer `layer` of it in the
    /// model.
    fn step(
        &mut self,
        shard: &mut Shard,
        step: &ProductRebuild,
        layer: &dyn Fn(u32) -> u32,
    ) -> Result<(), WeightError> {
        let (id, graph) = (step.operator, shard.graph.clone());
        let Some(product) = graph.product(id) else { return Ok(()) };
        let at = id.0 as usize;
        let of_model =
            |slice: &WeightSlice| WeightSlice { matrix: slice.matrix.at(layer), ..slice.clone() };
        let new: Vec<_> = step.new.iter().map(of_model).collect();
        let old = std::mem::take(&mut shard.products[at].matrices);
        let formats = self.dir.formats();
        let kept: Vec<_> = step.kept(product, formats).collect();
        let before = Before {
            parts: &step.old,
            runs: &product.runs(formats, &step.old),
            matrices: &old,
            kept: &kept,
        };
        let made = self.make(product, &new, &before, || shard.bytes())?;
        shard.products[at].matrices = made;
        drop(old);
        let biases = graph.biases(product).map(|bias| bias.at(layer));
        shard.products[at].bias = self.bias(biases, &new)?;
        Ok(())
    }

    /// Reports that all is there, and gives the bytes that were read.
    pub(super) fn end(mut self) -> Result<Bytes, WeightError> {
        let read = Bytes(self.read);
        self.total = self.total.max(self.read);
        self.read = self.total;
        self.tell()?;
        Ok(read)
    }

    /// Loads a product that every device holds, with its bias.
    fn whole(
        &mut self,
        graph: &OperatorGraph,
        product: &Product,
        vectors: &mut [Option<Vec<f32>>],
    ) -> Result<ShardProduct, WeightError> {
        let (inputs, outputs) = product.shape;
        let matrices =
            product.matrices.iter().filter_map(|id| match graph.weights[id.0 as usize] {
                Weight::Matrix(matrix) => Some(matrix),
                Weight::Vector(_) => None,
            });
        let part = |matrix| WeightSlice { matrix, inputs: 0..inputs, outputs: 0..outputs };
        let new: Vec<WeightSlice> = matrices.map(part).collect();
        let matrices = self.make(product, &new, &Before::default(), || Bytes(0))?;
        let bias = product.biases.first().and_then(|id| vectors[id.0 as usize].take());
        Ok(ShardProduct { share: Span::empty(), matrices, bias })
    }

    /// Loads the matrices of a piece of a shard, to their places.
    pub(super) fn piece(&mut self, piece: &Piece, into: &mut [u8]) -> Result<(), WeightError> {
        // Groups of columns are filled up with zeros, and so is what lies between matrices.
        into.fill(0);
        for (run, place) in piece.places() {
            let slices = &piece.slices[run.slices.clone()];
            let layout = Layout::of(run, slices);
            let into = &mut into[place.start as usize..place.end as usize];
            let mut first = 0;
            for part in slices {
                let source = self.source(part, layout.outputs)?;
                self.fill(&source, part, (0, first), (layout, run.format), into)?;
                first += part.outputs.len();
            }
        }
        self.tell()
    }

    /// Makes the matrices of the parts `new` of a product, side by side; none where there are none. `held` gives the
    /// bytes that are there besides.
    fn make(
        &mut self,
        product: &Product,
        new: &[WeightSlice],
        before: &Before<'_>,
        held: impl Fn() -> Bytes,
    ) -> Result<Vec<ShardMatrix>, WeightError> {
        let mut made = Vec::new();
        for run in product.runs(self.dir.formats(), new) {
            made.push(self.run(&run, new, before, &held)?);
        }
        self.tell()?;
        Ok(made)
    }

    /// Makes one of the matrices of [`Loader::make`].
    fn run(
        &mut self,
        run: &Run,
        new: &[WeightSlice],
        before: &Before<'_>,
        held: &impl Fn() -> Bytes,
    ) -> Result<ShardMatrix, WeightError> {
        let layout = Layout::of(run, &new[run.slices.clone()]);
        let sources = run.slices.clone().map(|at| self.source(&new[at], layout.outputs));
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        let size = layout.bytes(run.format);
        let no_memory = |NoMemory| WeightError::Memory { wanted: Bytes(size as u64), held: held() };
        let mut values = Lines::<u8>::zeroed(size).map_err(no_memory)?;
        let mut first = 0;
        for (at, source) in run.slices.clone().zip(&sources) {
            let part = &new[at];
            let kept = before.keeps(at);
            if let Some((matrix, window, kept)) = kept {
                let corner = corner(part, kept, first);
                matrix.copy(window, corner, layout, values.values_mut());
            }
            for missing in part.without(kept.map(|(_, _, kept)| kept)) {
                let corner = corner(part, &missing, first);
                let format = (layout, run.format);
                self.fill(source, &missing, corner, format, values.values_mut())?;
            }
            first += part.outputs.len();
        }
        Ok(ShardMatrix::new(layout, run.format, values))
    }

    /// The source of a part of a matrix, checked to have it. The part goes to a matrix of `outputs`
    /// columns.
    fn source(
        &mut self,
        part: &WeightSlice,
        outputs: usize,
    ) -> Result<MatrixSource<'a>, WeightError> {
        let source = self.dir.matrix(part.matrix)?;
        if part.inputs.end > source.rows() || part.outputs.end > source.columns() {
            // Refused before there is memory for it; the error is the reader's own.
            let (rows, columns) = (part.inputs.clone(), part.outputs.clone());
            source.read_f32((rows, columns), &mut [], outputs, 0, &mut self.scratch)?;
        }
        Ok(source)
    }

    /// Reads a part to its place: as the file has it, or widened to f32.
    fn fill(
        &mut self,
        source: &MatrixSource<'_>,
        part: &WeightSlice,
        corner: (usize, usize),
        (layout, format): (Layout, WeightFormat),
        bytes: &mut [u8],
    ) -> Result<(), WeightError> {
        let scratch = &mut self.scratch;
        let stored = source.format();
        self.read += stored.bytes(1, part.values());
        if format != WeightFormat::F32 && format != stored {
            return Err(WeightError::Format { planned: format, stored });
        }
        if format != stored {
            let values: &mut [f32] = bytemuck::cast_slice_mut(bytes);
            return Ok(fill(source, part, corner, layout, values, |rows, columns, place| {
                let Destination { out, stride, at } = place;
                source.read_f32((rows, columns), out, stride, at, scratch)
            })?);
        }
        if let (Some(blocks), Some(block)) = (layout.blocks(format), format.block()) {
            return Ok(fill_blocks(source, part, corner, (layout, blocks, block), bytes, scratch)?);
        }
        each_format!(format, F => {
            const WIDTH: usize = size_of::<<F as Format>::Element>();
            let values: &mut [[u8; WIDTH]] = bytemuck::cast_slice_mut(bytes);
            fill(source, part, corner, layout, values, |rows, columns, place| {
                let Destination { out, stride, at } = place;
                source.read_raw((rows, columns), out, stride, at, scratch)
            })
        })?;
        Ok(())
    }

    /// Loads the bias of the columns of a matrix, if it has one.
    pub(super) fn bias(
        &mut self,
        which: impl Iterator<Item = Vector>,
        slices: &[WeightSlice],
    ) -> Result<Option<Vec<f32>>, WeightError> {
        let mut which = which.peekable();
        if which.peek().is_none() || slices.is_empty() {
            return Ok(None);
        }
        let mut all = Vec::with_capacity(slices.iter().map(|part| part.outputs.len()).sum());
        for (which, part) in which.zip(slices) {
            let whole = self.dir.vector(which)?;
            let range = part.outputs.start as usize..part.outputs.end as usize;
            // A span beyond the model has failed already, when the matrix was read.
            all.extend_from_slice(whole.get(range).unwrap_or_default());
        }
        self.count(&all)?;
        Ok(Some(all))
    }

    fn vector(&mut self, which: Vector) -> Result<Vec<f32>, WeightError> {
        let vector = self.dir.vector(which)?;
        self.count(&vector)?;
        Ok(vector)
    }

    fn count(&mut self, values: &[f32]) -> Result<(), WeightError> {
        self.read += self.dir.formats().vectors().bytes(1, values.len() as u64);
        self.tell()
    }

    fn tell(&mut self) -> Result<(), WeightError> {
        match (self.progress)(self.read.min(self.total), self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WeightError::Stopped),
        }
    }
}

/// Where in a matrix `inner` begins, if `part` begins at column `first` of it: input and column.
fn corner(part: &WeightSlice, inner: &WeightSlice, first: usize) -> (usize, usize) {
    let column = first + (inner.outputs.start - part.outputs.start) as usize;
    ((inner.inputs.start - part.inputs.start) as usize, column)
}
