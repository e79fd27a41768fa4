//! What a device holds of a model, matrix by matrix, and what a change of it takes: which matrices are rebuilt,
//! in which order, what of them is read from files, and how much memory that needs.

use crate::operators::{Operator, OperatorGraph, OperatorId, Product, Weight, WeightId};
use galaxy_common::{Assignment, Bytes, Span, WeightFormat};
use galaxy_model::{Formats, Matrix, ModelSpec};
use smallvec::SmallVec;
use std::ops::Range;

/// Bytes of the buffers that files are read through, and values are spread from, while a shard is built.
pub const READ_BUFFERS: u64 = 2 << 20;
/// Bytes that the process takes before the first weight: code, stacks, connections, allocator slack.
pub const PROCESS: Bytes = Bytes(32_000_000);

/// A rectangle of a matrix of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightSlice {
    /// The matrix that is cut.
    pub matrix: Matrix,
    /// The range of the matrix's inputs.
    pub inputs: Range<u32>,
    /// The range of the matrix's outputs.
    pub outputs: Range<u32>,
}

impl WeightSlice {
    /// How many values it has.
    pub fn values(&self) -> u64 {
        self.inputs.len() as u64 * self.outputs.len() as u64
    }

    /// The part that is in `other`, too; `None` where they share nothing.
    pub fn common(&self, other: &Self) -> Option<Self> {
        let both = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
        let (inputs, outputs) =
            (both(&self.inputs, &other.inputs), both(&self.outputs, &other.outputs));
        let some = self.matrix == other.matrix && !inputs.is_empty() && !outputs.is_empty();
        some.then_some(Self { matrix: self.matrix, inputs, outputs })
    }

    /// What is left of it without `kept`, which lies inside: up to four rectangles.
    pub fn without(&self, kept: Option<&Self>) -> impl Iterator<Item = Self> + use<> {
        let cut =
            |inputs: Range<u32>, outputs: Range<u32>| Self { matrix: self.matrix, inputs, outputs };
        let (inputs, outputs) = (self.inputs.clone(), self.outputs.clone());
        let left = match kept {
            None => vec![self.clone()],
            Some(kept) => vec![
                cut(inputs.start..kept.inputs.start, outputs.clone()),
                cut(kept.inputs.end..inputs.end, outputs.clone()),
                cut(kept.inputs.clone(), outputs.start..kept.outputs.start),
                cut(kept.inputs.clone(), kept.outputs.end..outputs.end),
            ],
        };
        left.into_iter().filter(|part| part.values() > 0)
    }
}

/// Neighbouring slices of a product that a device holds in one format, as one matrix in panels of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// How their values are held.
    pub format: WeightFormat,
    /// The places of its slices among all slices of the product.
    pub slices: Range<usize>,
    /// Inputs of each of its slices: all have the same.
    pub inputs: u32,
    /// Outputs of all its slices together.
    pub outputs: u32,
    /// Whether it is a gate and the matrix that it gates, whose panels alternate.
    pub gated: bool,
}

impl Run {
    /// Bytes of its values as held.
    pub fn bytes(&self) -> u64 {
        self.bytes_by(|inputs, outputs| self.format.held(inputs, outputs))
    }

    /// Its bytes where a matrix of (inputs, outputs) takes `held` bytes.
    pub(crate) fn bytes_by(&self, held: impl Fn(u64, u64) -> u64) -> u64 {
        let (inputs, outputs) = (u64::from(self.inputs), u64::from(self.outputs));
        match self.gated {
            true => 2 * held(inputs, outputs / 2),
            false => held(inputs, outputs),
        }
    }
}

impl OperatorGraph {
    /// What a device of this assignment holds of a product: a slice of each of its matrices, which stand side
    /// by side; nothing where it has no values.
    pub fn slices(&self, product: &Product, assignment: &Assignment) -> Vec<WeightSlice> {
        let share = self.share(product, assignment);
        let slice =
            |(id, inputs, outputs): (WeightId, _, _)| match self.weights.get(id.0 as usize)? {
                Weight::Matrix(matrix) => Some(WeightSlice { matrix: *matrix, inputs, outputs }),
                Weight::Vector(_) => None,
            };
        let slices: Vec<_> = product.slices(share).into_iter().filter_map(slice).collect();
        if slices.iter().any(|slice| slice.values() > 0) { slices } else { Vec::new() }
    }

    /// Bytes of all that a device of this assignment holds of a product: its slices and their biases.
    fn held(&self, product: &Product, formats: &Formats, assignment: &Assignment) -> u64 {
        product.bytes(formats, &self.slices(product, assignment))
    }
}

