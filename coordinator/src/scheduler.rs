//! The scheduler of continuous batching: which sequences take part in the next step, with how many rows and for how many
//! tokens, and which sequences are evicted from the KV cache for that.
//!
//! It is pure: the waiting sequences go in, the next step comes out, and what a step took is reported back. Sequences
//! of which one row is to be run (the last token) decode together, in bursts. Prompts are prefilled in chunks, several
//! together where they are short. Where both wait, a mixed step has a row of each decoding sequence and a chunk of
//! prompts, so that weights are read once for both. Where that would change tokens, they take turns: single decode
//! steps, and between them chunks of prompts that take a little longer. Clients take turns; the sequences of one client
//! come by their priority, and those of one priority in the order in which they came to wait. A waiting sequence gains
//! on those that come later with a better priority, so that all get their turn.
//!
//! Blocks of the KV cache are given for what is needed now. Where there are none, the youngest sequence is evicted: it
//! is computed again later. The oldest is never evicted, so that it always ends.

use crate::fair::in_turns;
use galaxy_common::{Cache, plan::Phase};
use galaxy_engine::{
    generate::BURST_STEPS,
    pace::{Pace, Ran},
};
use galaxy_graph::budget::SEQUENCES;
use std::{hash::Hash, time::Duration};

/// How long a decode burst is to take at most, in seconds: for so long others wait, and so much is computed in vain for
/// a client that is gone.
const BURST_SECONDS: f64 = 0.25;
/// The most tokens of a burst for each sequence: where drafts are right, its steps give several.
const MOST: u32 = 64;
/// How long a sequence waits to come before those whose priority is better by one.
const GAIN: Duration = Duration::from_secs(10);
/// How long a chunk of prompts may take while other sequences decode, as a multiple of one of their decode steps.
const CHUNK_STEPS: f64 = 1.25;
/// The fewest rows of a chunk while other sequences decode. Between decode steps fewer take as long, since all weights are
/// read for them; in mixed steps what one took once, as when it was lowered for the first time, makes chunks no smaller.
const LEAST_CHUNK: u32 = 16;
/// Chunks of mixed steps have a multiple of so many rows: the weights are read anyway.
const MIXED_CHUNK_ROWS: u32 = 4;
/// Rows of prompts that are prefilled together where several wait and none decodes: products of so many rows are as
/// fast for each row as those of more.
const TOGETHER: u32 = 256;

/// A sequence between two steps, new or decoding: it may take part in the next one.
#[derive(Debug, Clone)]
pub struct Waiting<K> {
    /// The client whose sequence it is.
    pub client: K,
    /// Its priority among the sequences of its client: lower numbers come first.
    pub priority: i32,
    /// How long it has waited for a step.
    pub waited: Duration,
    /// Its number by the order in which sequences came: the oldest has the least.
    pub age: u64,
    /// How many of its rows are cached.
    pub context_len: u32,
    /// How many rows are to be run: of its prompt, or of its last token.
    pub rows: u32,
    /// How many tokens it may still get.
    pub left: u32,
    /// How many blocks of the KV cache it has.
    pub blocks: u32,
    /// Whether it begins: the rows that are cached are those of others.
    pub begins: bool,
    /// Whether it is to run without others, because a step with others has failed.
    pub alone: bool,
}

impl<K> Waiting<K> {
    /// Its rank among the sequences of its client: the priority, less one for each `GAIN` that it has waited.
    fn rank(&self) -> i64 {
        i64::from(self.priority) - (self.waited.as_secs() / GAIN.as_secs()) as i64
    }

    /// Whether its next row is that of the token that was sampled last.
    fn decodes(&self) -> bool {
        !self.begins && self.context_len > 0 && self.rows == 1
    }
}

/// The limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The most rows of a program.
    pub rows: u32,
    /// The most sequences for which one step may generate tokens.
    pub sequences: u32,
    /// How many blocks of the KV cache no running sequence has.
    pub free: u32,
    /// Whether drafts may be verified.
    pub drafts: bool,
    /// Whether sequences may decode in the programs that prefill prompts: rows have the same results in both.
    pub mixes: bool,
}

impl Limits {
    /// The most sequences that decode together.
    fn decoding(self) -> usize {
        self.sequences.min(self.rows) as usize
    }
}

/// What one sequence does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceStep {
    /// The index of the sequence among those that wait.
    pub index: usize,
    /// How many of its rows are run.
    pub rows: u32,
    /// The most tokens that are generated; none where rows of its prompt are left.
    pub count: Option<u32>,
    /// How many blocks of the KV cache it is to have.
    pub blocks: u32,
}

