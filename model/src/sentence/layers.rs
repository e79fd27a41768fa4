//! The modules of sentence-transformers that a pooled vector goes through.

use super::table::{DENSE, DROPOUT, LAYER_NORM, NORMALIZE, json};
use crate::{
    config::Fields,
    error::ModelError,
    fields::{Table, check},
    store::Store,
    widen::widen,
};
use std::{f64::consts::FRAC_1_SQRT_2, path::Path};

/// The most values that a vector may have; far above any that is real.
pub(super) const MAX_VALUES: u32 = 1 << 17;
/// The most values that a matrix may have: matrices are held in memory as a whole.
const MAX_MATRIX_VALUES: u64 = 1 << 28;
/// What PyTorch's `LayerNorm` adds to the variance.
const EPSILON: f64 = 1e-5;
const ACTIVATIONS: &[(&str, Activation)] = &[
    ("torch.nn.modules.linear.Identity", Activation::Identity),
    ("torch.nn.modules.activation.Tanh", Activation::Tanh),
    ("torch.nn.modules.activation.ReLU", Activation::Relu),
    ("torch.nn.modules.activation.GELU", Activation::Gelu),
    ("torch.nn.modules.activation.SiLU", Activation::Silu),
    ("torch.nn.modules.activation.Sigmoid", Activation::Sigmoid),
];

/// The activation function of a module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// The value itself.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// The value, or zero where it is negative.
    Relu,
    /// The value times the share of the normal distribution that lies below it.
    Gelu,
    /// The value times its sigmoid.
    Silu,
    /// The logistic function.
    Sigmoid,
}

impl Activation {
    /// Reads the activation from a field that has its class in PyTorch, with or without the path of its module.
    pub(super) fn named(
        fields: &Fields<'_>,
        field: &'static str,
    ) -> Result<Option<Self>, ModelError> {
        let Some(name) = fields.text(&[field])? else { return Ok(None) };
        let last = |name: &str| name.rsplit('.').next().map(str::to_owned);
        let found = ACTIVATIONS.iter().find(|(full, _)| {
            *full == name || (name.starts_with("torch.nn.") && last(full) == last(name))
        });
        let known = || ACTIVATIONS.iter().map(|known| known.0).collect::<Vec<_>>().join(", ");
        let (_, activation) = found.ok_or_else(|| fields.unknown("activation", name, known()))?;
        Ok(Some(*activation))
    }

    /// Applies the function to a value.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Self::Identity => x,
            Self::Tanh => x.tanh(),
            Self::Relu => x.max(0.0),
            Self::Gelu => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        }
    }
}

/// A module that a pooled vector goes through.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Layer {
    /// Scales the vector to length one.
    Normalise,
    /// Brings the values to a mean of zero and a variance of one, then applies weight and bias.
    Norm { weight: Vec<f32>, bias: Vec<f32> },
    /// A linear layer with an activation.
    Dense(Dense),
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Dense {
    pub(super) inputs: u32,
    pub(super) outputs: u32,
    /// The weights, `[outputs, inputs]`, row-major.
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    activation: Activation,
    residual: Residual,
}

/// The residual that a dense layer adds behind its activation.
#[derive(Clone, PartialEq, Debug)]
enum Residual {
    None,
    Input,
    /// The input, multiplied with a matrix `[outputs, inputs]`.
    Product(Vec<f32>),
}

impl Layer {
    /// Reads the module of this kind in the directory `place`, for vectors of `width` values where these are known.
    /// `None` if the kind is none of these, `Some(None)` if the module does nothing.
    pub(super) fn read(
        kind: &str,
        place: &Path,
        width: Option<u32>,
    ) -> Option<Result<Option<Self>, ModelError>> {
        match kind {
            "Normalize" => Some(normalise(place).map(|()| Some(Self::Normalise))),
            "Dense" => Some(dense(place, width).map(|dense| Some(Self::Dense(dense)))),
            "LayerNorm" => Some(norm(place, width).map(Some)),
            // Dropout acts only while a model is trained.
            "Dropout" => Some(Ok(None)),
            _ => None,
        }
    }

