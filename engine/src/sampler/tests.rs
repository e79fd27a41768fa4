//! Choices of tokens, against their definition and at the edges of numbers.

use super::*;
use galaxy_graph::program::candidates_bytes;
use proptest::prelude::*;

fn text(sampling: Sampling, tokens: &[u32], prompt: usize) -> Sequence {
    let sampling = sampling.checked(1000).expect("sensible");
    Sequence { slot: 0, rows: 64, sampling, tokens: tokens.to_vec(), prompt }
}

fn logits(seed: u64, count: usize, spread: f32) -> Vec<f32> {
    let value = |at| (mixed(seed * 1000 + at) >> 40) as f32 / (1 << 24) as f32 - 0.5;
    (0..count as u64).map(|at| value(at) * spread).collect()
}

/// The choice of devices whose slices of the vocabulary begin at 0 and `cuts`, all alike, and the
/// values that they report of it.
fn choose(
    text: &Sequence,
    logits: &[f32],
    cuts: &[usize],
    candidates: CandidateCount,
    position: u32,
) -> (SampledToken, Vec<f32>) {
    choose_of(text, logits, cuts, (candidates, None), position)
}

/// As `choose`, among the tokens that a mask allows.
fn choose_of(
    text: &Sequence,
    logits: &[f32],
    cuts: &[usize],
    (candidates, mask): (CandidateCount, Option<&TokenMask>),
    position: u32,
) -> (SampledToken, Vec<f32>) {
    let ends = cuts.iter().copied().chain([logits.len()]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let mut tiles = Vec::new();
    for (start, end) in starts.zip(ends).filter(|(start, end)| start < end) {
        let slice = &logits[start..end];
        let bytes = candidates_bytes(candidates.of(slice.len() as u32));
        let mut tile = vec![0xff; bytes as usize];
        let mut sampler = Sampler::new(text, slice.len() as u32);
        sampler.top_k((slice, start as u32), position, candidates, mask, &mut tile);
        tiles.push(tile);
    }
    let mut sampler = Sampler::new(text, 0);
    let mut gathered = Candidates::default();
    assert!(tiles.iter().all(|tile| gathered.gather(tile).is_some()));
    let mut told = vec![f32::NAN; TOKEN_VALUES as usize];
    (sampler.sample(&mut gathered, position, &mut told).expect("numbers"), told)
}

/// The probability of each token after all bounds, by their definition, from the logits of the whole
/// vocabulary.
fn distribution(text: &Sequence, logits: &[f32]) -> Vec<f64> {
    let mut scores = logits.to_vec();
    Sampler::new(text, logits.len() as u32).adjust(&mut scores, 0);
    let s = &text.sampling;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    let weight =
        |at: usize| (f64::from(scores[at] - scores[order[0]]) / f64::from(s.temperature)).exp();
    let mut left = order.clone();
    if s.top_k > 0 {
        left.truncate(s.top_k as usize);
    }
    if s.top_p < 1.0 {
        let whole: f64 = left.iter().map(|at| weight(*at)).sum();
        let mut mass = 0.0;
        let enough = left.iter().position(|at| {
            mass += weight(*at) / whole;
            mass >= f64::from(s.top_p)
        });
        left.truncate(enough.map_or(left.len(), |last| last + 1));
    }
    left.retain(|at| weight(*at) >= f64::from(s.min_p));
    let whole: f64 = left.iter().map(|at| weight(*at)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    left.iter().for_each(|at| probabilities[*at] = weight(*at) / whole);
    probabilities
}

#[test]
fn the_vocabulary_split_does_not_change_the_chosen_token() {
    let base = Sampling { temperature: 0.8, seed: 7, ..Sampling::default() };
    let cases = [
        Sampling::greedy(),
        base.clone(),
        Sampling { top_k: 5, ..base.clone() },
        Sampling { top_p: 0.9, ..base.clone() },
        Sampling { min_p: 0.05, ..base.clone() },
        Sampling { top_k: 300, top_p: 0.7, min_p: 0.01, ..base.clone() },
        Sampling { repetition: 1.5, presence: 0.3, frequency: 0.2, ..base.clone() },
        Sampling { bias: vec![(3, 4.0), (900, -50.0)], logprobs: 7, ..base },
    ];
    for (case, sampling) in cases.into_iter().enumerate() {
        let text = text(sampling, &[1, 2, 3, 3, 900, 901, 901], 4);
        for position in 0..40 {
            let logits = logits(position.into(), 1000, [3.0, 12.0, 40.0][position as usize % 3]);
            let whole = choose(&text, &logits, &[], CandidateCount::All, position);
            assert!(whole.0.proved);
            for cuts in [&[500][..], &[1, 2, 998], &[0, 333, 333, 777]] {
                for candidates in [CandidateCount::Few, CandidateCount::Many, CandidateCount::All] {
                    let some = choose(&text, &logits, cuts, candidates, position);
                    if !some.0.proved {
                        assert_ne!(candidates, CandidateCount::All);
                        continue;
                    }
                    assert_eq!(some.0, whole.0, "{case} {cuts:?} {candidates:?} at {position}");
                    for (a, b) in some.1.iter().zip(&whole.1) {
                        assert!((a - b).abs() < 1e-4, "{case} {cuts:?} {candidates:?}: {a} {b}");
                    }
                }
            }
        }
    }
}

#[test]
fn sampled_tokens_follow_the_expected_distribution() {
    let base = Sampling { temperature: 1.3, ..Sampling::default() };
    let cases = [
        base.clone(),
        Sampling { top_k: 4, ..base.clone() },
        Sampling { top_p: 0.6, ..base.clone() },
        Sampling { min_p: 0.2, ..base.clone() },
        Sampling { top_k: 6, top_p: 0.8, min_p: 0.1, repetition: 1.2, ..base },
    ];
    let logits = logits(5, 12, 5.0);
    for sampling in cases {
        let draws = 4000;
        let mut seen = [0_u32; 12];
        let mut text = text(sampling, &[1, 5], 2);
        for seed in 0..draws {
            text.sampling.seed = seed;
            let (chosen, _) = choose(&text, &logits, &[5], CandidateCount::Few, 9);
            assert!(chosen.proved);
            seen[chosen.token as usize] += 1;
        }
        for (token, p) in distribution(&text, &logits).into_iter().enumerate() {
            let (want, got) = (p * draws as f64, f64::from(seen[token]));
            // Five standard deviations.
            let slack = 5.0 * (want * (1.0 - p)).sqrt();
            assert!((want - got).abs() <= slack, "token {token}: {got}, not {want}");
        }
    }
}

#[test]
fn few_candidates_do_not_prove_a_choice_from_a_flat_distribution() {
    let sampling = Sampling { temperature: 1.0, top_p: 0.9, ..Sampling::default() };
    let flat = vec![0.0; 1000];
    let text = text(sampling, &[], 0);
    assert!(!choose(&text, &flat, &[500], CandidateCount::Few, 0).0.proved);
    assert!(choose(&text, &flat, &[500], CandidateCount::Many, 0).0.proved);
    let steep: Vec<f32> = (0..1000).map(|at| -(at as f32)).collect();
    assert!(choose(&text, &steep, &[500], CandidateCount::Few, 0).0.proved);
}

#[test]
fn malformed_candidate_tiles_are_refused_and_nan_logits_skipped() {
    let mut sampler = Sampler::new(&text(Sampling::greedy(), &[], 0), 0);
    let mut gathered = Candidates::default();
    for tile in [&[][..], &[0; 15], &[1; 16], &[0xff; 64]] {
        assert_eq!(gathered.gather(tile), None, "{tile:?}");
    }
    // What follows belongs to the next choice.
    assert_eq!(gathered.gather(&[0; 19]), Some(&[0; 3][..]));
    let mut told = vec![0.0; TOKEN_VALUES as usize];
    assert_eq!(sampler.sample(&mut gathered, 0, &mut told), None, "nobody named any");
    let (chosen, told) = choose(
        &text(Sampling { logprobs: 2, ..Sampling::greedy() }, &[], 0),
        &[f32::NAN, 1.0, 3.0, f32::NAN],
        &[1],
        CandidateCount::Few,
        0,
    );
    assert_eq!(chosen, SampledToken { token: 2, proved: true });
    assert_eq!((told[0], told[4], told[5], told[7]), (2.0, 2.0, 2.0, 1.0));
}

#[test]
fn with_all_logits_minus_infinity_no_token_has_a_probability() {
    let sampling = Sampling { logprobs: 1, ..Sampling::greedy() };
    let (chosen, told) =
        choose(&text(sampling, &[], 0), &[f32::NEG_INFINITY; 3], &[1], CandidateCount::Few, 0);
    assert_eq!(chosen, SampledToken { token: 0, proved: true });
    assert_eq!((told[1], told[5], told[6]), (f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY));
}

/// With a mask the other tokens are as if they had no logit, except in the reported log-probabilities.
#[test]
fn only_tokens_of_the_mask_are_chosen() {
    let base = Sampling { temperature: 1.1, seed: 3, logprobs: 4, ..Sampling::default() };
    let cases = [
        Sampling { logprobs: 4, ..Sampling::greedy() },
        base.clone(),
        Sampling { top_k: 3, ..base.clone() },
        Sampling { top_p: 0.8, repetition: 1.4, bias: vec![(4, 100.0), (640, 3.0)], ..base },
    ];
    let allowed: Vec<u32> = (0..1000).filter(|token| token % 37 == 11).chain([640]).collect();
    let mask = TokenMask::of(&allowed);
    assert!((0..2000).all(|token| mask.allows(token) == allowed.contains(&token)));
    for sampling in cases {
        let text = text(sampling, &[640, 11, 11, 4], 2);
        for position in 0..30 {
            let logits = logits(position.into(), 1000, 9.0);
            let left_out = |(token, logit): (usize, &f32)| {
                if mask.allows(token as u32) { *logit } else { f32::NEG_INFINITY }
            };
            let masked: Vec<f32> = logits.iter().enumerate().map(left_out).collect();
            let want = choose(&text, &masked, &[], CandidateCount::All, position).0;
            let all = choose(&text, &logits, &[], CandidateCount::All, position).1;
            for (cuts, candidates) in [
                (&[][..], CandidateCount::Few),
                (&[500], CandidateCount::Few),
                (&[3, 641], CandidateCount::Many),
            ] {
                let with = (candidates, Some(&mask));
                let (chosen, told) = choose_of(&text, &logits, cuts, with, position);
                assert_eq!(chosen, want, "{candidates:?} {cuts:?} at {position}");
                let sum = log_sum_exp(&logits, 1.0);
                let logprob = logits[chosen.token as usize] - sum;
                assert!((told[1] - logprob).abs() < 1e-4, "of all logits");
                assert_eq!(told[4..].len(), all[4..].len());
                assert!(told[4..].iter().zip(&all[4..]).all(|(a, b)| (a - b).abs() < 1e-4));
            }
        }
    }
}

/// A step that runs again makes the same choice again, which counts once.
#[test]
fn a_repeated_choice_counts_once_in_the_penalties() {
    let sampling = Sampling { presence: 1.0, frequency: 1.0, ..Sampling::greedy() };
    let text = text(sampling, &[0], 1);
    let choices = |again: usize| -> Vec<u32> {
        let mut sampler = Sampler::new(&text, 3);
        let mut told = vec![0.0; TOKEN_VALUES as usize];
        let mut tile = vec![0; candidates_bytes(3) as usize];
        let mut at = |position| {
            sampler.top_k((&[4.0, 3.5, 0.0], 0), position, CandidateCount::Few, None, &mut tile);
            let mut gathered = Candidates::default();
            assert!(gathered.gather(&tile).is_some());
            sampler.sample(&mut gathered, position, &mut told).expect("numbers").token
        };
        let mut many = |position| (0..again).map(|_| at(position)).last().expect("some");
        (1..9).map(&mut many).collect()
    };
    assert_eq!(choices(3), choices(1));
    assert!(choices(1).contains(&1), "penalties are of weight");
}

#[test]
fn the_likeliest_candidates_equal_a_full_sort() {
    for (count, most) in [(1, 1), (5, 9), (100, 1), (1000, 64), (1000, 999), (70, 70)] {
        let logits = logits(3, count, 4.0);
        let all = || {
            let each = logits.iter().enumerate();
            each.map(|(at, l)| Candidate { token: at as u32, logit: *l, score: (*l * 2.0).round() })
        };
        let (mut best, mut sorted) = (Vec::new(), all().collect::<Vec<_>>());
        likeliest(&mut best, most, all());
        sorted.sort_unstable_by(Candidate::order);
        sorted.truncate(most);
        assert_eq!(best, sorted);
    }
}

/// Logits at the edges of numbers: alike, forbidden, huge, and ordinary ones.
fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let edges = [f32::NEG_INFINITY, 0.0, -0.0, 1.0, 1e-30, 3e38, f32::MAX, f32::MIN, f32::INFINITY];
    let logit = prop_oneof![proptest::sample::select(edges.to_vec()), -20.0_f32..20.0, Just(2.0)];
    proptest::collection::vec(logit, 1..150)
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let one_of = |values: &'static [f32]| proptest::sample::select(values);
    let bounds = (
        one_of(&[0.0, 1e-45, 1e-8, 1e-5, 1e-3, 1.0, 100.0]),
        proptest::sample::select(&[0, 1, 2, 150, u32::MAX][..]),
        one_of(&[0.0, 1e-9, 0.5, 1.0]),
        one_of(&[0.0, 1e-9, 0.3, 1.0]),
    );
    let penalties = (one_of(&[0.01, 1.0, 100.0]), one_of(&[-2.0, 0.0, 2.0]), one_of(&[-2.0, 0.0]));
    let bias = one_of(&[-1e4, -100.0, 100.0]);
    (bounds, penalties, bias, any::<u64>()).prop_map(|(bounds, penalties, bias, seed)| Sampling {
        temperature: bounds.0,
        top_k: bounds.1,
        top_p: bounds.2,
        min_p: bounds.3,
        repetition: penalties.0,
        presence: penalties.1,
        frequency: penalties.2,
        bias: if seed.is_multiple_of(2) { vec![(1, bias), (140, -bias)] } else { Vec::new() },
        seed,
        ..Sampling::default()
    })
}

proptest! {
    #[test]
    fn choices_from_extreme_logits_stay_within_all_sampling_bounds(
        logits in any_logits(), sampling in any_sampling(), cut in 0_usize..150, position in 0_u32..9,
    ) {
        let text = text(sampling, &[0, 1, 1, 7, 7], 2);
        let sampling = &text.sampling;
        let (chosen, told) = choose(&text, &logits, &[], CandidateCount::All, position);
        prop_assert!(chosen.proved && !told.iter().any(|value| value.is_nan()));
        let mut scores = logits.clone();
        Sampler::new(&text, logits.len() as u32).adjust(&mut scores, 0);
        let by = if sampling.temperature == 0.0 { 1.0 } else { 1.0 / sampling.temperature };
        scores.iter_mut().for_each(|score| *score = (*score * by).min(f32::MAX));
        let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let score = scores[chosen.token as usize];
        prop_assert!(score > f32::NEG_INFINITY || best == f32::NEG_INFINITY);
        let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
        if temperature == 0.0 || top_k == 1 || top_p <= 1e-9 || min_p >= 1.0 {
            prop_assert_eq!(score, best);
        }
        if temperature == 0.0 {
            let first = scores.iter().position(|score| *score == best);
            // Minus zero is below zero here, as nothing is between them.
            prop_assert!(best == 0.0 || first == Some(chosen.token as usize));
        }
        let likelier = scores.iter().filter(|other| **other > score).count();
        prop_assert!(top_k == 0 || likelier < top_k as usize);
        // The mass of some tokens is as exact as the sum of all, which depends on the split.
        if top_p == 0.0 || top_p >= 1.0 || top_k > 0 {
            for candidates in [CandidateCount::Few, CandidateCount::Many, CandidateCount::All] {
                let (some, _) = choose(&text, &logits, &[cut.min(logits.len())], candidates, position);
                prop_assert!(!some.proved || some == chosen, "{:?}: {:?}, not {:?}", candidates, some, chosen);
                prop_assert!(some.proved || candidates != CandidateCount::All);
            }
        }
    }
}
