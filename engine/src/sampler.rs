//! Choosing the next token, by all devices alike.
//!
//! Each device that has a slice of the vocabulary applies penalties to its logits and names its likeliest tokens in a
//! tile, with the log-sum-exp of the whole slice. Every device collects all tiles and chooses from them: whichever
//! token it takes, all others take it, too. Candidates do not always prove a choice: top-k, top-p or min-p might admit
//! a token that is less likely than all that a device names. Then the choice does not count, and the step runs again
//! with more candidates.
//!
//! Sampling adds noise to logits and takes the largest sum, which draws from the softmax (the Gumbel-max
//! trick). Noise is a function of seed, position and token, so that the draw is the same however the vocabulary
//! is split.

mod mask;

pub use galaxy_common::Sequence;
pub use mask::TokenMask;

use crate::compute::kernels::vector::log_sum_exp;
use galaxy_common::{CandidateCount, Sampling, sampling::MOST_LOGPROBS};
use galaxy_graph::program::TOKEN_VALUES;
use std::cmp::Ordering;

/// Bytes of a tile before its first candidate.
const HEAD: usize = 16;
/// Bytes of a candidate in a tile.
const EACH: usize = 12;
/// The bit of a tile's count of candidates that says that the burst is to end.
const ENDS: u32 = 1 << 31;

/// A token with its logit, before penalties and after, divided by the temperature.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Candidate {
    token: u32,
    logit: f32,
    score: f32,
}

impl Candidate {
    /// Reads a candidate from its bytes in a tile.
    fn read(bytes: &[u8; EACH]) -> Self {
        let [token, logit, score] = [0, 4, 8]
            .map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        Self { token, logit: f32::from_bits(logit), score: f32::from_bits(score) }
    }

    /// Orders candidates by falling score; of equal scores the lower token comes first.
    fn order(&self, other: &Self) -> Ordering {
        other.score.total_cmp(&self.score).then(self.token.cmp(&other.token))
    }
}

/// A token that a sequence contains, and how often it was generated there.
#[derive(Clone, Copy, Debug)]
struct TokenCount {
    token: u32,
    /// How often the sampler chose the token; 0 where it occurs in the prompt only.
    chosen: u32,
}

/// The sampler of one sequence, on one device.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    /// The tokens that penalties apply to, in order; empty where the settings have no penalties.
    counts: Vec<TokenCount>,
    /// Scratch space for the scores of the slice, where logits are changed before they are compared.
    scores: Vec<f32>,
    best: Vec<Candidate>,
    /// The last choice and its position. Penalties count it once a later position is asked for: a step that
    /// runs again, because candidates did not prove the choice for another sequence, makes the same choice.
    last: Option<(u32, u32)>,
}

/// The candidates for a token that were collected from all devices.
#[derive(Debug)]
pub(crate) struct Candidates {
    candidates: Vec<Candidate>,
    /// Above this score no device left a token out: the largest of the least scores of those that named
    /// some of their tokens only. Minus infinity where all devices named all.
    floor: f32,
    /// Log-sum-exps over the slices of all devices, of logits and of scores.
    sums: [f64; 2],
    /// Whether a device was asked to end the burst.
    ends: bool,
}

/// A chosen token, and whether the candidates prove the choice.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct SampledToken {
    pub token: u32,
    pub proved: bool,
}

impl Default for Candidates {
    fn default() -> Self {
        let (floor, sums) = (f32::NEG_INFINITY, [f64::NEG_INFINITY; 2]);
        Self { candidates: Vec::new(), floor, sums, ends: false }
    }
}

impl Candidates {
    /// Forgets the candidates.
    pub(crate) fn begin(&mut self) {
        self.candidates.clear();
        self.floor = f32::NEG_INFINITY;
        self.sums = [f64::NEG_INFINITY; 2];
        self.ends = false;
    }

