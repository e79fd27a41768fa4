//! Making tokens: one device's part, which is every other device's, too.
//!
//! A program of one row for each sequence runs again and again, each time with the tokens that it chose. Where
//! candidates did not prove the choice for a sequence, the same rows run once more with a program that names
//! more for it; every device finds that out by itself, from the same tiles. What was proved for the others stays
//! as it is: each choice is told, and counts, once.

use crate::{
    choose::TokenMask,
    compute::Inputs,
    executor::{Choice, Executor, Job, RunError, RunReport, Step},
};
use galaxy_common::{BatchShape, Breadth, GeneratedToken, Segment, TokenGoal, Wanted};
use galaxy_graph::Program;
use std::sync::Arc;

/// What is told of a token.
pub type Told = Choice;

/// A token by what is told of it, with what it adds to the text.
pub fn token(told: &Told, text: String) -> GeneratedToken {
    let [token, logprob, _, count, likely @ ..] = told;
    let top = likely.chunks_exact(2).take(*count as usize).map(|pair| (pair[0] as u32, pair[1]));
    GeneratedToken { token: *token as u32, logprob: *logprob, top: top.collect(), text }
}

/// Tokens that are made at a time, before anybody may say that they are enough: on a device that makes a token
/// in 50 ms, four fifths of a second.
pub const STINT: u32 = 16;

/// What is wanted of a sequence.
#[derive(Clone, Default, Debug)]
pub struct Goal {
    /// How many tokens to make; more than one only from a single row.
    pub count: u32,
    /// None is made behind one of these.
    pub stop: Arc<[u32]>,
    /// Which tokens may be chosen, all without a mask. It holds until another is given.
    pub mask: Option<TokenMask>,
}

impl From<&TokenGoal> for Goal {
    fn from(TokenGoal { count, stop }: &TokenGoal) -> Self {
        Self { count: *count, stop: stop.clone(), mask: None }
    }
}

/// Tokens to make for the sequences of a batch, until one of them has what is wanted of it.
pub struct Generation {
    /// The first step: rows of a prompt, or of the last token of each sequence.
    pub first: Job,
    /// For each choice of its batch ([`BatchShape::choices`]).
    pub goals: Vec<Goal>,
}

/// What came of it.
#[derive(Debug)]
pub struct Generated {
    /// From the first step to the last; results and timeline are of the last.
    pub report: RunReport,
    /// How many tokens were made for each sequence: for all as many.
    pub count: u32,
    /// How many candidates the last choice for each sequence needed of each device: a good guess for the
    /// next.
    pub breadths: Vec<Breadth>,
}

impl Generation {
    /// Makes tokens, and tells of each: `tell` gets the number of the sequence, and may give a mask that holds
    /// for it from the next token on. `program` gives this device's program for another shape than the first.
    ///
    /// # Errors
    /// When a program is not to be had, goals do not fit the batch, or a run fails.
    pub fn run<E: From<RunError>>(
        self,
        executor: &Executor,
        mut program: impl FnMut(&BatchShape) -> Result<Arc<Program>, E>,
        mut tell: impl FnMut(usize, &Told) -> Option<TokenMask>,
    ) -> Result<Generated, E> {
        let Self { first: mut job, goals } = self;
        let shape = &job.binding.shape;
        if goals.is_empty() || goals.len() != shape.choices().count() {
            let why = "not as many goals as tokens that are wanted of the batch".to_owned();
            return Err(RunError::Program(why).into());
        }
        if shape.rows() as usize != goals.len() && goals.iter().any(|goal| goal.count > 1) {
            let why = "more than one token is made from single rows only".to_owned();
            return Err(RunError::Program(why).into());
        }
        job.binding.masks = goals.iter().map(|goal| goal.mask.clone()).collect();
        let (mut progress, mut before) = (Progress::new(goals), None::<RunReport>);
        loop {
            progress.steps = 0;
            let (run, masks) = (job.clone(), &mut job.binding.masks);
            let mut report = executor.run_steps(run, &mut |told, next| {
                let step = progress.step(told, next, &mut tell);
                masks.clone_from_slice(next);
                step
            })?;
            if let Some(before) = &before {
                report.follow(before);
            }
            let shape = &job.binding.shape;
            if progress.over {
                let breadths = shape.choices().map(|(.., breadth)| breadth).collect();
                return Ok(Generated { report, count: progress.made, breadths });
            }
            before = Some(report);
            job.binding.shape = progress.again(shape)?;
            job.program = program(&job.binding.shape)?;
            if progress.steps > 0 {
                job.binding.inputs = Inputs::from(progress.last.as_slice());
            }
        }
    }
}

/// How far the sequences of a batch are.
struct Progress {
    goals: Vec<Goal>,
    /// Choices of the step at hand that are proved.
    proved: Vec<Option<Told>>,
    /// The last tokens that were told.
    last: Vec<u32>,
    /// Tokens that were told, of each sequence.
    made: u32,
    /// How many of them came of the run at hand.
    steps: u32,
    /// Whether choices of the step at hand are not proved yet.
    lacks: bool,
    /// Whether a sequence has what is wanted of it.
    over: bool,
}

