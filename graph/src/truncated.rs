//! Models with fewer layers that stand for longer ones: of layers that are cut alike, a few show what
//! all of them take.

use galaxy_common::{Layer, Plan, Span};
use galaxy_model::ModelSpec;

/// Runs of layers that are cut alike, in order.
pub fn runs(plan: &Plan) -> Vec<Span<Layer>> {
    let mut edges: Vec<u32> =
        plan.modes.iter().flat_map(|m| [m.layers.start(), m.layers.end()]).collect();
    let parts = plan.ring.iter().flat_map(|d| [&d.prefill, &d.decode]);
    let blocks = parts.flat_map(|part| &part.blocks);
    edges.extend(blocks.flat_map(|b| [b.layers.start(), b.layers.end()]));
    edges.sort_unstable();
    edges.dedup();
    edges.windows(2).map(|pair| Span::new(pair[0], pair[1])).collect()
}

/// The same plan for a shorter model, which has as many layers of each of [`runs`] as `keep` says for
/// that run's length.
pub fn truncated(spec: &ModelSpec, plan: &Plan, keep: impl Fn(u32) -> u32) -> (ModelSpec, Plan) {
    let runs: Vec<_> = runs(plan).into_iter().map(|run| (run, keep(run.len()))).collect();
    // Where a layer of the long model stands in the short one.
    let short = |layer: u32| -> u32 {
        let before = runs.iter().map(|(run, own)| {
            let inside = layer.clamp(run.start(), run.end()) - run.start();
            inside.min(*own)
        });
        before.sum()
    };
    let cut = |span: Span<Layer>| Span::new(short(span.start()), short(span.end()));
    let mut plan = plan.clone();
    plan.modes.iter_mut().for_each(|m| m.layers = cut(m.layers));
    for device in &mut plan.ring {
        for part in [&mut device.prefill, &mut device.decode] {
            part.blocks.iter_mut().for_each(|b| b.layers = cut(b.layers));
        }
    }
    (ModelSpec { layers: short(spec.layers), ..spec.clone() }, plan)
}
