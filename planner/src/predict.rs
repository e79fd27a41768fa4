//! Predicts the latency of a plan, and what each device does, by the simulator.

use crate::{
    cost_model,
    costs::ProfileCosts,
    request::{DeviceShare, PlanningError, Prediction, Request},
};
use galaxy_common::{
    BatchShape, CandidateCount, DevicePlan, Layout, Plan, Segment, Wanted, plan::Phase,
};
use galaxy_graph::{
    lower,
    program::{Block, Operation},
    simulate, timeline, truncated,
};
use galaxy_model::ModelSpec;

/// How many lengths stand for all of a workload.
pub(crate) const LENGTHS: usize = 3;

/// How many layers of each run that is cut alike are simulated: each further one adds what the second did. The
/// first differs, because lanes start empty.
const LAYERS: u32 = 2;
/// How many layers of each run are simulated where blocks are cut by rows. Devices run ahead of one another there,
/// so that the last layer differs too, and every other one may: further ones add what the third and the fourth did
/// in the mean.
const LAYERS_BY_ROWS: u32 = 5;

/// Latency and shares of one run, or of a part of it.
#[derive(Clone, Debug)]
struct Run {
    latency: f64,
    devices: Vec<DeviceShare>,
}

impl Run {
    fn nothing(plan: &Plan) -> Self {
        let device = |d: &DevicePlan| DeviceShare {
            name: d.name.clone(),
            compute: 0.0,
            links: 0.0,
            waiting: 0.0,
            stalled: 0.0,
            sent: 0,
            received: 0,
        };
        Self { latency: 0.0, devices: plan.ring.iter().map(device).collect() }
    }

    /// Adds another run so many times.
    fn add(&mut self, other: &Self, times: f64) {
        self.latency += times * other.latency;
        for (sum, more) in self.devices.iter_mut().zip(&other.devices) {
            sum.compute += times * more.compute;
            sum.links += times * more.links;
            sum.waiting += times * more.waiting;
            sum.stalled += times * more.stalled;
            sum.sent += (times * more.sent as f64) as u64;
            sum.received += (times * more.received as f64) as u64;
        }
    }
}

/// Predicts the latency of `plan` for a request: means over the workload's lengths. `closed_form` repeats the latency;
/// the planner puts its own in.
///
/// # Errors
/// When a profile is missing, or the plan cannot be lowered.
pub(crate) fn predict(request: &Request<'_>, plan: &Plan) -> Result<Prediction, PlanningError> {
    let mut mean = Run::nothing(plan);
    let (mut token, made) = (0.0, request.generated_tokens(plan));
    for cost_model::Load { texts, text: rows, share } in cost_model::loads(request, LENGTHS) {
        let wanted = request.workload.wanted;
        let segment = |slot| Segment { slot, context_len: 0, cached: false, rows, wanted };
        let shape = BatchShape::new((0..texts).map(segment).collect())
            .map_err(|e| PlanningError::Lower(e.into()))?;
        mean.add(&run(request, plan, Phase::Prefill, &shape)?, share);
        if made > 0 {
            let one = decode_step(request, plan, rows, 1)?;
            token += share * one.latency;
            mean.add(&one, share * f64::from(made));
        }
    }
    let Run { latency, devices } = mean;
    Ok(Prediction { latency, token, closed_form: latency, devices })
}

/// Nanoseconds of a decode step of each of these numbers of sequences: means over the workload's lengths. Nothing where
/// no tokens are generated.
///
/// # Errors
/// When a profile is missing, or the plan cannot be lowered.
pub(crate) fn decode_steps(
    request: &Request<'_>,
    plan: &Plan,
    sequences: &[u32],
) -> Result<Vec<(u32, f64)>, PlanningError> {
    if request.generated_tokens(plan) == 0 {
        return Ok(Vec::new());
    }
    let of = |&sequences: &u32| {
        let mut mean = 0.0;
        for cost_model::Load { text, share, .. } in cost_model::loads(request, LENGTHS) {
            mean += share * decode_step(request, plan, text, sequences)?.latency;
        }
        Ok((sequences, mean))
    };
    sequences.iter().map(of).collect()
}

