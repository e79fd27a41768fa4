//! Generating tokens: one device's part, which is the same on every other device.
//!
//! A program of one row for each sequence runs again and again, each time with the tokens that it chose. Where
//! candidates did not prove the choice for a sequence, its row runs once more with a program that names more for it;
//! where a draft says what may follow a sequence, its rows run beside the last token's. Every device finds both out by
//! itself, from the same tiles and the same tokens. Each choice is reported, and counts, once.

use crate::{
    compute::{Binding, Inputs},
    draft::{Histories, Lookup, share},
    executor::{Executor, Job, RunError, RunReport, RunStep, TokenValues},
    sampler::TokenMask,
};
use galaxy_common::{
    BatchShape, CandidateCount, GeneratedToken, Row, Segment, Span, TokenGoal, Wanted,
};
use galaxy_graph::{Program, program::TOKEN_VALUES};
use std::sync::Arc;

/// The values that are reported of a token.
pub type TokenEvent = TokenValues;

/// The generated token that has these values, with what it adds to the text.
pub fn token(told: &TokenEvent, text: String) -> GeneratedToken {
    let [token, logprob, _, _, count, likely @ ..] = told;
    let top = likely.chunks_exact(2).take(*count as usize).map(|pair| (pair[0] as u32, pair[1]));
    GeneratedToken { token: *token as u32, logprob: *logprob, top: top.collect(), text }
}

/// The steps of a decode burst, at most, before anybody may say that its tokens are enough: on a device that takes 50
/// ms for a token, four fifths of a second.
pub const BURST_STEPS: u32 = 16;

/// What is wanted of a sequence in a generation.
#[derive(Clone, Default, Debug)]
pub struct Goal {
    /// How many tokens to generate; more than one only from a single row.
    pub count: u32,
    /// The tokens that end the sequence: none is generated behind one of these.
    pub stop: Arc<[u32]>,
    /// The tokens that may be chosen; all without a mask. It holds until another is given.
    pub mask: Option<TokenMask>,
}

impl From<&TokenGoal> for Goal {
    fn from(TokenGoal { count, stop }: &TokenGoal) -> Self {
        Self { count: *count, stop: stop.clone(), mask: None }
    }
}

/// The limits of drafting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drafting {
    /// The time that one more row takes, as a share of the time of a step.
    pub row_cost: f32,
    /// The most rows of a step.
    pub rows: u32,
}

/// Tokens to generate for the sequences of a batch: until one of them has what is wanted of it, all steps have run or
/// somebody asks for an end, and each has at least one.
pub struct Generation {
    /// The first step: rows of a prompt, or of the last token of each sequence.
    pub first: Job,
    /// The goal for each choice of its batch ([`BatchShape::sampled`]).
    pub goals: Vec<Goal>,
    /// The most steps that are run.
    pub steps: u32,
    /// The limits of drafting; without them each sequence has one row in a step.
    pub drafting: Option<Drafting>,
}

/// The results of a generation.
#[derive(Debug)]
pub struct Generated {
    /// The report from the first step to the last: its timeline is that of the last step, and its outputs are the last
    /// token of each sequence.
    pub report: RunReport,
    /// How much was decoded.
    pub decoded: Decoded,
}

/// How many tokens a burst has decoded, and in how many steps.
#[derive(Debug, Clone, Default)]
pub struct Decoded {
    /// How many tokens were generated for each sequence.
    pub counts: Vec<u32>,
    /// How many candidates the last choice for each sequence needed of each device: a good guess for the
    /// next.
    pub candidate_counts: Vec<CandidateCount>,
    /// How many steps ran.
    pub steps: u32,
    /// How many rows all of these steps had.
    pub rows: u32,
    /// The shape of the last step, where drafted rows ran in it.
    pub last: Option<BatchShape>,
}

impl Decoded {
    /// The number of tokens of all sequences together.
    pub fn tokens(&self) -> u32 {
        self.counts.iter().sum()
    }

