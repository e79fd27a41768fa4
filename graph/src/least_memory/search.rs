//! The exact search: shortest paths over sets of operators that have run, where a path is as long as
//! its peak.
//!
//! States are taken in the order of their peaks, so a state's peak is final when it is taken, the
//! first full state is best, and at any time no order is better than the state that is next.

use super::{
    LeastMemory,
    front::Front,
    indexed::Indexed,
    orders::{self, Found},
};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    rc::Rc,
};

/// How often operators are looked at, run or taken back for each state, on average: more than in networks, and a bound for
/// graphs in which very many operators can run next.
const WORK: usize = 600;

/// A set of operators that have run, and the best way there that is known.
struct State {
    done: Rc<[u64]>,
    peak: u64,
    /// The state before it, if it is not the first.
    before: Option<usize>,
    /// Operators that ran since.
    ran: Box<[usize]>,
}

/// What a state is ranked by: the peak of going on from it, the operators that are left, its live bytes, its number; and
/// up to which peak it was gone on from before, if it was.
type Rank = Reverse<(u64, usize, u64, usize, Option<u64>)>;

/// How a search ended.
enum End {
    /// No order is better than the one that leads to this state.
    Full(usize),
    /// No order is better than the one that was known before.
    NoneBetter,
    /// It took too many states; no order has a lower peak than this.
    Cut(u64),
}

/// States that were met, and those that wait.
struct Search<'a> {
    front: Front<'a>,
    states: Vec<State>,
    numbers: HashMap<Rc<[u64]>, usize>,
    waiting: BinaryHeap<Rank>,
    /// The peak of an order that is known; only lower ones matter.
    under: u64,
}

/// The best order of a graph, by a search of at most about `limit` states.
pub(super) fn least(graph: &Indexed, limit: usize) -> LeastMemory {
    let floor = graph.floor();
    let simple = orders::simple(graph);
    if simple.peak <= floor {
        let Found { order, peak } = simple;
        return LeastMemory { order, peak, bound: peak, states: 0 };
    }
    let mut search = Search::new(graph, floor, simple.peak);
    let end = search.run(limit);
    let states = search.states.len();
    let (Found { order, peak }, bound) = match end {
        End::NoneBetter => (simple.clone(), simple.peak),
        End::Full(state) => {
            let found = orders::found(graph, search.order_to(state)).unwrap_or(simple);
            let bound = found.peak;
            (found, bound)
        }
        End::Cut(bound) => {
            drop(search);
            (orders::beam(graph, simple.peak).unwrap_or(simple), bound)
        }
    };
    LeastMemory { order, peak, bound: bound.min(peak), states }
}

impl<'a> Search<'a> {
    fn new(graph: &'a Indexed, floor: u64, under: u64) -> Self {
        let mut search = Self {
            front: Front::new(graph),
            states: Vec::new(),
            numbers: HashMap::new(),
            waiting: BinaryHeap::new(),
            under,
        };
        let mut ran = Vec::new();
        search.front.close(floor, &mut ran);
        search.meet(floor, None, &ran);
        search
    }

    fn run(&mut self, limit: usize) -> End {
        let mut choices = Vec::new();
        let mut ran = Vec::new();
        while let Some(&Reverse((peak, left, live, number, before))) = self.waiting.peek() {
            if before.is_none() && peak > self.states[number].peak {
                // A better way there was found since.
                self.waiting.pop();
                continue;
            }
            if left == 0 {
                return End::Full(number);
            }
            if self.states.len() >= limit || self.front.work() > limit.saturating_mul(WORK) {
                return End::Cut(peak);
            }
            self.waiting.pop();
            self.front.go_to(&self.states[number].done);
            self.front.list_choices(&mut choices);
            let mut next = self.under;
            for &operator in &choices {
                let (own, front) = (self.states[number].peak, &mut self.front);
                let Some(with) = front.run_group(operator, own, self.under, &mut ran) else {
                    continue;
                };
                if with > peak {
                    next = next.min(with);
                } else if before.is_none_or(|before| before < with) {
                    self.front.close(with, &mut ran);
                    self.meet(with, Some(number), &ran);
                }
                ran.drain(..).for_each(|operator| self.front.undo(operator));
            }
            if next < self.under {
                // It is gone on from with a higher peak when there is none with a lower one.
                self.waiting.push(Reverse((next, left, live, number, Some(peak))));
            }
        }
        End::NoneBetter
    }

    /// Notes the state that the front is at, unless a way there is known that is as good.
    fn meet(&mut self, peak: u64, before: Option<usize>, ran: &[usize]) {
        let known = self.numbers.get(self.front.done()).copied();
        if known.is_some_and(|known| self.states[known].peak <= peak) {
            return;
        }
        let ran = ran.into();
        let number = known.unwrap_or(self.states.len());
        let left = self.front.graph().operators.len() - self.front.count();
        self.waiting.push(Reverse((peak, left, self.front.live(), number, None)));
        if let Some(state) = self.states.get_mut(number) {
            (state.peak, state.before, state.ran) = (peak, before, ran);
            return;
        }
        let done: Rc<[u64]> = self.front.done().into();
        self.numbers.insert(done.clone(), number);
        self.states.push(State { done, peak, before, ran });
    }

    /// The order that leads to a state.
    fn order_to(&self, state: usize) -> Vec<usize> {
        let before = |state: &&State| state.before.map(|before| &self.states[before]);
        let path = std::iter::successors(Some(&self.states[state]), before);
        let mut parts: Vec<&[usize]> = path.map(|state| &*state.ran).collect();
        parts.reverse();
        parts.concat()
    }
}
