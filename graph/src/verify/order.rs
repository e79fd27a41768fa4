//! Order: which operations are over before others start, for certain.

use super::{Site, VerifyError, site};
use crate::program::{Lane, LaneId, OpId, OpKind, Program};
use galaxy_common::Rank;
use petgraph::graph::{DiGraph, NodeIndex};
use std::collections::HashMap;

/// The send that each receive takes from: (rank, operation) of both.
type Sources = HashMap<(usize, OpId), (usize, OpId)>;

/// What is known about the order of operations.
pub(super) struct Order {
    /// All operations, each after everything it depends on: (rank, operation).
    pub sequence: Vec<(usize, OpId)>,
    /// For each rank and operation: how many operations of each lane of each device are over before
    /// it starts.
    clocks: Vec<Vec<Vec<u32>>>,
    /// Place of each operation on its lane.
    places: Vec<Vec<u32>>,
    /// Number of the first lane of each device.
    first_lane: Vec<usize>,
    /// The send that a receive takes from.
    pub source: Sources,
}

impl Order {
    /// Whether `a` is over before `b` starts; both of one device.
    pub fn before(&self, programs: &[Program], rank: usize, a: OpId, b: OpId) -> bool {
        let lane = programs[rank].operation(a).lane;
        self.count(rank, lane, b) > self.places[rank][a.0 as usize]
    }
    fn count(&self, rank: usize, lane: LaneId, b: OpId) -> u32 {
        self.clocks[rank][b.0 as usize][self.first_lane[rank] + usize::from(lane.0)]
    }
}

/// Pairs the ends of every link, proves that nothing can deadlock, and orders everything.
pub(super) fn order(programs: &[Program]) -> Result<Order, VerifyError> {
    let source = pair(programs)?;
    let mut places: Vec<Vec<u32>> = programs.iter().map(|p| vec![0; p.operations.len()]).collect();
    let mut first_lane = Vec::new();
    let mut lanes = 0;
    // Each send and its receive are one node: the worst case is that neither ends before the other
    // has begun. What has no cycle then, has none with any amount of buffering.
    let mut graph: DiGraph<Vec<(usize, OpId)>, ()> = DiGraph::new();
    let mut node: Vec<Vec<NodeIndex>> = Vec::new();
    for (rank, program) in programs.iter().enumerate() {
        first_lane.push(lanes);
        lanes += program.lanes.len();
        let ids = (0..program.operations.len()).map(|op| OpId(op as u32));
        let receives = |op: &OpId| source.contains_key(&(rank, *op));
        node.push(
            ids.map(|op| {
                if receives(&op) { NodeIndex::end() } else { graph.add_node(vec![(rank, op)]) }
            })
            .collect(),
        );
        for (_, ids) in &program.lanes {
            for (at, id) in ids.iter().enumerate() {
                places[rank][id.0 as usize] = at as u32;
            }
        }
    }
    for (&(rank, op), &(from, send)) in &source {
        let joint = node[from][send.0 as usize];
        node[rank][op.0 as usize] = joint;
        graph[joint].push((rank, op));
    }
    for (rank, program) in programs.iter().enumerate() {
        for (number, op) in program.operations.iter().enumerate() {
            for before in predecessors(program, &places[rank], OpId(number as u32), op.lane) {
                let (a, b) = (node[rank][before.0 as usize], node[rank][number]);
                graph.add_edge(a, b, ());
            }
        }
    }
    let sorted = match petgraph::algo::toposort(&graph, None) {
        Ok(sorted) => sorted,
        Err(cycle) => {
            let (rank, op) = graph[cycle.node_id()][0];
            let stuck = petgraph::algo::tarjan_scc(&graph);
            let count = stuck.iter().filter(|c| c.len() > 1).map(Vec::len).sum();
            return Err(VerifyError::Cycle { site: site(&programs[rank], op), count });
        }
    };
    let sequence: Vec<(usize, OpId)> =
        sorted.into_iter().flat_map(|n| graph[n].iter().copied()).collect();
    let mut clocks: Vec<Vec<Vec<u32>>> =
        programs.iter().map(|p| vec![Vec::new(); p.operations.len()]).collect();
    for &(rank, op) in &sequence {
        let mut clock = vec![0u32; lanes];
        let program = &programs[rank];
        let mut learn = |other: &[u32]| {
            for (mine, theirs) in clock.iter_mut().zip(other) {
                *mine = (*mine).max(*theirs);
            }
        };
        // A receive learns what was over when its send began, not that the send is over.
        if let Some(&(from, send)) = source.get(&(rank, op)) {
            learn(&clocks[from][send.0 as usize]);
        }
        let before: Vec<OpId> =
            predecessors(program, &places[rank], op, program.operation(op).lane).collect();
        for &earlier in &before {
            learn(&clocks[rank][earlier.0 as usize]);
        }
        for earlier in before {
            let lane = first_lane[rank] + usize::from(program.operation(earlier).lane.0);
            clock[lane] = clock[lane].max(places[rank][earlier.0 as usize] + 1);
        }
        clocks[rank][op.0 as usize] = clock;
    }
    Ok(Order { sequence, clocks, places, first_lane, source })
}

