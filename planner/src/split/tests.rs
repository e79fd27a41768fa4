#![allow(clippy::unwrap_used)]

use super::*;
use crate::testing::Dice;

/// All ways to give out `total` units within caps.
fn ways(caps: &[usize], total: usize) -> Vec<Vec<usize>> {
    let Some((&cap, rest)) = caps.split_first() else {
        return if total == 0 { vec![vec![]] } else { vec![] };
    };
    let with = |own: usize| {
        ways(rest, total - own).into_iter().map(move |mut choice| {
            choice.insert(0, own);
            choice
        })
    };
    (0..=cap.min(total)).flat_map(with).collect()
}

/// The least cost of all splits, by trying them all.
fn brute_force(problem: &Problem) -> Option<f64> {
    let n = problem.devices.len();
    let caps = |total: usize| vec![total; n];
    let owners: Vec<usize> =
        problem.devices.iter().map(|s| if s.owner { problem.rows } else { 0 }).collect();
    let (rows, columns) =
        (ways(&owners, problem.rows), ways(&caps(problem.columns), problem.columns));
    let words = ways(&caps(problem.vocabulary), problem.vocabulary);
    let mut best: Option<f64> = None;
    // Pairs of W and P, each once.
    let mut pairs: Vec<(f64, f64, Vec<usize>)> = Vec::new();
    for rows in rows {
        let most = |of: &dyn Fn(usize) -> f64| (0..n).map(of).fold(0.0, f64::max);
        let wire = most(&|d| problem.devices[d].wire[rows[d]]);
        let work = most(&|d| problem.devices[d].rows[rows[d]]);
        if !pairs.iter().any(|p| p.0 <= wire && p.1 <= work) {
            pairs.push((wire, work, rows));
        }
    }
    let mut split = Split { rows: vec![0; n], ..Split::default() };
    for heads in ways(&caps(problem.heads), problem.heads) {
        split.heads = heads;
        for columns in &columns {
            split.columns.clone_from(columns);
            for words in &words {
                split.vocabulary.clone_from(words);
                if !(0..n).all(|d| problem.bytes(&split, d) <= problem.devices[d].room) {
                    continue;
                }
                for (_, _, rows) in &pairs {
                    split.rows.clone_from(rows);
                    let cost = problem.price(&split);
                    if best.is_none_or(|b| cost < b) {
                        best = Some(cost);
                    }
                }
            }
        }
    }
    best
}

#[test]
fn the_split_has_the_least_cost() {
    let (mut infeasible, mut bound) = (0, 0);
    for seed in 0..2_400 {
        let problem = Dice::new(seed).problem();
        let (wanted, found) = (brute_force(&problem), problem.solve());
        match (wanted, found) {
            (Some(wanted), Ok(found)) => {
                let close = (found.cost - wanted).abs() <= 1e-9 * wanted;
                assert!(close, "seed {seed}: {} is not {wanted}", found.cost);
                assert!((problem.price(&found) - found.cost).abs() <= 1e-9 * wanted, "seed {seed}");
                let fits = |d| problem.bytes(&found, d) <= problem.devices[d].room;
                assert!((0..problem.devices.len()).all(fits), "seed {seed}");
                let low = problem.bound().unwrap();
                assert!(low <= wanted * (1.0 + 1e-9), "seed {seed}");
                bound += u32::from(low < wanted * (1.0 - 1e-9));
            }
            (None, Err(missing)) => {
                assert!(missing.bytes > 0);
                infeasible += 1;
            }
            (wanted, found) => panic!("seed {seed}: {wanted:?} against {found:?}"),
        }
    }
    // Otherwise the instances would not test what they are for.
    assert!(infeasible > 100 && bound > 300, "{infeasible} infeasible, {bound} bound by memory");
}
