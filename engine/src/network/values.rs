//! How values lie in memory, and constants as floats.

use super::NetworkError;
use galaxy_model::onnx::{Array, OnnxFile, Source, Value, Values};

/// The order of a value's axes in memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Layout {
    /// The order of the file, row after row.
    Rows,
    /// Channels last: the second axis of the file is the innermost one.
    Channels,
}

impl Layout {
    /// For each axis in memory, which one of the file it is.
    pub(super) fn order(self, axes: usize) -> Vec<usize> {
        match self {
            Self::Channels if axes > 2 => {
                std::iter::once(0).chain(2..axes).chain(std::iter::once(1)).collect()
            }
            _ => (0..axes).collect(),
        }
    }

    /// Where an axis of the file is in memory.
    pub(super) fn axis(self, axis: usize, axes: usize) -> usize {
        self.order(axes).iter().position(|of| *of == axis).unwrap_or(axis)
    }

    /// The shape in memory of a value of this shape.
    pub(super) fn dims(self, dims: &[u64]) -> Vec<usize> {
        self.order(dims.len()).iter().map(|axis| dims[*axis] as usize).collect()
    }

    /// Whether a value of this shape lies the same either way.
    pub(super) fn is_same(dims: &[u64]) -> bool {
        let channels = dims.get(1).copied().unwrap_or(1);
        dims.len() < 3 || channels == 1 || dims[2..].iter().all(|side| *side == 1)
    }
}

/// `[outer, side, inner]` around axes that follow one another in memory.
pub(super) fn around(dims: &[usize], first: usize, end: usize) -> [usize; 3] {
    let all = |dims: &[usize]| dims.iter().product();
    [all(&dims[..first]), all(&dims[first..end]), all(&dims[end..])]
}

/// The values of a constant, in the order of the file.
///
/// # Errors
/// When they cannot be read.
pub(super) fn constant(file: &OnnxFile, value: &Value) -> Result<Vec<f32>, NetworkError> {
    let floats = |array: &Array| match &array.values {
        Values::Floats(values) => values.iter().map(|x| *x as f32).collect(),
        Values::Wholes(values) => values.iter().map(|x| *x as f32).collect(),
    };
    match &value.source {
        Source::Known(array) => Ok(floats(array)),
        Source::Filled(number) => {
            let count = value.dims.iter().product::<u64>() as usize;
            let mut values = Vec::new();
            let wanted = galaxy_common::Bytes(4 * count as u64);
            values.try_reserve_exact(count).map_err(|_| NetworkError::Memory { wanted })?;
            values.resize(count, *number as f32);
            Ok(values)
        }
        Source::Stored(tensor) => Ok(file.floats(tensor)?),
        Source::Input | Source::Node => Ok(Vec::new()),
    }
}
