//! What a plan is predicted to do, by the simulator.

use crate::{
    closed,
    costs::ProfileCosts,
    draft::shortened,
    request::{DeviceShare, PlanningError, Prediction, Request},
};
use galaxy_common::{BatchShape, Layout, Plan};
use galaxy_graph::{lower, simulate, timeline};
use galaxy_model::ModelSpec;

/// Lengths that stand for all of a workload.
pub(crate) const LENGTHS: usize = 3;

/// Layers of a run of equal ones that are simulated: what each further one adds is what the last of
/// these added. The first layers of a run differ, because lanes start empty.
const LAYERS: u32 = 2;
/// The same where blocks are cut by rows: fast devices run ahead of slow ones for some layers, until
/// they wait for keys and values.
const LAYERS_BY_ROWS: u32 = 8;
/// And for a rough prediction.
const FEW_BY_ROWS: u32 = 5;

/// Latency and shares of one run.
#[derive(Clone, Debug)]
struct Run {
    latency: f64,
    devices: Vec<DeviceShare>,
}

impl Run {
    /// Adds `times` what lies between `less` and `more`.
    fn add(&mut self, more: &Self, less: &Self, times: f64) {
        self.latency += times * (more.latency - less.latency);
        let each = self.devices.iter_mut().zip(more.devices.iter().zip(&less.devices));
        for (sum, (more, less)) in each {
            sum.compute += times * (more.compute - less.compute);
            sum.links += times * (more.links - less.links);
            sum.waiting += times * (more.waiting - less.waiting);
            sum.sent += (times * more.sent.saturating_sub(less.sent) as f64) as u64;
            sum.received += (times * more.received.saturating_sub(less.received) as f64) as u64;
        }
    }
}

/// What `plan` is predicted to do: means over the workload's lengths. `closed_form` is the caller's.
///
/// # Errors
/// When a profile is missing, or the plan cannot be lowered.
pub(crate) fn predict(request: &Request<'_>, plan: &Plan) -> Result<Prediction, PlanningError> {
    predicted(request, plan, LENGTHS, layers(plan))
}

/// The same by few layers, within [`ROUGH`] of it.
pub(crate) fn roughly(request: &Request<'_>, plan: &Plan) -> Result<Prediction, PlanningError> {
    predicted(request, plan, LENGTHS, rough_layers(plan))
}

/// How far a rough prediction may be from a full one, as a share of it.
pub(crate) const ROUGH: f64 = 0.06;

/// Whether [`roughly`] tells of this plan all that [`predict`] does.
pub(crate) fn fully_by_few(plan: &Plan) -> bool {
    plan.layout == Layout::Stages || rough_layers(plan) == layers(plan)
}

fn rough_layers(plan: &Plan) -> u32 {
    if plan.any_sequence() { FEW_BY_ROWS } else { LAYERS }
}

fn layers(plan: &Plan) -> u32 {
    if plan.any_sequence() { LAYERS_BY_ROWS } else { LAYERS }
}

fn predicted(
    request: &Request<'_>,
    plan: &Plan,
    lengths: usize,
    layers: u32,
) -> Result<Prediction, PlanningError> {
    let mut mean: Option<Run> = None;
    for (rows, share) in closed::lengths(request, lengths) {
        let limit = request.spec.position_limit().min(plan.max_rows).max(1);
        let shape = BatchShape::single(rows.min(limit), request.workload.wanted)
            .map_err(|e| PlanningError::Lower(e.into()))?;
        let run = run(request, plan, &shape, layers)?;
        let nothing = blank(&run);
        mean.get_or_insert_with(|| nothing.clone()).add(&run, &nothing, share);
    }
    let nothing = || PlanningError::Nothing { why: "the workload has no lengths".into() };
    let mean = mean.ok_or_else(nothing)?;
    Ok(Prediction { latency: mean.latency, closed_form: mean.latency, devices: mean.devices })
}

fn blank(run: &Run) -> Run {
    let device = |d: &DeviceShare| DeviceShare {
        name: d.name.clone(),
        compute: 0.0,
        links: 0.0,
        waiting: 0.0,
        sent: 0,
        received: 0,
    };
    Run { latency: 0.0, devices: run.devices.iter().map(device).collect() }
}

