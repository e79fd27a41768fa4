//! `galaxy plan --model FILE.onnx`: the order of a network's operators that needs the least memory.

use crate::{
    failure::Failure,
    json,
    networks::Shapes,
    print,
    table::{row, table},
};
use galaxy_common::Bytes;
use galaxy_graph::{
    least_memory::{LeastMemory, MemoryError, MemoryGraph},
    offsets::{Arrangement, SEARCH},
};
use galaxy_model::onnx::{Network, ValueId};
use serde::Serialize;
use std::{fmt::Write as _, path::Path, time::Instant};

/// Columns and rows of the plot.
const PLOT: (usize, usize) = (72, 12);

/// What is known of a network's memory.
#[derive(Serialize)]
struct Memory {
    model: String,
    operators: usize,
    weight_bytes: u64,
    inputs: Vec<Named>,
    outputs: Vec<Named>,
    /// Bytes of values at once, at most, in the order of the file, and in the best one.
    file_order_bytes: u64,
    least_bytes: u64,
    /// No order needs less than this.
    bound_bytes: u64,
    /// The arena that holds all values at fixed places, in the best order.
    arena_bytes: u64,
    states: usize,
    /// What it took to find the order, and then the places.
    ordering_ms: f64,
    placing_ms: f64,
    order: Vec<usize>,
    /// Bytes while each operator runs, in the order of the file, and in the best one.
    file_order_timeline: Vec<u64>,
    least_timeline: Vec<u64>,
}

#[derive(Serialize)]
struct Named {
    name: String,
    shape: Vec<u64>,
}

/// Shows what a network's operators need of memory.
pub(super) fn plan(path: &Path, shapes: &Shapes, as_json: bool) -> Result<(), Failure> {
    let (_, network) = shapes.open(path)?;
    let memory = memory(path, &network)
        .map_err(|error| Failure::new(error.to_string()).at(path.display()))?;
    print(&if as_json { json(&memory)? } else { shown(&memory) })
}

fn memory(path: &Path, network: &Network) -> Result<Memory, MemoryError> {
    let graph = MemoryGraph::of_network(network);
    let in_file: Vec<usize> = (0..graph.operators.len()).collect();
    let begin = Instant::now();
    let least = graph.least(SEARCH)?;
    let ordered = Instant::now();
    let Arrangement { least, file_order, size, .. } = Arrangement::of(&graph, least)?;
    let (ordering, placing) = (ordered - begin, ordered.elapsed());
    let LeastMemory { order, peak, bound, states } = least;
    let named = |ids: &[ValueId]| {
        let named = |id: &ValueId| {
            let value = network.value(*id);
            Named { name: value.name.clone(), shape: value.dims.clone() }
        };
        ids.iter().map(named).collect()
    };
    Ok(Memory {
        model: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        operators: graph.operators.len(),
        weight_bytes: network.weight_bytes(),
        inputs: named(&network.inputs),
        outputs: named(&network.outputs),
        file_order_bytes: file_order,
        least_bytes: peak,
        bound_bytes: bound,
        arena_bytes: size,
        states,
        ordering_ms: ordering.as_secs_f64() * 1e3,
        placing_ms: placing.as_secs_f64() * 1e3,
        file_order_timeline: graph.timeline(&in_file)?,
        least_timeline: graph.timeline(&order)?,
        order,
    })
}

/// The memory of a network, for people.
fn shown(memory: &Memory) -> String {
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let named = |all: &[Named]| {
        let one = |named: &Named| format!("{} {:?}", named.name, named.shape);
        all.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    let mut out = format!(
        "{}: {} operators, {} of weights\n  from {}\n  to   {}\n\n",
        memory.model,
        memory.operators,
        bytes(memory.weight_bytes),
        named(&memory.inputs),
        named(&memory.outputs)
    );
    let proof = match memory.least_bytes == memory.bound_bytes {
        true => "proved: no order needs less".to_owned(),
        false => format!("an order may need {}, and none less", bytes(memory.bound_bytes)),
    };
    let gain = match memory.file_order_bytes {
        0 => String::new(),
        all => format!("{:.1}% less; ", 100.0 * (1.0 - memory.least_bytes as f64 / all as f64)),
    };
    out += &table(&[
        row(["values at once, at most", "", ""]),
        row(["in the order of the file", &bytes(memory.file_order_bytes), ""]),
        row(["in the best order", &bytes(memory.least_bytes), &format!("{gain}{proof}")]),
        row(["the arena that holds them", &bytes(memory.arena_bytes), ""]),
    ]);
    let _ = writeln!(
        out,
        "the order took {:.1} ms to find ({} states searched), the arena {:.1} ms\n",
        memory.ordering_ms, memory.states, memory.placing_ms
    );
    out + &plot(memory)
}

/// Bytes over the order of operators: `.` in the order of the file, `#` in the best one.
fn plot(memory: &Memory) -> String {
    let (columns, rows) = PLOT;
    let most = memory.file_order_bytes.max(memory.least_bytes).max(1);
    let steps = memory.least_timeline.len();
    let columns = columns.min(steps.max(1));
    // The most of the operators that share a column.
    let heights = |timeline: &[u64]| -> Vec<usize> {
        let of = |column: usize| {
            let range =
                column * steps / columns..((column + 1) * steps).div_ceil(columns).min(steps);
            let bytes = timeline[range].iter().copied().max().unwrap_or(0);
            (bytes as u128 * rows as u128).div_ceil(u128::from(most)) as usize
        };
        (0..columns).map(of).collect()
    };
    let (file, best) = (heights(&memory.file_order_timeline), heights(&memory.least_timeline));
    let mut out = String::from(
        "values while each operator runs (#: in the best order, .: in that of the file)\n",
    );
    for level in (1..=rows).rev() {
        let mark = |(file, best): (&usize, &usize)| match (*best >= level, *file >= level) {
            (true, _) => '#',
            (false, true) => '.',
            (false, false) => ' ',
        };
        let line: String = file.iter().zip(&best).map(mark).collect();
        let label = match level == rows || level == 1 {
            true => Bytes(most * level as u64 / rows as u64).to_string(),
            false => String::new(),
        };
        let _ = writeln!(out, "{label:>10} |{}", line.trim_end());
    }
    let _ = writeln!(out, "{:>10} +{} {steps} operators", "", "-".repeat(columns));
    out
}
