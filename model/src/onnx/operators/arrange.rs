//! Operators that move values, and compute nothing.

use crate::onnx::{
    array,
    node::{KnownNode, Made, axes, axis},
    operator::{Operator, PadMode, SliceAxis},
    tensor::{self, ElementType},
};

/// Reads a concatenation.
pub(super) fn concat(node: &KnownNode<'_>) -> Result<Made, String> {
    let first = node.input(0)?;
    let number = match (node.opset < 4, node.has("axis")) {
        (true, false) => 1,
        (false, false) => return Err("its attribute axis is missing".to_owned()),
        _ => node.whole("axis", 0)?,
    };
    let axis = axis(number, first.dims.len())?;
    let mut dims = first.dims.to_vec();
    let reads = node.present();
    for at in &reads[1..] {
        let other = node.input(*at)?;
        let fits = other.dims.len() == dims.len()
            && other.element == first.element
            && (0..dims.len()).all(|side| side == axis || other.dims[side] == dims[side]);
        if !fits {
            return Err(format!(
                "shapes {dims:?} and {:?} do not fit along axis {axis}",
                other.dims
            ));
        }
        dims[axis] += other.dims[axis];
    }
    Ok(Made { operator: Operator::Concat { axis }, reads, outputs: vec![(dims, first.element)] })
}

/// Reads a split, whose parts are an attribute in old files and an input in new ones.
pub(super) fn split(node: &KnownNode<'_>) -> Result<Made, String> {
    let input = node.input(0)?;
    let axis = axis(node.whole("axis", 0)?, input.dims.len())?;
    let (side, count) = (input.dims[axis], node.node.outputs.len() as u64);
    let given = match node.opset >= 13 {
        true => node.optional_array(1)?.map(|array| array.list()).transpose()?,
        false => node.wholes("split")?,
    };
    if node.opset >= 18 && node.has("num_outputs") && node.whole("num_outputs", 0)? != count as i64
    {
        return Err(format!(
            "it has {count} outputs, and its attribute num_outputs says otherwise"
        ));
    }
    let parts: Vec<u64> = match given {
        Some(parts) => parts.iter().map(|part| u64::try_from(*part).unwrap_or(u64::MAX)).collect(),
        // The last part may be smaller.
        None => {
            let each = side.div_ceil(count.max(1));
            (0..count).map(|at| each.min(side.saturating_sub(at * each))).collect()
        }
    };
    let all = parts.iter().try_fold(0u64, |all, part| all.checked_add(*part));
    if all != Some(side) || parts.len() as u64 != count {
        return Err(format!("an axis of {side} cannot be split into {count} parts {parts:?}"));
    }
    let part = |part: &u64| {
        let mut dims = input.dims.to_vec();
        dims[axis] = *part;
        (dims, input.element)
    };
    let outputs = parts.iter().map(part).collect();
    Ok(Made { operator: Operator::Split { axis, parts }, reads: vec![0], outputs })
}

/// Reads a slice, whose ranges are attributes in old files and inputs in new ones.
pub(super) fn slice(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let (starts, ends, over, steps) = match node.opset < 10 {
        true => {
            let list =
                |name| node.wholes(name)?.ok_or_else(|| format!("its attribute {name} is missing"));
            (list("starts")?, list("ends")?, node.wholes("axes")?, None)
        }
        false => {
            let list = |at| node.optional_array(at)?.map(|array| array.list()).transpose();
            let none: &[i64] = &[];
            (list(1)?.unwrap_or(none), list(2)?.unwrap_or(none), list(3)?, list(4)?)
        }
    };
    let count = starts.len();
    let fits = |list: Option<&[i64]>| list.is_none_or(|list| list.len() == count);
    if ends.len() != count || count > dims.len() || !fits(over) || !fits(steps) {
        return Err("its starts, ends, axes and steps are not as many".to_owned());
    }
    let whole = |side: &u64| SliceAxis { start: 0, step: 1, count: *side };
    let mut taken: Vec<SliceAxis> = dims.iter().map(whole).collect();
    for at in 0..count {
        let axis = axis(over.map_or(at as i64, |axes| axes[at]), dims.len())?;
        let step = steps.map_or(1, |steps| steps[at]);
        taken[axis] = slice_axis(dims[axis], starts[at], ends[at], step)?;
    }
    let result = taken.iter().map(|axis| axis.count).collect();
    Made::of_first(node, Operator::Slice { axes: taken }, result)
}

/// What a slice takes of an axis of `side`; numbers below 0 count from behind, and those beyond the axis mean its end.
fn slice_axis(side: u64, start: i64, end: i64, step: i64) -> Result<SliceAxis, String> {
    let of = side as i64;
    if step == 0 || step == i64::MIN {
        return Err(format!("a step of {step} is none"));
    }
    let from_front = |number: i64| if number < 0 { number.saturating_add(of) } else { number };
    let (start, end) = (from_front(start), from_front(end));
    let (start, end) = match step > 0 {
        true => (start.clamp(0, of), end.clamp(0, of)),
        false => (start.clamp(0, (of - 1).max(0)), end.clamp(-1, of - 1)),
    };
    let reach = if step > 0 { end - start } else { start - end };
    let count =
        if of == 0 || reach <= 0 { 0 } else { (reach as u64).div_ceil(step.unsigned_abs()) };
    Ok(SliceAxis { start: start as u64, step, count })
}

