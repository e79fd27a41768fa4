//! Runs the programs of all ranks in one thread, on the engine under test and on the reference, and
//! compares what each operation wrote. Staged tiles go from rank to rank by hand.

use crate::reference::{Reference, decode};
use galaxy_common::{Bytes, Rank, WireType};
use galaxy_engine::compute::{Binding, Engine, Staged};
use galaxy_graph::program::{Lane, LaneId, Memory, OpKind, Operation, Program, Region, TensorId};
use std::collections::{HashMap, VecDeque};

/// The largest error that passes, relative to the size of the terms that a value is the sum of (see
/// `Given::scale`). The rounding of f32 is 6e-8, sums here have up to 129 terms, and the
/// exponential and the activations add a few roundings of their own.
const LIMIT: f64 = 2e-6;
/// The error that half precision on the wire adds: half of its spacing at 1.
const HALF: f64 = 4.9e-4;
/// Half of the least number of 16 bits: what is smaller becomes that or nothing.
const LEAST_HALF: f64 = 3e-8;
/// The error that 8 bits on the wire add, whose largest number is 127.
const EIGHTH: f64 = 1.0 / 253.0;
/// The error that passes where nothing is rounded to 16 bits.
const EXACT: (f64, f64) = (LIMIT, 0.0);

/// The engine of one rank, and the reference that it is compared with.
pub struct Pair {
    pub engine: Box<dyn Engine>,
    pub reference: Reference,
}

/// Bytes aligned to 4, as the executor's tiles are.
struct Tile(Vec<u32>);

impl Tile {
    fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(4)])
    }
    fn bytes(&self, len: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..len]
    }
    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}

/// From, to, transfer and tile of what is on its way.
type TransferKey = (Rank, Rank, u32, u16);

struct Device<'a> {
    program: &'a Program,
    /// The same program with f32 on the wire: for reading back.
    exact: Program,
    pair: &'a mut Pair,
    next: usize,
    tiles: HashMap<TensorId, Tile>,
}

/// Runs `programs`, one for each of `pairs`. `name` stands in messages. Gives the largest error, as
/// a share of what passes, but for what half precision on the wire rounds.
///
/// # Panics
/// When an engine fails or is off by more than [`LIMIT`].
pub fn run(name: &str, programs: &[Program], pairs: &mut [Pair], binding: &Binding) -> f64 {
    let mut devices: Vec<Device<'_>> = programs
        .iter()
        .zip(pairs)
        .map(|(program, pair)| {
            pair.engine.prepare(&program.slots).unwrap();
            pair.reference.clear();
            let exact = Program { wire: WireType::F32, ..program.clone() };
            Device { program, exact, pair, next: 0, tiles: HashMap::new() }
        })
        .collect();
    let mut ways: HashMap<TransferKey, VecDeque<Tile>> = HashMap::new();
    let mut worst = 0.0_f64;
    while devices.iter().any(|d| d.next < d.program.operations.len()) {
        let mut moved = false;
        for device in &mut devices {
            // Until it is through, or waits for a tile.
            while let Some(operation) = device.program.operations.get(device.next) {
                let Some(error) = device.step(name, operation, binding, &mut ways) else { break };
                worst = worst.max(error);
                device.next += 1;
                moved = true;
            }
        }
        assert!(moved, "{name}: every rank waits for a tile");
    }
    assert!(ways.values().all(VecDeque::is_empty), "{name}: a tile was not received");
    worst
}