    /// The rows and the tokens beyond one of each sequence in a step: the rows that were drafted, and those of them
    /// that were right.
    pub fn beyond(&self) -> (u32, u32) {
        let one_each = self.steps.saturating_mul(self.counts.len() as u32);
        (self.rows.saturating_sub(one_each), self.tokens().saturating_sub(one_each))
    }
}

/// Somebody who hears of the tokens that are generated.
pub trait Listener {
    /// A token was generated for the sequence of this number. A mask that is given back holds from its next
    /// token on.
    fn token(&mut self, at: usize, told: &TokenEvent) -> Option<TokenMask>;
    /// All tokens of a step were reported.
    fn step(&mut self) {}
}

impl<F: FnMut(usize, &TokenEvent) -> Option<TokenMask>> Listener for F {
    fn token(&mut self, at: usize, told: &TokenEvent) -> Option<TokenMask> {
        self(at, told)
    }
}

impl Generation {
    /// Generates tokens, and reports each to `listener`. `program` gives this device's program for a shape other than
    /// the first.
    ///
    /// # Errors
    /// When `program` fails, goals do not fit the batch, or a run fails.
    pub fn run<E: From<RunError>>(
        self,
        executor: &Executor,
        mut program: impl FnMut(&BatchShape) -> Result<Arc<Program>, E>,
        mut listener: impl Listener,
    ) -> Result<Generated, E> {
        let Self { first: mut job, goals, steps: most, drafting } = self;
        let shape = &job.binding.shape;
        if goals.is_empty() || goals.len() != shape.sampled().count() {
            let why = "not as many goals as tokens that are wanted of the batch".to_owned();
            return Err(RunError::Program(why).into());
        }
        let single = shape.rows() as usize == goals.len();
        if !single && goals.iter().any(|goal| goal.count > 1) {
            let why = "more than one token is generated from single rows only".to_owned();
            return Err(RunError::Program(why).into());
        }
        job.binding.masks = goals.iter().map(|goal| goal.mask.clone()).collect();
        let slots = shape.sampled().map(|(_, segment, _)| segment.slot);
        let mut taken = Taken { histories: executor.take_histories(slots), executor };
        let histories = &mut taken.histories;
        let drafting = drafting.filter(|_| single);
        let mut progress = Progress::new(goals, &job.binding, (most, drafting), histories);
        if single {
            progress.draft(histories);
            progress.arrange();
            if !progress.rebind(&mut job.binding) {
                job.program = program(&job.binding.shape)?;
            }
        }
        let mut before = None::<RunReport>;
        loop {
            let binding = &mut job.binding;
            let mut report = executor.run_steps(
                Job { program: job.program.clone(), binding: binding.clone(), ..job },
                &mut |told, bound| {
                    progress.verify_drafts(told, histories, &mut listener);
                    if progress.is_over() {
                        return RunStep::Done;
                    }
                    progress.draft(histories);
                    progress.arrange();
                    match progress.rebind(bound) {
                        true => RunStep::Next,
                        false => RunStep::Done,
                    }
                },
            )?;
            if let Some(before) = &before {
                report.follow(before);
            }
            progress.check()?;
            if progress.is_over() {
                let Progress { sequences, steps, rows, .. } = progress;
                let drafted = single && progress.segments.len() != sequences.len();
                let last =
                    drafted.then(|| BatchShape::new(progress.segments.clone()).ok()).flatten();
                if single && !report.outputs.is_empty() {
                    report.outputs = sequences.iter().map(|of| of.last.to_vec()).collect();
                }
                let counts = sequences.iter().map(|of| of.generated).collect();
                let candidate_counts = sequences.iter().map(|of| of.needed).collect();
                let decoded = Decoded { counts, candidate_counts, steps, rows, last };
                return Ok(Generated { report, decoded });
            }
            before = Some(report);
            progress.rebind(binding);
            job.program = program(&binding.shape)?;
        }
    }
}

