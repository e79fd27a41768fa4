//! How far a run has come: the operators that have run, those that can run next, and the live bytes.
//!
//! All that is known here depends on the set of operators that have run, not on their order. So one
//! front goes from any set to any other by running and undoing those in which the two differ.

use super::indexed::Indexed;

/// A set of operators as bits, 64 to a word.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    fn has(&self, operator: usize) -> bool {
        self.0[operator / 64] >> (operator % 64) & 1 == 1
    }

    fn set(&mut self, operator: usize, wanted: bool) {
        let bit = 1 << (operator % 64);
        if wanted {
            self.0[operator / 64] |= bit;
        } else {
            self.0[operator / 64] &= !bit;
        }
    }
}

/// Numbers of the bits that are set in one word of a set.
fn ones(word: usize, mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(64 * word + lowest)
    })
}

/// How far a run has come.
pub(super) struct Front<'a> {
    graph: &'a Indexed,
    done: Bits,
    ready: Bits,
    /// How many operators have run.
    count: usize,
    /// Bytes that are there between operators.
    live: u64,
    /// Readers of each buffer that have not run.
    unread: Vec<usize>,
    /// Buffers that each operator reads and that are not made.
    unmade: Vec<usize>,
    /// How often operators were looked at, run or taken back: what a search has cost so far.
    work: usize,
}

impl<'a> Front<'a> {
    /// The front before anything has run.
    pub(super) fn new(graph: &'a Indexed) -> Self {
        let operators = graph.operators.len();
        let made = |&&read: &&usize| graph.buffers[read].maker.is_some();
        let unmade: Vec<usize> =
            graph.operators.iter().map(|own| own.reads.iter().filter(made).count()).collect();
        let mut ready = Bits::new(operators);
        (0..operators).filter(|&o| unmade[o] == 0).for_each(|o| ready.set(o, true));
        Self {
            graph,
            done: Bits::new(operators),
            ready,
            count: 0,
            live: graph.at_start,
            unread: graph.buffers.iter().map(|buffer| buffer.readers.len()).collect(),
            unmade,
            work: 0,
        }
    }

