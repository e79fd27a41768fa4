use super::*;
use std::collections::HashMap;

/// SplitMix64, so that graphs are the same in each run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number under `end`.
    pub(crate) fn under(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// A graph with buffers that are shared, several results, operators in place, and workspaces.
pub(crate) fn random_graph(random: &mut Random, operators: usize) -> MemoryGraph {
    let mut graph = MemoryGraph::default();
    let sizes = 1 + random.under(12);
    for input in 0..1 + random.under(2) {
        graph.bytes.push(random.under(sizes) as u64);
        graph.inputs.push(input);
    }
    let near = 1 + random.under(6);
    for _ in 0..operators {
        let reads: Vec<usize> = (0..random.under(4))
            .map(|_| graph.bytes.len() - 1 - random.under(near.min(graph.bytes.len())))
            .collect();
        let mut own = MemoryOperator { reads, ..MemoryOperator::default() };
        for _ in 0..1 + random.under(5) / 4 {
            own.makes.push(graph.bytes.len());
            graph.bytes.push(random.under(sizes) as u64);
        }
        if random.under(3) == 0 {
            own.workspace = random.under(sizes) as u64;
        }
        if let Some(&read) = own.reads.first()
            && random.under(3) == 0
        {
            own.in_place = Some((read, own.makes[0]));
            if random.under(4) > 0 {
                graph.bytes[own.makes[0]] = graph.bytes[read];
            }
        }
        graph.operators.push(own);
    }
    for buffer in 0..graph.bytes.len() {
        if random.under(6) == 0 {
            graph.kept.push(buffer);
        }
    }
    shuffle(random, &mut graph);
    graph
}

/// Puts the operators into any order, so that the file's is often none.
fn shuffle(random: &mut Random, graph: &mut MemoryGraph) {
    if random.under(2) == 0 {
        for last in (1..graph.operators.len()).rev() {
            graph.operators.swap(last, random.under(last + 1));
        }
    }
}

/// The least peak, straight from the definitions and by all orders, with sets as bits.
struct Brute<'a> {
    graph: &'a MemoryGraph,
    known: HashMap<u32, u64>,
}

impl Brute<'_> {
    fn least(graph: &MemoryGraph) -> u64 {
        let mut brute = Brute { graph, known: HashMap::new() };
        brute.live(0).max(brute.rest(0))
    }

    fn reads(&self, operator: usize, buffer: usize) -> bool {
        self.graph.operators[operator].reads.contains(&buffer)
    }

    fn is_made(&self, done: u32, buffer: usize) -> bool {
        let makes =
            |(o, own): (usize, &MemoryOperator)| done >> o & 1 == 1 && own.makes.contains(&buffer);
        self.graph.inputs.contains(&buffer) || self.graph.operators.iter().enumerate().any(makes)
    }

    fn is_last_reader(&self, done: u32, operator: usize, buffer: usize) -> bool {
        let others = (0..self.graph.operators.len()).filter(|&other| other != operator);
        let mut waiting = others.filter(|&other| done >> other & 1 == 0);
        self.reads(operator, buffer) && !waiting.any(|other| self.reads(other, buffer))
    }

    fn live(&self, done: u32) -> u64 {
        let stays = |&buffer: &usize| {
            let mut readers =
                (0..self.graph.operators.len()).filter(|&other| self.reads(other, buffer));
            let is_unread_input =
                self.graph.inputs.contains(&buffer) && readers.clone().next().is_none();
            self.is_made(done, buffer)
                && (self.graph.kept.contains(&buffer)
                    || is_unread_input
                    || readers.any(|reader| done >> reader & 1 == 0))
        };
        (0..self.graph.bytes.len()).filter(stays).map(|buffer| self.graph.bytes[buffer]).sum()
    }

    /// The least peak of all that is left.
    fn rest(&mut self, done: u32) -> u64 {
        if let Some(&known) = self.known.get(&done) {
            return known;
        }
        let live = self.live(done);
        let mut best = None;
        for (operator, own) in self.graph.operators.iter().enumerate() {
            if done >> operator & 1 == 1 || !own.reads.iter().all(|&b| self.is_made(done, b)) {
                continue;
            }
            let bytes = &self.graph.bytes;
            let mut during =
                live + own.makes.iter().map(|&made| bytes[made]).sum::<u64>() + own.workspace;
            if let Some((read, made)) = own.in_place
                && bytes[read] == bytes[made]
                && !self.graph.kept.contains(&read)
                && self.is_last_reader(done, operator, read)
            {
                during -= bytes[read];
            }
            let peak = during.max(self.rest(done | 1 << operator));
            best = Some(best.map_or(peak, |best: u64| best.min(peak)));
        }
        let best = best.unwrap_or(live);
        self.known.insert(done, best);
        best
    }
}

