//! A memory graph that makes sense, with what a search looks up.

use super::{MemoryError, MemoryGraph};

/// The most operators in a row that run right before another one.
const CHAIN: usize = 8;

/// A buffer, and who makes and reads it.
pub(crate) struct Buffer {
    pub(crate) bytes: u64,
    /// The operator that makes it; inputs and buffers that nothing uses have none.
    pub(crate) maker: Option<usize>,
    pub(crate) is_input: bool,
    /// Whether it stays to the end: results, and inputs that nobody reads.
    pub(crate) is_kept: bool,
    /// Operators that read it, each once.
    pub(crate) readers: Vec<usize>,
}

/// An operator, and what it costs.
pub(crate) struct Operator {
    /// Buffers that it reads, each once.
    pub(crate) reads: Vec<usize>,
    pub(crate) makes: Vec<usize>,
    /// Bytes that it makes, and its workspace.
    pub(crate) adds: u64,
    /// Bytes that it makes and that stay after it.
    pub(crate) leaves: u64,
    /// A buffer whose bytes one of its results takes over if it is the buffer's last reader, and that result.
    pub(crate) in_place: Option<(usize, usize)>,
    /// Operators that run right before it if they have not run yet, each after those that it needs; itself the last.
    /// None if it is one that runs right before others.
    pub(crate) group: Vec<usize>,
}

/// A memory graph that was checked: buffers exist and are made once, and no operators wait for each
/// other.
pub(crate) struct Indexed {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) operators: Vec<Operator>,
    /// Bytes that are there before anything runs.
    pub(crate) at_start: u64,
}

impl Indexed {
    pub(crate) fn new(graph: &MemoryGraph) -> Result<Self, MemoryError> {
        let mut buffers = ends(graph)?;
        for (operator, own) in graph.operators.iter().enumerate() {
            let named = own.reads.iter().chain(&own.makes);
            if let Some(&buffer) = named.into_iter().find(|&&buffer| buffer >= buffers.len()) {
                let buffers = buffers.len();
                return Err(MemoryError::UnknownBuffer { operator, buffer, buffers });
            }
            for &buffer in &own.makes {
                let made = &mut buffers[buffer];
                if made.is_input {
                    return Err(MemoryError::MakesInput { operator, buffer });
                }
                if let Some(first) = made.maker.replace(operator) {
                    return Err(MemoryError::MadeTwice { buffer, first, second: operator });
                }
            }
            for &buffer in &own.reads {
                // An operator that reads a buffer twice comes twice in a row.
                if buffers[buffer].readers.last() != Some(&operator) {
                    buffers[buffer].readers.push(operator);
                }
            }
        }
        keep_unread_inputs(&mut buffers);
        if !fits(graph) {
            return Err(MemoryError::TooManyBytes);
        }
        let cost = |operator| cost(graph, &buffers, operator);
        let operators = (0..graph.operators.len()).map(cost).collect::<Result<_, _>>()?;
        let at_start = buffers.iter().filter(|b| b.is_input).map(|b| b.bytes).sum();
        let mut indexed = Self { buffers, operators, at_start };
        indexed.find_unmade()?;
        let order = indexed.any_order()?;
        indexed.group(&order);
        Ok(indexed)
    }

    /// Bytes that any order needs at its peak: what is there at the beginning and in the end, and for
    /// each operator what it cannot run without.
    pub(crate) fn floor(&self) -> u64 {
        let is_last = |b: &&Buffer| b.is_kept && (b.is_input || b.maker.is_some());
        let in_the_end = self.buffers.iter().filter(is_last).map(|b| b.bytes).sum();
        let kept_inputs: u64 =
            self.buffers.iter().filter(|b| b.is_kept && b.is_input).map(|b| b.bytes).sum();
        let alone = |operator: &Operator| {
            let reads = operator.reads.iter().map(|&read| &self.buffers[read]);
            let reads = reads.filter(|read| !(read.is_kept && read.is_input));
            let shared = operator.in_place.map_or(0, |(read, _)| self.buffers[read].bytes);
            kept_inputs + reads.map(|read| read.bytes).sum::<u64>() + operator.adds - shared
        };
        self.operators.iter().map(alone).fold(self.at_start.max(in_the_end), u64::max)
    }

    /// Whether all that is read or kept is made.
    fn find_unmade(&self) -> Result<(), MemoryError> {
        for (buffer, own) in self.buffers.iter().enumerate() {
            if own.is_input || own.maker.is_some() {
                continue;
            }
            if let Some(&operator) = own.readers.first() {
                return Err(MemoryError::NeverMade { operator, buffer });
            }
            if own.is_kept {
                return Err(MemoryError::KeptNeverMade { buffer });
            }
        }
        Ok(())
    }

    /// An order in which all operators can run, unless some wait for each other.
    fn any_order(&self) -> Result<Vec<usize>, MemoryError> {
        let mut waits: Vec<usize> =
            (0..self.operators.len()).map(|operator| self.makers(operator).count()).collect();
        let mut ready: Vec<usize> =
            (0..waits.len()).filter(|&operator| waits[operator] == 0).collect();
        let mut order = Vec::with_capacity(waits.len());
        while let Some(operator) = ready.pop() {
            order.push(operator);
            for reader in self.readers(operator) {
                waits[reader] -= 1;
                if waits[reader] == 0 {
                    ready.push(reader);
                }
            }
        }
        let Some(stuck) = waits.iter().position(|&waits| waits > 0) else {
            return Ok(order);
        };
        // Whoever is stuck waits for another that is stuck; after as many steps as there are
        // operators, one is on a cycle.
        let before = |operator: usize| {
            self.makers(operator).find(|&maker| waits[maker] > 0).unwrap_or(operator)
        };
        let operator = (0..waits.len()).fold(stuck, |operator, _| before(operator));
        Err(MemoryError::Cycle { operator, other: before(operator) })
    }