/// The next step of the waiting sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The sequences that are evicted first, by their index.
    pub evicted: Vec<usize>,
    /// What each sequence does that takes part.
    pub parts: Vec<SequenceStep>,
    /// Whether the programs are those for prefill or for decode.
    pub phase: Phase,
    /// The most steps of a decode burst.
    pub steps: u32,
    /// The share of the step's time that one more row takes; none where no drafts may be verified.
    pub row_cost: Option<f32>,
}

#[cfg(test)]
impl Step {
    fn rows(&self) -> u32 {
        self.parts.iter().map(|part| part.rows).sum()
    }
}

/// Decides on the next step, by how long earlier ones took.
#[derive(Debug, Default)]
pub struct Scheduler {
    /// How long steps take.
    pace: Pace,
    /// Whether the last step was a prefill.
    prefilled: bool,
}

impl Scheduler {
    /// The next step of the waiting sequences, which stand in the order in which they came to wait. None where no
    /// sequence has room.
    pub fn next<K: Hash + Eq>(&self, waiting: &[Waiting<K>], limits: Limits) -> Option<Step> {
        let mut order = in_order(waiting);
        // A sequence that cannot have room keeps no other waiting.
        order.retain(|index| may_have_room(waiting, *index, limits.free));
        let (decoding, prompts): (Vec<_>, Vec<_>) =
            order.into_iter().partition(|index| waiting[*index].decodes());
        let both = !(decoding.is_empty() || prompts.is_empty());
        let mixes = both && limits.mixes && limits.decoding() > 1;
        let limits = Limits { mixes: mixes && !waiting.iter().any(|of| of.alone), ..limits };
        let steps = match prompts.is_empty() {
            true => self.burst(decoding.len(), limits),
            false => 1,
        };
        let wanted = if limits.mixes {
            self.mixed(waiting, &decoding, &prompts, limits)
        } else if decoding.is_empty() || both && !self.prefilled {
            // In turns.
            self.prefill_chunks(waiting, &prompts, decoding.len(), limits)
        } else {
            decoded_together(waiting, &decoding, steps, limits)
        };
        let (evicted, parts) = with_room(waiting, wanted, limits.free);
        let decodes = parts.iter().all(|part| waiting[part.index].decodes());
        let phase = if decodes { Phase::Decode } else { Phase::Prefill };
        let drafts = limits.drafts && phase == Phase::Decode;
        let row_cost = drafts.then(|| self.pace.row_cost(parts.len()));
        (!parts.is_empty()).then_some(Step { evicted, parts, phase, steps, row_cost })
    }

    /// How many steps a burst of `sequences` sequences has.
    fn burst(&self, sequences: usize, limits: Limits) -> u32 {
        match self.pace.step(sequences.min(limits.decoding())) {
            Some(step) => ((BURST_SECONDS / step) as u32).clamp(1, BURST_STEPS),
            None => BURST_STEPS,
        }
    }

    /// What sequences that decode and prompts would do in one step.
    fn mixed<K>(
        &self,
        waiting: &[Waiting<K>],
        decoding: &[usize],
        prompts: &[usize],
        limits: Limits,
    ) -> Vec<SequenceStep> {
        // One place is for a prompt.
        let most = limits.decoding() as u32 - 1;
        let beside = Limits { sequences: most, drafts: false, ..limits };
        let mut parts = decoded_together(waiting, decoding, 1, beside);
        let taken = parts.len() as u32;
        let (rows, sequences) = (limits.rows - taken, limits.sequences - taken);
        let left = Limits { rows, sequences, ..limits };
        parts.extend(self.prefill_chunks(waiting, prompts, parts.len(), left));
        parts
    }

