//! `galaxy-testbed orders`: what the order of least memory saves in networks of convolutions, and how long it takes to find.

mod graphs;

use crate::models::{network, network_names};
use anyhow::{Context, Result};
use galaxy_common::{Bytes, Spread};
use galaxy_graph::{
    least_memory::MemoryGraph,
    offsets::{Arrangement, SEARCH},
};
use galaxy_model::onnx::{Fixed, Network, OnnxFile};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// The options of `galaxy-testbed orders`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Networks of `galaxy-testbed models`, or ONNX files; all of those networks where nothing is named.
    #[arg(value_name = "NETWORK|FILE.onnx")]
    pub networks: Vec<String>,
    /// Graphs of 500 operators that no network has, instead of networks.
    #[arg(long, conflicts_with = "networks")]
    pub graphs: bool,
    /// How often each is ordered.
    #[arg(long, default_value_t = 15)]
    pub runs: usize,
    /// Prints one JSON object for each network.
    #[arg(long)]
    pub json: bool,
}

/// What was found of one network.
#[derive(Serialize)]
struct Order {
    network: String,
    operators: usize,
    file_order: u64,
    peak: u64,
    bound: u64,
    arena: u64,
    states: usize,
    /// The time until the order is found, in milliseconds.
    ordering_ms: Spread,
    /// The processor's time of the same.
    ordering_cpu_ms: Spread,
    /// The time until buffers have places in the arena.
    placing_ms: Spread,
    placing_cpu_ms: Spread,
}

/// Orders networks, several times each, and shows what came out.
///
/// # Errors
/// When there is no such network, or its file cannot be read.
pub fn run(options: &Options) -> Result<()> {
    if !options.json {
        println!(
            "| network | operators | file order | least | less | bound | states | ordered, ms | of the processor \
             | placed, ms | of the processor | arena / peak |"
        );
        println!(
            "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        );
    }
    let mut found = Vec::new();
    let mut measure = |name: &str, graph: &MemoryGraph| -> Result<()> {
        let order = measured(name, graph, options.runs.max(1))?;
        match options.json {
            true => println!("{}", serde_json::to_string(&order)?),
            false => println!("{}", order.row()),
        }
        found.push(order);
        Ok(())
    };
    if options.graphs {
        for (name, graph) in graphs::graphs() {
            measure(&name, &graph)?;
        }
    } else {
        let all = || network_names().map(str::to_owned).collect();
        let names = if options.networks.is_empty() { all() } else { options.networks.clone() };
        for name in names {
            let network = read(&name).with_context(|| name.clone())?;
            measure(&name, &MemoryGraph::of_network(&network))?;
        }
    }
    if !options.json {
        println!("\n{}", summary(&found));
    }
    Ok(())
}

/// How much less all need in the best order: the mean of those that need less.
fn summary(found: &[Order]) -> String {
    let less: Vec<f64> = found.iter().map(Order::less).filter(|less| *less > 0.0).collect();
    let mean = less.iter().sum::<f64>() / less.len().max(1) as f64;
    format!(
        "{} of {} networks need less than in the order of their file, {:.1}% in the mean",
        less.len(),
        found.len(),
        100.0 * mean
    )
}

fn measured(name: &str, graph: &MemoryGraph, runs: usize) -> Result<Order> {
    let [mut ordering, mut ordering_cpu, mut placing, mut placing_cpu] = [const { Vec::new() }; 4];
    let mut result = None;
    // The first is not counted: it finds cold caches.
    for run in 0..=runs {
        let begin = Clocks::now()?;
        let least = graph.least(SEARCH)?;
        let ordered = Clocks::now()?;
        result = Some(Arrangement::of(graph, least)?);
        let placed = Clocks::now()?;
        if run > 0 {
            let (wall, processor) = begin.until(&ordered);
            ordering.push(wall);
            ordering_cpu.push(processor);
            let (wall, processor) = ordered.until(&placed);
            placing.push(wall);
            placing_cpu.push(processor);
        }
    }
    let Arrangement { least, file_order, size, .. } = result.context("it was ordered")?;
    Ok(Order {
        network: name.to_owned(),
        operators: graph.operators.len(),
        file_order,
        peak: least.peak,
        bound: least.bound,
        arena: size,
        states: least.states,
        ordering_ms: Spread::of(&ordering),
        ordering_cpu_ms: Spread::of(&ordering_cpu),
        placing_ms: Spread::of(&placing),
        placing_cpu_ms: Spread::of(&placing_cpu),
    })
}

/// The network of a name or file. Of one of the catalogue only the structure is written, to a directory that goes.
fn read(name: &str) -> Result<Network> {
    if name.ends_with(".onnx") {
        return Ok(Network::of(&OnnxFile::open(Path::new(name))?, &Fixed::default())?);
    }
    let recipe = network(name).with_context(|| {
        let names: Vec<&str> = network_names().collect();
        format!("no network is named so; there are {}", names.join(", "))
    })?;
    let dir = tempfile::tempdir()?;
    let file = recipe.description().write_structure(dir.path())?;
    Ok(Network::of(&OnnxFile::open(&file)?, &Fixed::default())?)
}

/// The time, and that of the processor.
struct Clocks(Instant, Duration);

impl Clocks {
    fn now() -> Result<Self> {
        let processor = Duration::try_from(clock_gettime(ClockId::ProcessCPUTime))?;
        Ok(Self(Instant::now(), processor))
    }

    /// Milliseconds of both.
    fn until(&self, later: &Self) -> (f64, f64) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        (ms(later.0 - self.0), ms(later.1.saturating_sub(self.1)))
    }
}