/// The tokens of the sequences that run, which go back to the executor when this is dropped.
struct Taken<'a> {
    executor: &'a Executor,
    histories: Histories,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.executor.put_histories(&mut self.histories);
    }
}

/// How far a sequence of a generation is.
struct Progression {
    goal: Goal,
    /// The segment of its next row, or of the rows of its prompt.
    segment: Segment,
    /// The last token, whose row is the next.
    token: u32,
    /// How many candidates its last choice needed.
    needed: CandidateCount,
    /// How many tokens were generated.
    generated: u32,
    /// The values that were reported of the last token.
    last: TokenEvent,
    /// Whether it has what is wanted of it.
    over: bool,
    drafted: Vec<u32>,
}

impl Progression {
    /// How many candidates its next choice is to have.
    fn candidate_count(&self) -> CandidateCount {
        match self.segment.wanted {
            Wanted::Token(breadth) => breadth,
            _ => CandidateCount::Few,
        }
    }

    /// Its segment for the next step, in which it may be asked for all candidates or not.
    fn next_segment(&self, all: bool) -> Segment {
        let most = if all { CandidateCount::All } else { CandidateCount::Many };
        Segment { wanted: Wanted::Token(self.candidate_count().min(most)), ..self.segment }
    }

    /// How many rows may be drafted behind its next.
    fn room(&self) -> u32 {
        let alone =
            self.over || self.goal.mask.is_some() || self.candidate_count() == CandidateCount::All;
        if alone { 0 } else { self.goal.count.saturating_sub(self.generated + 1) }
    }

    /// Takes a choice that is proved. Gives whether it is the token that was drafted, so that the choice behind it
    /// counts, too.
    fn accept(&mut self, row: usize, told: &TokenEvent, mask: Option<TokenMask>) -> bool {
        let token = told[0] as u32;
        (self.generated, self.last) = (self.generated + 1, *told);
        self.goal.mask = mask.or(self.goal.mask.take());
        self.over = self.generated >= self.goal.count || self.goal.stop.contains(&token);
        if !self.over {
            self.segment.context_len = self.segment.context_len.saturating_add(self.segment.rows);
            self.token = token;
        }
        // A mask is of the next choice: none that was made without it counts.
        !self.over && self.goal.mask.is_none() && self.drafted.get(row) == Some(&token)
    }

    /// Has its row run again for more candidates than these. False where there are no more.
    fn widen(&mut self, asked: CandidateCount) -> bool {
        let wider = asked.wider();
        self.segment.wanted = Wanted::Token(wider.unwrap_or(asked));
        wider.is_some()
    }
}

/// How far the sequences of a batch are.
struct Progress {
    sequences: Vec<Progression>,
    drafting: Option<Drafting>,
    most_steps: u32,
    lookups: Vec<Option<Lookup>>,
    drafts: Vec<u32>,
    /// All segments of the next step.
    segments: Vec<Segment>,
    /// The tokens of the rows of the next step, where each sequence began with a single row.
    tokens: Vec<u32>,
    /// The mask of each choice of the next step.
    masks: Vec<Option<TokenMask>>,
    /// Whether each sequence began with a single row, not with a prompt.
    single: bool,
    steps: u32,
    rows: u32,
    /// Whether somebody has asked for an end.
    ended: bool,
    /// Whether a choice is not proved by all candidates, which is an error.
    failed: bool,
}