impl Progress {
    fn new(goals: Vec<Goal>) -> Self {
        let (proved, last) = (vec![None; goals.len()], vec![0; goals.len()]);
        Self { goals, proved, last, made: 0, steps: 0, lacks: false, over: false }
    }

    /// Takes what a step has chosen. Once all is proved, tells of it and clears it away.
    fn step(
        &mut self,
        told: &[Told],
        masks: &mut [Option<TokenMask>],
        tell: &mut impl FnMut(usize, &Told) -> Option<TokenMask>,
    ) -> Step {
        let is_proved = |told: &Told| told[2] > 0.0;
        for (proved, told) in self.proved.iter_mut().zip(told) {
            *proved = proved.or_else(|| is_proved(told).then_some(*told));
        }
        self.lacks = self.proved.iter().any(Option::is_none);
        if self.lacks {
            return Step::Done;
        }
        (self.made, self.steps) = (self.made + 1, self.steps + 1);
        for (at, proved) in self.proved.iter_mut().enumerate() {
            let Some(told) = proved.take() else { continue };
            if let Some(mask) = tell(at, &told) {
                masks[at] = Some(mask);
            }
            let (goal, token) = (&self.goals[at], told[0] as u32);
            self.over |= self.made >= goal.count || goal.stop.contains(&token);
            self.last[at] = token;
        }
        // A choice that was proved by an earlier run of the step may not be by this one.
        if self.over || !told.iter().all(is_proved) { Step::Done } else { Step::Next }
    }

    /// The batch to go on with after a run that ended early. Its steps became past, and sequences whose choice
    /// is not proved are asked for more candidates. Only one is asked for all at a time: budgets have room for
    /// that.
    fn again(&self, shape: &BatchShape) -> Result<BatchShape, RunError> {
        let mut segments: Vec<Segment> = shape.segments().to_vec();
        let mut open = self.proved.iter().map(|proved| self.lacks && proved.is_none());
        let mut choices = shape.choices().zip(open.clone());
        let all = choices.find(|((.., breadth), open)| *open && *breadth == Breadth::Many);
        let all = all.map(|((index, ..), _)| index);
        for (index, segment) in segments.iter_mut().enumerate() {
            segment.past = segment.past.saturating_add(segment.rows * self.steps);
            let Wanted::Token(breadth) = &mut segment.wanted else { continue };
            *breadth = match (*breadth, open.next().unwrap_or(false)) {
                (Breadth::Few, true) => Breadth::Many,
                (Breadth::Many, true) if all == Some(index) => Breadth::All,
                (Breadth::All, false) if all.is_some() => Breadth::Many,
                (Breadth::All, true) => {
                    let why = "all candidates do not prove a choice".to_owned();
                    return Err(RunError::Program(why));
                }
                (breadth, _) => breadth,
            };
        }
        BatchShape::new(segments).map_err(|error| RunError::Program(error.to_string()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Sequences whose choices are proved by so many candidates, over some steps: each token is told once, in
    /// order, and no two are asked for all candidates at a time.
    #[test]
    fn each_choice_is_told_once_however_often_a_step_runs() {
        use Breadth::{All, Few, Many};
        let needed = [Few, All, Many, All, Few];
        let segment =
            |slot| Segment { slot, past: 9, kept: true, rows: 1, wanted: Wanted::Token(Few) };
        let mut shape = BatchShape::new((0..5).map(segment).collect()).unwrap();
        let mut progress = Progress::new(vec![Goal { count: 4, ..Goal::default() }; 5]);
        let (mut masks, mut told) = (vec![None; 5], Vec::new());
        let mut runs = 0;
        while !progress.over {
            runs += 1;
            progress.steps = 0;
            let asked_for_all = shape.choices().filter(|(.., breadth)| *breadth == All);
            assert!(asked_for_all.count() <= 1);
            let mut bound = shape.clone();
            loop {
                let choices = bound.choices().zip(needed).map(|((at, segment, have), need)| {
                    let mut choice = [0.0; 44];
                    choice[0] = (100 * segment.past as usize + at) as f32;
                    choice[2] = f32::from(u8::from(have >= need));
                    choice
                });
                let choices: Vec<Told> = choices.collect();
                let mut tell = |at, one: &Told| {
                    told.push((at, one[0] as usize));
                    None
                };
                match progress.step(&choices, &mut masks, &mut tell) {
                    Step::Next => bound.advance(),
                    Step::Done => break,
                }
            }
            if !progress.over {
                shape = progress.again(&shape).unwrap();
            }
        }
        let want = (9..13).flat_map(|past| (0..5).map(move |at| (at, 100 * past + at)));
        assert_eq!(told, want.collect::<Vec<_>>());
        assert!(runs < 16, "{runs} runs for 4 steps");
    }
}