    /// The chunks of prompts that would be prefilled together.
    fn prefill_chunks<K>(
        &self,
        waiting: &[Waiting<K>],
        order: &[usize],
        decoding: usize,
        limits: Limits,
    ) -> Vec<SequenceStep> {
        let undisturbed = decoding == 0;
        let each = if limits.mixes { MIXED_CHUNK_ROWS } else { LEAST_CHUNK };
        let row_limit = match (self.pace.step(decoding), self.pace.row()) {
            _ if undisturbed && order.len() < 2 => limits.rows,
            (Some(step), Some(row)) if !undisturbed => {
                let rows = (CHUNK_STEPS * step / row) as u32;
                (rows / each * each).max(LEAST_CHUNK)
            }
            _ if !undisturbed => LEAST_CHUNK,
            _ => TOGETHER,
        };
        let mut left = row_limit.min(limits.rows);
        let mut parts = Vec::new();
        for index in together(waiting, order).take(limits.sequences as usize) {
            let of = &waiting[*index];
            let rows = of.rows.min(left);
            if rows == 0 {
                break;
            }
            left -= rows;
            let count = (rows == of.rows).then_some(1);
            // A sequence that begins has room for all of its prompt.
            let blocks = (of.context_len + of.rows).div_ceil(Cache::BLOCK);
            parts.push(SequenceStep { index: *index, rows, count, blocks });
        }
        parts
    }

    /// Notes what a step took; a burst may have ended early.
    pub fn ran(&mut self, phase: Phase, ran: Ran, took: Duration) {
        self.prefilled = phase == Phase::Prefill;
        match phase {
            Phase::Decode => self.pace.decoded(ran, took),
            Phase::Prefill => self.pace.prefilled(ran, took),
        }
    }
}

/// The order of the waiting sequences: clients in turns, and those of one client by priority.
fn in_order<K: Hash + Eq>(waiting: &[Waiting<K>]) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..waiting.len()).collect();
    ranked.sort_by_key(|index| waiting[*index].rank());
    let turns = in_turns(ranked.iter().map(|index| &waiting[*index].client));
    turns.into_iter().map(|at| ranked[at]).collect()
}

/// What the decoding sequences would do together in `steps` steps.
fn decoded_together<K>(
    waiting: &[Waiting<K>],
    order: &[usize],
    steps: u32,
    limits: Limits,
) -> Vec<SequenceStep> {
    // A step gives several tokens where drafts are right.
    let most = if limits.drafts { MOST.min(steps.saturating_mul(SEQUENCES)) } else { steps };
    let part = |index: &usize| {
        let count = most.min(waiting[*index].left).max(1);
        let blocks = (waiting[*index].context_len + count).div_ceil(Cache::BLOCK);
        SequenceStep { index: *index, rows: 1, count: Some(count), blocks }
    };
    together(waiting, order).take(limits.decoding()).map(part).collect()
}

/// Those that may run with the first: all that need not run alone, or it alone.
fn together<'a, K>(
    waiting: &'a [Waiting<K>],
    order: &'a [usize],
) -> impl Iterator<Item = &'a usize> {
    let alone = order.first().is_some_and(|first| waiting[*first].alone);
    let others = order.iter().enumerate();
    let may = move |(at, index): &(usize, &usize)| *at == 0 || (!alone && !waiting[**index].alone);
    others.filter(may).map(|(_, index)| index)
}

/// Whether there is room for a sequence's next rows, or could be if all younger ones were evicted.
fn may_have_room<K>(waiting: &[Waiting<K>], index: usize, free: u32) -> bool {
    let of = &waiting[index];
    let needs = (of.context_len + of.rows).div_ceil(Cache::BLOCK);
    let younger = waiting.iter().filter(|other| other.age > of.age);
    needs <= of.blocks + free + younger.map(|other| other.blocks).sum::<u32>()
}