/// The operation before this one on its lane, and the last one of each lane that is waited for.
fn predecessors<'a>(
    program: &'a Program,
    places: &[u32],
    op: OpId,
    lane: LaneId,
) -> impl Iterator<Item = OpId> + 'a {
    let place = places[op.0 as usize] as usize;
    let ids = &program.lanes[usize::from(lane.0)].1;
    let waits = program.operation(op).waits.iter().filter(|w| w.count > 0);
    let waited = waits.map(|w| program.lanes[usize::from(w.lane.0)].1[w.count as usize - 1]);
    place.checked_sub(1).map(|at| ids[at]).into_iter().chain(waited)
}

/// The k-th send of a link meets the k-th receive: links are FIFO.
fn pair(programs: &[Program]) -> Result<Sources, VerifyError> {
    let mut ends: HashMap<(Rank, Rank), (Vec<OpId>, Vec<OpId>)> = HashMap::new();
    for program in programs {
        for (lane, ids) in &program.lanes {
            match *lane {
                Lane::Send(to) => ends.entry((program.rank, to)).or_default().0.extend(ids),
                Lane::Receive(from) => ends.entry((from, program.rank)).or_default().1.extend(ids),
                _ => {}
            }
        }
    }
    let mut links: Vec<_> = ends.into_iter().collect();
    links.sort_unstable_by_key(|(link, _)| *link);
    let mut source = HashMap::new();
    for ((from, to), (sends, receives)) in links {
        if from.index() >= programs.len() || to.index() >= programs.len() {
            return Err(VerifyError::Malformed(format!("a link from {from} to {to}")));
        }
        let at = |rank: Rank, op: OpId| -> Site { site(&programs[rank.index()], op) };
        for (&send, &receive) in sends.iter().zip(&receives) {
            let (a, b) = (&programs[from.index()], &programs[to.index()]);
            if let Some(why) = differ(a, send, b, receive) {
                let (send, receive) = (at(from, send), at(to, receive));
                return Err(VerifyError::Mismatch { send, receive, why });
            }
            source.insert((to.index(), receive), (from.index(), send));
        }
        let (a, b) = (sends.len(), receives.len());
        if a > b {
            return Err(VerifyError::Unmatched { site: at(from, sends[b]), from, to });
        }
        if b > a {
            return Err(VerifyError::Unmatched { site: at(to, receives[a]), from, to });
        }
    }
    Ok(source)
}

fn differ(a: &Program, send: OpId, b: &Program, receive: OpId) -> Option<String> {
    let (send, receive) = (a.operation(send), b.operation(receive));
    let (OpKind::Send { transfer: sent, .. }, OpKind::Receive { transfer: wanted, .. }) =
        (send.kind, receive.kind)
    else {
        return Some("an operation is on the wrong lane".to_owned());
    };
    let (Some(read), Some(written)) = (send.reads.first(), receive.writes.first()) else {
        return Some("an end names no tile".to_owned());
    };
    if sent != wanted {
        return Some(format!("transfer {sent} against {wanted}"));
    }
    if a.tensor(read.tensor).role != b.tensor(written.tensor).role {
        return Some("a tile of another kind".to_owned());
    }
    if (read.rows, read.columns) != (written.rows, written.columns) || a.wire != b.wire {
        return Some(format!("rows {:?} against {:?}", read.rows, written.rows));
    }
    None
}