impl Progress {
    fn new(
        goals: Vec<Goal>,
        binding: &Binding,
        (most_steps, drafting): (u32, Option<Drafting>),
        histories: &mut Histories,
    ) -> Self {
        let shape = &binding.shape;
        let most = drafting.map_or(0, |of| of.rows as usize).max(shape.segments().len());
        let choices = shape.placed().filter(|(_, of)| matches!(of.wanted, Wanted::Token(_)));
        let tokens = match &binding.inputs {
            Inputs::Tokens(tokens) => &tokens[..],
            _ => &[],
        };
        let sequence = |((rows, segment), goal): ((Span<Row>, &Segment), Goal)| {
            let run = tokens.get(rows.start() as usize..rows.end() as usize).unwrap_or_default();
            histories.runs(segment.slot, segment.context_len, run);
            let (segment, needed) = (*segment, CandidateCount::Few);
            let token = run.first().copied().unwrap_or(0);
            let drafted = Vec::with_capacity(if drafting.is_some() { most } else { 0 });
            let (generated, last, over) = (0, [0.0; TOKEN_VALUES as usize], false);
            Progression { goal, segment, token, needed, generated, last, over, drafted }
        };
        let sequences: Vec<_> = choices.zip(goals).map(sequence).collect();
        Self {
            lookups: Vec::with_capacity(sequences.len()),
            drafts: Vec::with_capacity(sequences.len()),
            segments: shape.segments().to_vec(),
            tokens: Vec::with_capacity(most),
            masks: Vec::with_capacity(most),
            single: shape.rows() as usize == sequences.len(),
            sequences,
            drafting,
            most_steps,
            steps: 0,
            rows: 0,
            ended: false,
            failed: false,
        }
    }

    /// Whether the generation is over: a sequence has what is wanted of it, all steps have run or an end is asked for,
    /// and each has a token.
    fn is_over(&self) -> bool {
        let begun = self.sequences.iter().all(|of| of.generated > 0);
        let over = self.ended || self.steps >= self.most_steps;
        self.failed || begun && (over || self.sequences.iter().any(|of| of.over))
    }

    fn check(&self) -> Result<(), RunError> {
        let why = || RunError::Program("all candidates do not prove a choice".to_owned());
        if self.failed { Err(why()) } else { Ok(()) }
    }

    /// Verifies the drafts of a step: a drafted token is accepted where the token sampled behind the row before it is the
    /// same. Reports what is proved and follows what was reported before.
    fn verify_drafts(
        &mut self,
        told: &[TokenEvent],
        histories: &mut Histories,
        listener: &mut impl Listener,
    ) {
        self.steps += 1;
        self.ended |= told.iter().any(|told| told[3] > 0.0);
        self.rows += self.segments.iter().map(|segment| segment.rows).sum::<u32>();
        let choices = self.segments.iter().filter_map(|segment| match segment.wanted {
            Wanted::Token(breadth) => Some(breadth),
            _ => None,
        });
        let mut told = told.iter().zip(choices);
        for (at, of) in self.sequences.iter_mut().enumerate() {
            let slot = of.segment.slot;
            let (mut right, mut follows) = (0, !of.over);
            for row in 0..=of.drafted.len() {
                let Some((told, asked)) = told.next() else { break };
                if !follows {
                    continue;
                }
                let proved = told[2] > 0.0;
                // Others may have been asked for all candidates before it.
                if !proved && row == 0 && asked == of.candidate_count() {
                    self.failed |= !of.widen(asked);
                }
                follows = proved && {
                    of.needed = asked;
                    histories.push(slot, told[0] as u32);
                    of.accept(row, told, listener.token(at, told))
                };
                right += u32::from(follows);
            }
            if let Some(lookup) = self.lookups.get(at).copied().flatten() {
                histories.learn(slot, &lookup, of.drafted.len() as u32, right);
            }
        }
        listener.step();
    }

    /// Drafts what may follow each sequence.
    fn draft(&mut self, histories: &Histories) {
        let Some(Drafting { row_cost, rows }) = self.drafting else { return };
        let room = rows.saturating_sub(self.sequences.len() as u32);
        self.lookups.clear();
        let look_up = |of: &Progression| histories.look_up(of.segment.slot, of.room());
        self.lookups.extend(self.sequences.iter().map(look_up));
        share(&self.lookups, row_cost, room, &mut self.drafts);
        let drafts = self.lookups.iter().zip(&self.drafts);
        for (of, (lookup, rows)) in self.sequences.iter_mut().zip(drafts) {
            of.drafted.clear();
            if let Some(lookup) = lookup {
                let slot = of.segment.slot;
                let token = |at| histories.drafted(slot, lookup, at);
                of.drafted.extend((0..*rows as usize).map(token));
            }
        }
    }