/// Gives blocks to the sequences that are to run, the oldest first. A sequence without room does not run, or runs for
/// fewer tokens; a younger one is evicted for an older one.
fn with_room<K>(
    waiting: &[Waiting<K>],
    wanted: Vec<SequenceStep>,
    mut free: u32,
) -> (Vec<usize>, Vec<SequenceStep>) {
    let mut evicted: Vec<usize> = Vec::new();
    let mut oldest: Vec<usize> = (0..wanted.len()).collect();
    oldest.sort_by_key(|at| waiting[wanted[*at].index].age);
    let mut runs: Vec<Option<SequenceStep>> = vec![None; wanted.len()];
    for at in oldest {
        let mut part = wanted[at];
        let of = &waiting[part.index];
        if evicted.contains(&part.index) {
            continue;
        }
        let more = part.blocks.saturating_sub(of.blocks);
        if of.decodes() && more > free {
            // For as many tokens as it has room for.
            let room = (of.blocks + free) * Cache::BLOCK;
            let count = part.count.unwrap_or(1).min(room.saturating_sub(of.context_len)).max(1);
            part.count = Some(count);
            part.blocks = (of.context_len + count).div_ceil(Cache::BLOCK);
        }
        let more = part.blocks.saturating_sub(of.blocks);
        let mut victims = Vec::new();
        let mut freed = 0;
        while free + freed < more {
            let victim = (0..waiting.len())
                .filter(|other| waiting[*other].age > of.age && waiting[*other].blocks > 0)
                .filter(|other| !evicted.contains(other) && !victims.contains(other))
                .max_by_key(|other| waiting[*other].age);
            let Some(victim) = victim else { break };
            freed += waiting[victim].blocks;
            victims.push(victim);
        }
        if free + freed < more {
            continue;
        }
        free = free + freed - more;
        evicted.extend(victims);
        part.blocks = part.blocks.max(of.blocks);
        runs[at] = Some(part);
    }
    let parts = runs.into_iter().flatten().collect();
    (evicted, parts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits =
        Limits { rows: 512, sequences: 16, free: 100, drafts: true, mixes: false };

    fn prompt(age: u64, rows: u32) -> Waiting<u8> {
        let (client, priority, waited) = (0, 0, Duration::ZERO);
        let (context_len, left, blocks, begins, alone) = (0, 50, 0, true, false);
        Waiting { client, priority, waited, age, context_len, rows, left, blocks, begins, alone }
    }

    fn decoding(age: u64, context_len: u32) -> Waiting<u8> {
        let blocks = context_len.div_ceil(Cache::BLOCK);
        Waiting { context_len, blocks, begins: false, ..prompt(age, 1) }
    }

    fn ran(step: &Step, steps: u32) -> Ran {
        let sequences = step.parts.len() as u32;
        let rows = if step.phase == Phase::Decode { steps * sequences } else { step.rows() };
        let decoding = step.parts.iter().filter(|part| part.rows == 1).count() as u32;
        Ran { rows, steps, decoding }
    }

    fn indices(step: &Step) -> Vec<usize> {
        step.parts.iter().map(|part| part.index).collect()
    }

    #[test]
    fn sequences_decode_together_in_bursts() {
        let mut scheduler = Scheduler::default();
        let waiting = [decoding(1, 10), decoding(2, 300), Waiting { left: 3, ..decoding(3, 5) }];
        let step = scheduler.next(&waiting, LIMITS).unwrap();
        assert_eq!((step.phase, indices(&step)), (Phase::Decode, vec![0, 1, 2]));
        let counts = |step: &Step| step.parts.iter().map(|part| part.count).collect::<Vec<_>>();
        assert_eq!((step.steps, counts(&step)), (16, vec![Some(50), Some(50), Some(3)]));
        let plain = scheduler.next(&waiting, Limits { drafts: false, ..LIMITS }).unwrap();
        assert_eq!((plain.row_cost, counts(&plain)), (None, vec![Some(16), Some(16), Some(3)]));
        // Slow steps make short bursts.
        scheduler.ran(step.phase, ran(&step, 3), Duration::from_millis(300));
        let step = scheduler.next(&waiting, LIMITS).unwrap();
        assert_eq!((step.steps, step.parts[0].count), (2, Some(32)));
        let few = Limits { sequences: 2, ..LIMITS };
        assert_eq!(indices(&scheduler.next(&waiting, few).unwrap()), [0, 1]);
        assert_eq!(scheduler.next::<u8>(&[], LIMITS), None);
    }

    #[test]
    fn prompts_are_prefilled_in_chunks_between_decode_steps() {
        let mut scheduler = Scheduler::default();
        let long = [prompt(1, 2000)];
        let step = scheduler.next(&long, LIMITS).unwrap();
        assert_eq!((step.parts[0].rows, step.parts[0].count), (512, None));
        assert_eq!(step.parts[0].blocks, 11, "for all of it");
        scheduler.ran(step.phase, ran(&step, 1), Duration::from_secs(2));
        let both = [decoding(0, 7), prompt(1, 2000)];
        let step = scheduler.next(&both, LIMITS).unwrap();
        assert_eq!((step.phase, step.steps), (Phase::Decode, 1));
        scheduler.ran(step.phase, ran(&step, 1), Duration::from_millis(200));
        let step = scheduler.next(&both, LIMITS).unwrap();
        assert_eq!((step.phase, indices(&step)), (Phase::Prefill, vec![1]));
        // A quarter of a second of rows of 3.9 ms, in multiples of 16.
        assert_eq!(step.parts[0].rows, 64);
        scheduler.ran(step.phase, ran(&step, 1), Duration::from_millis(300));
        assert_eq!(scheduler.next(&both, LIMITS).unwrap().phase, Phase::Decode);
        let short = [prompt(1, 20), prompt(2, 30), prompt(3, 400), prompt(4, 10)];
        let step = scheduler.next(&short, LIMITS).unwrap();
        let rows: Vec<_> = step.parts.iter().map(|part| (part.rows, part.count)).collect();
        assert_eq!(rows, [(20, Some(1)), (30, Some(1)), (206, None)]);
    }

    #[test]
    fn sequences_decode_in_the_steps_that_prefill_prompts() {
        let mut scheduler = Scheduler::default();
        let mixes = Limits { mixes: true, ..LIMITS };
        let decoding = (0..7).map(|age| decoding(age, 9));
        scheduler.ran(
            Phase::Decode,
            Ran { rows: 7, steps: 1, decoding: 7 },
            Duration::from_millis(80),
        );
        let waiting: Vec<_> = decoding.chain([prompt(7, 200), prompt(8, 9)]).collect();
        let step = scheduler.next(&waiting, mixes).unwrap();
        let all = |rows| [vec![(1, Some(1)); 7], rows].concat();
        let parts = |step: &Step| -> Vec<_> {
            step.parts.iter().map(|part| (part.rows, part.count)).collect()
        };
        assert_eq!(
            (step.phase, step.steps, parts(&step)),
            (Phase::Prefill, 1, all(vec![(16, None)]))
        );
        // Each row of the prompt took 5 ms: 1.25 decode steps have 20.
        scheduler.ran(step.phase, ran(&step, 1), Duration::from_millis(160));
        let step = scheduler.next(&waiting, mixes).unwrap();
        assert_eq!(parts(&step), all(vec![(20, None)]));
        // One of 16 places is left to a prompt.
        let many: Vec<_> =
            (0..20).map(|age| self::decoding(age, 9)).chain([prompt(20, 3)]).collect();
        let step = scheduler.next(&many, mixes).unwrap();
        assert_eq!(
            (step.parts.len(), step.parts[15].index, step.parts[15].count),
            (16, 20, Some(1))
        );
        // Without room for the prompt, it is a decode step.
        let full = Limits { free: 0, ..mixes };
        let step = scheduler.next(&waiting, full).unwrap();
        assert_eq!((step.phase, step.parts.len()), (Phase::Decode, 7));
        // A sequence that is to run alone decodes in no step of others.
        let mut alone = waiting;
        alone[0].alone = true;
        let step = scheduler.next(&alone, mixes).unwrap();
        assert!(step.parts.iter().all(|part| part.index != 0) || step.parts.len() == 1);
    }

    #[test]
    fn clients_take_turns() {
        let scheduler = Scheduler::default();
        let mut waiting: Vec<_> = (0..20).map(|age| decoding(age, 9)).collect();
        waiting.extend((20..22).map(|age| Waiting { client: 1, ..decoding(age, 9) }));
        let few = Limits { sequences: 4, ..LIMITS };
        assert_eq!(indices(&scheduler.next(&waiting, few).unwrap()), [0, 20, 1, 21]);
    }

    #[test]
    fn sequences_of_better_priority_run_first_and_none_waits_forever() {
        let scheduler = Scheduler::default();
        let of = |age, priority| Waiting { priority, ..decoding(age, 9) };
        let mut waiting = vec![of(0, 1), of(1, 0), of(2, -4), of(3, 0)];
        // Another client's has its turn whatever it says.
        waiting.push(Waiting { client: 1, ..of(4, 99) });
        let order = |waiting: &[Waiting<u8>], sequences| {
            indices(&scheduler.next(waiting, Limits { sequences, ..LIMITS }).unwrap())
        };
        assert_eq!(order(&waiting, 5), [2, 4, 1, 3, 0]);
        assert_eq!(order(&waiting, 2), [2, 4]);
        waiting[0].waited = Duration::from_secs(50);
        assert_eq!(order(&waiting, 5), [0, 4, 2, 1, 3]);
        let absurd = Waiting { priority: i32::MIN, waited: Duration::MAX, ..prompt(9, 1) };
        assert!(absurd.rank() < i64::from(i32::MIN));
    }

    #[test]
    fn a_sequence_that_failed_in_a_batch_runs_alone() {
        let scheduler = Scheduler::default();
        let alone = |of| Waiting { alone: true, ..of };
        let first = [alone(decoding(1, 9)), decoding(2, 9)];
        assert_eq!(indices(&scheduler.next(&first, LIMITS).unwrap()), [0]);
        let second = [decoding(1, 9), alone(decoding(2, 9)), decoding(3, 9)];
        assert_eq!(indices(&scheduler.next(&second, LIMITS).unwrap()), [0, 2]);
    }

    #[test]
    fn the_youngest_sequence_is_evicted_for_an_older_one() {
        let scheduler = Scheduler::default();
        let full = Limits { free: 0, ..LIMITS };
        let waiting = [decoding(5, 100), decoding(1, 192), decoding(3, 384)];
        let step = scheduler.next(&waiting, full).unwrap();
        // The first has room in its block; the oldest needs one, and takes that of the youngest.
        assert_eq!(step.evicted, [0]);
        assert_eq!(indices(&step), [1]);
        assert_eq!(step.parts[0].blocks, 2);
        // A prompt takes room from those that came later, and else waits while the others go on.
        let waiting = [decoding(1, 100), prompt(2, 100)];
        let step = scheduler.next(&waiting, full).unwrap();
        assert_eq!((step.evicted.len(), indices(&step)), (0, vec![0]));
        assert_eq!(scheduler.next(&[prompt(1, 100)], full), None);
        // One that nearly fills its room gets as many tokens as it has room for.
        let step = scheduler.next(&[decoding(1, 185)], full).unwrap();
        assert_eq!(step.parts[0].count, Some(7));
    }

    proptest! {
        /// Sequences come in any order, with any lengths and little room; every step fits, and all end.
        #[test]
        fn every_step_fits_its_limits_and_all_sequences_end(
            sequences in prop::collection::vec((1u32..500, 1u32..300, 0u8..3, -2i32..3), 1..12),
            blocks in 5u32..12,
            rows in 16u32..600,
            most in 1u32..5,
            mixes: bool,
        ) {
            let mut scheduler = Scheduler::default();
            let mut queue: Vec<(Waiting<u8>, u32)> = Vec::new();
            for (age, (prompt, left, client, priority)) in sequences.into_iter().enumerate() {
                let age = age as u64;
                queue.push((Waiting { client, priority, left, ..self::prompt(age, prompt) }, prompt));
            }
            let mut steps = 0;
            while !queue.is_empty() {
                steps += 1;
                prop_assert!(steps < 100_000, "{queue:?}");
                let free = blocks - queue.iter().map(|(of, _)| of.blocks).sum::<u32>();
                let waiting: Vec<_> = queue.iter().map(|(of, _)| of.clone()).collect();
                let limits = Limits { rows, sequences: most, free, drafts: true, mixes };
                let step = scheduler.next(&waiting, limits).expect("something runs");
                prop_assert!(step.rows() <= rows && step.parts.len() <= most as usize);
                let oldest = queue.iter().map(|(of, _)| of.age).min();
                for index in &step.evicted {
                    let (of, tokens) = &mut queue[*index];
                    prop_assert!(Some(of.age) != oldest && of.blocks > 0);
                    (of.context_len, of.rows, of.blocks, of.begins) = (0, *tokens, 0, true);
                }
                let made = step.parts.iter().filter_map(|part| part.count).min().unwrap_or(1);
                // Without drafts that are right, a step gives a token.
                let made = made.min(step.steps);
                let took = Duration::from_millis(u64::from(10 * made));
                scheduler.ran(step.phase, ran(&step, made), took);
                for part in &step.parts {
                    prop_assert!(!step.evicted.contains(&part.index));
                    let (of, tokens) = &mut queue[part.index];
                    (of.blocks, of.begins) = (part.blocks, false);
                    match part.count {
                        None => (of.context_len, of.rows) = (of.context_len + part.rows, of.rows - part.rows),
                        Some(_) => {
                            of.context_len += part.rows + made - 1;
                            of.rows = 1;
                            of.left -= made;
                            *tokens += made;
                        }
                    }
                    prop_assert!(of.context_len <= of.blocks * Cache::BLOCK);
                }
                prop_assert!(queue.iter().map(|(of, _)| of.blocks).sum::<u32>() <= blocks);
                // Those that ran wait behind the others.
                let ran: Vec<_> = step.parts.iter().map(|part| queue[part.index].0.age).collect();
                let (mut behind, mut before) = (Vec::new(), Vec::new());
                for entry in queue {
                    let to = if ran.contains(&entry.0.age) { &mut behind } else { &mut before };
                    to.push(entry);
                }
                before.append(&mut behind);
                before.retain(|(of, _)| of.left > 0);
                queue = before;
            }
        }
    }
}
