//! What is done to rows between products, in burn's own operations.

use crate::compute::{kernels::rotary::RowPosition, op_error::OpError};
use burn::{Device, Tensor, TensorData, activation};
use galaxy_graph::operators::Rotary;
use galaxy_model::{Activation, ClassActivation, LAPLACE_DEVIATION, LAPLACE_MEAN, NormKind, Pairs};

/// A norm with its vectors.
pub(super) struct Norm<'a> {
    pub(super) kind: NormKind,
    pub(super) epsilon: f32,
    /// The weights, `[1, columns]`.
    pub(super) weight: &'a Tensor<2>,
    /// The biases, `[1, columns]`.
    pub(super) bias: Option<&'a Tensor<2>>,
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
        let rows = rows / (square + self.epsilon).sqrt() * self.weight.clone();
        match self.bias {
            Some(bias) => rows + bias.clone(),
            None => rows,
        }
    }
}

/// Applies an activation function to every value.
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
        Activation::QuickGelu => rows.clone() * activation::sigmoid(rows * 1.702),
        Activation::ClippedGelu => activation::gelu(rows).clamp_max(10.0),
        Activation::SquaredRelu => {
            let positive = activation::relu(rows);
            positive.clone() * positive
        }
        Activation::Relu6 => rows.clamp(0.0, 6.0),
        Activation::LeakyRelu => rows.clone().max_pair(rows * 0.01),
        Activation::HardSwish => rows.clone() * ((rows + 3.0).clamp(0.0, 6.0) / 6.0),
        // tanh(ln(1 + e)) is n / (n + 2) of n = e * (e + 2), where e = e^x; from 20 on it is 1.
        Activation::Mish => {
            let power = rows.clone().clamp_max(20.0).exp();
            let grown = power.clone() * (power + 2.0);
            rows * (grown.clone() / (grown + 2.0))
        }
        Activation::Laplace => {
            let scaled = (rows - LAPLACE_MEAN) / (LAPLACE_DEVIATION * std::f32::consts::SQRT_2);
            (scaled.erf() + 1.0) * 0.5
        }
        Activation::Tanh => rows.tanh(),
        Activation::Sigmoid => activation::sigmoid(rows),
        Activation::Linear => rows,
    }
}

/// Applies the activation function behind the dense layer of a class head, if there is one.
pub(super) fn activate_class(activation: Option<ClassActivation>, rows: Tensor<2>) -> Tensor<2> {
    match activation {
        Some(ClassActivation::Tanh) => rows.tanh(),
        Some(ClassActivation::Relu) => activation::relu(rows),
        Some(ClassActivation::Gelu) => activation::gelu(rows),
        None => rows,
    }
}

/// Norms each head of each row by itself: as many heads by each norm as `heads` says, one behind
/// another.
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

/// Rotates pairs of columns of the first `heads` heads of each row by its place.
///
/// # Shapes
/// rows `[places.len(), any]`, at least `heads * width` columns; at most `width` columns of a head are
/// rotated.
pub(super) fn rotate(
    rows: Tensor<2>,
    places: &[RowPosition],
    rotation: &Rotary,
    heads: usize,
    width: usize,
    device: &Device,
) -> Tensor<2> {
    let (count, half) = (places.len(), rotation.inverse_frequencies.len());
    let [_, columns] = rows.dims();
    if heads * width == 0 || half == 0 {
        return rows;
    }
    // In f64: at position 100 000 an f32 angle is off by half a percent of a turn.
    let table = |function: fn(f64) -> f64| -> Tensor<3> {
        let of = |place: &RowPosition| {
            let position = f64::from(place.position);
            let scale = f64::from(rotation.scale);
            let value = move |f: &f32| (function(position * f64::from(*f)) * scale) as f32;
            rotation.frequencies(place.length).iter().map(value)
        };
        let values: Vec<f32> = places.iter().flat_map(of).collect();
        Tensor::from_data(TensorData::new(values, [count, 1, half]), device)
    };
    let (cosines, sines) = (table(f64::cos), table(f64::sin));
    let turned = rows.clone().slice([0..count, 0..heads * width]).reshape([count, heads, width]);
    let part = |columns| turned.clone().slice([0..count, 0..heads, columns]);
    let (low, high) = match rotation.pairs {
        Pairs::Halves => (part(0..half), part(half..2 * half)),
        Pairs::Neighbours => {
            let pairs = part(0..2 * half).reshape([count, heads, half, 2]);
            let of = |at: usize| pairs.clone().slice([0..count, 0..heads, 0..half, at..at + 1]);
            (of(0).reshape([count, heads, half]), of(1).reshape([count, heads, half]))
        }
    };
    let low_turned = low.clone() * cosines.clone() - high.clone() * sines.clone();
    let high_turned = high * cosines + low * sines;
    let mut parts = match rotation.pairs {
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
pub(super) fn values(rows: Tensor<2>) -> Result<Vec<f32>, OpError> {
    let data = rows.try_into_data().map_err(|error| OpError::Device(format!("{error:?}")))?;
    data.try_into_vec().map_err(|error| OpError::Device(format!("{error:?}")))
}