/// Predicts a decode step of sequences with prompts of so many rows; the token in the middle stands for all.
fn decode_step(
    request: &Request<'_>,
    plan: &Plan,
    prompt: u32,
    sequences: u32,
) -> Result<Run, PlanningError> {
    let middle = prompt + request.generated_tokens(plan) / 2;
    let context_len = middle.min(request.spec.position_limit().saturating_sub(1));
    let wanted = Wanted::Token(CandidateCount::Few);
    let segment = |slot| Segment { slot, context_len, cached: true, rows: 1, wanted };
    let shape = BatchShape::new((0..sequences).map(segment).collect())
        .map_err(|e| PlanningError::Lower(e.into()))?;
    run(request, plan, Phase::Decode, &shape)
}

/// Predicts a batch of this shape: few layers of each run that is cut alike are simulated, and the rest is added.
fn run(
    request: &Request<'_>,
    plan: &Plan,
    phase: Phase,
    shape: &BatchShape,
) -> Result<Run, PlanningError> {
    let spec = request.spec;
    let layers = if plan.any_sequence() { LAYERS_BY_ROWS } else { LAYERS };
    let longest =
        shape.segments().iter().map(|text| text.context_len + text.rows).max().unwrap_or(0);
    let streams = plan.ring.iter().any(|device| device.streaming.is_some());
    if plan.layout == Layout::Stages || streams || !spec.sees_alike(longest) {
        // Whole: stages are unlike one another, and so are layers of which not all stays, or some see less.
        return Ok(simulated(request, spec, plan, phase, shape)?.0);
    }
    let (short_spec, short) = truncated::truncated(spec, plan, |all| all.min(layers));
    let (mut all, steps) = simulated(request, &short_spec, &short, phase, shape)?;
    let mut end = 0;
    for run in truncated::runs(plan) {
        let own = run.len().min(layers);
        end += own as usize;
        let left = f64::from(run.len() - own);
        match &steps[end - own as usize..end] {
            [_, _, third, fourth, _] => {
                all.add(third, left / 2.0);
                all.add(fourth, left / 2.0);
            }
            steps => steps.last().into_iter().for_each(|last| all.add(last, left)),
        }
    }
    Ok(all)
}