/// Reads a look-up of entries along an axis.
pub(super) fn gather(node: &KnownNode<'_>) -> Result<Made, String> {
    let (input, indices) = (node.input(0)?, node.input(1)?);
    if !matches!(indices.element, ElementType::I64 | ElementType::I32) {
        return Err(format!("its indices are {} values", indices.element.name()));
    }
    let axis = axis(node.whole("axis", 0)?, input.dims.len())?;
    if let Some(array) = indices.array {
        let side = input.dims[axis] as i64;
        if let Some(index) = array.list()?.iter().find(|index| !(-side..side).contains(*index)) {
            return Err(format!("index {index} is none of an axis of {side}"));
        }
    }
    let (before, after) = (&input.dims[..axis], &input.dims[axis + 1..]);
    let dims = [before, indices.dims, after].concat();
    Ok(Made {
        operator: Operator::Gather { axis },
        reads: vec![0, 1],
        outputs: vec![(dims, input.element)],
    })
}

/// Reads a transposition, which reverses all axes if it does not say their order.
pub(super) fn transpose(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let order = match node.wholes("perm")? {
        None => (0..dims.len()).rev().collect(),
        Some(given) => {
            let all = axes(given, dims.len())?;
            if all.len() != dims.len() {
                return Err(format!(
                    "its attribute perm is {given:?}, and there are {} axes",
                    dims.len()
                ));
            }
            given.iter().map(|n| axis(*n, dims.len())).collect::<Result<Vec<_>, _>>()?
        }
    };
    let result = order.iter().map(|axis| dims[*axis]).collect();
    Made::of_first(node, Operator::Transpose { order }, result)
}

/// Reads a border, whose widths are an attribute in old files and an input in new ones.
pub(super) fn pad(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let mode = node.text("mode", "constant")?;
    let (widths, value, over) = match node.opset < 11 {
        true => {
            let name = if node.opset < 2 { "paddings" } else { "pads" };
            let widths =
                node.wholes(name)?.ok_or_else(|| format!("its attribute {name} is missing"))?;
            (widths, node.float("value", 0.0)?, None)
        }
        false => {
            let value = node.optional_array(2)?.map(|array| array.one()).transpose()?;
            let over = node.optional_array(3)?.map(|array| array.list()).transpose()?;
            (node.array(1)?.list()?, value.unwrap_or(0.0) as f32, over)
        }
    };
    let mode = match mode {
        "constant" => PadMode::Constant(value),
        "reflect" => PadMode::Reflect,
        "edge" => PadMode::Edge,
        "wrap" => PadMode::Wrap,
        other => return Err(format!("its attribute mode is {other:?}, which is not known")),
    };
    let over = match over {
        Some(over) => over.iter().map(|n| axis(*n, dims.len())).collect::<Result<Vec<_>, _>>()?,
        None => (0..dims.len()).collect(),
    };
    if widths.len() != 2 * over.len() {
        return Err(format!("{} widths of borders do not fit {} axes", widths.len(), over.len()));
    }
    let (mut before, mut after) = (vec![0; dims.len()], vec![0; dims.len()]);
    let mut result = dims.to_vec();
    for (at, &axis) in over.iter().enumerate() {
        (before[axis], after[axis]) = (widths[at], widths[at + over.len()]);
        let side = dims[axis] as i64;
        let padded = before[axis].checked_add(after[axis]).and_then(|more| more.checked_add(side));
        let Some(padded) = padded.and_then(|padded| u64::try_from(padded).ok()) else {
            return Err(format!(
                "a border of {} and {} does not fit an axis of {side}",
                before[axis], after[axis]
            ));
        };
        let most = match mode {
            PadMode::Constant(_) => i64::MAX,
            PadMode::Reflect => side - 1,
            PadMode::Edge | PadMode::Wrap => {
                if side == 0 {
                    0
                } else {
                    i64::MAX
                }
            }
        };
        if before[axis].max(after[axis]) > most {
            return Err(format!(
                "an axis of {side} has too few values for a border of {} and {}",
                before[axis], after[axis]
            ));
        }
        result[axis] = padded;
    }
    Made::of_first(node, Operator::Pad { mode, before, after }, result)
}

fn view(node: &KnownNode<'_>, dims: Vec<u64>) -> Result<Made, String> {
    let have = node.input(0)?.dims;
    match tensor::count(&dims) == tensor::count(have) {
        true => Made::of_first(node, Operator::View, dims),
        false => Err(format!("values of shape {have:?} cannot be of shape {dims:?}")),
    }
}

