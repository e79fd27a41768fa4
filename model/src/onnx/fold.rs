//! Nodes whose inputs are all known when a network is loaded: shapes, indices and scales, and what is computed from
//! them.

use super::{
    array::{self, Array, Values},
    node::{KnownNode, axis},
    operator::{Binary, Operator, ReduceKind, SliceAxis, Unary},
    operators,
    tensor::{self, ElementType},
};

/// The most values that are computed when a network is loaded.
pub(super) const MAX_VALUES: u64 = 1 << 16;

/// What a node computes, if all its inputs are known; `None` where it is of a kind that is computed when the network
/// runs.
///
/// # Errors
/// When its inputs do not fit.
pub(super) fn evaluate(node: &KnownNode<'_>) -> Result<Option<Vec<Array>>, String> {
    let inputs: Option<Vec<&Array>> = node
        .present()
        .into_iter()
        .map(|at| node.inputs[at].as_ref().and_then(|known| known.array))
        .collect();
    let Some(inputs) = inputs.filter(|inputs| !inputs.is_empty()) else { return Ok(None) };
    let name = node.node.operator.as_str();
    let result = match (name, inputs.as_slice()) {
        ("Range", [start, limit, delta]) => range(start, limit, delta)?,
        ("Where", [condition, yes, no]) => choose(condition, yes, no)?,
        ("Not", [one]) => {
            let values = one.list()?.iter().map(|value| i64::from(*value == 0)).collect();
            Array::new(one.dims.clone(), ElementType::Bool, Values::Wholes(values))
        }
        (
            "And" | "Or" | "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual",
            [a, b],
        ) => {
            let values = pairs(a, b, |a, b| f64::from(compared(name, a, b)))?;
            Array::new(values.0, ElementType::Bool, Values::Floats(values.1))
        }
        ("Mod", [a, b]) => {
            if node.whole("fmod", 0)? != 0 {
                return Ok(None);
            }
            whole_pairs(a, b, |a, b| {
                a.checked_rem_euclid(b).map(|rest| if b < 0 && rest > 0 { rest + b } else { rest })
            })?
        }
        ("Tile", [one, counts]) => tile(one, counts.list()?)?,
        ("ReduceProd", [one])
            if node.wholes("axes")?.is_none_or(|axes| axes == [0]) && one.dims.len() == 1 =>
        {
            let all = one.list()?.iter().try_fold(1i64, |all, value| all.checked_mul(*value));
            let all = all.ok_or("the product of its values is too large")?;
            let dims = if node.flag("keepdims", true)? { vec![1] } else { vec![] };
            Array::new(dims, one.element, Values::Wholes(vec![all]))
        }
        _ => return known(node, &inputs),
    };
    node.check_all_read()?;
    Ok(Some(vec![result]))
}

/// What a node of an operator that is known when a network runs computes from known inputs.
fn known(node: &KnownNode<'_>, inputs: &[&Array]) -> Result<Option<Vec<Array>>, String> {
    let made = operators::read(node)?;
    let sizes: Option<Vec<u64>> =
        made.outputs.iter().map(|(dims, _)| tensor::count(dims)).collect();
    if sizes.is_none_or(|sizes| sizes.iter().any(|count| *count > MAX_VALUES)) {
        return Ok(None);
    }
    let Some((dims, element)) = made.outputs.first().cloned() else { return Ok(None) };
    let first = inputs[0];
    let result = match &made.operator {
        Operator::View => Array { dims, ..first.clone() },
        Operator::Cast => Array::new(dims, element, first.values.clone()),
        Operator::Unary(function) => match (unary(*function), &first.values) {
            (Some(of), Values::Floats(values)) => {
                Array::new(dims, element, Values::Floats(values.iter().map(|x| of(*x)).collect()))
            }
            (Some(of), Values::Wholes(values)) => Array::new(
                dims,
                element,
                Values::Wholes(values.iter().map(|x| of(*x as f64) as i64).collect()),
            ),
            (None, _) => return Ok(None),
        },
        Operator::Binary(function) => {
            let mut result = first.clone();
            for other in &inputs[1..] {
                result = binary(*function, &result, other)?;
            }
            result
        }
        Operator::Slice { axes } => first.picked(dims.clone(), &sliced(first, &dims, axes)),
        Operator::Expand => array::repeated(first, &dims),
        Operator::Transpose { order } => {
            let strides = array::strides(&first.dims);
            let of = |index: &[u64]| {
                index.iter().zip(order).map(|(at, axis)| at * strides[*axis]).sum::<u64>() as usize
            };
            first.picked(dims.clone(), &array::places(&dims, of))
        }
        Operator::Concat { axis } => concat(inputs, *axis, dims)?,
        Operator::Gather { axis } => {
            gather(first, inputs.get(1).ok_or("its indices are missing")?, *axis, dims)?
        }
        Operator::Split { axis, parts } => return Ok(Some(split(first, *axis, parts))),
        Operator::Reduce(reduce) if reduce.axes == [0] && first.dims.len() == 1 => {
            let values = first.floats();
            let all = match reduce.kind {
                ReduceKind::Sum => values.iter().sum(),
                ReduceKind::Mean => values.iter().sum::<f64>() / values.len() as f64,
                ReduceKind::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                ReduceKind::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
            };
            Array::new(dims, element, Values::Floats(vec![all]))
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![result]))
}