/// The least peak of all permutations that are orders, as [`MemoryGraph::peak`] replays them.
fn least_of_permutations(graph: &MemoryGraph, order: &mut Vec<usize>) -> Option<u64> {
    if order.len() == graph.operators.len() {
        return graph.peak(order).ok();
    }
    let mut best: Option<u64> = None;
    for operator in 0..graph.operators.len() {
        if !order.contains(&operator) {
            order.push(operator);
            let peak = least_of_permutations(graph, order);
            best = [best, peak].into_iter().flatten().min();
            order.pop();
        }
    }
    best
}

#[test]
fn the_least_peak_is_that_of_brute_force() {
    let mut random = Random(1);
    for case in 0..2000 {
        let operators = random.under(9);
        let graph = random_graph(&mut random, operators);
        let found = graph.least(usize::MAX).expect("the graph makes sense");
        assert_eq!(found.peak, Brute::least(&graph), "case {case}: {graph:?}");
        assert_eq!(graph.peak(&found.order), Ok(found.peak), "case {case}: {graph:?}");
        assert!(found.is_exact());
    }
}

#[test]
fn chains_that_run_at_once_harm_no_peak() {
    let mut random = Random(10);
    for case in 0..150 {
        let mut graph = wired(&mut random, 3);
        graph.bytes.iter_mut().for_each(|bytes| *bytes = 1 + random.under(40) as u64);
        let found = graph.least(usize::MAX).expect("the graph makes sense");
        assert_eq!(found.peak, Brute::least(&graph), "case {case}: {graph:?}");
        assert_eq!(graph.peak(&found.order), Ok(found.peak), "case {case}: {graph:?}");
    }
}

/// Operators most of which overwrite the one buffer that they read, if they are its last readers, or read nothing; sizes
/// are those of what is read, or any.
fn factors(random: &mut Random, operators: usize) -> MemoryGraph {
    let mut graph = MemoryGraph { bytes: vec![3, 1], inputs: vec![0, 1], ..MemoryGraph::default() };
    let near = 2 + random.under(5);
    for _ in 0..operators {
        let made = graph.bytes.len();
        let count = [0, 1, 1, 1, 1, 2, 3][random.under(7)];
        let reads: Vec<usize> =
            (0..count).map(|_| made - 1 - random.under(near.min(made))).collect();
        let once = |read: &&usize| reads.iter().filter(|other| other == read).count() == 1;
        let over = reads.first().filter(once).filter(|_| random.under(5) > 0).copied();
        graph.bytes.push(match reads.first() {
            Some(read) if random.under(5) > 0 => graph.bytes[*read],
            _ => random.under(5) as u64,
        });
        let workspace = (random.under(8) == 0).into();
        let in_place = over.map(|read| (read, made));
        graph.operators.push(MemoryOperator { reads, makes: vec![made], workspace, in_place });
    }
    graph.kept = (0..graph.bytes.len()).filter(|_| random.under(8) == 0).collect();
    shuffle(random, &mut graph);
    graph
}

#[test]
fn operators_that_run_as_late_as_they_can_harm_no_peak() {
    let mut random = Random(20);
    for case in 0..1500 {
        let operators = random.under(13);
        let graph = factors(&mut random, operators);
        let found = graph.least(usize::MAX).expect("the graph makes sense");
        assert_eq!(found.peak, Brute::least(&graph), "case {case}: {graph:?}");
        assert_eq!(graph.peak(&found.order), Ok(found.peak), "case {case}: {graph:?}");
    }
}

