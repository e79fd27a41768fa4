//! Measures how far the paper's Algorithm 1 is from the exact split, over random small clusters, and
//! how often it fails though a split fits. The same instances as in the test of exactness.
//!
//!     cargo run --release -p galaxy-planner --example optimality
#![allow(clippy::unwrap_used)]

use galaxy_planner::{Allowed, Offer, Request, Workload, paper, split, synthetic};

#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;

const INSTANCES: u64 = 2_400;

fn main() {
    let (mut feasible, mut failed, mut equal) = (0u32, 0u32, 0u32);
    let mut ratios: Vec<f64> = Vec::new();
    for seed in 0..INSTANCES {
        let problem = testing::Dice::new(seed).problem();
        let Ok(best) = problem.solve() else { continue };
        feasible += 1;
        match paper::algorithm(&problem) {
            Ok(found) => {
                ratios.push(found.cost / best.cost);
                equal += u32::from(found.cost <= best.cost * (1.0 + 1e-9));
            }
            Err(_) => failed += 1,
        }
    }
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| 100.0 * (ratios[(share * (ratios.len() - 1) as f64) as usize] - 1.0);
    let mean = 100.0 * (ratios.iter().sum::<f64>() / ratios.len() as f64 - 1.0);
    let percent = |part: u32, all: u32| 100.0 * f64::from(part) / f64::from(all);
    println!("{INSTANCES} instances, of which {feasible} have a split that fits");
    println!(
        "Algorithm 1 fails on {failed} of them ({:.1}%) and is optimal on {equal} ({:.1}%)",
        percent(failed, feasible),
        percent(equal, feasible)
    );
    println!(
        "where it does not fail its cost is above the optimum by {mean:.1}% in the mean, {:.1}% in the \
         median, {:.1}% at the 90th percentile, {:.1}% at most",
        at(0.5),
        at(0.9),
        at(1.0)
    );
}
