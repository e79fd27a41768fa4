//! Decode bursts: which tokens a request asks to generate, and this device's part of them.

use crate::{
    error::WorkerError,
    running::{Active, Events},
};
use bytes::Bytes;
use galaxy_common::{BatchShape, Burst, Sequence, TokenGoal, plan::Phase};
use galaxy_engine::{
    compute::Inputs,
    executor::{Executor, Job},
    generate::{Drafting, Generated, Generation, Goal, Listener, TokenEvent},
    sampler::TokenMask,
};
use galaxy_graph::{
    budget::{self, SEQUENCES},
    program::TOKEN_VALUES,
};
use galaxy_proto::v1;

/// The most tokens that one execution may generate for a sequence.
const MOST: u32 = 64;

/// A decode burst that was checked, and whether each step is reported.
pub(crate) struct Decode {
    burst: Burst,
    report_steps: bool,
}

fn wrong(why: String) -> WorkerError {
    WorkerError::Burst { why }
}

/// Checks a sequence that begins, for a vocabulary of so many tokens.
pub(crate) fn checked(text: Sequence, vocabulary: u32) -> Result<Sequence, WorkerError> {
    let sampling = text.sampling.checked(vocabulary);
    let sampling = sampling.map_err(|error| wrong(error.to_string()))?;
    if text.tokens.len() > text.rows as usize {
        return Err(wrong("a sequence has more tokens than room is taken for".to_owned()));
    }
    Ok(Sequence { sampling, ..text })
}

impl Decode {
    /// Checks a burst against the batch that it begins with.
    pub(crate) fn read(burst: v1::Burst, shape: &BatchShape) -> Result<Self, WorkerError> {
        let (report_steps, burst) = (burst.report_steps, Burst::from(burst));
        let mut slots: Vec<u32> = shape.sampled().map(|(_, segment, _)| segment.slot).collect();
        slots.sort_unstable();
        let (goals, choices) = (burst.goals.len(), shape.sampled().count());
        let longest = burst.goals.iter().map(|goal| goal.count).max().unwrap_or(0);
        let why = if goals == 0 || goals != choices {
            format!("{goals} sequences are to get tokens, and {choices} of the batch want some")
        } else if goals > SEQUENCES as usize {
            format!("{goals} sequences are to get tokens, and {SEQUENCES} may at a time")
        } else if slots.windows(2).any(|pair| pair[0] == pair[1]) {
            "two tokens of a step are wanted of one sequence".to_owned()
        } else if burst.goals.iter().any(|goal| goal.count == 0) {
            "no tokens are to be generated for a sequence".to_owned()
        } else if burst.steps == 0 {
            "no step is to run".to_owned()
        } else if longest > MOST {
            format!("{longest} tokens are to be generated, and {MOST} may be at a time")
        } else if longest > 1 && shape.rows() as usize != goals {
            "more than one token is generated from single rows only".to_owned()
        } else {
            return Ok(Self { burst, report_steps });
        };
        Err(wrong(why))
    }

    /// The phase whose programs run the burst.
    pub(crate) fn phase(&self) -> Phase {
        self.burst.phase
    }

    /// The most steps that can be reported: each but the last generates something, for one sequence at least.
    pub(crate) fn steps(&self) -> usize {
        self.burst.goals.iter().map(|goal| goal.count as usize).sum()
    }

    /// Generates tokens from what `job` begins with: the result, and the tokens of one sequence after another.
    pub(crate) fn run(
        self,
        executor: &Executor,
        job: Job,
        active: &Active,
        events: &Events,
    ) -> Result<(Generated, Vec<u32>), WorkerError> {
        let Self { burst: Burst { phase, goals, steps, row_cost }, report_steps } = self;
        match job.binding.inputs {
            Inputs::Tokens(_) => {}
            Inputs::Typed { .. } => {
                return Err(wrong("a pair of sequences cannot be continued".to_owned()));
            }
            Inputs::Patches { .. } => {
                return Err(wrong("a model of images generates no text".to_owned()));
            }
        }
        let most = budget::sequences(&active.plan);
        let room = |goal: &TokenGoal| Vec::with_capacity(goal.count as usize);
        let mut reported = Steps {
            tokens: goals.iter().map(room).collect(),
            step: Vec::with_capacity(most as usize * TOKEN_VALUES as usize),
            counts: vec![0; goals.len()],
            events: report_steps.then_some(events),
        };
        let drafting = row_cost.map(|row_cost| Drafting { row_cost, rows: most });
        let goals = goals.iter().map(Goal::from).collect();
        let generation = Generation { first: job, goals, steps, drafting };
        let program = |shape: &BatchShape| active.lower(phase, shape).map(|(_, program)| program);
        let generated = generation.run(executor, program, &mut reported)?;
        Ok((generated, reported.tokens.concat()))
    }
}