    /// Adds the candidates of one device, which `tile` begins with, and gives the bytes behind them. None
    /// where they are malformed.
    pub(crate) fn gather<'t>(&mut self, tile: &'t [u8]) -> Option<&'t [u8]> {
        let DeviceCandidates { floor, sums, ends, candidates, rest } = read(tile)?;
        self.floor = self.floor.max(floor);
        self.ends |= ends;
        for (all, sum) in self.sums.iter_mut().zip(sums) {
            *all = log_add(*all, f64::from(sum));
        }
        let (candidates, _) = candidates.as_chunks::<EACH>();
        let candidates = candidates.iter().map(Candidate::read);
        self.candidates.extend(candidates.filter(|candidate| !candidate.score.is_nan()));
        Some(rest)
    }

    /// The score of the likeliest of all collected candidates. None where no logit is a number; minus
    /// infinity where every token is left out.
    pub(crate) fn best(&self) -> Option<f32> {
        self.candidates.iter().map(|candidate| candidate.score).reduce(f32::max)
    }
}

impl Sampler {
    /// The sampler of a sequence, on a device that has `slice` tokens of the vocabulary.
    pub(crate) fn new(text: &Sequence, slice: u32) -> Self {
        let sampling = text.sampling.clone();
        let (looks_back, adjusts) = (sampling.looks_back(), adjusts(&sampling));
        let mut counts = Vec::new();
        if looks_back {
            counts.reserve_exact(text.rows as usize + 1);
        }
        let mut sampler = Self {
            sampling,
            counts,
            scores: Vec::with_capacity(if adjusts { slice as usize } else { 0 }),
            best: Vec::new(),
            last: None,
        };
        if looks_back {
            for (at, token) in text.tokens.iter().enumerate() {
                sampler.count(*token, at >= text.prompt);
            }
        }
        sampler
    }

    fn count(&mut self, token: u32, chosen: bool) {
        match self.counts.binary_search_by_key(&token, |count| count.token) {
            Ok(at) => self.counts[at].chosen += u32::from(chosen),
            Err(at) => self.counts.insert(at, TokenCount { token, chosen: chosen.into() }),
        }
    }

    /// Writes candidates for the token at `position` of the sequence to `tile`: of the tokens from `first` on, whose
    /// logits are `logits`, those that `mask` allows. Gives the number of bytes that they take.
    ///
    /// # Panics
    /// When `tile` is shorter than [`candidates_bytes`](galaxy_graph::program::candidates_bytes) of that count.
    pub(crate) fn top_k(
        &mut self,
        (logits, first): (&[f32], u32),
        position: u32,
        count: CandidateCount,
        mask: Option<&TokenMask>,
        tile: &mut [u8],
    ) -> usize {
        if let Some((_, token)) = self.last.take_if(|(at, _)| *at < position) {
            self.count(token, true);
        }
        let most = count.of(logits.len() as u32) as usize;
        let by = match self.sampling.temperature {
            0.0 => 1.0,
            temperature => 1.0 / temperature,
        };
        let mut scores = std::mem::take(&mut self.scores);
        let adjusted = mask.is_some() || adjusts(&self.sampling);
        if adjusted {
            scores.clear();
            scores.extend_from_slice(logits);
            if let Some(mask) = mask {
                mask.apply(&mut scores, first);
            }
            self.adjust(&mut scores, first);
        }
        let adjusted = if adjusted { &scores[..] } else { logits };
        let at = |index: usize| Candidate {
            token: first + index as u32,
            logit: logits[index],
            // Beyond what a float holds, tokens are alike; what is left out stays so.
            score: (adjusted[index] * by).clamp(f32::NEG_INFINITY, f32::MAX),
        };
        // Room for one drawn token and for the likeliest before penalties.
        let unbounded = self.sampling.is_unbounded();
        let extra = usize::from(unbounded) + self.sampling.logprobs as usize;
        let named = if most == logits.len() { most } else { most - extra.min(most / 2) };
        let best = &mut self.best;
        likeliest(best, named, (0..logits.len()).map(at));
        let floor = best.last().map_or(f32::NEG_INFINITY, |last| last.score);
        let complete = named == logits.len();
        if !complete {
            if unbounded {
                let noise = Noise::new(self.sampling.seed, position);
                if let Some(drawn) = noise.largest((0..logits.len()).map(at), best) {
                    push_new(best, drawn);
                }
            }
            // Penalties may have pushed the likeliest far down.
            let mut told = [Candidate::default(); MOST_LOGPROBS as usize];
            let told = &mut told[..self.sampling.logprobs as usize];
            for candidate in largest_logits(told, (0..logits.len()).map(at)) {
                push_new(best, *candidate);
            }
        }
        best.truncate(most);
        // What is no number in a broken model is of no weight here.
        let sums = [log_sum_exp(logits, 1.0), log_sum_exp(adjusted, by)];
        let sums = sums.map(|sum| if sum.is_nan() { f32::NEG_INFINITY } else { sum.min(f32::MAX) });
        write(tile, &self.best, if complete { f32::NEG_INFINITY } else { floor }, sums);
        self.scores = scores;
        HEAD + EACH * self.best.len()
    }