#[test]
fn a_replay_agrees_with_the_definitions() {
    let mut random = Random(2);
    for case in 0..100 {
        let operators = 1 + random.under(5);
        let graph = random_graph(&mut random, operators);
        let least = least_of_permutations(&graph, &mut Vec::new());
        assert_eq!(least, Some(Brute::least(&graph)), "case {case}: {graph:?}");
    }
}

#[test]
fn a_search_that_is_cut_short_bounds_the_optimum() {
    let mut random = Random(3);
    let mut cut = 0;
    for case in 0..300 {
        let operators = 10 + random.under(20);
        let graph = random_graph(&mut random, operators);
        let exact = graph.least(usize::MAX).expect("the graph makes sense");
        assert!(exact.is_exact());
        let file: Vec<usize> = (0..operators).collect();
        let file = graph.peak(&file).unwrap_or(u64::MAX);
        for limit in [0, 1, 2, 5, 20] {
            let found = graph.least(limit).expect("the graph makes sense");
            cut += usize::from(!found.is_exact());
            assert!(found.bound <= exact.peak, "case {case}, limit {limit}: {graph:?}");
            assert!(exact.peak <= found.peak, "case {case}, limit {limit}: {graph:?}");
            assert_eq!(graph.peak(&found.order), Ok(found.peak));
            assert!(found.peak <= file);
        }
    }
    println!("{cut} searches of 1500 were cut before a proof");
    assert!(cut > 20, "only {cut} searches were cut before a proof");
}

/// The example of section 2.2 of MemoriaNova: T0 is 3 channels of 224 by 224, Conv1 makes 64 of 224 by
/// 224, Conv2 and Conv3 each 128 of 112 by 112. Kernels are 3 by 3, which gives the 7 and 288 KB of the
/// text; it does not say what Conv3's is, which matters to no peak.
fn excerpt() -> MemoryGraph {
    let square = |channels: u64, side: u64| 4 * channels * side * side;
    let kernel = |inputs: u64, outputs: u64| 4 * 9 * inputs * outputs;
    let half = square(128, 112);
    let conv = |read, made, workspace| MemoryOperator {
        reads: vec![read],
        makes: vec![made],
        workspace,
        in_place: None,
    };
    MemoryGraph {
        bytes: vec![square(3, 224), square(64, 224), half, half, half],
        inputs: vec![0],
        kept: vec![4],
        operators: vec![
            conv(0, 1, kernel(3, 64)),
            conv(1, 2, kernel(64, 128)),
            conv(0, 3, kernel(3, 128)),
            MemoryOperator {
                reads: vec![2, 3],
                makes: vec![4],
                workspace: 0,
                in_place: Some((2, 4)),
            },
        ],
    }
}

#[test]
fn the_example_of_memorianova_has_its_peaks() {
    const KB: u64 = 1 << 10;
    let graph = excerpt();
    let sizes = [588, 12_544, 6_272, 6_272, 6_272];
    assert_eq!(graph.bytes, sizes.map(|size| size * KB));
    // 6.75 and 13.5 KB of kernels are what the text rounds.
    let during = graph.timeline(&[0, 1, 2, 3]).expect("the order is one");
    let conv1 = (588 + 12_544) * KB + 27 * KB / 4;
    let conv3 = (588 + 6_272 + 6_272) * KB + 27 * KB / 2;
    assert_eq!(during, [conv1, 19_692 * KB, conv3, 12_544 * KB]);
    assert_eq!(conv1.div_ceil(KB), 13_139);
    assert_eq!(graph.peak(&[0, 1, 2, 3]), Ok(19_692 * KB));
    assert_eq!(graph.peak(&[0, 2, 1, 3]), Ok(25_376 * KB));
    assert_eq!(graph.peak(&[2, 0, 1, 3]), Ok(25_376 * KB));
    let least = graph.least(1000).expect("the graph makes sense");
    assert_eq!((least.peak, least.bound), (19_692 * KB, 19_692 * KB));
    assert_eq!(least.order, [0, 1, 2, 3]);
}