    /// The matrix of a dense layer that does nothing else than multiply with it.
    pub(super) fn projection(&self) -> Option<Projection<'_>> {
        let Self::Dense(dense) = self else { return None };
        let plain = dense.bias.is_none()
            && dense.activation == Activation::Identity
            && dense.residual == Residual::None;
        let Dense { inputs, outputs, weight, .. } = dense;
        plain.then_some(Projection { inputs: *inputs, outputs: *outputs, weight })
    }

    /// The number of values of a vector behind the module, given that before it.
    pub(super) fn width(&self, width: u32) -> u32 {
        match self {
            Self::Dense(dense) => dense.outputs,
            Self::Normalise | Self::Norm { .. } => width,
        }
    }

    /// Applies the module to a vector.
    pub(super) fn apply(&self, mut values: Vec<f32>) -> Vec<f32> {
        match self {
            Self::Normalise => {
                to_unit_length(&mut values);
                values
            }
            Self::Norm { weight, bias } => {
                let count = values.len().max(1) as f64;
                let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
                let square = |v: &f32| (f64::from(*v) - mean).powi(2);
                let deviation = (values.iter().map(square).sum::<f64>() / count + EPSILON).sqrt();
                for ((value, weight), bias) in values.iter_mut().zip(weight).zip(bias) {
                    let normed = (f64::from(*value) - mean) / deviation;
                    *value = (normed * f64::from(*weight) + f64::from(*bias)) as f32;
                }
                values
            }
            Self::Dense(dense) => dense.apply(&values),
        }
    }
}

/// A matrix that vectors are multiplied with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection<'a> {
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    /// The weights, `[outputs, inputs]`, row-major.
    pub(crate) weight: &'a [f32],
}

impl Dense {
    fn apply(&self, values: &[f32]) -> Vec<f32> {
        let inputs = self.inputs as usize;
        let rows = self.weight.chunks_exact(inputs).enumerate();
        let output = |(index, row): (usize, &[f32])| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[index]);
            let value = self.activation.apply(dot(row, values) + f64::from(bias));
            let residual = match &self.residual {
                Residual::None => 0.0,
                Residual::Input => f64::from(values[index]),
                Residual::Product(matrix) => dot(&matrix[index * inputs..][..inputs], values),
            };
            (value + residual) as f32
        };
        rows.map(output).collect()
    }
}

