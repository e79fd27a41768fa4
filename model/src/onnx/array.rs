//! Small tensors whose values are known when a network is loaded: shapes, axes, indices and scales, and what is
//! computed from these.

use super::tensor::ElementType;

/// The values of a tensor, row after row.
#[derive(Clone, PartialEq, Debug)]
pub enum Values {
    /// Floats of any width. Each is one that its type has.
    Floats(Vec<f64>),
    /// Whole numbers of any width, and truth values as 0 and 1.
    Wholes(Vec<i64>),
}

/// A tensor whose values are known.
#[derive(Clone, PartialEq, Debug)]
pub struct Array {
    /// Its shape, the slowest axis first.
    pub dims: Vec<u64>,
    /// The type of its elements.
    pub element: ElementType,
    /// The values, row after row.
    pub values: Values,
}

impl Array {
    /// The tensor of these little-endian bytes, as many as its shape and type take.
    pub fn of_bytes(dims: Vec<u64>, element: ElementType, bytes: &[u8]) -> Self {
        let values = match element.is_float() {
            true => Values::Floats(element.floats(bytes)),
            false => Values::Wholes(element.wholes(bytes)),
        };
        Self { dims, element, values }
    }

    /// A list of whole numbers.
    pub(super) fn wholes(values: Vec<i64>) -> Self {
        let dims = vec![values.len() as u64];
        Self { dims, element: ElementType::I64, values: Values::Wholes(values) }
    }

    /// Values of a type that floats are rounded to, and whole numbers are cut to.
    pub(super) fn new(dims: Vec<u64>, element: ElementType, values: Values) -> Self {
        let values = match (values, element.is_float()) {
            (Values::Floats(values), true) => Values::Floats(values),
            (Values::Floats(values), false) => {
                let whole = |value: &f64| match element {
                    ElementType::Bool => i64::from(*value != 0.0),
                    _ => *value as i64,
                };
                Values::Wholes(values.iter().map(whole).collect())
            }
            (Values::Wholes(values), true) => {
                Values::Floats(values.iter().map(|value| *value as f64).collect())
            }
            (Values::Wholes(values), false) => Values::Wholes(values),
        };
        let values = match values {
            Values::Floats(values) => {
                Values::Floats(values.into_iter().map(|value| rounded(element, value)).collect())
            }
            Values::Wholes(values) => {
                Values::Wholes(values.into_iter().map(|value| cut(element, value)).collect())
            }
        };
        Self { dims, element, values }
    }

    /// How many values it has.
    pub fn len(&self) -> usize {
        match &self.values {
            Values::Floats(values) => values.len(),
            Values::Wholes(values) => values.len(),
        }
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its values as whole numbers.
    ///
    /// # Errors
    /// When they are floats.
    pub(super) fn list(&self) -> Result<&[i64], String> {
        match &self.values {
            Values::Wholes(values) => Ok(values),
            Values::Floats(_) => {
                Err(format!("{} values stand where whole numbers should", self.element.name()))
            }
        }
    }

    /// Its values as floats, whatever they are.
    pub fn floats(&self) -> Vec<f64> {
        match &self.values {
            Values::Floats(values) => values.clone(),
            Values::Wholes(values) => values.iter().map(|value| *value as f64).collect(),
        }
    }

    /// Its only value.
    ///
    /// # Errors
    /// When it has more than one.
    pub(super) fn one(&self) -> Result<f64, String> {
        match self.floats().as_slice() {
            [one] => Ok(*one),
            _ => Err(format!("{:?} values stand where one should", self.dims)),
        }
    }

    /// The values at these places, in this order.
    pub(super) fn picked(&self, dims: Vec<u64>, places: &[usize]) -> Self {
        let values = match &self.values {
            Values::Floats(values) => {
                Values::Floats(places.iter().filter_map(|at| values.get(*at).copied()).collect())
            }
            Values::Wholes(values) => {
                Values::Wholes(places.iter().filter_map(|at| values.get(*at).copied()).collect())
            }
        };
        Self { dims, element: self.element, values }
    }
}

/// A float as its type has it.
fn rounded(element: ElementType, value: f64) -> f64 {
    match element {
        ElementType::F32 => (value as f32).into(),
        ElementType::F16 => half::f16::from_f64(value).into(),
        ElementType::Bf16 => half::bf16::from_f64(value).into(),
        _ => value,
    }
}

/// A whole number as its type has it.
fn cut(element: ElementType, value: i64) -> i64 {
    match element {
        ElementType::I8 => (value as i8).into(),
        ElementType::I16 => (value as i16).into(),
        ElementType::I32 => (value as i32).into(),
        ElementType::U8 => (value as u8).into(),
        ElementType::U16 => (value as u16).into(),
        ElementType::U32 => (value as u32).into(),
        ElementType::Bool => (value != 0).into(),
        _ => value,
    }
}

/// The shape that two shapes have together, where axes of one are repeated.
///
/// # Errors
/// When they do not fit.
pub(super) fn broadcast(a: &[u64], b: &[u64]) -> Result<Vec<u64>, String> {
    let axes = a.len().max(b.len());
    let side = |of: &[u64], axis: usize| match (axis + of.len()).checked_sub(axes) {
        Some(at) => of[at],
        None => 1,
    };
    let both = |axis| match (side(a, axis), side(b, axis)) {
        (a, b) if a == b => Ok(a),
        (1, b) => Ok(b),
        (a, 1) => Ok(a),
        _ => Err(format!("shapes {a:?} and {b:?} do not fit together")),
    };
    (0..axes).map(both).collect()
}

/// How far apart neighbours along each axis are.
pub(super) fn strides(dims: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    strides
}

/// For each place of a tensor of shape `dims`, what `of` says of its index along each axis.
pub(super) fn places(dims: &[u64], of: impl Fn(&[u64]) -> usize) -> Vec<usize> {
    let all = dims.iter().product::<u64>() as usize;
    let mut index = vec![0; dims.len()];
    let mut places = Vec::with_capacity(all);
    for _ in 0..all {
        places.push(of(&index));
        for axis in (0..dims.len()).rev() {
            index[axis] += 1;
            if index[axis] < dims[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    places
}

/// The values of `array` repeated to a shape that it fits.
pub(super) fn repeated(array: &Array, dims: &[u64]) -> Array {
    let strides = strides(&array.dims);
    let skipped = dims.len() - array.dims.len().min(dims.len());
    let of = |index: &[u64]| {
        let own = index.iter().skip(skipped).zip(&array.dims).zip(&strides);
        own.map(|((at, side), stride)| if *side == 1 { 0 } else { at * stride }).sum::<u64>()
            as usize
    };
    array.picked(dims.to_vec(), &places(dims, of))
}