/// Operators one after another, whose buffers have these sizes.
fn chain(bytes: &[u64]) -> MemoryGraph {
    let step = |read| MemoryOperator {
        reads: vec![read],
        makes: vec![read + 1],
        ..MemoryOperator::default()
    };
    MemoryGraph {
        bytes: bytes.to_vec(),
        inputs: vec![0],
        kept: vec![bytes.len() - 1],
        operators: (0..bytes.len() - 1).map(step).collect(),
    }
}

#[test]
fn a_chain_has_one_order() {
    let graph = chain(&[3, 1, 4, 1, 5, 9, 2]);
    let least = graph.least(0).expect("the graph makes sense");
    assert_eq!(least.order, [0, 1, 2, 3, 4, 5]);
    assert_eq!((least.peak, least.bound), (14, 14));
    assert_eq!(graph.timeline(&least.order), Ok(vec![4, 5, 5, 6, 14, 11]));
    let empty = MemoryGraph { bytes: vec![7], inputs: vec![0], ..MemoryGraph::default() };
    let least = empty.least(0).expect("the graph makes sense");
    assert_eq!((least.peak, least.bound, least.order), (7, 7, vec![]));
}

#[test]
fn the_branch_that_peaks_higher_goes_first() {
    // 0 is read by both branches; one goes through 50 bytes and the other through 100 to 10 each.
    let operator = |reads: &[usize], made| MemoryOperator {
        reads: reads.to_vec(),
        makes: vec![made],
        ..MemoryOperator::default()
    };
    let graph = MemoryGraph {
        bytes: vec![5, 50, 10, 100, 10, 1],
        inputs: vec![0],
        kept: vec![5],
        operators: vec![
            operator(&[0], 1),
            operator(&[1], 2),
            operator(&[0], 3),
            operator(&[3], 4),
            operator(&[2, 4], 5),
        ],
    };
    assert_eq!(graph.peak(&[0, 1, 2, 3, 4]), Ok(120));
    let least = graph.least(1000).expect("the graph makes sense");
    assert_eq!((least.peak, least.bound), (115, 115));
    assert_eq!(least.order, [2, 3, 0, 1, 4]);
}

#[test]
fn results_in_place_take_no_bytes_only_from_a_last_reader() {
    let mut graph = chain(&[8, 8, 8]);
    graph.operators[0].in_place = Some((0, 1));
    graph.operators[1].in_place = Some((1, 2));
    assert_eq!(graph.timeline(&[0, 1]), Ok(vec![8, 8]));
    graph.kept.push(0);
    assert_eq!(graph.timeline(&[0, 1]), Ok(vec![16, 16]));
    graph.kept.pop();
    graph.operators[1].reads.push(0);
    assert_eq!(graph.timeline(&[0, 1]), Ok(vec![16, 16]));
    graph.bytes[2] = 4;
    assert_eq!(graph.timeline(&[0, 1]), Ok(vec![16, 20]));
}

