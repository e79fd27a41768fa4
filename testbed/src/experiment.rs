//! Experiments as data: which models run on which environments in which ways, how often, and what
//! the paper found. One mechanism runs them all; what differs is how they are shown.

mod decode;
mod latency;
mod memory;
mod predictions;
mod show;
mod transport;

use crate::instance;
use anyhow::{Context, Result, bail};
use galaxy_common::Strategy;
use std::path::PathBuf;

/// One way to run a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Variant {
    /// Its name in tables and keys.
    pub name: &'static str,
    /// How work is cut.
    pub strategy: Strategy,
    /// Into how many tiles it is split by hand, in proportion to speed or equally; without, the
    /// planner splits it, by profiles that the devices measure, and predicts it.
    pub tiles: Option<u16>,
}

/// What is found in the paper for a model in an environment.
type Paper = fn(environment: &str, model: &str) -> Option<f64>;

/// How an experiment is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum View {
    /// Latency of each strategy, and their ratios.
    Strategies,
    /// Latency and hidden communication over tiles.
    Tiles,
    /// Latency of runs that have nothing in common but their settings.
    Repeats,
    /// Latency beside what was predicted, and `auto` beside all others.
    Predictions,
}

/// Latencies of models on environments.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// Its name.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// Names of environments.
    pub environments: &'static [&'static str],
    /// Names of models.
    pub models: &'static [&'static str],
    /// Ways to run each model on each environment.
    pub variants: &'static [Variant],
    /// Tokens of the text.
    pub tokens: u32,
    /// Runs of each cell that are counted.
    pub samples: usize,
    /// Runs in a row before the next variant has its turn.
    pub in_a_row: usize,
    /// How often it is made anew from nothing: testbed, calibration, workers, placement.
    pub anew: usize,
    /// How it is shown.
    pub view: View,
    /// Megatron's latency over galaxy's, as the paper found it.
    pub paper: Paper,
}

const LOCAL: Variant = by_hand("local", Strategy::Local, 1);
const MEGATRON: Variant = by_hand("megatron", Strategy::Megatron, 1);
const GALAXY: Variant = by_hand("galaxy", Strategy::Galaxy, TILES);
/// Tiles of a device's rows where an experiment does not vary them: `overlap` shows that more gain
/// nothing, and fewer hide less.
const TILES: u16 = 4;

const fn by_hand(name: &'static str, strategy: Strategy, tiles: u16) -> Variant {
    Variant { name, strategy, tiles: Some(tiles) }
}

const fn tiles(name: &'static str, tiles: u16) -> Variant {
    by_hand(name, Strategy::Galaxy, tiles)
}

const fn planned(name: &'static str, strategy: Strategy) -> Variant {
    Variant { name, strategy, tiles: None }
}

/// Every strategy as the planner makes it.
const PLANNED: &[Variant] = &[
    planned("local", Strategy::Local),
    planned("megatron", Strategy::Megatron),
    planned("sequence", Strategy::Sequence),
    planned("pipeline", Strategy::Pipeline),
    planned("galaxy", Strategy::Galaxy),
    planned("auto", Strategy::Auto),
];

/// Speedup of Galaxy over Megatron-LM at 125 Mbit/s (Galaxy, Table IV).
fn table_four(environment: &str, model: &str) -> Option<f64> {
    Some(match (model, environment) {
        ("distilbert", "A") => 1.37,
        ("bert-large", "A") => 1.36,
        ("bert-large", "B") => 1.38,
        ("gpt2-large", "A") => 1.31,
        ("gpt2-large", "B") => 1.46,
        ("opt-1.3b", "A") => 1.26,
        ("opt-1.3b", "B") => 1.40,
        ("opt-1.3b", "C") => 1.43,
        ("opt-2.7b", "C") => 1.28,
        _ => return None,
    })
}

/// The average length of the paper's texts (Galaxy, §IV-A).
const TOKENS: u32 = 284;

/// All experiments over latency.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "table4",
        about: "every strategy and model on two, three and four equal boards (Galaxy, Table IV)",
        environments: &["A", "B", "C"],
        models: &["distilbert", "bert-large", "gpt2-large", "opt-1.3b", "opt-2.7b"],
        variants: &[LOCAL, MEGATRON, GALAXY],
        tokens: TOKENS,
        samples: 4,
        in_a_row: 2,
        anew: 1,
        view: View::Strategies,
        paper: table_four,
    },
    Experiment {
        name: "overlap",
        about: "how much communication tiles hide (Galaxy, §III-D)",
        environments: &["A", "C"],
        models: &["bert-large"],
        variants: &[tiles("1", 1), tiles("2", 2), tiles("4", 4), tiles("8", 8), tiles("16", 16)],
        tokens: TOKENS,
        samples: 4,
        in_a_row: 2,
        anew: 1,
        view: View::Tiles,
        paper: |_, _| None,
    },
    Experiment {
        name: "repeats",
        about: "whether an experiment that is made anew gives the same: ten times from nothing",
        environments: &["A"],
        models: &["bert-large"],
        variants: &[GALAXY],
        tokens: TOKENS,
        samples: 3,
        in_a_row: 3,
        anew: 10,
        view: View::Repeats,
        paper: |_, _| None,
    },
    Experiment {
        name: "planner",
        about: "what the planner predicts and what is measured, every strategy; auto against the best other",
        environments: &["A", "B", "C", "D", "E", "F", "G", "H", "I"],
        models: &["distilbert", "bert-large", "gpt2-large"],
        variants: PLANNED,
        tokens: TOKENS,
        samples: 4,
        in_a_row: 2,
        anew: 1,
        view: View::Predictions,
        paper: |_, _| None,
    },
    Experiment {
        name: "slow",
        about: "auto against galaxy over slow links, with memory to spare",
        environments: &[
            "A@10Mbit/s,memory=8GB",
            "A@20Mbit/s,memory=8GB",
            "A@40Mbit/s,memory=8GB",
            "F@10Mbit/s,memory=8GB",
            "F@20Mbit/s,memory=8GB",
            "F@40Mbit/s,memory=8GB",
        ],
        models: &["distilbert", "bert-large"],
        variants: &[planned("galaxy", Strategy::Galaxy), planned("auto", Strategy::Auto)],
        tokens: TOKENS,
        samples: 4,
        in_a_row: 2,
        anew: 1,
        view: View::Predictions,
        paper: |_, _| None,
    },
];

