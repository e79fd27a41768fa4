//! Windows that slide along axes: of convolutions and of pooling.

use crate::onnx::{node::KnownNode, operator::Window};

/// The largest number that a window may have.
const MOST: i64 = 1 << 24;

impl Window {
    /// How many results it has along an axis of `of` elements.
    ///
    /// # Errors
    /// When it does not fit once.
    pub(super) fn results(&self, of: u64) -> Result<u64, String> {
        let padded = of + self.before + self.after;
        match padded.checked_sub(self.extent()) {
            Some(room) => Ok(room / self.stride + 1),
            None => Err(format!("a window of {} does not fit an axis of {padded}", self.extent())),
        }
    }

    /// The same window with its padding chosen so that it has a result for each `stride` elements.
    fn same(self, of: u64, upper: bool) -> Self {
        let results = of.div_ceil(self.stride);
        let reach = results.saturating_sub(1) * self.stride + self.extent();
        let all = reach.saturating_sub(of);
        let (less, more) = (all / 2, all - all / 2);
        let (before, after) = if upper { (less, more) } else { (more, less) };
        Self { before, after, ..self }
    }
}

/// How an operator chooses its padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AutoPad {
    /// As its attribute `pads` says.
    Given,
    /// There is none.
    None,
    /// So much that there is a result for each stride; what cannot be halved goes behind the axis.
    Upper,
    /// The same, but what cannot be halved goes before the axis.
    Lower,
}

/// The attribute by which an operator chooses its padding.
pub(super) fn auto_pad(node: &KnownNode<'_>) -> Result<AutoPad, String> {
    match node.text("auto_pad", "NOTSET")? {
        "NOTSET" | "" => Ok(AutoPad::Given),
        "VALID" => Ok(AutoPad::None),
        "SAME_UPPER" => Ok(AutoPad::Upper),
        "SAME_LOWER" => Ok(AutoPad::Lower),
        other => Err(format!("its attribute auto_pad is {other:?}, which is not known")),
    }
}

/// The attributes of a window along each axis, padded as they say, but not by `auto_pad`.
pub(super) fn given(
    node: &KnownNode<'_>,
    kernel: &[u64],
    dilated: bool,
) -> Result<Vec<Window>, String> {
    let axes = kernel.len();
    let list = |name, default: i64, count: usize| -> Result<Vec<u64>, String> {
        let Some(given) = node.wholes(name)? else { return Ok(vec![default as u64; count]) };
        let least = default;
        if given.len() != count || given.iter().any(|n| !(least..=MOST).contains(n)) {
            return Err(format!(
                "its attribute {name} is {given:?}, and should have {count} numbers of at least {least}"
            ));
        }
        Ok(given.iter().map(|n| *n as u64).collect())
    };
    let strides = list("strides", 1, axes)?;
    let dilations = if dilated { list("dilations", 1, axes)? } else { vec![1; axes] };
    let pads = list("pads", 0, 2 * axes)?;
    if kernel.iter().any(|side| !(1..=MOST as u64).contains(side)) {
        return Err(format!("a kernel of {kernel:?} is none"));
    }
    let window = |axis: usize| Window {
        kernel: kernel[axis],
        dilation: dilations[axis],
        stride: strides[axis],
        before: pads[axis],
        after: pads[axis + axes],
    };
    Ok((0..axes).map(window).collect())
}

/// The windows of an operator along the spatial axes `dims`, with their padding as `auto_pad` says.
pub(super) fn windows(
    node: &KnownNode<'_>,
    kernel: &[u64],
    dims: &[u64],
    dilated: bool,
) -> Result<Vec<Window>, String> {
    let pad = auto_pad(node)?;
    let padded = |(window, of): (Window, &u64)| match pad {
        AutoPad::Given => window,
        AutoPad::None => Window { before: 0, after: 0, ..window },
        AutoPad::Upper | AutoPad::Lower => window.same(*of, pad == AutoPad::Upper),
    };
    Ok(given(node, kernel, dilated)?.into_iter().zip(dims).map(padded).collect())
}

/// The attribute `kernel_shape`.
pub(super) fn kernel_shape(node: &KnownNode<'_>) -> Result<Option<Vec<u64>>, String> {
    let Some(given) = node.wholes("kernel_shape")? else { return Ok(None) };
    let sides: Option<Vec<u64>> = given.iter().map(|n| u64::try_from(*n).ok()).collect();
    sides.map(Some).ok_or_else(|| format!("its attribute kernel_shape is {given:?}"))
}