/// Reads another shape, in which 0 means the axis as it is, and -1 what is left.
pub(super) fn reshape(node: &KnownNode<'_>) -> Result<Made, String> {
    if node.opset < 5 {
        node.wholes("consumed_inputs")?;
    }
    let given = match node.opset < 5 {
        true => node.wholes("shape")?.ok_or("its attribute shape is missing")?,
        false => node.array(1)?.list()?,
    };
    let have = node.input(0)?.dims;
    let zero_stays = node.opset >= 14 && node.flag("allowzero", false)?;
    if given.len() > tensor::MAX_AXES {
        return Err(format!("a shape of {} axes is more than any", given.len()));
    }
    let mut dims = Vec::new();
    for (axis, &side) in given.iter().enumerate() {
        dims.push(match side {
            0 if !zero_stays => *have
                .get(axis)
                .ok_or_else(|| format!("axis {axis} should be as it is, and {have:?} has none"))?,
            -1 => 1,
            side => u64::try_from(side).map_err(|_| format!("an axis of {side} is none"))?,
        });
    }
    let open: Vec<usize> = (0..given.len()).filter(|axis| given[*axis] == -1).collect();
    match open.as_slice() {
        [] => {}
        [one] => {
            let others = tensor::count(&dims).filter(|n| *n > 0);
            let all = tensor::count(have).unwrap_or(0);
            let Some(others) = others.filter(|others| all.is_multiple_of(*others)) else {
                return Err(format!("values of shape {have:?} cannot be of shape {given:?}"));
            };
            dims[*one] = all / others;
        }
        _ => return Err(format!("a shape of {given:?} leaves two axes open")),
    }
    view(node, dims)
}

/// Reads a view as a matrix.
pub(super) fn flatten(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let number = node.whole("axis", 1)?;
    let at = if number == dims.len() as i64 { dims.len() } else { axis(number, dims.len())? };
    let product = |dims: &[u64]| dims.iter().product::<u64>();
    view(node, vec![product(&dims[..at]), product(&dims[at..])])
}

/// The axes that an attribute of old files or the second input names.
fn named_axes<'a>(node: &KnownNode<'a>) -> Result<Option<&'a [i64]>, String> {
    match node.opset < 13 {
        true => node.wholes("axes"),
        false => node.optional_array(1)?.map(|array| array.list()).transpose(),
    }
}

/// Reads a view without some axes of length 1, or without all of them.
pub(super) fn squeeze(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let gone = match named_axes(node)? {
        Some(given) => axes(given, dims.len())?,
        None => (0..dims.len()).filter(|axis| dims[*axis] == 1).collect(),
    };
    let kept = (0..dims.len()).filter(|axis| !gone.contains(axis));
    view(node, kept.map(|axis| dims[axis]).collect())
}

/// Reads a view with more axes of length 1.
pub(super) fn unsqueeze(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let given = named_axes(node)?.ok_or("its axes are missing")?;
    let of = dims.len() + given.len();
    let new = axes(given, of)?;
    let mut old = dims.iter().copied();
    let side = |axis| if new.contains(&axis) { 1 } else { old.next().unwrap_or(1) };
    view(node, (0..of).map(side).collect())
}

/// Reads a node that passes its input on.
pub(super) fn identity(node: &KnownNode<'_>) -> Result<Made, String> {
    view(node, node.input(0)?.dims.to_vec())
}

/// Reads a dropout, which passes its input on when a network runs.
pub(super) fn dropout(node: &KnownNode<'_>) -> Result<Made, String> {
    if node.opset < 12 {
        node.float("ratio", 0.5)?;
        node.whole("is_test", 0)?;
        node.wholes("consumed_inputs")?;
    } else {
        node.whole("seed", 0)?;
        if let Some(training) = node.optional_array(2)?
            && training.one()? != 0.0
        {
            return Err("its input 2 asks for training: networks are not trained here".to_owned());
        }
    }
    identity(node)
}

/// Reads a repetition along axes of length 1.
pub(super) fn expand(node: &KnownNode<'_>) -> Result<Made, String> {
    let have = node.input(0)?.dims;
    let given = node.array(1)?.list()?;
    let sides: Option<Vec<u64>> = given.iter().map(|n| u64::try_from(*n).ok()).collect();
    let sides = sides.filter(|sides| sides.len() <= tensor::MAX_AXES);
    let sides = sides.ok_or_else(|| format!("a shape of {given:?} is none"))?;
    Made::of_first(node, Operator::Expand, array::broadcast(have, &sides)?)
}

/// Reads a change of type.
pub(super) fn cast(node: &KnownNode<'_>) -> Result<Made, String> {
    let input = node.input(0)?;
    if node.opset >= 19 {
        node.flag("saturate", true)?;
        node.text("round_mode", "up")?;
    }
    if node.opset < 6 {
        return Err("its type is given by name, which is not read".to_owned());
    }
    let to = ElementType::of(node.whole("to", 0)?);
    Ok(Made { operator: Operator::Cast, reads: vec![0], outputs: vec![(input.dims.to_vec(), to)] })
}