    /// Puts the segments of the next step together. Only one is asked for all candidates at a time, the one with the
    /// fewest tokens: budgets have room for that.
    fn arrange(&mut self) {
        self.masks.clear();
        let open = self
            .sequences
            .iter()
            .enumerate()
            .filter(|(_, of)| of.candidate_count() == CandidateCount::All);
        let all = open.min_by_key(|(_, of)| (of.over, of.generated)).map(|(at, _)| at);
        if !self.single {
            let is_choice = |segment: &&mut Segment| matches!(segment.wanted, Wanted::Token(_));
            let choices = self.segments.iter_mut().filter(is_choice).zip(&self.sequences);
            for (at, (segment, of)) in choices.enumerate() {
                *segment = of.next_segment(all == Some(at));
                self.masks.push(of.goal.mask.clone());
            }
            return;
        }
        self.segments.clear();
        self.tokens.clear();
        for (at, of) in self.sequences.iter().enumerate() {
            let mut segment = of.next_segment(all == Some(at));
            for token in [of.token].iter().chain(&of.drafted) {
                self.segments.push(segment);
                self.tokens.push(*token);
                self.masks.push(of.goal.mask.clone());
                segment.context_len += 1;
            }
        }
    }

    /// Binds the next step, and gives whether the same programs run it. Nothing is allocated then, if the batch's
    /// tokens are nobody else's. Otherwise it is bound all the same, for other programs.
    fn rebind(&self, binding: &mut Binding) -> bool {
        let same = binding.shape.rebind(&self.segments);
        if !same && let Ok(shape) = BatchShape::new(self.segments.clone()) {
            binding.shape = shape;
        }
        self.masks.clone_into(&mut binding.masks);
        if !self.single {
            return same;
        }
        match &mut binding.inputs {
            Inputs::Tokens(tokens) => match Arc::get_mut(tokens) {
                Some(tokens) if tokens.len() == self.tokens.len() => {
                    tokens.copy_from_slice(&self.tokens);
                }
                _ => *tokens = self.tokens.as_slice().into(),
            },
            inputs => *inputs = Inputs::from(self.tokens.as_slice()),
        }
        same
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::{Sampling, Sequence};

    /// The choices of a model that answers each token with the next number, proved by so many candidates.
    fn chosen(shape: &BatchShape, tokens: &[u32], needed: &[CandidateCount]) -> Vec<TokenEvent> {
        let choices = shape.sampled().zip(tokens).map(|((_, segment, have), token)| {
            let mut choice = [0.0; TOKEN_VALUES as usize];
            choice[0] = ((token + 1) % 10) as f32;
            choice[1] = segment.context_len as f32;
            choice[2] = f32::from(u8::from(have >= needed[segment.slot as usize]));
            choice
        });
        choices.collect()
    }

    /// Sequences whose choices are proved by so many candidates, with drafts and without: each token is reported once,
    /// in order, and no two are asked for all candidates at a time.
    #[test]
    fn each_token_is_reported_once_however_often_a_step_runs() {
        use CandidateCount::{All, Few, Many};
        let needed = [Few, All, Many, All, Few];
        let goals = vec![Goal { count: 14, ..Goal::default() }; 5];
        let mut steps = Vec::new();
        for drafting in [None, Some(Drafting { row_cost: 0.01, rows: 16 })] {
            let segment = |slot| Segment {
                slot,
                context_len: 19,
                cached: true,
                rows: 1,
                wanted: Wanted::Token(Few),
            };
            let shape = BatchShape::new((0..5).map(segment).collect()).unwrap();
            let mut binding = Binding::new(shape, &[0; 5][..]);
            let mut histories = Histories::default();
            for slot in 0..5 {
                let (sampling, prompt) = (Sampling::greedy(), 20);
                // Slot 4 has seen no number before.
                let tokens = (0..20).map(|at| if slot == 4 { 50 + at } else { (at + 1) % 10 });
                let tokens = tokens.collect();
                histories.begin(&Sequence { slot, rows: 99, sampling, tokens, prompt });
            }
            let mut progress =
                Progress::new(goals.clone(), &binding, (99, drafting), &mut histories);
            let mut told = vec![Vec::new(); 5];
            while !progress.is_over() {
                progress.draft(&histories);
                progress.arrange();
                progress.rebind(&mut binding);
                assert!(binding.shape.rows() <= 16);
                let asked_for_all = binding.shape.sampled().filter(|(.., of)| *of == All);
                assert!(asked_for_all.count() <= 1);
                let Inputs::Tokens(tokens) = &binding.inputs else { panic!("no tokens") };
                let choices = chosen(&binding.shape, tokens, &needed);
                let mut tell = |at: usize, one: &TokenEvent| {
                    told[at].push((one[0] as u32, one[1] as u32));
                    None
                };
                progress.verify_drafts(&choices, &mut histories, &mut tell);
            }
            progress.check().unwrap();
            for (told, of) in told.iter().zip(&progress.sequences) {
                let want = (0..of.generated).map(|at| ((1 + at) % 10, 19 + at));
                assert!(of.generated > 0 && told.iter().copied().eq(want), "{told:?}");
            }
            assert_eq!(progress.sequences.iter().map(|of| of.generated).max(), Some(14));
            let candidate_counts: Vec<_> = progress.sequences.iter().map(|of| of.needed).collect();
            assert_eq!(candidate_counts, needed);
            steps.push((progress.steps, progress.rows));
        }
        assert!(steps[1].0 < steps[0].0 && steps[1].1 > steps[1].0 * 5, "{steps:?}");
    }

    /// What was drafted before a mask came was chosen without it, and does not count.
    #[test]
    fn a_new_token_mask_discards_drafts_that_were_chosen_before() {
        let wanted = Wanted::Token(CandidateCount::Few);
        let row = |context_len| Segment { slot: 0, context_len, cached: true, rows: 1, wanted };
        let binding = Binding::new(BatchShape::new(vec![row(3)]).unwrap(), &[7][..]);
        let goals = vec![Goal { count: 9, ..Goal::default() }];
        let mut histories = Histories::default();
        let mut progress = Progress::new(goals, &binding, (9, None), &mut histories);
        progress.sequences[0].drafted = vec![1, 2];
        progress.segments = (3..6).map(row).collect();
        let told = [1.0, 2.0, 3.0].map(|token| {
            let mut told = [0.0; TOKEN_VALUES as usize];
            (told[0], told[2]) = (token, 1.0);
            told
        });
        let mut said = Vec::new();
        let mut tell = |_: usize, told: &TokenEvent| {
            said.push(told[0] as u32);
            Some(TokenMask::of(&[5]))
        };
        progress.verify_drafts(&told, &mut histories, &mut tell);
        assert_eq!((said, progress.sequences[0].generated), (vec![1], 1));
    }

    #[test]
    fn a_token_not_proved_by_all_candidates_is_an_error() {
        let wanted = Wanted::Token(CandidateCount::All);
        let segment = Segment { slot: 0, context_len: 3, cached: true, rows: 1, wanted };
        let shape = BatchShape::new(vec![segment]).unwrap();
        let binding = Binding::new(shape, &[7][..]);
        let goals = vec![Goal { count: 3, ..Goal::default() }];
        let mut histories = Histories::default();
        let mut progress = Progress::new(goals, &binding, (9, None), &mut histories);
        let mut tell = |_: usize, _: &TokenEvent| None;
        progress.verify_drafts(&[[0.0; TOKEN_VALUES as usize]], &mut histories, &mut tell);
        assert!(progress.is_over() && progress.check().is_err());
    }
}
