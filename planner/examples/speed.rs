//! Measures how long planning takes: a Llama of 32 layers on 4, 8 and 64 unlike devices. Prints the
//! median and the spread of 11 runs, or of as many as are asked for.
//!
//!     cargo run --release -p galaxy-planner --example speed [-- DEVICES [RUNS]]
#![allow(clippy::unwrap_used)]

use galaxy_common::{Bytes, LinkType, Strategy, Wanted, WeightFormat, WireType};
use galaxy_model::Formats;
use galaxy_planner::{Allowed, Offer, Request, Workload, plan, split, synthetic};
use std::time::Instant;

#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;

const RUNS: usize = 11;

fn main() {
    let spec = testing::llama(32, 2048, 32, 8);
    let workload =
        Workload { generated: 0, texts: 1, lengths: vec![(284, 1.0)], wanted: Wanted::LastLogits };
    let allowed = Allowed {
        strategy: Strategy::Auto,
        wires: vec![WireType::F32],
        links: vec![LinkType::Tls],
        tiles: None,
        exchange: None,
        max_rows: 512,
        cache: galaxy_common::Cache::NONE,
        reading: galaxy_common::Reading::Preload,
    };
    let number = |at| std::env::args().nth(at).and_then(|n| n.parse().ok());
    let only: Option<usize> = number(1);
    let runs = number(2).unwrap_or(RUNS).max(1);
    for (count, unlike) in [(4, false), (8, false), (8, true), (64, false)] {
        if only.is_some_and(|n| n != count) {
            continue;
        }
        let devices = testing::devices(count, 40.0, 60e6);
        let mut profile = synthetic::profile(&spec, "s", WeightFormat::F16, &devices);
        if unlike {
            let mut dice = testing::Dice::new(1);
            for link in &mut profile.links {
                link.busy_rate *= dice.real(0.5, 1.0);
            }
        }
        for (what, memory) in
            [("plenty of memory", 64e9), ("little memory", (5.5e9 / count as f64).max(150e6))]
        {
            let offers: Vec<Offer> = devices
                .iter()
                .map(|d| Offer { name: d.name.clone(), budget: Bytes(memory as u64), threads: 1 })
                .collect();
            let request = Request {
                spec: &spec,
                formats: &Formats::all(WeightFormat::F16),
                model: "m",
                fingerprint: "f",
                shape: "s",
                offers: &offers,
                profile: &profile,
                workload: &workload,
                allowed: &allowed,
            };
            let mut times = Vec::new();
            let mut planned = None;
            for _ in 0..runs {
                let begin = Instant::now();
                planned = Some(plan(&request));
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
            times.sort_by(f64::total_cmp);
            let links = if unlike { "unlike links" } else { "equal links" };
            println!(
                "{count} devices, {links}, {what}: {:.1} ms ({:.1} to {:.1})",
                times[runs / 2],
                times[0],
                times[runs - 1]
            );
            match planned {
                Some(Ok(p)) => println!(
                    "    {}: {:.0} ms, closed form {:.0}; {:?}",
                    p.what,
                    p.prediction.latency * 1e-6,
                    p.prediction.closed_form * 1e-6,
                    p.search
                ),
                Some(Err(e)) => println!("    {e}"),
                None => {}
            }
        }
    }
}
