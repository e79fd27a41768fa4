//! What a device holds of a model, matrix by matrix, and what a change of it takes: which matrices
//! are made anew, in which order, what of them is read from files, and how much memory that needs.

use crate::{budget, lower::kv_span};
use galaxy_common::{Assignment, Bytes, Span, WeightFormat};
use galaxy_model::{HeadSpec, Matrix, ModelSpec, Vector};
use std::ops::Range;

/// What files are read through, and values spread from, while a shard is made.
pub const READ_BUFFERS: u64 = 2 << 20;

/// A matrix of a shard: parts of the model's matrices that have the same inputs, side by side.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Held {
    /// Queries, keys and values of some heads of a layer.
    Qkv(u32),
    /// Context of these heads -> hidden.
    AttentionOutput(u32),
    /// Inner columns of a layer; gated: gate columns, then up columns.
    Up(u32),
    /// These columns -> hidden.
    Down(u32),
    /// Logits of a slice of the vocabulary.
    Language,
}

/// A rectangle of a matrix of the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Of which.
    pub matrix: Matrix,
    /// Its inputs.
    pub inputs: Range<u32>,
    /// Its outputs.
    pub outputs: Range<u32>,
}

impl Part {
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

impl Held {
    /// Those of a layer.
    pub fn of_layer(l: u32) -> [Self; 4] {
        [Self::Qkv(l), Self::AttentionOutput(l), Self::Up(l), Self::Down(l)]
    }

    /// Its layer; 0 of what no layer has.
    pub fn layer(self) -> u32 {
        match self {
            Self::Qkv(l) | Self::AttentionOutput(l) | Self::Up(l) | Self::Down(l) => l,
            Self::Language => 0,
        }
    }

    /// All that a shard may have.
    fn all(layers: u32) -> impl Iterator<Item = Self> {
        (0..layers).flat_map(Self::of_layer).chain([Self::Language])
    }

    /// The same in the order in which programs need them.
    pub(crate) fn in_order(spec: &ModelSpec) -> impl Iterator<Item = Self> {
        let parallel = spec.parallel;
        let of = move |l| {
            let [qkv, output] = [Self::Qkv(l), Self::AttentionOutput(l)];
            // Where both blocks stand beside each other, their first products come first.
            match parallel {
                true => [qkv, Self::Up(l), output, Self::Down(l)],
                false => [qkv, output, Self::Up(l), Self::Down(l)],
            }
        };
        (0..spec.layers).flat_map(of).chain([Self::Language])
    }

    /// What a device of this assignment has in it; nothing where it has no values.
    pub fn parts(self, spec: &ModelSpec, assignment: &Assignment) -> Vec<Part> {
        let hidden = || 0..spec.hidden;
        let part = |matrix, inputs, outputs| Part { matrix, inputs, outputs };
        let width = spec.head_width;
        let heads = |layer| {
            let heads = assignment.block(layer).heads;
            heads.start() * width..heads.end() * width
        };
        let keys = |layer| {
            let heads = kv_span(spec, assignment.block(layer).heads);
            heads.start() * width..heads.end() * width
        };
        let columns = |layer| assignment.block(layer).columns.iter();
        let parts = match self {
            Self::Qkv(layer) => vec![
                part(Matrix::Query(layer), hidden(), heads(layer)),
                part(Matrix::Key(layer), hidden(), keys(layer)),
                part(Matrix::Value(layer), hidden(), keys(layer)),
            ],
            Self::AttentionOutput(layer) => {
                vec![part(Matrix::AttentionOutput(layer), heads(layer), hidden())]
            }
            Self::Up(layer) if spec.gated => vec![
                part(Matrix::Gate(layer), hidden(), columns(layer)),
                part(Matrix::Up(layer), hidden(), columns(layer)),
            ],
            Self::Up(layer) => vec![part(Matrix::Up(layer), hidden(), columns(layer))],
            Self::Down(layer) => vec![part(Matrix::Down(layer), columns(layer), hidden())],
            Self::Language => {
                vec![part(Matrix::LanguageHead, hidden(), assignment.vocabulary.iter())]
            }
        };
        if parts.iter().any(|part| part.values() > 0) { parts } else { Vec::new() }
    }

    /// The biases of its outputs, one for each part, where the model has them. Those of row-split
    /// matrices are no part of a slice: they join whole at the owner of a row.
    pub fn biases(self, spec: &ModelSpec) -> Vec<Vector> {
        match self {
            Self::Qkv(l) if spec.qkv_bias => {
                vec![Vector::QueryBias(l), Vector::KeyBias(l), Vector::ValueBias(l)]
            }
            Self::Up(l) if spec.mlp_bias && spec.gated => {
                vec![Vector::GateBias(l), Vector::UpBias(l)]
            }
            Self::Up(l) if spec.mlp_bias => vec![Vector::UpBias(l)],
            Self::Language if matches!(spec.head, HeadSpec::Language { bias: true, .. }) => {
                vec![Vector::LanguageBias]
            }
            _ => Vec::new(),
        }
    }

    /// Values of the biases of these parts.
    pub(crate) fn bias_values(self, spec: &ModelSpec, parts: &[Part]) -> u64 {
        let each = self.biases(spec).into_iter().zip(parts);
        each.map(|(_, part)| part.outputs.len() as u64).sum()
    }

    /// Bytes of these parts as held, without their biases.
    pub(crate) fn bytes(self, spec: &ModelSpec, format: WeightFormat, parts: &[Part]) -> u64 {
        self.bytes_by(spec, parts, |inputs, outputs| format.held(inputs, outputs))
    }

