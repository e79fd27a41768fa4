//! What a device holds of a model, matrix by matrix, and what a change of it takes: which matrices
//! are made anew, in which order, what of them is read from files, and how much memory that needs.

use crate::{
    budget,
    operators::{Operator, OperatorGraph, OperatorId, Product, Weight, WeightId},
};
use galaxy_common::{Assignment, Bytes, Span, WeightFormat};
use galaxy_model::Matrix;
use std::ops::Range;

/// What files are read through, and values spread from, while a shard is made.
pub const READ_BUFFERS: u64 = 2 << 20;

/// A rectangle of a matrix of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WeightSlice {
    /// Of which.
    pub matrix: Matrix,
    /// Its inputs.
    pub inputs: Range<u32>,
    /// Its outputs.
    pub outputs: Range<u32>,
}

impl WeightSlice {
    /// Values in it.
    pub fn values(&self) -> u64 {
        self.inputs.len() as u64 * self.outputs.len() as u64
    }

    /// What is in `other` too.
    pub fn common(&self, other: &Self) -> Option<Self> {
        let both = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
        let (inputs, outputs) =
            (both(&self.inputs, &other.inputs), both(&self.outputs, &other.outputs));
        let some = self.matrix == other.matrix && !inputs.is_empty() && !outputs.is_empty();
        some.then_some(Self { matrix: self.matrix, inputs, outputs })
    }

    /// What is not in `kept`, which lies inside: up to four rectangles.
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
    fn held(&self, product: &Product, format: WeightFormat, assignment: &Assignment) -> u64 {
        let slices = product.slices(self.share(product, assignment));
        let inputs = slices.first().map_or(0, |(_, inputs, _)| inputs.len() as u64);
        let outputs = slices.iter().map(|(.., outputs)| outputs.len() as u64);
        let held = |inputs, outputs| format.held(inputs, outputs);
        let biases = outputs.clone().take(product.biases.len()).sum::<u64>();
        product.bytes_by(inputs, outputs, held) + 4 * biases
    }
}

impl Product {
    /// Values of the biases of these slices. Those of products that are cut by their inputs are no part of a
    /// slice: they join whole at the owner of a row.
    fn bias_values(&self, slices: &[WeightSlice]) -> u64 {
        self.biases.iter().zip(slices).map(|(_, slice)| slice.outputs.len() as u64).sum()
    }

    /// Bytes of these slices as held, without their biases.
    pub(crate) fn bytes(&self, format: WeightFormat, slices: &[WeightSlice]) -> u64 {
        self.bytes_of(slices, |inputs, outputs| format.held(inputs, outputs))
    }

    /// The same of matrices that take so many bytes for (inputs, outputs).
    pub(crate) fn bytes_of(&self, slices: &[WeightSlice], held: impl Fn(u64, u64) -> u64) -> u64 {
        let inputs = slices.first().map_or(0, |slice| slice.inputs.len() as u64);
        self.bytes_by(inputs, slices.iter().map(|slice| slice.outputs.len() as u64), held)
    }

    /// The same of matrices of so many inputs, and of each so many outputs.
    fn bytes_by(
        &self,
        inputs: u64,
        outputs: impl Iterator<Item = u64>,
        held: impl Fn(u64, u64) -> u64,
    ) -> u64 {
        match self.gated {
            // Panels of gate and up columns alternate.
            true => outputs.map(|outputs| held(inputs, outputs)).sum(),
            false => held(inputs, outputs.sum()),
        }
    }
}

/// An assignment of nothing: what a device has before the first plan.
pub fn nothing() -> Assignment {
    Assignment { blocks: Vec::new(), row_weight: 0, vocabulary: Span::empty() }
}

/// The matrices of a product, which a change of assignment makes anew.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which.
    pub operator: OperatorId,
    /// What is there of them,
    pub old: Vec<WeightSlice>,
    /// and what will be.
    pub new: Vec<WeightSlice>,
}

impl Step {
    /// The parts that are there and stay, by the places of the new ones.
    pub fn kept(&self) -> impl Iterator<Item = Option<WeightSlice>> {
        // Slices of a product always come in the same order.
        let old = self.old.iter().map(Some).chain(std::iter::repeat(None));
        self.new.iter().zip(old).map(|(new, old)| new.common(old?))
    }
}