#[test]
fn graphs_that_make_no_sense_are_refused() {
    let refused = |change: fn(&mut MemoryGraph)| {
        let mut graph = chain(&[1, 2, 3]);
        change(&mut graph);
        let error = graph.least(10).expect_err("the graph makes no sense");
        assert_eq!(graph.peak(&[0, 1]), Err(error));
        error
    };
    let unknown = MemoryError::UnknownBuffer { operator: 1, buffer: 9, buffers: 3 };
    assert_eq!(refused(|graph| graph.operators[1].reads.push(9)), unknown);
    assert_eq!(refused(|graph| graph.operators[1].makes.push(9)), unknown);
    let unknown = MemoryError::UnknownEnd { buffer: 9, buffers: 3 };
    assert_eq!(refused(|graph| graph.kept.push(9)), unknown);
    assert_eq!(refused(|graph| graph.inputs.push(9)), unknown);
    let twice = MemoryError::MadeTwice { buffer: 1, first: 0, second: 1 };
    assert_eq!(refused(|graph| graph.operators[1].makes.push(1)), twice);
    let makes = MemoryError::MakesInput { operator: 1, buffer: 0 };
    assert_eq!(refused(|graph| graph.operators[1].makes.push(0)), makes);
    let twice = MemoryError::InputTwice { buffer: 0 };
    assert_eq!(refused(|graph| graph.inputs.push(0)), twice);
    let never = MemoryError::NeverMade { operator: 0, buffer: 0 };
    assert_eq!(refused(|graph| graph.inputs.clear()), never);
    let never = MemoryError::KeptNeverMade { buffer: 3 };
    let keep = |graph: &mut MemoryGraph| {
        graph.bytes.push(1);
        graph.kept.push(3);
    };
    assert_eq!(refused(keep), never);
    let in_place = MemoryError::InPlace { operator: 1 };
    assert_eq!(refused(|graph| graph.operators[1].in_place = Some((0, 2))), in_place);
    assert_eq!(refused(|graph| graph.operators[1].in_place = Some((1, 1))), in_place);
    let itself = MemoryError::Cycle { operator: 1, other: 1 };
    assert_eq!(refused(|graph| graph.operators[1].reads.push(2)), itself);
    let cycle = refused(|graph| graph.operators[0].reads.push(2));
    assert!(matches!(cycle, MemoryError::Cycle { operator: 0 | 1, other: 0 | 1 }), "{cycle}");
    assert!(cycle.to_string().contains("need each other"));
    assert_eq!(refused(|graph| graph.bytes[0] = u64::MAX), MemoryError::TooManyBytes);
}

#[test]
fn orders_that_are_none_are_refused() {
    let graph = chain(&[1, 2, 3]);
    let short = MemoryError::OrderLength { given: 1, operators: 2 };
    assert_eq!(graph.peak(&[0]), Err(short));
    let unknown = MemoryError::UnknownOperator { operator: 2, operators: 2 };
    assert_eq!(graph.peak(&[0, 2]), Err(unknown));
    assert_eq!(graph.peak(&[0, 0]), Err(MemoryError::RunTwice { operator: 0 }));
    let early = MemoryError::TooEarly { operator: 1, buffer: 1 };
    assert_eq!(graph.timeline(&[1, 0]), Err(early));
}

/// A network of operators with one result each, as it is built.
#[derive(Default)]
struct Network(MemoryGraph);

impl Network {
    fn input(&mut self, bytes: u64) -> usize {
        self.0.bytes.push(bytes);
        self.0.inputs.push(self.0.bytes.len() - 1);
        self.0.bytes.len() - 1
    }

    fn add(&mut self, reads: &[usize], bytes: u64, workspace: u64) -> usize {
        let made = self.0.bytes.len();
        self.0.bytes.push(bytes);
        self.0.operators.push(MemoryOperator {
            reads: reads.to_vec(),
            makes: vec![made],
            workspace,
            in_place: None,
        });
        made
    }

    fn in_place(&mut self, reads: &[usize]) -> usize {
        let made = self.add(reads, self.0.bytes[reads[0]], 0);
        let own = self.0.operators.last_mut().expect("one was added");
        own.in_place = Some((reads[0], made));
        made
    }

    /// A separable convolution: activation, depthwise, pointwise.
    fn separable(&mut self, read: usize, bytes: u64) -> usize {
        let active = self.add(&[read], self.0.bytes[read], 0);
        let depthwise = self.add(&[active], bytes, 9);
        self.add(&[depthwise], bytes, bytes / 16)
    }
}

