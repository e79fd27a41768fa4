//! Plans by relative shares: what `cluster.toml` says, turned into an exact split.

use crate::holdings::Cuts;
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, Cache, DeviceName, DevicePlan, Exchange, Layer, LinkType,
    Mode, Modes, Plan, PlanError, Span, Strategy, Unit, WireType, apportion,
};
use galaxy_model::{Formats, ModelSpec};

/// A device that may take part.
#[derive(Clone, Debug)]
pub struct Member {
    /// The device's name.
    pub name: DeviceName,
    /// Bytes that it grants.
    pub budget: Bytes,
    /// How many kernel threads it runs.
    pub threads: u16,
    /// Relative weight of work, above zero.
    pub share: f64,
}

/// Shares that give no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ShareError {
    /// A share that weighs nothing.
    #[error("the share of device {device} is {share}; it must be a number above zero")]
    Share {
        /// The device of that share.
        device: DeviceName,
        /// What was given.
        share: f64,
    },
    /// A strategy that needs to know what devices can do.
    #[error(
        "strategy auto is planned from profiles of the devices, and shares say nothing of them: measure them with `galaxy profile`, or name another strategy"
    )]
    Auto,
    /// The shares give a plan that is not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// All that a plan by shares needs to know besides its members.
#[derive(Clone, Debug)]
pub struct PlanOptions<'a> {
    /// Name of the model's directory.
    pub model: &'a str,
    /// The model's fingerprint.
    pub fingerprint: &'a str,
    /// The formats of its matrices as devices hold them.
    pub formats: &'a Formats,
    /// The strategy, which says how work is split.
    pub strategy: Strategy,
    /// The wire format of activations.
    pub wire: WireType,
    /// How many tiles each device's rows are cut into.
    pub tiles: u16,
    /// Most rows of one program.
    pub max_rows: u32,
    /// The size and number type of the KV cache.
    pub cache: Cache,
}

/// A plan whose heads, columns and vocabulary follow the members' shares.
///
/// Rows of connective blocks are cut equally (Galaxy, §III-C: their cost is memory access, and
/// equal runs keep the transfers of a ring equal). [`Strategy::Local`] takes the member of the
/// largest share, the first of equals. With [`Strategy::Sequence`] every member has all heads and
/// columns, and rows are cut equally (the baseline SP of Galaxy, §IV-A). With
/// [`Strategy::Pipeline`] layers follow the shares.
///
/// # Errors
/// When a share is not above zero, the strategy is [`Strategy::Auto`], or the plan is not valid.
pub fn plan(
    spec: &ModelSpec,
    terms: &PlanOptions<'_>,
    members: &[Member],
) -> Result<Plan, ShareError> {
    for member in members {
        if !(member.share.is_finite() && member.share > 0.0) {
            return Err(ShareError::Share { device: member.name.clone(), share: member.share });
        }
    }
    if terms.strategy == Strategy::Auto {
        return Err(ShareError::Auto);
    }
    let largest = members.iter().map(|m| m.share).fold(0.0, f64::max);
    let members: Vec<&Member> = match terms.strategy {
        Strategy::Local => members.iter().find(|m| m.share == largest).into_iter().collect(),
        _ => members.iter().collect(),
    };
    // Six digits of a share are more than any measurement of a device gives.
    let weights: Vec<u32> =
        members.iter().map(|m| ((m.share / largest * 1e6).round() as u32).max(1)).collect();
    let extent = spec.extent();
    let cuts = Cuts::of(spec, terms.formats);
    let heads = apportioned(extent.heads, cuts.heads, &weights);
    let columns = apportioned(extent.intermediate, cuts.columns, &weights);
    let vocabulary = apportion(extent.vocabulary, &weights);
    let stages = stages(extent.layers, &weights);
    let last = stages.iter().rposition(|layers| !layers.is_empty());
    let all = (Span::first(extent.heads), Span::first(extent.intermediate));
    let layers = Span::first(extent.layers);
    let ring = members.iter().enumerate().map(|(i, member)| {
        let (layers, (heads, columns), row_weight) = match terms.strategy {
            Strategy::Sequence => (layers, all, 1),
            Strategy::Pipeline => (stages[i], all, u32::from(last == Some(i))),
            _ => (layers, (heads[i], columns[i]), 1),
        };
        let block = BlockAssignment { layers, heads, columns };
        let assignment = Assignment {
            blocks: (!layers.is_empty()).then_some(block).into_iter().collect(),
            row_weight,
            vocabulary: vocabulary[i],
        };
        DevicePlan {
            name: member.name.clone(),
            budget: member.budget,
            threads: member.threads,
            prefill: assignment.clone(),
            decode: assignment,
            streaming: None,
        }
    });
    let mode = if terms.strategy == Strategy::Sequence { Mode::Sequence } else { Mode::Tensor };
    let plan = Plan {
        model: terms.model.to_owned(),
        fingerprint: terms.fingerprint.to_owned(),
        strategy: terms.strategy,
        layout: terms.strategy.layout(),
        modes: Modes::uniform(extent.layers, mode),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: terms.wire,
        activations: terms.formats.activations(),
        tiles: terms.tiles,
        max_rows: terms.max_rows,
        cache: terms.cache,
        ring: ring.collect(),
    };
    plan.validate(extent)?;
    Ok(plan)
}

/// Runs by weight that are cut between multiples of `unit`.
fn apportioned<U: Unit>(total: u32, unit: u32, weights: &[u32]) -> Vec<Span<U>> {
    let place = |units: u32| units.saturating_mul(unit).min(total);
    let spans = apportion::<U>(total.div_ceil(unit), weights);
    spans.into_iter().map(|span| Span::new(place(span.start()), place(span.end()))).collect()
}

/// Whole layers by weight, one at least for each as long as there are enough.
fn stages(layers: u32, weights: &[u32]) -> Vec<Span<Layer>> {
    let spans = apportion::<Layer>(layers, weights);
    let mut sizes: Vec<u32> = spans.iter().map(|span| span.len()).collect();
    while let Some(none) = sizes.iter().position(|&size| size == 0) {
        let most = (0..sizes.len()).max_by_key(|&at| sizes[at]).filter(|&at| sizes[at] > 1);
        let Some(most) = most else { break };
        sizes[most] -= 1;
        sizes[none] += 1;
    }
    let mut at = 0;
    let place = |size: u32| {
        at += size;
        Span::new(at - size, at)
    };
    sizes.into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apportioned_runs_are_cut_between_units() {
        let spans: Vec<Span<galaxy_common::Head>> = apportioned(5, 2, &[1, 1, 1]);
        assert_eq!(spans, [Span::new(0, 2), Span::new(2, 4), Span::new(4, 5)]);
        let all = apportioned::<galaxy_common::Head>(5, 1, &[2, 3]);
        assert_eq!(all, apportion(5, &[2, 3]));
    }

    #[test]
    fn every_stage_has_a_layer_while_there_are_enough() {
        let sizes = |layers, weights: &[u32]| -> Vec<u32> {
            let spans = stages(layers, weights);
            assert_eq!(spans.last().map(|span| span.end()), Some(layers));
            spans.iter().map(|span| span.len()).collect()
        };
        assert_eq!(sizes(12, &[2, 1, 1]), [6, 3, 3]);
        assert_eq!(sizes(4, &[100, 1, 1]), [2, 1, 1]);
        assert_eq!(sizes(3, &[1, 50, 1, 1, 1]), [1, 1, 1, 0, 0]);
        assert_eq!(sizes(2, &[1, 1, 1]), [1, 1, 0]);
        assert_eq!(sizes(1, &[1]), [1]);
    }
}