/// The matrices that change from one assignment to another: those that go first, then
/// those that shrink, so that their memory is free for those that grow.
pub fn steps(graph: &OperatorGraph, old: &Assignment, new: &Assignment) -> Vec<Step> {
    let values = |slices: &[WeightSlice]| slices.iter().map(WeightSlice::values).sum::<u64>();
    let step = |(operator, product): (OperatorId, &Product)| {
        let [old, new] = [old, new].map(|assignment| graph.slices(product, assignment));
        Step { operator, old, new }
    };
    let mut steps: Vec<Step> =
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
    /// Most bytes that the process holds on the way: weights, what is read through, and itself.
    /// What programs work in has been given back before.
    pub peak: Bytes,
}

/// What it takes to turn a shard of `old` into one of `new`, product by product in the order of
/// [`steps`]: the new matrix is made beside the old one, which then goes. Without `old`, to load it.
///
/// `format` is that of the model's matrices.
pub fn transition(
    graph: &OperatorGraph,
    format: WeightFormat,
    old: Option<&Assignment>,
    new: &Assignment,
) -> Transition {
    let mut read = if old.is_some() { 0 } else { Common::of(graph).stored(format) };
    let nothing = nothing();
    let old = old.unwrap_or(&nothing);
    let mut held = bytes(graph, format, old);
    let mut peak = held;
    for step in steps(graph, old, new) {
        let Some(product) = graph.product(step.operator) else { continue };
        let bytes = |slices: &[WeightSlice]| {
            product.bytes(format, slices) + 4 * product.bias_values(slices)
        };
        held += bytes(&step.new);
        peak = peak.max(held);
        held -= bytes(&step.old);
        let kept = step.kept().flatten().map(|part| part.values()).sum::<u64>();
        let wanted = step.new.iter().map(WeightSlice::values).sum::<u64>();
        read += format.bytes(1, wanted - kept + product.bias_values(&step.new));
    }
    Transition { read: Bytes(read), peak: Bytes(peak + READ_BUFFERS) + budget::PROCESS }
}

/// Bytes of a shard of this assignment, in memory and on disk: its slices in panels, and vectors in f32.
pub fn bytes(graph: &OperatorGraph, format: WeightFormat, assignment: &Assignment) -> u64 {
    let sliced = graph.shared().map(|(_, product)| graph.held(product, format, assignment));
    Common::of(graph).held(format) + sliced.sum::<u64>()
}

/// What every device holds, whatever its assignment.
struct Common {
    /// Values of vectors,
    vectors: u64,
    /// and matrices, as (inputs, outputs).
    matrices: Vec<(u64, u64)>,
}

impl Common {
    fn of(graph: &OperatorGraph) -> Self {
        let whole = graph.operators.iter().filter_map(|operator| match operator {
            Operator::Product(product) if product.cut.is_none() => Some(product.shape),
            _ => None,
        });
        let widths = |all: &mut dyn Iterator<Item = &u32>| all.map(|n| u64::from(*n)).sum::<u64>();
        let biases = graph.shared().flat_map(|(_, product)| &product.biases);
        let of_slices = widths(&mut biases.map(|id| &graph.widths[id.0 as usize]));
        Self {
            vectors: widths(&mut graph.widths.iter()) - of_slices,
            matrices: whole.map(|(inputs, outputs)| (inputs.into(), outputs.into())).collect(),
        }
    }

    /// Bytes of them in files.
    fn stored(&self, format: WeightFormat) -> u64 {
        let matrices = self.matrices.iter().map(|&(inputs, outputs)| format.bytes(inputs, outputs));
        format.bytes(1, self.vectors) + matrices.sum::<u64>()
    }

    /// Bytes of them as devices hold them.
    fn held(&self, format: WeightFormat) -> u64 {
        let matrices = self.matrices.iter().map(|&(inputs, outputs)| format.held(inputs, outputs));
        4 * self.vectors + matrices.sum::<u64>()
    }
}