/// One text of this shape: few layers of each run of equal ones are simulated, and the rest is added.
fn run(
    request: &Request<'_>,
    plan: &Plan,
    shape: &BatchShape,
    layers: u32,
) -> Result<Run, PlanningError> {
    let spec = request.spec;
    if plan.layout == Layout::Stages {
        // Few operations: nothing of a stage is cut into tiles.
        return simulated(request, spec, plan, shape);
    }
    let (short_spec, short) = shortened(spec, plan, layers);
    let mut total = simulated(request, &short_spec, &short, shape)?;
    if short_spec.layers == spec.layers {
        return Ok(total);
    }
    for run in &plan.modes {
        let left = run.layers.len().saturating_sub(layers);
        if left == 0 {
            continue;
        }
        // The same plan, if all its layers were cut as these are.
        let mut alike = plan.clone();
        alike.modes = vec![*run];
        alike.modes[0].layers = galaxy_common::Span::first(layers);
        for device in &mut alike.ring {
            for part in [&mut device.prefill, &mut device.decode] {
                let mut block = part.block(run.layers.start());
                block.layers = alike.modes[0].layers;
                part.blocks = vec![block];
            }
        }
        let more_spec = ModelSpec { layers, ..spec.clone() };
        let more = if plan.modes.len() == 1 {
            total.clone()
        } else {
            simulated(request, &more_spec, &alike, shape)?
        };
        let (less_spec, less) = shortened(&more_spec, &alike, layers - 1);
        let less = simulated(request, &less_spec, &less, shape)?;
        total.add(&more, &less, f64::from(left));
    }
    Ok(total)
}

/// One text of this shape, all layers.
fn simulated(
    request: &Request<'_>,
    spec: &ModelSpec,
    plan: &Plan,
    shape: &BatchShape,
) -> Result<Run, PlanningError> {
    let programs = lower(spec, plan, request.workload.phase, shape)?;
    let costs = ProfileCosts::new(spec, plan, shape, request.profile)?;
    let run = simulate(&programs, &costs);
    let run = run.map_err(|e| PlanningError::Nothing { why: e.to_string() })?;
    let devices = programs.iter().zip(&run.times).map(|(program, times)| {
        let compute = timeline::lane_use(program, times).swap_remove(0);
        let (sent, received) = timeline::traffic(program);
        DeviceShare {
            name: plan.ring[program.rank.index()].name.clone(),
            compute: compute.busy as f64,
            links: costs.links_of(program),
            waiting: run.total.saturating_sub(compute.busy) as f64,
            sent,
            received,
        }
    });
    Ok(Run { latency: run.total as f64, devices: devices.collect() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{draft, testing, testing::Question};
    use galaxy_common::{Bytes, Strategy};
    use galaxy_graph::budget;

    /// Few layers stand for all: latency within 1%, of rows cut equally over unlike devices
    /// within 2%; memory exactly.
    #[test]
    fn few_layers_tell_what_all_would() {
        let bert = testing::bert(12, 512);
        let llama = testing::llama(10, 1024, 16, 4);
        let mut worst: f64 = 0.0;
        for (spec, rate) in [(&bert, 1e8), (&bert, 5e6), (&llama, 1e8), (&llama, 1e7)] {
            for tiles in [1, 2, 4, 8] {
                for strategy in [
                    Strategy::Galaxy,
                    Strategy::Megatron,
                    Strategy::Sequence,
                    Strategy::Pipeline,
                    Strategy::Local,
                    Strategy::Auto,
                ] {
                    let mut question = Question::new(spec, testing::devices(3, 30.0, rate));
                    (question.allowed.strategy, question.allowed.tiles) = (strategy, Some(tiles));
                    let request = question.request();
                    let planned = crate::plan(&request).unwrap();
                    let shape = BatchShape::single(128, request.workload.wanted).unwrap();
                    let all = simulated(&request, spec, &planned.plan, &shape).unwrap().latency;
                    let few = run(&request, &planned.plan, &shape, layers(&planned.plan))
                        .unwrap()
                        .latency;
                    println!("{} {rate} {strategy} {tiles}: {:.4}", spec.family, few / all);
                    worst = worst.max((few / all - 1.0).abs());
                    let rough = run(&request, &planned.plan, &shape, rough_layers(&planned.plan));
                    let rough = rough.unwrap().latency;
                    assert!((rough / all - 1.0).abs() < ROUGH, "{strategy}: {rough}, {all}");
                    let needs = draft::needs(&request, &planned.plan).unwrap();
                    let full = budget::needs_all(spec, 4, &planned.plan).unwrap();
                    let total = |needs: &[budget::Needs]| -> Vec<Bytes> {
                        needs.iter().map(budget::Needs::total).collect()
                    };
                    assert_eq!(total(&needs), total(&full), "{strategy}, {tiles}");
                }
            }
        }
        assert!(worst < 0.02, "{worst}");
    }
}