impl Device<'_> {
    fn step(
        &mut self,
        name: &str,
        operation: &Operation,
        binding: &Binding,
        ways: &mut HashMap<TransferKey, VecDeque<Tile>>,
    ) -> Option<f64> {
        let program = self.program;
        let own = program.rank;
        let (lane, _) = program.lanes[operation.lane.0 as usize];
        match (operation.kind, lane) {
            (OpKind::Send { transfer, tile }, Lane::Send(to)) => {
                let sent = Tile(self.tiles[&operation.reads[0].tensor].0.clone());
                ways.entry((own, to, transfer, tile)).or_default().push_back(sent);
                Some(0.0)
            }
            (OpKind::Receive { transfer, tile }, Lane::Receive(from)) => {
                let tile = ways.get_mut(&(from, own, transfer, tile))?.pop_front()?;
                self.tiles.insert(operation.writes[0].tensor, tile);
                Some(0.0)
            }
            (kind, Lane::Compute) => {
                let what = || format!("{name}, rank {own}, operation {}: {kind:?}", self.next);
                Some(self.compute(operation, binding, what().as_str()))
            }
            (kind, lane) => panic!("{name}: {kind:?} on lane {lane:?}"),
        }
    }

    fn compute(&mut self, operation: &Operation, binding: &Binding, what: &str) -> f64 {
        let program = self.program;
        let staged = |regions: &[Region]| -> Option<Region> {
            regions.iter().copied().find(|r| program.tensor(r.tensor).memory == Memory::Staging)
        };
        let size = |region: &Region| program.region_bytes(region) as usize;
        let (reads, writes) = (staged(&operation.reads), staged(&operation.writes));
        let mut output = writes.map(|region| Tile::new(size(&region)));
        let mut emitted = match operation.kind {
            OpKind::Emit { output } => {
                let hidden = operation.reads[0].columns.len();
                let (rows, width) =
                    program.outputs[output as usize].extent(hidden, self.pair.engine.labels());
                Some(vec![f32::NAN; (rows * width) as usize])
            }
            _ => None,
        };
        let input = reads.map(|region| self.tiles[&region.tensor].bytes(size(&region)));
        let Pair { engine, reference } = &mut *self.pair;
        let ran = engine.run(
            program,
            operation,
            binding,
            Staged {
                input,
                output: output.as_mut().zip(writes).map(|(t, region)| t.bytes_mut(size(&region))),
                emitted: emitted.as_deref_mut(),
                weights: None,
            },
        );
        ran.unwrap_or_else(|error| panic!("{what}: {error}"));
        let given = reference.run(program, operation, binding, input);
        let compare = |got: &[f64], want: &[f64], (limit, step): (f64, f64)| -> f64 {
            assert_eq!(got.len(), want.len(), "{what}");
            let errors = got.iter().zip(want).map(|(g, w)| (g - w).abs());
            // Not a number is larger than anything here.
            let error = errors.fold(0.0_f64, |a, b| if a >= b { a } else { b });
            let allowed = limit * given.scale + step;
            assert!(
                error <= allowed,
                "{what}: off by {error:e}, and {allowed:e} passes\n{:?}",
                operation.writes
            );
            if allowed > 0.0 { error / allowed } else { 0.0 }
        };
        let mut worst = 0.0_f64;
        if let Some(values) = emitted {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            worst = worst.max(compare(&values, &given.values, EXACT));
        }
        if let Some((tile, region)) = output.zip(writes) {
            let columns = region.columns.len() as usize;
            let got = decode(program.wire, columns, tile.bytes(size(&region)));
            let limit = match program.wire {
                WireType::F32 => EXACT,
                WireType::F16 => (LIMIT + HALF, LEAST_HALF),
                WireType::Q8 => (LIMIT + EIGHTH, 0.0),
            };
            let error = compare(&got, &given.values, limit);
            if program.wire == WireType::F32 {
                worst = worst.max(error);
            }
            self.tiles.insert(region.tensor, tile);
        }
        for region in &operation.writes {
            if program.tensor(region.tensor).memory == Memory::Device && size(region) > 0 {
                let got = read_back(engine.as_mut(), &self.exact, region, binding);
                let want = reference.read(program, region);
                worst = worst.max(compare(&got, &want.values, EXACT));
                reference.write(program, region, got);
            }
        }
        worst
    }
}

/// The values of a region of the engine's memory, by an operation of our own.
fn read_back(
    engine: &mut dyn Engine,
    exact: &Program,
    region: &Region,
    binding: &Binding,
) -> Vec<f64> {
    let operation = Operation {
        kind: OpKind::Export { staged: false },
        lane: LaneId(0),
        reads: vec![*region].into(),
        writes: Default::default(),
        waits: Default::default(),
        takes: Bytes(0),
        gives: Bytes(0),
        block: galaxy_graph::program::Block::Head,
        layer: 0,
    };
    let mut values = vec![f32::NAN; (region.rows.len() * region.columns.len()) as usize];
    let output = Some(bytemuck::cast_slice_mut(&mut values));
    let staged = Staged { output, ..Staged::default() };
    engine.run(exact, &operation, binding, staged).unwrap();
    values.into_iter().map(f64::from).collect()
}