/// Smoke forms: tiny models, few runs, every step.
const SMOKE: &[Experiment] = &[
    Experiment {
        name: "table4",
        environments: &["A", "B"],
        models: &["tiny-bert", "tiny-gpt2"],
        tokens: 24,
        samples: 2,
        in_a_row: 1,
        ..EXPERIMENTS[0]
    },
    Experiment {
        name: "overlap",
        environments: &["A"],
        models: &["tiny-bert"],
        tokens: 24,
        samples: 2,
        in_a_row: 1,
        ..EXPERIMENTS[1]
    },
    Experiment {
        name: "repeats",
        models: &["tiny-bert"],
        tokens: 24,
        samples: 2,
        anew: 2,
        ..EXPERIMENTS[2]
    },
    Experiment {
        name: "planner",
        environments: &["A", "B"],
        models: &["tiny-bert", "tiny-gpt2"],
        tokens: 24,
        samples: 2,
        ..EXPERIMENTS[3]
    },
    Experiment {
        name: "slow",
        environments: &["A@10Mbit/s,memory=1GB"],
        models: &["tiny-bert"],
        tokens: 24,
        samples: 2,
        ..EXPERIMENTS[4]
    },
];

/// How to run one.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Which; without a name, all are listed
    pub name: Option<String>,
    /// Tiny models and few runs: every step of it, in seconds
    #[arg(long)]
    pub smoke: bool,
    /// Processes on this machine's loopback instead of devices and links: no root, nothing to compare
    #[arg(long)]
    pub loopback: bool,
    /// The testbed's name [default: the experiment's]
    #[arg(long, value_name = "NAME")]
    pub testbed: Option<String>,
    /// Starts anew where a run was begun before
    #[arg(long)]
    pub fresh: bool,
    /// Environments, names or files, instead of the experiment's own
    #[arg(long, value_delimiter = ',')]
    pub environments: Option<Vec<String>>,
    /// Models instead of the experiment's own
    #[arg(long, value_delimiter = ',')]
    pub models: Option<Vec<String>>,
    /// Counted runs of each cell instead of the experiment's own number
    #[arg(long)]
    pub samples: Option<usize>,
    /// Ring links without TLS
    #[arg(long)]
    pub plain: bool,
    /// Where models are kept
    #[arg(long, default_value = crate::models::CACHE)]
    pub cache: PathBuf,
    /// Where results go
    #[arg(long, default_value = "target/testbed-results")]
    pub output: PathBuf,
}

/// Runs an experiment and shows what it found.
///
/// # Errors
/// When it cannot run here, or something fails on the way; what was measured until then is kept.
pub fn run(options: &Options) -> Result<()> {
    let Some(name) = options.name.as_deref() else {
        for experiment in EXPERIMENTS {
            println!("{:10} {}", experiment.name, experiment.about);
        }
        println!("{:10} {}", transport::NAME, transport::ABOUT);
        println!("{:10} {}", decode::NAME, decode::ABOUT);
        println!("{:10} {}", memory::NAME, memory::ABOUT);
        return Ok(());
    };
    let root = options.loopback || instance::is_root();
    anyhow::ensure!(
        root,
        "experiments make namespaces and groups, which needs root; --loopback runs without, unshaped and not to be compared"
    );
    match name {
        transport::NAME => return transport::run(options),
        decode::NAME => return decode::run(options),
        memory::NAME => return memory::run(options),
        _ => {}
    }
    let known = if options.smoke { SMOKE } else { EXPERIMENTS };
    let Some(experiment) = known.iter().find(|e| e.name == name) else {
        let names: Vec<&str> = known
            .iter()
            .map(|e| e.name)
            .chain([transport::NAME, decode::NAME, memory::NAME])
            .collect();
        bail!("no experiment is named {name:?}; there are {}", names.join(", "))
    };
    let record = latency::run(experiment, options)?;
    show::show(experiment, &record, options).context("the results are kept, but not shown")
}
