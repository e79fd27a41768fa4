//! Orders that are found without a proof.

use super::{front::Front, indexed::Indexed};
use std::{collections::HashMap, rc::Rc};

/// States of one size that a beam keeps.
const BEAM: usize = 64;
/// Operators that a beam tries after each state: those that look best.
const CHOICES: usize = 8;
/// Operators that a beam looks at, runs or takes back at most, about: a few tenths of a second. Where
/// that is too few for all states of a size, the best of them are looked at, and always the first.
const WORK: usize = 6_000_000;

/// An order and the bytes at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) order: Vec<usize>,
    pub(super) peak: u64,
}

/// The best of three orders: the file's, if it is one, a depth-first one, and a greedy one.
///
/// The file's wins ties, so that a graph whose order is good stays as it is.
pub(super) fn simple(graph: &Indexed) -> Found {
    let file: Vec<usize> = (0..graph.operators.len()).collect();
    let orders = [file, depth_first(graph), greedy(graph)];
    let found = orders.into_iter().filter_map(|order| found(graph, order));
    found.min_by_key(|found| found.peak).expect("a depth-first order is an order")
}

/// An order with its peak, unless it runs something too early.
pub(super) fn found(graph: &Indexed, order: Vec<usize>) -> Option<Found> {
    let during = graph.timeline(&order).ok()?;
    let peak = during.into_iter().fold(graph.at_start, u64::max);
    Some(Found { order, peak })
}

/// Runs what became possible last.
fn depth_first(graph: &Indexed) -> Vec<usize> {
    let mut front = Front::new(graph);
    let mut order = Vec::with_capacity(graph.operators.len());
    let mut waiting = Vec::new();
    front.list_ready(&mut waiting);
    waiting.reverse();
    while let Some(operator) = waiting.pop() {
        // One that reads two results of the same operator waits twice.
        if front.has_run(operator) {
            continue;
        }
        front.run(operator);
        order.push(operator);
        let before = waiting.len();
        waiting.extend(front.followers(operator));
        waiting[before..].reverse();
    }
    order
}

/// Runs what harms least: what raises the peak least, and then what leaves the fewest bytes.
fn greedy(graph: &Indexed) -> Vec<usize> {
    let mut front = Front::new(graph);
    let mut peak = graph.floor();
    let (mut order, mut ready) = (Vec::new(), Vec::new());
    loop {
        front.close(peak, &mut order);
        front.list_ready(&mut ready);
        let harm = |&operator: &usize| (front.during(operator).max(peak), front.after(operator));
        let Some(operator) = ready.iter().copied().min_by_key(harm) else {
            return order;
        };
        peak = peak.max(front.during(operator));
        front.run(operator);
        order.push(operator);
    }
}

/// A state of a beam.
struct Step {
    peak: u64,
    live: u64,
    done: Rc<[u64]>,
    /// The steps before it, the last one's number, if it is not the first.
    before: Option<usize>,
    /// Operators that ran since.
    ran: Vec<usize>,
}

/// A search that keeps the best few sets of each size, for orders whose peak is less than `under`.
pub(super) fn beam(graph: &Indexed, under: u64) -> Option<Found> {
    let count = graph.operators.len();
    let mut front = Front::new(graph);
    let mut first = Step {
        peak: graph.floor(),
        live: 0,
        done: front.done().into(),
        before: None,
        ran: Vec::new(),
    };
    front.close(first.peak, &mut first.ran);
    (first.live, first.done) = (front.live(), front.done().into());
    // Steps that are to be looked at, by how many operators have run.
    let mut waiting: Vec<HashMap<Rc<[u64]>, Step>> = (0..=count).map(|_| HashMap::new()).collect();
    waiting[front.count()].insert(first.done.clone(), first);
    let mut steps: Vec<Step> = Vec::new();
    for size in 0..count {
        let mut level: Vec<Step> = std::mem::take(&mut waiting[size]).into_values().collect();
        level.sort_unstable_by(|a, b| (a.peak, a.live, &a.done).cmp(&(b.peak, b.live, &b.done)));
        let share = WORK / count * (size + 1);
        for (place, step) in level.into_iter().take(BEAM).enumerate() {
            if place > 0 && front.work() > share {
                break;
            }
            front.go_to(&step.done);
            for operator in choices(&mut front, step.peak, under) {
                let mut ran = Vec::new();
                let Some(peak) = front.run_group(operator, step.peak, under, &mut ran) else {
                    continue;
                };
                front.close(peak, &mut ran);
                let known = &mut waiting[front.count()];
                if known.get(front.done()).is_none_or(|other| peak < other.peak) {
                    let (done, ran): (Rc<[u64]>, _) = (front.done().into(), ran.clone());
                    let (live, before) = (front.live(), Some(steps.len()));
                    known.insert(done.clone(), Step { peak, live, done, before, ran });
                }
                ran.into_iter().for_each(|operator| front.undo(operator));
            }
            steps.push(step);
        }
    }
    let last = std::mem::take(&mut waiting[count]).into_values().next()?;
    found(graph, walk_back(&steps, &last))
}

/// The operators to try next: those that raise the peak least, and then those that leave the fewest bytes.
fn choices(front: &mut Front<'_>, peak: u64, under: u64) -> Vec<usize> {
    let (mut choices, mut ran) = (Vec::new(), Vec::new());
    front.list_choices(&mut choices);
    let mut ranked: Vec<(u64, u64, usize)> = Vec::new();
    for operator in choices {
        if let Some(peak) = front.run_group(operator, peak, under, &mut ran) {
            ranked.push((peak, front.live(), operator));
            ran.drain(..).for_each(|operator| front.undo(operator));
        }
    }
    ranked.sort_unstable();
    ranked.into_iter().take(CHOICES).map(|(_, _, operator)| operator).collect()
}

/// The order that leads to a step.
fn walk_back(steps: &[Step], last: &Step) -> Vec<usize> {
    let before = |step: &&Step| step.before.map(|before| &steps[before]);
    let mut parts: Vec<&[usize]> =
        std::iter::successors(Some(last), before).map(|step| step.ran.as_slice()).collect();
    parts.reverse();
    parts.concat()
}
