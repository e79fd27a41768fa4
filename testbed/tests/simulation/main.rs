//! A coordinator and workers, whole, in one process, with virtual time, under all faults that a cluster may
//! have: every request is answered rightly or with an error that says why, nothing hangs, and nothing is left
//! behind.
//!
//! Each seed is a story of its own. `scripts/simulate SEEDS` plays more of them than the checks do;
//! `scripts/simulate --seed N` prints one.
#![allow(clippy::unwrap_used)]

mod clock;
mod network;
mod scenario;
mod world;

use scenario::{MODELS, Tally, play, references};
use std::{
    env, fs,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use world::Keys;

/// The number of stories that the checks play.
const SEEDS: u64 = 1000;
/// The number of parts of the stories that the checks play, one for each process.
const PARTS: u64 = 4;

/// The threads and descriptors that are left after a story.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    threads: Vec<String>,
    descriptors: usize,
}

impl Left {
    fn now() -> Self {
        let names = fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = names.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        let mut threads: Vec<_> = names.collect();
        threads.sort();
        Self { threads, descriptors: fs::read_dir("/proc/self/fd").unwrap().count() }
    }
}

/// The lock by which one story is played at a time: a story watches all threads of the process.
static STAGE: Mutex<()> = Mutex::new(());

fn part(part: u64) {
    let _alone = STAGE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seeds: Vec<u64> = match number("GALAXY_SEED") {
        Some(seed) if seed % PARTS == part => vec![seed],
        Some(_) => vec![],
        None => {
            (0..number("GALAXY_SEEDS").unwrap_or(SEEDS)).filter(|s| s % PARTS == part).collect()
        }
    };
    let (keys, references) = (Arc::new(Keys::create(4, &MODELS).unwrap()), references().unwrap());
    let (begun, mut all, mut before) = (Instant::now(), Tally::default(), None);
    for (at, seed) in seeds.iter().enumerate() {
        let runtime = clock::runtime().unwrap();
        let played = runtime.block_on(play(*seed, keys.clone(), references.clone()));
        let tally = played.unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
        let tasks = runtime.metrics().num_alive_tasks();
        assert_eq!(tasks, 1, "seed {seed}: tasks are left, beside the clock's own");
        drop(runtime);
        // A thread of the runtime that had nothing to do for long ends by itself.
        let ended = Instant::now();
        let before = before.get_or_insert_with(Left::now);
        while *before != Left::now() && ended.elapsed() < Duration::from_secs(240) {
            std::thread::yield_now();
        }
        assert_eq!(*before, Left::now(), "seed {seed}: something is left");
        all.add(&tally);
        if at % 50 == 49 {
            eprintln!("{} stories in {:.0} s: {all}", at + 1, begun.elapsed().as_secs_f64());
        }
    }
    eprintln!("{} stories in {:.0} s: {all}", seeds.len(), begun.elapsed().as_secs_f64());
    // Among that many stories are some with several sequences at once, and some of these evict sequences.
    assert!(seeds.len() < 200 || all.most > 1 && all.evicted > 0, "no sequence met another");
}

#[test]
fn simulated_clusters_survive_random_faults_part_0() {
    part(0);
}

#[test]
fn simulated_clusters_survive_random_faults_part_1() {
    part(1);
}

#[test]
fn simulated_clusters_survive_random_faults_part_2() {
    part(2);
}

#[test]
fn simulated_clusters_survive_random_faults_part_3() {
    part(3);
}
