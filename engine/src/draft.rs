//! Drafts: tokens that may follow a sequence, by what followed the same tokens in it before.
//!
//! Every device keeps the tokens of its sequences and drafts from them by the same rule, so that all draft the same,
//! and nothing is sent for it. A step then runs the last token and its draft as neighbouring rows (prompt lookup, a
//! form of speculative decoding). The choice behind each row is the one that a step of a single row would make; a
//! drafted row counts where the choice before it is the token that was drafted. So drafts change how soon tokens come,
//! and never which.
//!
//! How many rows are drafted follows from how often drafts were accepted lately, and from what a row costs.

use galaxy_common::Sequence;
use std::collections::BTreeMap;

/// The most tokens that are compared to find the same ones before.
const LONGEST: usize = 16;
/// The fewest equal tokens that count: fewer say nothing.
const SHORTEST: usize = 2;
/// The most drafted rows of a sequence.
const MOST: usize = 15;
/// Classes of drafts, by how many tokens were equal: up to 2, 4, 8, and more.
const CLASSES: usize = 4;
/// The acceptance rate, the share of drafted tokens of each class that are right, before anything is known of a
/// sequence.
const BEFORE: [f32; CLASSES] = [0.4, 0.6, 0.75, 0.9];
/// The weight of one drafted token in the running mean of its class.
const LATELY: f32 = 0.15;
/// How far, as a share, each lookup of a class that is not drafted from moves its mean back to what is
/// expected before.
const FORGIVEN: f32 = 0.004;

/// The tokens of a device's sequences, by slot.
#[derive(Default)]
pub(crate) struct Histories(BTreeMap<u32, History>);

/// The histories of a device, some of which may be taken out while their sequences run.
#[derive(Default)]
pub(crate) struct SharedHistories {
    here: Histories,
    /// Sequences that have ended since some were taken out, and whether all have.
    ended: (bool, Vec<u32>),
}

/// The tokens of a sequence, and how well they predict what follows.
struct History {
    tokens: Vec<u32>,
    /// The acceptance rate, the share of drafted tokens of each class that are right, as a running mean.
    right: [f32; CLASSES],
    /// Whether to draft at all: not where earlier tokens change what is likely (penalties), nor where
    /// tokens were left out.
    drafts: bool,
}

/// An earlier place in a sequence whose tokens equal its last ones, and what may be drafted from there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lookup {
    /// Where the tokens that followed them begin.
    from: usize,
    class: usize,
    /// How likely each drafted token is right where those before it are.
    right: f32,
    /// The most rows that may be drafted.
    most: u32,
}

impl SharedHistories {
    /// Takes the tokens of a sequence that begins, or has more room now.
    pub(crate) fn begin(&mut self, text: &Sequence) {
        self.here.begin(text);
    }

    /// Forgets a sequence, or without a slot all of them.
    pub(crate) fn end(&mut self, slot: Option<u32>) {
        let (all, ended) = &mut self.ended;
        match slot {
            Some(slot) if self.here.0.remove(&slot).is_none() => ended.push(slot),
            Some(_) => {}
            None => (*all, self.here) = (true, Histories::default()),
        }
    }

    /// Takes the histories of some sequences out.
    pub(crate) fn take(&mut self, slots: impl Iterator<Item = u32>) -> Histories {
        self.ended = (false, Vec::new());
        let taken = slots.filter_map(|slot| self.here.0.remove_entry(&slot));
        Histories(taken.collect())
    }

    /// Puts histories back, but those of sequences that have ended since.
    pub(crate) fn put(&mut self, taken: &mut Histories) {
        let (all, ended) = std::mem::take(&mut self.ended);
        if !all {
            taken.0.retain(|slot, _| !ended.contains(slot));
            self.here.0.append(&mut taken.0);
        }
    }
}

impl Histories {
    /// Takes the tokens of a sequence that begins, or has more room now.
    pub(crate) fn begin(&mut self, text: &Sequence) {
        let new = History { tokens: Vec::new(), right: BEFORE, drafts: true };
        let history = self.0.entry(text.slot).or_insert(new);
        history.drafts = !text.sampling.looks_back();
        history.tokens.clear();
        history.tokens.reserve(text.rows as usize + 1);
        history.tokens.extend_from_slice(&text.tokens);
    }

