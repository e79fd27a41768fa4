//! Pooling: the largest or the mean value of each window of a channel.

use super::window;
use crate::onnx::{
    node::{KnownNode, Made},
    operator::{Operator, Pool, PoolKind},
};

/// Reads pooling by windows.
pub(super) fn read(node: &KnownNode<'_>) -> Result<Made, String> {
    let input = node.input(0)?.dims;
    let Some(kernel) = window::kernel_shape(node)? else {
        return Err("its attribute kernel_shape is missing".to_owned());
    };
    if input.len() < 3 || kernel.len() != input.len() - 2 {
        return Err(format!("a window of {kernel:?} does not fit an input of shape {input:?}"));
    }
    let is_max = node.node.operator == "MaxPool";
    let kind = match is_max {
        true => PoolKind::Max,
        false => PoolKind::Average { with_padding: node.flag("count_include_pad", false)? },
    };
    if is_max {
        // It decides the order of indices, which are not computed.
        node.flag("storage_order", false)?;
    }
    let windows = window::windows(node, &kernel, &input[2..], true)?;
    let up = node.flag("ceil_mode", false)?;
    let mut dims = input[..2].to_vec();
    for (window, of) in windows.iter().zip(&input[2..]) {
        let mut results = window.results(*of);
        if up {
            let padded = of + window.before + window.after;
            let more = padded.saturating_sub(window.extent()).div_ceil(window.stride) + 1;
            // A window begins in the axis or in the padding before it.
            let begins = (more - 1) * window.stride < of + window.before;
            results = Ok(if begins { more } else { more - 1 });
        }
        dims.push(results?);
    }
    Made::of_first(node, Operator::Pool(Pool { kind, windows }), dims)
}