/// Collects the tokens, and reports each step.
struct Steps<'a> {
    /// The tokens of each sequence.
    tokens: Vec<Vec<u32>>,
    /// The values of the tokens of the current step, `TOKEN_VALUES` of each.
    step: Vec<f32>,
    /// How many tokens of the current step belong to each sequence.
    counts: Vec<u32>,
    events: Option<&'a Events>,
}

impl Listener for &mut Steps<'_> {
    fn token(&mut self, at: usize, event: &TokenEvent) -> Option<TokenMask> {
        self.tokens[at].push(event[0] as u32);
        self.step.extend_from_slice(event);
        self.counts[at] += 1;
        None
    }

    fn step(&mut self) {
        if let Some(events) = self.events.filter(|_| !self.step.is_empty()) {
            let tokens = Bytes::copy_from_slice(bytemuck::cast_slice(&self.step));
            let step = v1::GeneratedStep { counts: self.counts.clone(), tokens };
            let event = v1::ExecuteEvent { event: Some(v1::execute_event::Event::Step(step)) };
            // There is room for all events; a caller that hung up misses nothing.
            drop(events.try_send(Ok(event)));
        }
        self.step.clear();
        self.counts.fill(0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::{CandidateCount, Sampling, Segment, Wanted};
    use galaxy_proto::convert;

    fn shape(rows: u32, wanted: &[Wanted]) -> BatchShape {
        let segment = |(slot, wanted): (u32, &Wanted)| Segment {
            slot,
            context_len: 0,
            cached: true,
            rows,
            wanted: *wanted,
        };
        BatchShape::new((0..).zip(wanted).map(segment).collect()).unwrap()
    }

    #[test]
    fn invalid_decode_bursts_and_sequences_are_rejected() {
        let token = Wanted::Token(CandidateCount::Few);
        let read = |counts: &[u32], rows, wanted: &[Wanted]| {
            let goal = |count: &u32| v1::TokenGoal { count: *count, stop: vec![] };
            let goals = counts.iter().map(goal).collect();
            let burst =
                v1::Burst { goals, decode: true, report_steps: true, steps: 8, row_cost: 0.5 };
            Decode::read(burst, &shape(rows, wanted)).map(|d| d.steps()).map_err(|e| e.to_string())
        };
        assert_eq!(read(&[64], 1, &[token]), Ok(64));
        assert_eq!(read(&[1], 9, &[token]), Ok(1));
        assert_eq!(read(&[3, 7], 1, &[token, token]), Ok(10));
        assert_eq!(read(&[1, 1], 5, &[token, Wanted::Nothing, token]), Ok(2));
        for (counts, rows, wanted, says) in [
            (&[0][..], 1, &[token][..], "no tokens"),
            (&[65], 1, &[token], "64 may be"),
            (&[u32::MAX], 1, &[token], "64 may be"),
            (&[2], 9, &[token], "single rows"),
            (&[2, 2], 1, &[token, Wanted::Nothing, token], "single rows"),
            (&[1], 9, &[Wanted::Nothing], "0 of the batch"),
            (&[], 9, &[Wanted::Nothing], "0 sequences"),
            (&[1], 1, &[token, token], "2 of the batch"),
            (&[1; 99], 1, &[token; 99], "may at a time"),
        ] {
            let error = read(counts, rows, wanted).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let twice =
            |context_len| Segment { slot: 4, context_len, cached: true, rows: 1, wanted: token };
        let twice = BatchShape::new(vec![twice(7), twice(8)]).unwrap();
        let goals = vec![v1::TokenGoal { count: 1, stop: vec![] }; 2];
        let burst = v1::Burst { goals, decode: true, report_steps: true, steps: 1, row_cost: 0.0 };
        let error = Decode::read(burst, &twice).map(|d| d.steps()).unwrap_err().to_string();
        assert!(error.contains("of one sequence"), "{error}");
        let begins = |text: v1::SequenceStart| checked(convert::sequence_from_wire(text)?.0, 10);
        let refused = |text: v1::SequenceStart| begins(text).unwrap_err().to_string();
        let sampling = |s: &Sampling| postcard::to_stdvec(s).unwrap();
        let good = v1::SequenceStart {
            rows: 4,
            sampling: sampling(&Sampling::greedy()),
            ..v1::SequenceStart::default()
        };
        assert!(begins(good.clone()).is_ok());
        assert!(
            refused(v1::SequenceStart { sampling: vec![1], ..good.clone() }).contains("version")
        );
        let hot = sampling(&Sampling { temperature: f32::NAN, ..Sampling::greedy() });
        assert!(
            refused(v1::SequenceStart { sampling: hot, ..good.clone() }).contains("temperature")
        );
        assert!(refused(v1::SequenceStart { tokens: vec![1; 5], ..good }).contains("room"));
    }
}