/// The functions of one value that shapes and scales are computed by.
fn unary(function: Unary) -> Option<fn(f64) -> f64> {
    Some(match function {
        Unary::Abs => f64::abs,
        Unary::Ceil => f64::ceil,
        Unary::Floor => f64::floor,
        Unary::Neg => std::ops::Neg::neg,
        Unary::Sqrt => f64::sqrt,
        Unary::Reciprocal => f64::recip,
        Unary::Relu => |x| x.max(0.0),
        Unary::Exp => f64::exp,
        Unary::Log => f64::ln,
        _ => return None,
    })
}

/// What a function makes of two arrays: whole numbers of whole numbers, floats of floats.
fn binary(function: Binary, a: &Array, b: &Array) -> Result<Array, String> {
    if let (Values::Wholes(_), Values::Wholes(_)) = (&a.values, &b.values) {
        return whole_pairs(a, b, |a, b| match function {
            Binary::Add => a.checked_add(b),
            Binary::Sub => a.checked_sub(b),
            Binary::Mul => a.checked_mul(b),
            Binary::Div => a.checked_div(b),
            Binary::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            Binary::Max => Some(a.max(b)),
            Binary::Min => Some(a.min(b)),
            Binary::PRelu => {
                if a < 0 {
                    a.checked_mul(b)
                } else {
                    Some(a)
                }
            }
        });
    }
    let (dims, values) = pairs(a, b, |a, b| match function {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow => a.powf(b),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::PRelu => {
            if a < 0.0 {
                a * b
            } else {
                a
            }
        }
    })?;
    Ok(Array::new(dims, a.element, Values::Floats(values)))
}

/// What `of` makes of each pair of floats of two arrays that fit together.
fn pairs(
    a: &Array,
    b: &Array,
    of: impl Fn(f64, f64) -> f64,
) -> Result<(Vec<u64>, Vec<f64>), String> {
    let dims = small(array::broadcast(&a.dims, &b.dims)?)?;
    let (a, b) = (array::repeated(a, &dims).floats(), array::repeated(b, &dims).floats());
    let values = a.into_iter().zip(b).map(|(a, b)| of(a, b)).collect();
    Ok((dims, values))
}

/// What `of` makes of each pair of whole numbers of two arrays that fit together.
fn whole_pairs(
    a: &Array,
    b: &Array,
    of: impl Fn(i64, i64) -> Option<i64>,
) -> Result<Array, String> {
    let dims = small(array::broadcast(&a.dims, &b.dims)?)?;
    let (a, b) = (array::repeated(a, &dims), array::repeated(b, &dims));
    let each = a.list()?.iter().zip(b.list()?).map(|(a, b)| of(*a, *b));
    let values: Option<Vec<i64>> = each.collect();
    let values = values.ok_or("its whole numbers are too large, or divided by 0")?;
    Ok(Array::new(dims, a.element, Values::Wholes(values)))
}

fn compared(operator: &str, a: f64, b: f64) -> bool {
    match operator {
        "And" => a != 0.0 && b != 0.0,
        "Or" => a != 0.0 || b != 0.0,
        "Equal" => a == b,
        "Less" => a < b,
        "LessOrEqual" => a <= b,
        "Greater" => a > b,
        _ => a >= b,
    }
}

/// A shape of few enough values.
fn small(dims: Vec<u64>) -> Result<Vec<u64>, String> {
    match tensor::count(&dims).is_some_and(|count| count <= MAX_VALUES) {
        true => Ok(dims),
        false => Err(format!(
            "{dims:?} values are more than are computed when a network is loaded ({MAX_VALUES})"
        )),
    }
}

fn range(start: &Array, limit: &Array, delta: &Array) -> Result<Array, String> {
    let (from, to, by) = (start.one()?, limit.one()?, delta.one()?);
    let count = ((to - from) / by).ceil().max(0.0);
    if !count.is_finite() {
        return Err(format!("a range from {from} to {to} by {by} has no end"));
    }
    let dims = small(vec![count as u64])?;
    let values = (0..dims[0]).map(|at| from + at as f64 * by).collect();
    Ok(Array::new(dims, start.element, Values::Floats(values)))
}