impl Order {
    /// By what share the best order needs less than the file's.
    fn less(&self) -> f64 {
        1.0 - self.peak as f64 / self.file_order.max(1) as f64
    }

    fn row(&self) -> String {
        let ms = |of: &Spread| format!("{:.2} ({:.2} to {:.2})", of.median, of.low, of.high);
        let bound = match self.bound == self.peak {
            true => "proved".to_owned(),
            false => {
                let gap = 100.0 * (self.peak - self.bound) as f64 / self.bound.max(1) as f64;
                format!("{}, gap {gap:.1}%", Bytes(self.bound))
            }
        };
        format!(
            "| {} | {} | {} | {} | {:.1}% | {bound} | {} | {} | {} | {} | {} | {:.3} |",
            self.network,
            self.operators,
            Bytes(self.file_order),
            Bytes(self.peak),
            100.0 * self.less(),
            self.states,
            ms(&self.ordering_ms),
            ms(&self.ordering_cpu_ms),
            ms(&self.placing_ms),
            ms(&self.placing_cpu_ms),
            self.arena as f64 / self.peak.max(1) as f64,
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn order(name: &str) -> Order {
        let graph = MemoryGraph::of_network(&read(name).unwrap());
        let order = measured(name, &graph, 1).unwrap();
        println!("{}", order.row());
        assert!(order.bound <= order.peak && order.peak <= order.arena, "{}", order.row());
        assert!(order.peak <= order.file_order, "{}", order.row());
        order
    }

    #[test]
    fn orders_of_networks_without_many_branches_are_proved() {
        for name in ["resnet-50", "densenet-201", "yolov4-608", "mobilenet-v2"] {
            let order = order(name);
            assert_eq!(order.bound, order.peak, "{name}");
        }
    }

    #[test]
    fn networks_with_many_branches_need_less_than_in_the_order_of_their_file() {
        for name in ["nasnet-mobile", "darts-cifar", "randwire-1", "randwire-2", "randwire-3"] {
            let order = order(name);
            assert!(order.less() > 0.0 && order.bound == order.peak, "{name}: {}", order.row());
        }
        // Their first convolution needs more than any of their branches.
        for name in ["shufflenet-v1", "shufflenet-v2", "darts"] {
            let order = order(name);
            assert_eq!(order.bound, order.peak, "{name}");
        }
    }

    #[test]
    fn graphs_that_no_network_has_are_ordered_and_bounded() {
        for (name, graph) in graphs::graphs() {
            let order = measured(&name, &graph, 1).unwrap();
            assert!((484..=500).contains(&order.operators), "{name}");
            assert!(order.bound <= order.peak && order.peak <= order.file_order, "{name}");
        }
    }
}