    /// Applies penalties and biases to logits of the tokens from `first` on.
    fn adjust(&self, scores: &mut [f32], first: u32) {
        let Sampling { repetition, presence, frequency, bias, .. } = &self.sampling;
        let place = |token: u32| token.checked_sub(first).map(|at| at as usize);
        for count in &self.counts {
            let Some(score) = place(count.token).and_then(|at| scores.get_mut(at)) else {
                continue;
            };
            *score = if *score > 0.0 { *score / repetition } else { *score * repetition };
            if count.chosen > 0 {
                *score -= presence + frequency * count.chosen as f32;
            }
        }
        for (token, bias) in bias {
            if let Some(score) = place(*token).and_then(|at| scores.get_mut(at)) {
                *score += bias;
            }
        }
    }

    /// Chooses the token at `position` from the collected candidates, and writes to `told` what
    /// [`TOKEN_VALUES`] lists of it. None where no logit is a number.
    pub(crate) fn sample(
        &mut self,
        gathered: &mut Candidates,
        position: u32,
        told: &mut [f32],
    ) -> Option<SampledToken> {
        gathered.candidates.sort_unstable_by(Candidate::order);
        let (chosen, proved) = self.choose(gathered, position)?;
        if proved && self.sampling.looks_back() {
            self.last = Some((position, chosen.token));
        }
        let told = told.get_mut(..TOKEN_VALUES as usize)?;
        // What is left out has no probability, also where everything is.
        let logprob = |logit: f32| match logit {
            f32::NEG_INFINITY => logit,
            logit => (f64::from(logit) - gathered.sums[0]).min(0.0) as f32,
        };
        told.fill(0.0);
        let wanted = self.sampling.logprobs as usize;
        let mut largest = [Candidate::default(); MOST_LOGPROBS as usize];
        let largest = largest_logits(&mut largest[..wanted], gathered.candidates.iter().copied());
        let head = [
            chosen.token as f32,
            logprob(chosen.logit),
            f32::from(u8::from(proved)),
            f32::from(u8::from(gathered.ends)),
            largest.len() as f32,
        ];
        let (first, likely) = told.split_at_mut(head.len());
        first.copy_from_slice(&head);
        for (candidate, told) in largest.iter().zip(likely.chunks_exact_mut(2)) {
            told.copy_from_slice(&[candidate.token as f32, logprob(candidate.logit)]);
        }
        Some(SampledToken { token: chosen.token, proved })
    }