/// Cells like those of NASNet: each takes two earlier results, and joins pairs of separable
/// convolutions and poolings of random earlier results of its own.
pub(crate) fn cells(random: &mut Random, count: usize, blocks: usize) -> MemoryGraph {
    let mut net = Network::default();
    let mut bytes = 960;
    let image = net.input(300);
    let stem = net.add(&[image], bytes, 30);
    let (mut before, mut last) = (stem, stem);
    for cell in 0..count {
        if cell % 4 == 3 {
            bytes = bytes / 2 + 7;
        }
        let squeezed = [net.add(&[before], bytes / 4, 20), net.add(&[last], bytes / 4, 20)];
        let mut states = squeezed.to_vec();
        let mut joined = Vec::new();
        for _ in 0..blocks {
            let mut pair = [0; 2];
            for own in &mut pair {
                let state = states[random.under(states.len())];
                *own = match random.under(3) {
                    0 => net.add(&[state], bytes / 4, 0),
                    _ => net.separable(state, bytes / 4),
                };
            }
            let sum = net.in_place(&pair);
            states.push(sum);
            joined.push(sum);
        }
        before = last;
        last = net.add(&joined, bytes / 4 * blocks as u64, 0);
    }
    net.0.kept.push(last);
    net.0
}

/// A network wired at random, like RandWire: nodes add up a few of those shortly before them.
fn wired(random: &mut Random, nodes: usize) -> MemoryGraph {
    let mut net = Network::default();
    let mut made = vec![net.input(64)];
    for node in 0..nodes {
        let bytes = 64 >> (3 * node / nodes);
        let from = |random: &mut Random, made: &[usize]| {
            made[made.len() - 1 - random.under(made.len().min(5))]
        };
        let mut reads = vec![from(random, &made), from(random, &made)];
        reads.dedup();
        let sum = if reads.len() > 1 { net.add(&reads, bytes, 0) } else { reads[0] };
        let last = net.separable(sum, bytes);
        made.push(last);
    }
    let results: Vec<usize> = made
        .into_iter()
        .filter(|made| !net.0.operators.iter().any(|o| o.reads.contains(made)))
        .collect();
    let joined = net.add(&results, 8, 0);
    net.0.kept.push(joined);
    net.0
}

#[test]
fn networks_with_many_branches_take_few_states() {
    let mut random = Random(4);
    let mut graphs = Vec::new();
    for _ in 0..6 {
        graphs.push(("cells of 5 blocks", cells(&mut random, 14, 5)));
        graphs.push(("cells of 7 blocks", cells(&mut random, 9, 7)));
    }
    for _ in 0..4 {
        graphs.push(("wired at random", wired(&mut random, 96)));
    }
    for (name, graph) in graphs {
        let least = graph.least(20_000).expect("the graph makes sense");
        let file: Vec<usize> = (0..graph.operators.len()).collect();
        let file = graph.peak(&file).expect("the file's order is one");
        println!(
            "{name}: {} operators, {} states, peak {} (file {file}, bound {})",
            graph.operators.len(),
            least.states,
            least.peak,
            least.bound
        );
        assert!(least.is_exact(), "{name}: {} < {}", least.bound, least.peak);
        assert!(least.peak <= file);
    }
}

/// Operators in a square, each of which reads the results of those above it and to its left.
fn grid(random: &mut Random, side: usize) -> MemoryGraph {
    let mut net = Network::default();
    let input = net.input(1);
    for place in 0..side * side {
        let left = (place % side > 0).then_some(place);
        let above = (place >= side).then(|| place + 1 - side);
        let reads: Vec<usize> = [left, above].into_iter().flatten().collect();
        let reads = if reads.is_empty() { vec![input] } else { reads };
        net.add(&reads, 1 + random.under(1000) as u64, 0);
    }
    net.0
}

#[test]
fn grids_are_bounded_where_they_are_not_solved() {
    let mut random = Random(12);
    for _ in 0..3 {
        let graph = grid(&mut random, 7);
        let exact = graph.least(usize::MAX).expect("the graph makes sense");
        let cut = graph.least(50).expect("the graph makes sense");
        println!("grid: {} states, {} <= {} <= {}", exact.states, cut.bound, exact.peak, cut.peak);
        assert!(exact.is_exact());
        assert!(cut.bound <= exact.peak && exact.peak <= cut.peak);
        assert_eq!(graph.peak(&cut.order), Ok(cut.peak));
    }
}