    /// Notes the tokens of rows of a sequence that run now, behind `context_len` others. What was noted behind those
    /// is forgotten.
    pub(crate) fn runs(&mut self, slot: u32, context_len: u32, rows: &[u32]) {
        let Some(history) = self.0.get_mut(&slot) else { return };
        if history.tokens.len() < context_len as usize {
            // Its tokens were left out.
            history.tokens.clear();
            history.drafts = false;
            return;
        }
        history.tokens.truncate(context_len as usize);
        history.tokens.extend_from_slice(rows);
    }

    /// Notes a token that was chosen for a sequence.
    pub(crate) fn push(&mut self, slot: u32, token: u32) {
        if let Some(history) = self.0.get_mut(&slot).filter(|history| history.drafts) {
            history.tokens.push(token);
        }
    }

    /// Looks up what may follow a sequence, of which at most `most` rows may be drafted. None where
    /// there is nothing to draft.
    pub(crate) fn look_up(&self, slot: u32, most: u32) -> Option<Lookup> {
        let History { tokens, right, .. } =
            self.0.get(&slot).filter(|history| history.drafts && most > 0)?;
        let (equal, from) = longest_before(tokens)?;
        let class = class(equal);
        Some(Lookup { from, class, right: right[class], most: most.min(MOST as u32) })
    }

    /// Token number `at` of a draft, from 0.
    pub(crate) fn drafted(&self, slot: u32, of: &Lookup, at: usize) -> u32 {
        let tokens = self.0.get(&slot).map_or(&[][..], |history| &history.tokens);
        // Behind its end a repetition repeats itself.
        let period = tokens.len() - of.from;
        tokens[of.from + at % period]
    }

    /// Learns from a draft of which `drafted` tokens were verified, the first `right` of them right.
    pub(crate) fn learn(&mut self, slot: u32, of: &Lookup, drafted: u32, right: u32) {
        let Some(history) = self.0.get_mut(&slot) else { return };
        let mean = &mut history.right[of.class];
        if drafted == 0 {
            *mean += FORGIVEN * (BEFORE[of.class] - *mean);
            return;
        }
        for _ in 0..right {
            *mean += LATELY * (1.0 - *mean);
        }
        if right < drafted {
            *mean -= LATELY * *mean;
        }
    }
}

fn class(equal: usize) -> usize {
    match equal {
        ..=2 => 0,
        3..=4 => 1,
        5..=8 => 2,
        _ => 3,
    }
}

/// The longest run of tokens that equals the last ones: its length, and the place behind it. Of equally long
/// runs the last.
fn longest_before(tokens: &[u32]) -> Option<(usize, usize)> {
    let (&last, before) = tokens.split_last()?;
    let mut longest = None;
    for at in (0..before.len()).rev().filter(|at| before[*at] == last) {
        let ends = tokens[..=at].iter().rev().zip(tokens.iter().rev());
        let equal = ends.take(LONGEST).take_while(|(a, b)| a == b).count();
        if equal >= SHORTEST && longest.is_none_or(|(most, _)| equal > most) {
            longest = Some((equal, at + 1));
        }
        if equal == LONGEST {
            break;
        }
    }
    longest
}