    pub(super) fn graph(&self) -> &'a Indexed {
        self.graph
    }

    pub(super) fn live(&self) -> u64 {
        self.live
    }

    pub(super) fn work(&self) -> usize {
        self.work
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The operators that have run, as bits.
    pub(super) fn done(&self) -> &[u64] {
        &self.done.0
    }

    pub(super) fn has_run(&self, operator: usize) -> bool {
        self.done.has(operator)
    }

    /// Puts the operators that can run next into a list.
    pub(super) fn list_ready(&self, list: &mut Vec<usize>) {
        list.clear();
        list.extend(self.ready.0.iter().enumerate().flat_map(|(word, &bits)| ones(word, bits)));
    }

    /// Puts the operators that can run next, with those that run right before them, into a list.
    pub(super) fn list_choices(&mut self, list: &mut Vec<usize>) {
        self.list_ready(list);
        let mut next = 0;
        let mut choices = Vec::new();
        // Those that run right before others stand for these.
        while let Some(&operator) = list.get(next) {
            next += 1;
            match self.graph.operators[operator].group.is_empty() {
                false => choices.push(operator),
                true => list.extend(self.graph.readers(operator)),
            }
        }
        choices.sort_unstable();
        choices.dedup();
        self.work += list.len() + choices.len();
        choices.retain(|&operator| self.can_run_group(operator));
        *list = choices;
    }

    /// Whether an operator can run, once those have run that do so right before it.
    fn can_run_group(&self, operator: usize) -> bool {
        let graph = self.graph;
        // What one of those makes is made in time.
        let is_late = |&maker: &usize| graph.operators[maker].group.is_empty();
        let comes = |&read: &usize| {
            self.is_made(read) || graph.buffers[read].maker.as_ref().is_some_and(is_late)
        };
        let group = graph.operators[operator].group.iter();
        group.flat_map(|&own| &graph.operators[own].reads).all(comes)
    }

    /// Runs an operator after those that run right before it, and lists them. The peak of that and of `peak`; none if it
    /// is not less than `under`, and nothing has run then.
    pub(super) fn run_group(
        &mut self,
        operator: usize,
        peak: u64,
        under: u64,
        ran: &mut Vec<usize>,
    ) -> Option<u64> {
        let graph = self.graph;
        let (mut peak, before) = (peak, ran.len());
        for &own in &graph.operators[operator].group {
            if self.has_run(own) {
                continue;
            }
            peak = peak.max(self.during(own));
            if peak >= under {
                ran.drain(before..).for_each(|operator| self.undo(operator));
                return None;
            }
            self.run(own);
            ran.push(own);
        }
        Some(peak)
    }

    /// The first buffer that an operator reads and that is not made.
    pub(super) fn missing(&self, operator: usize) -> Option<usize> {
        self.graph.operators[operator].reads.iter().copied().find(|&read| !self.is_made(read))
    }

    /// Operators that can run now and read what `operator` made.
    pub(super) fn followers(&self, operator: usize) -> impl Iterator<Item = usize> {
        self.graph.readers(operator).filter(|&reader| self.ready.has(reader))
    }

    /// Bytes that are there while an operator runs next.
    pub(super) fn during(&self, operator: usize) -> u64 {
        let own = &self.graph.operators[operator];
        let shared = own.in_place.filter(|&(read, _)| self.unread[read] == 1);
        let shared = shared.map_or(0, |(read, _)| self.graph.buffers[read].bytes);
        self.live + own.adds - shared
    }

    /// Bytes that are there after an operator has run next.
    pub(super) fn after(&self, operator: usize) -> u64 {
        let own = &self.graph.operators[operator];
        let goes = |&&read: &&usize| self.unread[read] == 1 && !self.graph.buffers[read].is_kept;
        let freed = own.reads.iter().filter(goes).map(|&read| self.graph.buffers[read].bytes);
        self.live + own.leaves - freed.sum::<u64>()
    }

    /// Runs an operator that has not run.
    pub(super) fn run(&mut self, operator: usize) {
        self.flip(operator);
    }

    /// Takes back an operator that has run.
    pub(super) fn undo(&mut self, operator: usize) {
        self.flip(operator);
    }

    /// Goes to another set of operators that have run.
    pub(super) fn go_to(&mut self, done: &[u64]) {
        for (word, &wanted) in done.iter().enumerate() {
            ones(word, self.done.0[word] ^ wanted).for_each(|operator| self.flip(operator));
        }
    }

    /// Runs all operators that cannot make things worse while the peak is at most `peak`, and lists
    /// them: single ones that fit and leave no more bytes than before, and chains of them, each made
    /// possible by the one before, which first rise and then fall to that.
    ///
    /// An order that runs them later is no better. Live bytes are submodular in the set of operators
    /// that have run, and all sets between the one before a chain and the one after it have more than
    /// the latter; so running the chain first takes bytes away from all that follows.
    pub(super) fn close(&mut self, peak: u64, ran: &mut Vec<usize>) {
        let mut ready = Vec::new();
        loop {
            let before = ran.len();
            self.list_ready(&mut ready);
            self.work += ready.len();
            for &operator in &ready {
                let may_fall = self.after(operator) <= self.live || self.may_lead_on(operator);
                if may_fall && self.during(operator) <= peak {
                    self.run_chain(operator, peak, ran);
                }
            }
            if ran.len() == before {
                return;
            }
        }
    }

    /// Whether others may become possible after an operator; it saves most attempts at a chain.
    fn may_lead_on(&self, operator: usize) -> bool {
        let made = &self.graph.operators[operator].makes;
        let mut readers = made.iter().flat_map(|&made| &self.graph.buffers[made].readers);
        readers.any(|&reader| self.unmade[reader] <= made.len())
    }

    /// Runs an operator and a chain of others behind it if that leaves no more bytes than before;
    /// otherwise nothing.
    fn run_chain(&mut self, first: usize, peak: u64, ran: &mut Vec<usize>) {
        let (start, before) = (self.live, ran.len());
        let mut next = Some(first);
        while let Some(operator) = next {
            self.run(operator);
            ran.push(operator);
            if self.live <= start {
                return;
            }
            let fits = self.followers(operator).filter(|&follower| self.during(follower) <= peak);
            next = fits.min_by_key(|&follower| (self.after(follower), follower));
        }
        ran.drain(before..).for_each(|operator| self.undo(operator));
    }

    /// Runs or takes back an operator, in whatever order others were.
    fn flip(&mut self, operator: usize) {
        self.work += 1;
        let graph = self.graph;
        let own = &graph.operators[operator];
        let runs = !self.done.has(operator);
        for &made in &own.makes {
            let buffer = &graph.buffers[made];
            if buffer.is_kept || self.unread[made] > 0 {
                self.count_bytes(buffer.bytes, runs);
            }
            for &reader in &buffer.readers {
                self.unmade[reader] =
                    if runs { self.unmade[reader] - 1 } else { self.unmade[reader] + 1 };
                self.ready.set(reader, self.unmade[reader] == 0 && !self.done.has(reader));
            }
        }
        for &read in &own.reads {
            self.unread[read] = if runs { self.unread[read] - 1 } else { self.unread[read] + 1 };
            let is_last = self.unread[read] == usize::from(!runs);
            let buffer = &graph.buffers[read];
            if is_last && !buffer.is_kept && self.is_made(read) {
                self.count_bytes(buffer.bytes, !runs);
            }
        }
        self.done.set(operator, runs);
        self.ready.set(operator, !runs && self.unmade[operator] == 0);
        self.count = if runs { self.count + 1 } else { self.count - 1 };
    }

    /// Adds bytes to those that are live, or takes them away.
    fn count_bytes(&mut self, bytes: u64, come: bool) {
        self.live = if come { self.live + bytes } else { self.live - bytes };
    }

    fn is_made(&self, buffer: usize) -> bool {
        self.graph.buffers[buffer].maker.is_none_or(|maker| self.done.has(maker))
    }
}