/// Simulates all layers of a batch of this shape: what it takes, and what each layer adds. A layer is measured
/// between the ends of attentions, since what follows them is the same in the last layer.
fn simulated(
    request: &Request<'_>,
    spec: &ModelSpec,
    plan: &Plan,
    phase: Phase,
    shape: &BatchShape,
) -> Result<(Run, Vec<Run>), PlanningError> {
    let programs = lower(spec, request.formats, plan, phase, &shape.unbound())?;
    let costs = ProfileCosts::new(spec, plan, shape, request.profile)?;
    let run = simulate(&programs, &costs);
    let run = run.map_err(|e| PlanningError::Nothing { why: e.to_string() })?;
    let mut all = Run { latency: run.total as f64, ..Run::nothing(plan) };
    let mut layers = vec![Run::nothing(plan); spec.layers as usize];
    let mut ends = vec![0; spec.layers as usize];
    // What the busiest cable out of a device works for each layer.
    let mut busiest = vec![0u64; spec.layers as usize];
    for (program, times) in programs.iter().zip(&run.times) {
        let device = program.rank.index();
        let of_layer = |op: &Operation| {
            let inside = matches!(op.block, Block::Attention | Block::Connective | Block::Mlp);
            Some(op.layer as usize).filter(|&layer| inside && layer < layers.len())
        };
        let places: Vec<Option<usize>> = program.operations.iter().map(of_layer).collect();
        let stalled = timeline::stalled(program, times) as f64;
        let mut count = |at: usize, add: &dyn Fn(&mut DeviceShare)| {
            add(&mut all.devices[device]);
            if let Some(layer) = places[at] {
                add(&mut layers[layer].devices[device]);
            }
        };
        let mut sending = vec![0u64; spec.layers as usize];
        for (at, op) in program.operations.iter().enumerate() {
            let (sent, received) = timeline::moved(program, op);
            if let Some(layer) = places[at] {
                if sent > 0 {
                    sending[layer] += times[at].1 - times[at].0;
                }
                if op.block == Block::Attention {
                    ends[layer] = times[at].1.max(ends[layer]);
                }
            }
            if sent + received > 0 {
                let links = costs.links_of(program, op, sent + received);
                count(at, &|share| {
                    share.sent += sent;
                    share.received += received;
                    share.links += links;
                });
            }
        }
        busiest.iter_mut().zip(sending).for_each(|(most, own)| *most = own.max(*most));
        timeline::each_compute(program, times, |id, busy, awaiting| {
            count(id.0 as usize, &|share| {
                share.compute += busy as f64;
                share.waiting += awaiting as f64;
            });
        });
        all.devices[device].stalled += stalled;
    }
    let mut before = 0;
    for ((layer, end), busiest) in layers.iter_mut().zip(ends).zip(busiest) {
        // In the long run no layer takes less than the device that is busiest with it.
        let kernels = layer.devices.iter().map(|d| d.compute).fold(0.0, f64::max);
        let took = end.saturating_sub(before) as f64;
        layer.latency = took.max(kernels).max(busiest as f64);
        before = end;
    }
    Ok((all, layers))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{testing, testing::Question};
    use galaxy_common::Strategy;

    /// A few layers stand for all: latency within 1%.
    #[test]
    fn latency_from_a_few_layers_is_within_1_percent_of_all_layers() {
        let bert = testing::bert(12, 512);
        let llama = testing::llama(10, 1024, 16, 4);
        let mut worst: f64 = 0.0;
        for (spec, rate) in [(&bert, 1e8), (&bert, 5e6), (&llama, 1e8), (&llama, 1e7)] {
            for tiles in [1, 2, 4, 8] {
                for strategy in Strategy::ALL {
                    let mut question = Question::new(spec, testing::devices(3, 30.0, rate));
                    (question.allowed.strategy, question.allowed.tiles) = (strategy, Some(tiles));
                    let request = question.request();
                    let planned = crate::plan(&request).unwrap();
                    let shape = BatchShape::single(128, request.workload.wanted).unwrap();
                    let phase = Phase::Prefill;
                    let plan = &planned.plan;
                    let all = simulated(&request, spec, plan, phase, &shape).unwrap().0.latency;
                    let few = run(&request, plan, phase, &shape).unwrap().latency;
                    println!("{} {rate} {strategy} {tiles}: {:.4}", spec.family, few / all);
                    worst = worst.max((few / all - 1.0).abs());
                }
            }
        }
        assert!(worst < 0.01, "{worst}");
    }

    #[test]
    fn a_step_of_several_sequences_takes_more_than_one_and_less_than_each_alone() {
        let llama = testing::llama(4, 1024, 16, 4);
        for strategy in [Strategy::Local, Strategy::Galaxy, Strategy::Pipeline] {
            let mut question = Question::new(&llama, testing::devices(2, 30.0, 1e8));
            question.allowed.strategy = strategy;
            question.allowed.cache.rows = 8192;
            question.workload.generated = 64;
            let request = question.request();
            let planned = crate::plan(&request).unwrap();
            let steps = decode_steps(&request, &planned.plan, &[1, 4, 8]).unwrap();
            assert_eq!(steps[0], (1, planned.prediction.token), "{strategy}");
            for pair in steps.windows(2) {
                let times = f64::from(pair[1].0) / f64::from(pair[0].0);
                let slower = pair[1].1 / pair[0].1;
                assert!(slower > 1.0 && slower < times, "{strategy}: {steps:?}");
            }
        }
    }
}
