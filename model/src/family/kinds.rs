//! Which layers of a model have a sliding window, and which rotary positions each has.

use super::limits::{MAX_LAYERS, MAX_POSITIONS};
use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::{LayerKind, ModelSpec, Rotation, SlidingWindow},
};

/// Which layers have a sliding window: those that `layer_types` names, or by default those of the family.
pub(super) fn sliding(
    config: &Fields<'_>,
    layers: u32,
    default: impl Fn(u32) -> bool,
) -> Result<Vec<bool>, ModelError> {
    let Some((name, value)) = config.get(&["layer_types"]) else {
        return Ok((0..layers).map(default).collect());
    };
    let list = value.as_array().filter(|list| list.len() == layers as usize);
    let list = list
        .ok_or_else(|| config.wrong(name, format!("must be a list of {layers} kinds of layers")))?;
    let kind = |kind: &serde_json::Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => {
            let known = "full_attention, sliding_attention";
            Err(config.unknown("kind of layer", &short(kind), known))
        }
    };
    list.iter().map(kind).collect()
}

/// Which layers of SmolLM3 have rotary positions; the others have none.
pub(super) fn rotated_layers(config: &Fields<'_>, layers: u32) -> Result<Vec<bool>, ModelError> {
    let every = config.count_or_none(&["no_rope_layer_interval"], MAX_LAYERS)?.unwrap_or(4);
    let Some((name, value)) = config.get(&["no_rope_layers"]) else {
        return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect());
    };
    let flag = |value: &serde_json::Value| value.as_u64().filter(|n| *n <= 1).map(|n| n == 1);
    let flags: Option<Vec<bool>> =
        value.as_array().and_then(|list| list.iter().map(flag).collect());
    let flags = flags.filter(|flags| flags.len() >= layers as usize);
    flags.ok_or_else(|| {
        let problem = format!("is {}: {layers} zeros and ones are wanted", short(value));
        config.wrong(name, problem)
    })
}

/// The kinds of a model's layers, of which some have a window of so many rows: a row itself and those before it, or,
/// where rows see later ones too, so many on each side.
pub(super) fn list(
    spec: &ModelSpec,
    sliding: &[bool],
    window: Option<u32>,
    rotation: impl Fn(u32) -> Rotation,
) -> Vec<LayerKind> {
    let window = window.map(|rows| match spec.causal {
        true => SlidingWindow { before: rows.saturating_sub(1), after: 0 },
        false => SlidingWindow { before: rows, after: rows },
    });
    // A window as wide as any text is no window.
    let window = window.filter(|of| of.before < MAX_POSITIONS);
    let kind = |(layer, slides): (u32, &bool)| LayerKind {
        window: window.filter(|_| *slides),
        rotation: rotation(layer),
    };
    let kinds: Vec<LayerKind> = (0..).zip(sliding).map(kind).collect();
    match kinds.iter().all(|kind| *kind == LayerKind::default()) {
        true => Vec::new(),
        false => kinds,
    }
}

/// The kinds of layers of a model that has a window, if any, in all of them.
pub(super) fn windowed(spec: &ModelSpec, window: Option<u32>) -> Vec<LayerKind> {
    list(spec, &vec![window.is_some(); spec.layers as usize], window, |_| Rotation::Usual)
}

/// The kinds of layers of a model in which those with a window have rotary positions of their own.
pub(super) fn local(spec: &ModelSpec, sliding: &[bool], window: Option<u32>) -> Vec<LayerKind> {
    list(spec, sliding, window, |layer| match sliding[layer as usize] {
        true => Rotation::Local,
        false => Rotation::Usual,
    })
}