/// Scales a vector to length one; a vector of zeros stays as it is.
pub(super) fn to_unit_length(values: &mut [f32]) {
    let length = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    if length > 1e-12 {
        values.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
}

/// The error function within 1.5e-7: Abramowitz and Stegun, formula 7.1.26.
fn erf(x: f64) -> f64 {
    const TERMS: [f64; 5] = [0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429];
    let t = 1.0 / (1.0 + 0.3275911 * x.abs());
    let sum = TERMS.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    (1.0 - sum * (-x * x).exp()).copysign(x)
}

/// The dot product, in sixteen partial sums, so that it is computed with vector instructions.
fn dot(left: &[f32], right: &[f32]) -> f64 {
    let mut sums = [0.0_f32; 16];
    let (left, left_rest) = left.as_chunks::<16>();
    let (right, right_rest) = right.as_chunks::<16>();
    for (left, right) in left.iter().zip(right) {
        for ((sum, a), b) in sums.iter_mut().zip(left).zip(right) {
            *sum += a * b;
        }
    }
    let rest = left_rest.iter().zip(right_rest).map(|(a, b)| f64::from(*a) * f64::from(*b));
    sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() + rest.sum::<f64>()
}

fn normalise(place: &Path) -> Result<(), ModelError> {
    let path = place.join("config.json");
    // Older versions leave the directory empty.
    if path.is_file() {
        checked(&path, NORMALIZE)?;
    }
    Ok(())
}

fn norm(place: &Path, width: Option<u32>) -> Result<Layer, ModelError> {
    let path = place.join("config.json");
    let value = json(&path)?;
    let fields = Fields::new(&path, &value)?;
    check(&fields, &[LAYER_NORM])?;
    let count = fields.count(&["dimension"], MAX_VALUES)?;
    fits(&fields, "dimension", count, width)?;
    let store = weights(place)?;
    Ok(Layer::Norm {
        weight: tensor(&store, "norm.weight", &[count])?,
        bias: tensor(&store, "norm.bias", &[count])?,
    })
}

fn dense(place: &Path, width: Option<u32>) -> Result<Dense, ModelError> {
    let path = place.join("config.json");
    let value = json(&path)?;
    let fields = Fields::new(&path, &value)?;
    check(&fields, &[DENSE])?;
    let inputs = fields.count(&["in_features"], MAX_VALUES)?;
    let outputs = fields.count(&["out_features"], MAX_VALUES)?;
    fits(&fields, "in_features", inputs, width)?;
    let values = u64::from(inputs) * u64::from(outputs);
    if values > MAX_MATRIX_VALUES {
        let problem =
            format!("and in_features make {values} values; at most {MAX_MATRIX_VALUES} are held");
        return Err(fields.wrong("out_features", problem));
    }
    let activation = Activation::named(&fields, "activation_function")?.unwrap_or(Activation::Tanh);
    let store = weights(place)?;
    let bias = match fields.flag("bias", true)? {
        true => Some(tensor(&store, "linear.bias", &[outputs])?),
        false => None,
    };
    let residual = match (fields.flag("use_residual", false)?, inputs == outputs) {
        (false, _) => Residual::None,
        (true, true) => Residual::Input,
        (true, false) => Residual::Product(tensor(&store, "residual.weight", &[outputs, inputs])?),
    };
    let weight = tensor(&store, "linear.weight", &[outputs, inputs])?;
    Ok(Dense { inputs, outputs, weight, bias, activation, residual })
}

fn checked(path: &Path, table: Table) -> Result<(), ModelError> {
    let value = json(path)?;
    check(&Fields::new(path, &value)?, &[table]).map(drop)
}

/// Refuses a module for vectors of another width than those before it.
fn fits(
    fields: &Fields<'_>,
    name: &'static str,
    takes: u32,
    comes: Option<u32>,
) -> Result<(), ModelError> {
    match comes.filter(|width| *width != takes) {
        None => Ok(()),
        Some(width) => {
            let problem = format!("is {takes}, and the vectors that come have {width} values");
            Err(fields.wrong(name, problem))
        }
    }
}

fn weights(place: &Path) -> Result<Store, ModelError> {
    let pickled = place.join("pytorch_model.bin");
    if !place.join("model.safetensors").is_file() && pickled.is_file() {
        let problem = "is pickled, which can run programs: save the model again with \
            sentence-transformers, which writes model.safetensors";
        return Err(ModelError::Field {
            path: pickled,
            field: "weights".to_owned(),
            problem: problem.to_owned(),
        });
    }
    Store::open(place)
}

/// Reads a whole tensor, widened to f32. Its memory is bounded by the size of the file.
fn tensor(store: &Store, name: &str, shape: &[u32]) -> Result<Vec<f32>, ModelError> {
    let shape: Vec<u64> = shape.iter().map(|extent| u64::from(*extent)).collect();
    let (tensor, format) = store.tensor(name, &shape)?;
    let mut bytes = vec![0; tensor.bytes as usize];
    store.read_at(tensor.shard, &mut bytes, tensor.offset)?;
    let mut values = vec![0.0; bytes.len() / format.bytes(1, 1) as usize];
    widen(format, &bytes, &mut values);
    Ok(values)
}

/// The fields of a module's config, by the kind of module, for warnings.
pub(super) fn table(kind: &str) -> Option<Table> {
    match kind {
        "Normalize" => Some(NORMALIZE),
        "Dense" => Some(DENSE),
        "LayerNorm" => Some(LAYER_NORM),
        "Dropout" => Some(DROPOUT),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_scaled_to_unit_length_and_zero_stays_zero() {
        let mut values = [3.0, 4.0];
        to_unit_length(&mut values);
        assert_eq!(values, [0.6, 0.8]);
        let mut zero = [0.0; 3];
        to_unit_length(&mut zero);
        assert_eq!(zero, [0.0; 3]);
    }

    #[test]
    fn activations_match_torch() {
        let of = [
            (Activation::Gelu, 0.7, 0.530_625_5),
            (Activation::Gelu, -1.5, -0.100_210_81),
            (Activation::Silu, 0.7, 0.467_732_2),
            (Activation::Sigmoid, -1.5, 0.182_425_52),
        ];
        for (activation, x, want) in of {
            let have = activation.apply(x);
            assert!((have - want).abs() < 1e-6, "{activation:?} of {x}: {have}, wanted {want}");
        }
    }

    #[test]
    fn a_dot_product_of_odd_length_is_exact() {
        let values: Vec<f32> = (0..37).map(|i| i as f32).collect();
        let want: f64 = (0..37).map(|i| f64::from(i * i)).sum();
        assert_eq!(dot(&values, &values), want);
    }

    #[test]
    fn a_dense_residual_is_added_after_the_activation() {
        let dense = |residual| Dense {
            inputs: 2,
            outputs: 2,
            weight: vec![1.0, 0.0, 0.0, -1.0],
            bias: Some(vec![0.0, 1.0]),
            activation: Activation::Relu,
            residual,
        };
        assert_eq!(dense(Residual::None).apply(&[2.0, 3.0]), [2.0, 0.0]);
        assert_eq!(dense(Residual::Input).apply(&[2.0, 3.0]), [4.0, 3.0]);
        let product = Residual::Product(vec![0.0, 1.0, 1.0, 0.0]);
        assert_eq!(dense(product).apply(&[2.0, 3.0]), [5.0, 2.0]);
    }
}