    /// Chooses by top-k, top-p and min-p among the candidates, whose logits were divided by the temperature when they
    /// were found. Gives whether they prove the choice: no token that a device left out could change it.
    fn choose(&self, gathered: &Candidates, position: u32) -> Option<(Candidate, bool)> {
        let all = &gathered.candidates[..];
        let best = *all.first()?;
        let Sampling { temperature, top_k, top_p, min_p, seed, .. } = self.sampling;
        if temperature == 0.0 {
            return Some((best, true));
        }
        let noise = Noise::new(seed, position);
        let draw = |from: &[Candidate]| {
            let sums = from.iter().map(|candidate| (noise.sum(candidate), *candidate));
            sums.reduce(larger).map(|(_, drawn)| drawn)
        };
        if self.sampling.is_unbounded() {
            return Some((draw(all)?, true));
        }
        // Of these no device has left any out.
        let sure = match gathered.floor {
            f32::NEG_INFINITY => all.len(),
            floor => all.partition_point(|candidate| candidate.score >= floor),
        };
        let complete = sure == all.len() && gathered.floor == f32::NEG_INFINITY;
        let mut left = &all[..sure];
        let mut proved = complete;
        if top_k > 0 {
            proved |= sure >= top_k as usize;
            left = &left[..left.len().min(top_k as usize)];
        }
        if top_p < 1.0 {
            let whole = match top_k {
                0 => gathered.sums[1],
                _ => left.iter().fold(f64::NEG_INFINITY, |sum, c| log_add(sum, c.score.into())),
            };
            let mut mass = 0.0;
            let enough = left.iter().position(|candidate| {
                mass += (f64::from(candidate.score) - whole).exp();
                mass >= f64::from(top_p)
            });
            if let Some(last) = enough {
                left = &left[..=last];
                // With a bound on their number the mass is of these alone.
                proved |= top_k == 0;
            }
        }
        if min_p > 0.0 {
            let floor = best.score + min_p.ln();
            let enough = left.partition_point(|candidate| candidate.score >= floor);
            // Where these are fewer than are sure, and no other bound hangs on those that are not.
            proved |= enough < left.len() && (top_p >= 1.0 || top_k == 0);
            left = &left[..enough.max(1)];
        }
        Some((draw(left)?, proved))
    }
}

/// Whether logits are changed before tokens are compared.
fn adjusts(sampling: &Sampling) -> bool {
    sampling.looks_back() || !sampling.bias.is_empty()
}

/// Puts the `most` likeliest candidates into `best`, the likeliest first, without those whose score is
/// not a number.
fn likeliest(best: &mut Vec<Candidate>, most: usize, all: impl Iterator<Item = Candidate>) {
    best.clear();
    // A heap whose first is the least likely; what is less likely still is passed by.
    let mut floor = f32::NEG_INFINITY;
    let mut heaped = false;
    for candidate in all {
        if candidate.score.is_nan() {
            continue;
        }
        if best.len() < most {
            best.push(candidate);
        } else if candidate.score > floor || !heaped {
            if !heaped {
                // The worst is at the front once the order is turned round.
                best.sort_unstable_by(|a, b| b.order(a));
                heaped = true;
            }
            if let Some(worst) = best.first_mut()
                && candidate.order(worst) == Ordering::Less
            {
                *worst = candidate;
                sink(best);
            }
            floor = best.first().map_or(floor, |worst| worst.score);
        }
    }
    best.sort_unstable_by(Candidate::order);
}

/// Restores the order of a heap whose first element has changed.
fn sink(heap: &mut [Candidate]) {
    let mut at = 0;
    loop {
        let child = [2 * at + 1, 2 * at + 2]
            .into_iter()
            .filter(|child| *child < heap.len())
            .max_by(|a, b| heap[*a].order(&heap[*b]));
        match child {
            Some(child) if heap[child].order(&heap[at]) == Ordering::Greater => {
                heap.swap(at, child);
                at = child;
            }
            _ => return,
        }
    }
}

/// Puts the candidates with the largest logits into `out`, the largest first, and gives those that
/// there are.
fn largest_logits(out: &mut [Candidate], all: impl Iterator<Item = Candidate>) -> &[Candidate] {
    let mut count = 0;
    if out.is_empty() {
        return out;
    }
    for candidate in all {
        let before = |other: &Candidate| {
            let order = other.logit.total_cmp(&candidate.logit);
            order.is_gt() || order.is_eq() && other.token < candidate.token
        };
        let full = count == out.len();
        if candidate.logit.is_nan() || full && before(&out[count - 1]) {
            continue;
        }
        let at = out[..count].partition_point(before);
        count = (count + 1).min(out.len());
        out[at..count].rotate_right(1);
        out[at] = candidate;
    }
    &out[..count]
}

fn push_new(best: &mut Vec<Candidate>, candidate: Candidate) {
    if best.iter().all(|known| known.token != candidate.token) {
        best.push(candidate);
    }
}