    /// Whether there is a best order in which an operator runs as late as it can, right before one that reads its result.
    ///
    /// It reads one buffer at most, which it overwrites if it is the last reader, and otherwise adds as many bytes; or it
    /// adds bytes and frees none. So bytes that are there after it are those while it ran, and not fewer than before.
    /// Where another one that does not need it comes next, the two may change places: the other one then runs with no
    /// more bytes, and this one with no more than the other did. Which of several such operators comes first matters not.
    fn is_late(&self, operator: usize) -> bool {
        let own = &self.operators[operator];
        let [made] = own.makes[..] else { return false };
        let frees_none = match own.reads[..] {
            [] => true,
            [read] => own.in_place.is_some() || self.buffers[read].is_kept,
            _ => false,
        };
        let made = &self.buffers[made];
        frees_none && own.adds == own.leaves && !made.is_kept && !made.readers.is_empty()
    }

    /// Notes which operators run right before which; `order` is one in which all can run.
    fn group(&mut self, order: &[usize]) {
        // How many of those that run late end in each; 0 if it is none.
        let mut late = vec![0; order.len()];
        let before = |late: &[usize], operator: usize| {
            self.makers(operator).next().filter(|&maker| late[maker] > 0)
        };
        for &operator in order.iter().filter(|&&operator| self.is_late(operator)) {
            let length = 1 + before(&late, operator).map_or(0, |maker| late[maker]);
            late[operator] = if length <= CHAIN { length } else { 0 };
        }
        let mut seen = vec![usize::MAX; order.len()];
        let mut groups = vec![Vec::new(); order.len()];
        for (operator, group) in groups.iter_mut().enumerate() {
            if late[operator] > 0 {
                continue;
            }
            for maker in self.makers(operator).filter(|&maker| late[maker] > 0) {
                let chain: Vec<usize> =
                    std::iter::successors(Some(maker), |&next| before(&late, next)).collect();
                let new = |&&own: &&usize| std::mem::replace(&mut seen[own], operator) != operator;
                group.extend(chain.iter().rev().filter(new));
            }
            group.push(operator);
        }
        self.operators.iter_mut().zip(groups).for_each(|(own, group)| own.group = group);
    }

    /// Operators that make what an operator reads, one for each buffer.
    fn makers(&self, operator: usize) -> impl Iterator<Item = usize> {
        self.operators[operator].reads.iter().filter_map(|&read| self.buffers[read].maker)
    }

    /// Operators that read what an operator makes, for each buffer.
    pub(crate) fn readers(&self, operator: usize) -> impl Iterator<Item = usize> {
        let made = self.operators[operator].makes.iter();
        made.flat_map(|&made| &self.buffers[made].readers).copied()
    }
}

/// Buffers, of which only inputs and results are known as yet.
fn ends(graph: &MemoryGraph) -> Result<Vec<Buffer>, MemoryError> {
    let plain = |&bytes: &u64| Buffer {
        bytes,
        maker: None,
        is_input: false,
        is_kept: false,
        readers: Vec::new(),
    };
    let mut buffers: Vec<Buffer> = graph.bytes.iter().map(plain).collect();
    let count = buffers.len();
    let unknown = |buffer| MemoryError::UnknownEnd { buffer, buffers: count };
    for &buffer in &graph.inputs {
        let input = buffers.get_mut(buffer).ok_or(unknown(buffer))?;
        if std::mem::replace(&mut input.is_input, true) {
            return Err(MemoryError::InputTwice { buffer });
        }
    }
    for &buffer in &graph.kept {
        buffers.get_mut(buffer).ok_or(unknown(buffer))?.is_kept = true;
    }
    Ok(buffers)
}

/// Inputs that nobody reads stay.
fn keep_unread_inputs(buffers: &mut [Buffer]) {
    for buffer in buffers.iter_mut().filter(|b| b.is_input && b.readers.is_empty()) {
        buffer.is_kept = true;
    }
}

/// Whether all bytes together can be counted, so that no sum of some of them overflows.
fn fits(graph: &MemoryGraph) -> bool {
    let workspaces = graph.operators.iter().map(|operator| operator.workspace);
    let mut all = graph.bytes.iter().copied().chain(workspaces);
    all.try_fold(0u64, u64::checked_add).is_some()
}

/// What an operator costs, once it is known who reads its results.
fn cost(graph: &MemoryGraph, buffers: &[Buffer], operator: usize) -> Result<Operator, MemoryError> {
    let own = &graph.operators[operator];
    if let Some((read, made)) = own.in_place
        && !(own.reads.contains(&read) && own.makes.contains(&made))
    {
        return Err(MemoryError::InPlace { operator });
    }
    let mut reads = own.reads.clone();
    reads.sort_unstable();
    reads.dedup();
    let made = || own.makes.iter().map(|&made| &buffers[made]);
    let stays = made().filter(|made| made.is_kept || !made.readers.is_empty());
    let shares = |&(read, made): &(usize, usize)| {
        buffers[read].bytes == buffers[made].bytes && !buffers[read].is_kept
    };
    Ok(Operator {
        reads,
        adds: made().map(|made| made.bytes).sum::<u64>() + own.workspace,
        leaves: stays.map(|made| made.bytes).sum(),
        makes: own.makes.clone(),
        in_place: own.in_place.filter(shares),
        group: Vec::new(),
    })
}