impl Product {
    /// Values of the biases of these slices. Those of products that are cut by their inputs are no part of a
    /// slice: they join whole at the owner of a row.
    fn bias_values(&self, slices: &[WeightSlice]) -> u64 {
        self.biases.iter().zip(slices).map(|(_, slice)| slice.outputs.len() as u64).sum()
    }

    /// Bytes of these slices as held, with their biases.
    fn bytes(&self, formats: &Formats, slices: &[WeightSlice]) -> u64 {
        let runs = self.runs(formats, slices);
        runs.iter().map(Run::bytes).sum::<u64>() + 4 * self.bias_values(slices)
    }

    /// How a device holds each of these slices, of matrices in these formats: as they say, or widened to
    /// f32 where the slice cuts what that format keeps together, or gates one of another format.
    pub fn held_in(
        &self,
        formats: &Formats,
        slices: &[WeightSlice],
    ) -> SmallVec<[WeightFormat; 3]> {
        let held = |slice: &WeightSlice| {
            let (format, inputs) = (formats.held(slice.matrix), &slice.inputs);
            let between = |at: u32| at.is_multiple_of(format.cut());
            let whole =
                between(inputs.start) && (inputs.end == self.shape.0 || between(inputs.end));
            if whole { format } else { WeightFormat::F32 }
        };
        let mut held: SmallVec<[WeightFormat; 3]> = slices.iter().map(held).collect();
        if self.gated && held.windows(2).any(|pair| pair[0] != pair[1]) {
            held.fill(WeightFormat::F32);
        }
        held
    }

    /// The runs in which a device holds these slices, which stand side by side.
    pub fn runs(&self, formats: &Formats, slices: &[WeightSlice]) -> SmallVec<[Run; 3]> {
        let mut runs = SmallVec::<[Run; 3]>::new();
        for (at, (format, slice)) in
            self.held_in(formats, slices).into_iter().zip(slices).enumerate()
        {
            let (inputs, outputs) = (slice.inputs.len() as u32, slice.outputs.len() as u32);
            match runs.last_mut().filter(|run| run.format == format) {
                Some(run) => {
                    run.slices.end = at + 1;
                    run.outputs += outputs;
                }
                None => {
                    let (slices, gated) = (at..at + 1, self.gated);
                    runs.push(Run { format, slices, inputs, outputs, gated });
                }
            }
        }
        runs
    }
}

/// The units between which a model may be cut so that devices hold its matrices in the formats that they have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cuts {
    /// Query heads of a unit: heads are cut between multiples of it.
    pub heads: u32,
    /// Columns of the intermediate size in a unit: they are cut between multiples of it.
    pub columns: u32,
}

impl Cuts {
    /// The units of a model in these formats.
    pub fn of(spec: &ModelSpec, formats: &Formats) -> Self {
        let inputs = |matrix: fn(u32) -> Matrix| {
            (0..spec.layers).map(|layer| formats.held(matrix(layer)).cut()).max().unwrap_or(1)
        };
        let (of_heads, columns) = (inputs(Matrix::AttentionOutput), inputs(Matrix::Down));
        let whole = |heads: &u32| (heads * spec.head_width).is_multiple_of(of_heads);
        Self { heads: (1..=of_heads).find(whole).unwrap_or(of_heads), columns }
    }
}

/// An assignment of nothing: what a device has before the first plan.
pub fn nothing() -> Assignment {
    Assignment { blocks: Vec::new(), row_weight: 0, vocabulary: Span::empty() }
}

/// The matrices of one product, which a change of assignment rebuilds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProductRebuild {
    /// The product whose matrices change.
    pub operator: OperatorId,
    /// The slices that the device holds before the change; none of a product that it had no part of.
    pub old: Vec<WeightSlice>,
    /// The slices that it holds after the change; none of a product that it gives up.
    pub new: Vec<WeightSlice>,
}

impl ProductRebuild {
    /// The parts of the new slices that the device holds already and keeps as they are, one for each new slice;
    /// `None` where nothing of it stays.
    pub fn kept(
        &self,
        product: &Product,
        formats: &Formats,
    ) -> impl Iterator<Item = Option<WeightSlice>> {
        // Slices of a product always come in the same order.
        let [old, new] = [&self.old, &self.new]
            .map(|slices| slices.iter().zip(product.held_in(formats, slices)));
        let old = old.map(Some).chain(std::iter::repeat(None));
        new.zip(old).map(|((new, as_new), old)| {
            let (old, as_old) = old?;
            new.common(old).filter(|_| as_new == as_old)
        })
    }