/// Decides how many rows are drafted for each sequence, into `rows`, where one more row takes `cost` of a
/// step's time and there is room for `room` more: each row that makes tokens come sooner.
pub(crate) fn share(lookups: &[Option<Lookup>], cost: f32, room: u32, rows: &mut Vec<u32>) {
    rows.clear();
    rows.resize(lookups.len(), 0);
    let (mut tokens, mut time) = (lookups.len() as f32, 1.0);
    for _ in 0..room {
        let likely = |(at, lookup): (usize, &Option<Lookup>)| {
            let of = lookup.filter(|of| rows[at] < of.most)?;
            Some((at, of.right.powi(rows[at] as i32 + 1)))
        };
        let all = lookups.iter().enumerate().filter_map(likely);
        let Some((at, likely)) = all.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))) else {
            return;
        };
        if likely * time <= cost * tokens {
            return;
        }
        rows[at] += 1;
        (tokens, time) = (tokens + likely, time + cost);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::Sampling;

    fn history(tokens: &[u32], sampling: Sampling) -> Histories {
        let mut histories = Histories::default();
        let (rows, prompt) = (tokens.len() as u32 + 20, tokens.len());
        histories.begin(&Sequence { slot: 3, rows, sampling, tokens: tokens.to_vec(), prompt });
        histories
    }

    fn drafted(histories: &Histories, most: u32) -> Option<Vec<u32>> {
        let of = histories.look_up(3, most)?;
        Some((0..of.most as usize).map(|at| histories.drafted(3, &of, at)).collect())
    }

    #[test]
    fn drafts_are_the_tokens_that_followed_the_same_tokens_before() {
        let greedy = Sampling::greedy;
        let text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3];
        let histories = history(&text, greedy());
        // Three equal ones at the beginning, two later: the longer run says more.
        assert_eq!(drafted(&histories, 4), Some(vec![4, 5, 9, 2]));
        assert_eq!(drafted(&histories, 0), None);
        // A repetition repeats itself.
        let histories = history(&[7, 1, 2, 1, 2, 1, 2], greedy());
        assert_eq!(drafted(&histories, 5), Some(vec![1, 2, 1, 2, 1]));
        for other in [&[1, 2, 3, 4][..], &[5, 1, 6, 1], &[1], &[]] {
            assert_eq!(drafted(&history(other, greedy()), 4), None, "{other:?}");
        }
        let penalties = Sampling { presence: 1.0, ..greedy() };
        assert_eq!(drafted(&history(&text, penalties), 4), None);
    }

    #[test]
    fn a_row_that_runs_again_replaces_the_token_in_the_history() {
        let mut histories = history(&[1, 2, 3, 4], Sampling::greedy());
        histories.push(3, 1);
        histories.push(3, 2);
        assert_eq!(drafted(&histories, 2), Some(vec![3, 4]));
        // The last one is run again, as another token.
        histories.runs(3, 5, &[9]);
        assert_eq!(drafted(&histories, 2), None);
        histories.runs(3, 5, &[2]);
        assert_eq!(drafted(&histories, 2), Some(vec![3, 4]));
        // Rows whose tokens were never noted.
        histories.runs(3, 90, &[2]);
        histories.runs(3, 91, &[2]);
        assert_eq!(drafted(&histories, 2), None);
    }

    #[test]
    fn the_history_of_a_sequence_that_ends_during_a_step_is_dropped() {
        let mut kept = SharedHistories::default();
        let text = |slot| {
            let (sampling, tokens) = (Sampling::greedy(), vec![1, 2, 1, 2]);
            Sequence { slot, rows: 9, sampling, tokens, prompt: 4 }
        };
        let slots = |kept: &SharedHistories| kept.here.0.keys().copied().collect::<Vec<_>>();
        (0..4).for_each(|slot| kept.begin(&text(slot)));
        let mut taken = kept.take([1, 2, 7].into_iter());
        assert_eq!(slots(&kept), [0, 3]);
        kept.end(Some(2));
        kept.end(Some(3));
        kept.put(&mut taken);
        assert_eq!(slots(&kept), [0, 1]);
        let mut taken = kept.take([1].into_iter());
        kept.end(None);
        kept.put(&mut taken);
        assert_eq!(slots(&kept), [0; 0]);
    }

    #[test]
    fn rows_are_drafted_only_where_the_expected_gain_exceeds_the_cost() {
        let of = |right| Some(Lookup { from: 0, class: 0, right, most: 15 });
        let shared = |lookups: &[Option<Lookup>], cost, room| {
            let mut rows = Vec::new();
            share(lookups, cost, room, &mut rows);
            rows
        };
        // Nearly nothing costs nothing; where rows cost as much as steps, only certainty would pay.
        assert_eq!(shared(&[of(0.9)], 0.001, 15), [15]);
        assert_eq!(shared(&[of(0.9)], 1.0, 15), [0]);
        assert_eq!(shared(&[of(0.3)], 0.35, 15), [0]);
        let few = shared(&[of(0.8)], 0.2, 15)[0];
        assert!((2..8).contains(&few), "{few}");
        assert_eq!(shared(&[of(0.9), None, of(0.5)], 0.02, 4), [4, 0, 0], "the likeliest first");
        let both = shared(&[of(0.9), None, of(0.8)], 0.02, 9);
        assert!(both[0] > both[2] && both[1] == 0 && both.iter().sum::<u32>() == 9, "{both:?}");
    }

    #[test]
    fn draft_success_estimates_fall_with_wrong_drafts_and_recover() {
        let mut histories = history(&[1, 2, 3, 1, 2], Sampling::greedy());
        let right = |histories: &Histories| histories.look_up(3, 9).unwrap().right;
        let of = histories.look_up(3, 9).unwrap();
        for _ in 0..12 {
            histories.learn(3, &of, 1, 0);
        }
        let low = right(&histories);
        assert!(low < 0.1, "{low}");
        for _ in 0..200 {
            histories.learn(3, &of, 0, 0);
        }
        assert!(right(&histories) > low + 0.1);
        for _ in 0..12 {
            histories.learn(3, &of, 2, 2);
        }
        assert!(right(&histories) > 0.9);
    }
}
