//! Plans by relative shares: what `cluster.toml` says, turned into an exact split.

use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Exchange, LinkType, Mode, Modes,
    Plan, PlanError, Span, Strategy, WireType, apportion,
};
use galaxy_model::ModelSpec;

/// A device that may take part.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name.
    pub name: DeviceName,
    /// Bytes that it grants.
    pub budget: Bytes,
    /// Kernel threads.
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
        /// Whose.
        device: DeviceName,
        /// What was given.
        share: f64,
    },
    /// A plan that does not hold.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// How a plan is made, besides by whom.
#[derive(Clone, Debug)]
pub struct Terms<'a> {
    /// Name of the model's directory.
    pub model: &'a str,
    /// The model's fingerprint.
    pub fingerprint: &'a str,
    /// How work is cut.
    pub strategy: Strategy,
    /// How activations travel.
    pub wire: WireType,
    /// Tiles of each device's rows.
    pub tiles: u16,
    /// Most rows of one program.
    pub max_rows: u32,
}

/// A plan whose heads, columns and vocabulary follow the members' shares.
///
/// Rows of connective blocks are cut equally (Galaxy, §III-C: their cost is memory access, and
/// equal runs keep the transfers of a ring equal). [`Strategy::Local`] takes the member of the
/// largest share, the first of equals.
///
/// # Errors
/// When a share is not above zero, or the plan is none.
pub fn plan(spec: &ModelSpec, terms: &Terms<'_>, members: &[Member]) -> Result<Plan, ShareError> {
    for member in members {
        if !(member.share.is_finite() && member.share > 0.0) {
            return Err(ShareError::Share { device: member.name.clone(), share: member.share });
        }
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
    let heads = apportion(extent.heads, &weights);
    let columns = apportion(extent.columns, &weights);
    let vocabulary = apportion(extent.vocabulary, &weights);
    let ring = members.iter().enumerate().map(|(i, member)| {
        let assignment = Assignment {
            blocks: vec![BlockAssignment {
                layers: Span::first(extent.layers),
                heads: heads[i],
                columns: columns[i],
            }],
            row_weight: 1,
            vocabulary: vocabulary[i],
        };
        DevicePlan {
            name: member.name.clone(),
            budget: member.budget,
            threads: member.threads,
            prefill: assignment.clone(),
            decode: assignment,
        }
    });
    let plan = Plan {
        model: terms.model.to_owned(),
        fingerprint: terms.fingerprint.to_owned(),
        strategy: terms.strategy,
        layout: terms.strategy.layout(),
        modes: Modes::uniform(extent.layers, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: terms.wire,
        tiles: terms.tiles,
        max_rows: terms.max_rows,
        ring: ring.collect(),
    };
    plan.validate(extent)?;
    Ok(plan)
}