    /// Bytes that files have of those parts of the new slices that the device does not hold yet.
    fn read(&self, product: &Product, formats: &Formats) -> u64 {
        let kept = self.kept(product, formats);
        let missing = self.new.iter().zip(kept).flat_map(|(new, kept)| new.without(kept.as_ref()));
        let bytes = |part: WeightSlice| formats.of(part.matrix).bytes(1, part.values());
        missing.map(bytes).sum()
    }
}

/// The matrices that change from one assignment to another: those that go first, then
/// those that shrink, so that their memory is free for those that grow.
pub fn steps(graph: &OperatorGraph, old: &Assignment, new: &Assignment) -> Vec<ProductRebuild> {
    let values = |slices: &[WeightSlice]| slices.iter().map(WeightSlice::values).sum::<u64>();
    let step = |(operator, product): (OperatorId, &Product)| {
        let [old, new] = [old, new].map(|assignment| graph.slices(product, assignment));
        ProductRebuild { operator, old, new }
    };
    let mut steps: Vec<ProductRebuild> =
        graph.shared().map(step).filter(|step| step.old != step.new).collect();
    // Stable, so that files are read from front to back.
    steps.sort_by_key(|step| match (values(&step.old), values(&step.new)) {
        (_, 0) => 0,
        (old, new) if new <= old => 1,
        _ => 2,
    });
    steps
}

/// What a change of assignment takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transition {
    /// Bytes of the values that are read from the model's files: those that the device does not
    /// hold yet, and the biases of matrices that change. Bytes between values, which may be read over,
    /// do not count.
    pub read: Bytes,
    /// The most bytes that the process holds on the way: weights, read buffers, and the process itself. What
    /// programs work in was freed before.
    pub peak: Bytes,
}

/// What it takes to turn a shard of `old` into one of `new`, product by product in the order of [`steps`]: the
/// new matrix is built beside the old one, which is then freed. Without `old`, what it takes to load `new`.
///
/// `formats` are those of the model's matrices.
pub fn transition(
    graph: &OperatorGraph,
    formats: &Formats,
    old: Option<&Assignment>,
    new: &Assignment,
) -> Transition {
    let mut read = if old.is_some() { 0 } else { Common::of(graph, formats).stored };
    let nothing = nothing();
    let old = old.unwrap_or(&nothing);
    let mut held = bytes(graph, formats, old);
    let mut peak = held;
    for step in steps(graph, old, new) {
        let Some(product) = graph.product(step.operator) else { continue };
        held += product.bytes(formats, &step.new);
        peak = peak.max(held);
        held -= product.bytes(formats, &step.old);
        read += step.read(product, formats);
        read += formats.vectors().bytes(1, product.bias_values(&step.new));
    }
    Transition { read: Bytes(read), peak: Bytes(peak + READ_BUFFERS) + PROCESS }
}

/// Bytes of a shard of this assignment, in memory and on disk: its slices in panels, and vectors in f32.
pub fn bytes(graph: &OperatorGraph, formats: &Formats, assignment: &Assignment) -> u64 {
    let sliced = graph.shared().map(|(_, product)| graph.held(product, formats, assignment));
    Common::of(graph, formats).held + sliced.sum::<u64>()
}

/// Bytes of what every device holds, whatever its assignment.
struct Common {
    /// Bytes in the model's files.
    stored: u64,
    /// Bytes as a device holds them.
    held: u64,
}

impl Common {
    fn of(graph: &OperatorGraph, formats: &Formats) -> Self {
        let widths = |all: &mut dyn Iterator<Item = &u32>| all.map(|n| u64::from(*n)).sum::<u64>();
        let biases = graph.shared().flat_map(|(_, product)| &product.biases);
        let of_slices = widths(&mut biases.map(|id| &graph.widths[id.0 as usize]));
        let vectors = widths(&mut graph.widths.iter()) - of_slices;
        let mut common = Self { stored: formats.vectors().bytes(1, vectors), held: 4 * vectors };
        for operator in &graph.operators {
            let Operator::Product(product) = operator else { continue };
            if product.cut.is_some() {
                continue;
            }
            // Its biases are among the vectors.
            let slices = graph.slices(product, &nothing());
            common.held += product.runs(formats, &slices).iter().map(Run::bytes).sum::<u64>();
            let stored = |slice: &WeightSlice| formats.of(slice.matrix).bytes(1, slice.values());
            common.stored += slices.iter().map(stored).sum::<u64>();
        }
        common
    }
}