    /// The same of matrices that take so many bytes for (inputs, outputs).
    pub(crate) fn bytes_by(
        self,
        spec: &ModelSpec,
        parts: &[Part],
        held: impl Fn(u64, u64) -> u64,
    ) -> u64 {
        let inputs = parts.first().map_or(0, |part| part.inputs.len() as u64);
        let outputs = |parts: &[Part]| parts.iter().map(|part| part.outputs.len() as u64).sum();
        match self {
            // Panels of gate and up columns alternate.
            Self::Up(_) if spec.gated => {
                parts.chunks(1).map(|one| held(inputs, outputs(one))).sum()
            }
            _ => held(inputs, outputs(parts)),
        }
    }
}

/// An assignment of nothing: what a device has before the first plan.
pub fn nothing() -> Assignment {
    Assignment { blocks: Vec::new(), row_weight: 0, vocabulary: Span::empty() }
}

/// One matrix that a change of assignment makes anew.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which.
    pub held: Held,
    /// What is there of it,
    pub old: Vec<Part>,
    /// and what will be.
    pub new: Vec<Part>,
}

impl Step {
    /// The parts that are there and stay, by the places of the new ones.
    pub fn kept(&self) -> impl Iterator<Item = Option<Part>> {
        // Parts of a matrix always come in the same order.
        let old = self.old.iter().map(Some).chain(std::iter::repeat(None));
        self.new.iter().zip(old).map(|(new, old)| new.common(old?))
    }
}

/// The matrices that change from one assignment to another: those that go first, then
/// those that shrink, so that their memory is free for those that grow.
pub fn steps(spec: &ModelSpec, old: &Assignment, new: &Assignment) -> Vec<Step> {
    let values = |parts: &[Part]| parts.iter().map(Part::values).sum::<u64>();
    let step = |held: Held| Step { held, old: held.parts(spec, old), new: held.parts(spec, new) };
    let mut steps: Vec<Step> =
        Held::all(spec.layers).map(step).filter(|step| step.old != step.new).collect();
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

/// What it takes to turn a shard of `old` into one of `new`, matrix by matrix in the order of
/// [`steps`]: the new matrix is made beside the old one, which then goes. Without `old`, to load it.
///
/// `format` is that of the model's matrices.
pub fn transition(
    spec: &ModelSpec,
    format: WeightFormat,
    old: Option<&Assignment>,
    new: &Assignment,
) -> Transition {
    let all = Common::of(spec);
    let mut read = if old.is_some() { 0 } else { all.stored(format) };
    let nothing = nothing();
    let old = old.unwrap_or(&nothing);
    let bytes = |held: Held, parts: &[Part]| {
        held.bytes(spec, format, parts) + 4 * held.bias_values(spec, parts)
    };
    let mut held = bytes_of(spec, format, &all, old);
    let mut peak = held;
    for step in steps(spec, old, new) {
        held += bytes(step.held, &step.new);
        peak = peak.max(held);
        held -= bytes(step.held, &step.old);
        let kept = step.kept().flatten().map(|part| part.values()).sum::<u64>();
        let wanted = step.new.iter().map(Part::values).sum::<u64>();
        let biases = step.held.bias_values(spec, &step.new);
        read += format.bytes(1, wanted - kept + biases);
    }
    Transition { read: Bytes(read), peak: Bytes(peak + READ_BUFFERS) + budget::PROCESS }
}

/// Bytes of a shard of this assignment, in memory and on disk: its slices in panels, and vectors in f32.
pub fn bytes(spec: &ModelSpec, format: WeightFormat, assignment: &Assignment) -> u64 {
    bytes_of(spec, format, &Common::of(spec), assignment)
}

fn bytes_of(spec: &ModelSpec, format: WeightFormat, all: &Common, assignment: &Assignment) -> u64 {
    let sliced = Held::all(spec.layers).map(|held| {
        let parts = held.parts(spec, assignment);
        held.bytes(spec, format, &parts) + 4 * held.bias_values(spec, &parts)
    });
    4 * all.vectors + all.held(format) + sliced.sum::<u64>()
}

/// What every device holds, whatever its assignment.
struct Common {
    /// Values of vectors,
    vectors: u64,
    /// and matrices, as (inputs, outputs).
    matrices: Vec<(u64, u64)>,
}

impl Common {
    fn of(spec: &ModelSpec) -> Self {
        let sliced = |vector: &Vector| {
            use Vector::*;
            let of_layers = matches!(
                vector,
                QueryBias(_) | KeyBias(_) | ValueBias(_) | GateBias(_) | UpBias(_)
            );
            of_layers || *vector == LanguageBias
        };
        let vectors = Vector::all(spec).filter(|vector| !sliced(vector));
        let whole = [Matrix::Patch, Matrix::ClassDense, Matrix::ClassOutput];
        let shapes = whole.iter().filter_map(|matrix| matrix.shape(spec));
        Self {
            vectors: vectors.filter_map(|vector| vector.width(spec)).map(u64::from).sum(),
            matrices: shapes.map(|(inputs, outputs)| (inputs.into(), outputs.into())).collect(),
        }
    }

    /// Bytes of them in files.
    fn stored(&self, format: WeightFormat) -> u64 {
        let matrices = self.matrices.iter().map(|&(inputs, outputs)| format.bytes(inputs, outputs));
        format.bytes(1, self.vectors) + matrices.sum::<u64>()
    }

    /// Bytes of the matrices as devices hold them.
    fn held(&self, format: WeightFormat) -> u64 {
        self.matrices.iter().map(|&(inputs, outputs)| format.held(inputs, outputs)).sum()
    }
}