fn choose(condition: &Array, yes: &Array, no: &Array) -> Result<Array, String> {
    let dims = array::broadcast(&array::broadcast(&condition.dims, &yes.dims)?, &no.dims)?;
    let dims = small(dims)?;
    let all = [condition, yes, no].map(|array| array::repeated(array, &dims));
    let count = all[0].len();
    let both = Array {
        values: match (&all[1].values, &all[2].values) {
            (Values::Wholes(a), Values::Wholes(b)) => Values::Wholes([a.as_slice(), b].concat()),
            _ => Values::Floats([all[1].floats(), all[2].floats()].concat()),
        },
        ..all[1].clone()
    };
    let places = all[0]
        .list()?
        .iter()
        .enumerate()
        .map(|(at, chosen)| if *chosen != 0 { at } else { count + at });
    Ok(both.picked(dims, &places.collect::<Vec<_>>()))
}

fn tile(one: &Array, counts: &[i64]) -> Result<Array, String> {
    if counts.len() != one.dims.len() {
        return Err(format!("{} repetitions do not fit {} axes", counts.len(), one.dims.len()));
    }
    let repeated = |(side, count): (&u64, &i64)| {
        u64::try_from(*count).ok().and_then(|count| side.checked_mul(count))
    };
    let dims: Option<Vec<u64>> = one.dims.iter().zip(counts).map(repeated).collect();
    let dims = small(dims.ok_or_else(|| format!("repetitions of {counts:?} are none"))?)?;
    let strides = array::strides(&one.dims);
    let of = |index: &[u64]| {
        let own = index.iter().zip(&one.dims).zip(&strides);
        own.map(|((at, side), stride)| at % side * stride).sum::<u64>() as usize
    };
    Ok(one.picked(dims.clone(), &array::places(&dims, of)))
}

/// The places of what a slice takes.
fn sliced(from: &Array, dims: &[u64], axes: &[SliceAxis]) -> Vec<usize> {
    let strides = array::strides(&from.dims);
    let of = |index: &[u64]| {
        let own = index.iter().zip(axes).zip(&strides);
        own.map(|((at, axis), stride)| (axis.start as i64 + *at as i64 * axis.step) as u64 * stride)
            .sum::<u64>() as usize
    };
    array::places(dims, of)
}

fn concat(inputs: &[&Array], axis: usize, dims: Vec<u64>) -> Result<Array, String> {
    let all = Array {
        dims: vec![],
        element: inputs[0].element,
        values: match &inputs[0].values {
            Values::Wholes(_) => {
                let lists =
                    inputs.iter().map(|array| array.list()).collect::<Result<Vec<_>, _>>()?;
                Values::Wholes(lists.concat())
            }
            Values::Floats(_) => {
                Values::Floats(inputs.iter().flat_map(|array| array.floats()).collect())
            }
        },
    };
    let of = |index: &[u64]| {
        let (mut first, mut at) = (0, index[axis]);
        for array in inputs {
            let side = array.dims[axis];
            if at < side {
                let strides = array::strides(&array.dims);
                let own = index.iter().enumerate().map(|(n, i)| if n == axis { at } else { *i });
                return first
                    + own.zip(&strides).map(|(i, stride)| i * stride).sum::<u64>() as usize;
            }
            at -= side;
            first += array.len();
        }
        first
    };
    Ok(all.picked(dims.clone(), &array::places(&dims, of)))
}

fn gather(from: &Array, indices: &Array, along: usize, dims: Vec<u64>) -> Result<Array, String> {
    let (strides, side) = (array::strides(&from.dims), from.dims[along] as usize);
    let chosen =
        indices.list()?.iter().map(|index| axis(*index, side)).collect::<Result<Vec<_>, _>>()?;
    let own = array::strides(&indices.dims);
    let count = indices.dims.len();
    let of = |index: &[u64]| {
        let at =
            index[along..along + count].iter().zip(&own).map(|(i, stride)| i * stride).sum::<u64>();
        let before = index[..along].iter().zip(&strides).map(|(i, stride)| i * stride).sum::<u64>();
        let after = index[along + count..]
            .iter()
            .zip(&strides[along + 1..])
            .map(|(i, stride)| i * stride)
            .sum::<u64>();
        (before + chosen[at as usize] as u64 * strides[along] + after) as usize
    };
    Ok(from.picked(dims.clone(), &array::places(&dims, of)))
}

fn split(from: &Array, axis: usize, parts: &[u64]) -> Vec<Array> {
    let mut first = 0;
    let part = |count: &u64| {
        let whole = |side: &u64| SliceAxis { start: 0, step: 1, count: *side };
        let mut axes: Vec<SliceAxis> = from.dims.iter().map(whole).collect();
        axes[axis] = SliceAxis { start: first, step: 1, count: *count };
        first += count;
        let dims: Vec<u64> = axes.iter().map(|axis| axis.count).collect();
        from.picked(dims.clone(), &sliced(from, &dims, &axes))
    };
    parts.iter().map(part).collect()
}