/// The logarithm of a sum: ln(e^a + e^b).
fn log_add(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

fn write(tile: &mut [u8], candidates: &[Candidate], floor: f32, sums: [f32; 2]) {
    let head = [candidates.len() as u32, floor.to_bits(), sums[0].to_bits(), sums[1].to_bits()];
    let each = candidates.iter().flat_map(|c| [c.token, c.logit.to_bits(), c.score.to_bits()]);
    let (words, _) = tile.as_chunks_mut();
    for (word, value) in words.iter_mut().zip(head.into_iter().chain(each)) {
        *word = value.to_le_bytes();
    }
}

/// Marks a tile of candidates: the burst is to end.
pub(crate) fn end_burst(tile: &mut [u8]) {
    if let Some(count) = tile.first_chunk_mut() {
        *count = (u32::from_le_bytes(*count) | ENDS).to_le_bytes();
    }
}

/// What a tile contains for one sequence: the candidates of one device.
struct DeviceCandidates<'t> {
    floor: f32,
    sums: [f32; 2],
    ends: bool,
    candidates: &'t [u8],
    /// The bytes of the tile behind it.
    rest: &'t [u8],
}

/// Reads the candidates that a tile begins with; none where it is shorter than their count says, or its floor
/// and sums are not numbers.
fn read(tile: &[u8]) -> Option<DeviceCandidates<'_>> {
    let (head, each) = tile.split_at_checked(HEAD)?;
    let (words, _) = head.as_chunks();
    let word = |at: usize| words.get(at).map(|word| u32::from_le_bytes(*word));
    let value = |at| word(at).map(f32::from_bits);
    let (count, ends) = ((word(0)? & !ENDS) as usize, word(0)? & ENDS > 0);
    let (candidates, rest) = each.split_at_checked(count.checked_mul(EACH)?)?;
    let (floor, sums) = (value(1)?, [value(2)?, value(3)?]);
    if floor.is_nan() || sums.iter().any(|sum| sum.is_nan()) {
        return None;
    }
    Some(DeviceCandidates { floor, sums, ends, candidates, rest })
}

/// The Gumbel noise at one position of a sequence.
struct Noise {
    key: u64,
}

impl Noise {
    fn new(seed: u64, position: u32) -> Self {
        Self { key: mixed(mixed(seed).wrapping_add(u64::from(position))) }
    }

    /// The 53 random bits of a token.
    fn bits(&self, token: u32) -> u64 {
        mixed(self.key.wrapping_add(u64::from(token))) >> 11
    }

    /// The value of the standard Gumbel distribution that belongs to 53 random bits.
    fn gumbel(bits: u64) -> f64 {
        let uniform = (bits as f64 + 0.5) / (1_u64 << 53) as f64;
        -(-uniform.ln()).ln()
    }

    fn sum(&self, candidate: &Candidate) -> f64 {
        f64::from(candidate.score) + Self::gumbel(self.bits(candidate.token))
    }

    /// The candidate of `all` whose score and noise have the largest sum. `known` are some of them.
    fn largest(
        &self,
        all: impl Iterator<Item = Candidate>,
        known: &[Candidate],
    ) -> Option<Candidate> {
        let with = |candidate: &Candidate| (self.sum(candidate), *candidate);
        let mut best = known.iter().map(with).reduce(larger)?;
        // Bits that a token needs at least that is so many whole units behind the best: most need no
        // logarithm.
        let least =
            |behind: usize| ((-(-(behind as f64)).exp()).exp() * (1_u64 << 53) as f64) as u64;
        let needed: [u64; 40] = std::array::from_fn(|behind| least(behind).saturating_sub(1));
        for candidate in all {
            let behind = best.0 - f64::from(candidate.score);
            if behind > 0.0 {
                let Some(needed) = needed.get(behind as usize) else { continue };
                if self.bits(candidate.token) < *needed {
                    continue;
                }
            }
            if !candidate.score.is_nan() {
                best = larger(best, with(&candidate));
            }
        }
        Some(best.1)
    }
}

/// The larger sum; of equal ones that of the lower token, wherever the vocabulary is split.
fn larger(a: (f64, Candidate), b: (f64, Candidate)) -> (f64, Candidate) {
    let later = b.0 > a.0 || b.0 == a.0 && b.1.token < a.1.token;
    if later { b } else { a }
}

/// A bijection of 64 bits after which neighbours have nothing in common (SplitMix64).
fn mixed(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
