//! What is done to rows between products, in burn's own operations.

use super::weights::NormTensors;
use crate::compute::call::Misfit;
use burn::{Device, Tensor, TensorData, activation};
use galaxy_model::{Activation, ClassActivation, NormKind, Pairs};

/// A norm with its vectors.
pub(super) struct Norm<'a> {
    pub(super) kind: NormKind,
    pub(super) epsilon: f32,
    pub(super) vectors: &'a NormTensors,
}

impl Norm<'_> {
    /// # Shapes
    /// rows `[rows, columns]`, as many columns as the vectors have.
    pub(super) fn apply(&self, rows: Tensor<2>) -> Tensor<2> {
        let rows = match self.kind {
            NormKind::Layer => rows.clone() - rows.mean_dim(1),
            NormKind::Rms => rows,
        };
        let square = (rows.clone() * rows.clone()).mean_dim(1);
        let rows = rows / (square + self.epsilon).sqrt() * self.vectors.weight.clone();
        match &self.vectors.bias {
            Some(bias) => rows + bias.clone(),
            None => rows,
        }
    }
}

/// An activation of every value.
pub(super) fn activate(activation: Activation, rows: Tensor<2>) -> Tensor<2> {
    match activation {
        Activation::Gelu => activation::gelu(rows),
        // Not burn's own: it takes the third power by logarithms, which not every GPU can of
        // negative numbers.
        Activation::GeluTanh => {
            let cube = rows.clone() * rows.clone() * rows.clone();
            let inner = (rows.clone() + cube * 0.044_715) * (2.0 / std::f32::consts::PI).sqrt();
            rows * (inner.tanh() + 1.0) * 0.5
        }
        Activation::Silu => activation::silu(rows),
        Activation::Relu => activation::relu(rows),
    }
}

/// The same for what follows the dense layer of a class head.
pub(super) fn activate_class(activation: Option<ClassActivation>, rows: Tensor<2>) -> Tensor<2> {
    match activation {
        Some(ClassActivation::Tanh) => rows.tanh(),
        Some(ClassActivation::Relu) => activation::relu(rows),
        None => rows,
    }
}

/// Norms heads of each row, each by itself: as many as there are of each norm, one behind another.
pub(super) fn norm_heads(
    rows: Tensor<2>,
    heads: [(usize, Norm<'_>); 2],
    width: usize,
) -> Tensor<2> {
    let [count, columns] = rows.dims();
    let mut first = 0;
    let mut parts = Vec::new();
    for (heads, norm) in heads.into_iter().filter(|(heads, _)| *heads > 0) {
        let end = first + heads * width;
        let part = rows.clone().slice([0..count, first..end]).reshape([count * heads, width]);
        parts.push(norm.apply(part).reshape([count, heads * width]));
        first = end;
    }
    rows_beside(Tensor::cat(parts, 1), rows.slice([0..count, first..columns]))
}

/// Turns pairs of columns of the first `heads` heads of each row by its position.
///
/// # Shapes
/// rows `[positions.len(), any]`, at least `heads * width` columns; `2 * inverse_frequencies.len()`
/// is at most `width`.
pub(super) fn rotate(
    rows: Tensor<2>,
    positions: &[u32],
    pairs: Pairs,
    heads: usize,
    width: usize,
    inverse_frequencies: &[f32],
    device: &Device,
) -> Tensor<2> {
    let (count, half) = (positions.len(), inverse_frequencies.len());
    let [_, columns] = rows.dims();
    if heads * width == 0 || half == 0 {
        return rows;
    }
    // In f64: at position 100 000 an f32 angle is off by half a percent of a turn.
    let table = |function: fn(f64) -> f64| -> Tensor<3> {
        let of = |&position: &u32| {
            let angle = move |f: &f32| f64::from(position) * f64::from(*f);
            inverse_frequencies.iter().map(move |f| function(angle(f)) as f32)
        };
        let values: Vec<f32> = positions.iter().flat_map(of).collect();
        Tensor::from_data(TensorData::new(values, [count, 1, half]), device)
    };
    let (cosines, sines) = (table(f64::cos), table(f64::sin));
    let turned = rows.clone().slice([0..count, 0..heads * width]).reshape([count, heads, width]);
    let part = |columns| turned.clone().slice([0..count, 0..heads, columns]);
    let (low, high) = match pairs {
        Pairs::Halves => (part(0..half), part(half..2 * half)),
        Pairs::Neighbours => {
            let pairs = part(0..2 * half).reshape([count, heads, half, 2]);
            let of = |at: usize| pairs.clone().slice([0..count, 0..heads, 0..half, at..at + 1]);
            (of(0).reshape([count, heads, half]), of(1).reshape([count, heads, half]))
        }
    };
    let low_turned = low.clone() * cosines.clone() - high.clone() * sines.clone();
    let high_turned = high * cosines + low * sines;
    let mut parts = match pairs {
        Pairs::Halves => vec![low_turned, high_turned],
        Pairs::Neighbours => {
            let each = [low_turned, high_turned].map(|t| t.reshape([count, heads, half, 1]));
            vec![Tensor::cat(each.to_vec(), 3).reshape([count, heads, 2 * half])]
        }
    };
    if 2 * half < width {
        parts.push(part(2 * half..width));
    }
    let turned = Tensor::cat(parts, 2).reshape([count, heads * width]);
    rows_beside(turned, rows.slice([0..count, heads * width..columns]))
}

fn rows_beside(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    match right.dims() {
        [_, 0] => left,
        _ => Tensor::cat(vec![left, right], 1),
    }
}

/// The values of a tensor, on the host.
pub(super) fn values(rows: Tensor<2>) -> Result<Vec<f32>, Misfit> {
    let data = rows.try_into_data().map_err(|error| Misfit::Device(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| Misfit::Device(format!("{error:?}")))
}
