//! Experiments as data: which models run on which environments by which variants, how often, and what the
//! paper found. One mechanism runs them all; what differs is how they are shown.

mod contest;
mod decode;
mod embed;
mod latency;
mod memory;
mod peers;
mod placing;
mod predictions;
mod rates;
mod scaling;
mod show;
mod strategies;
mod transport;

use crate::{
    environment::BitRate,
    health,
    instance::{self, Testbed},
    record::{Record, RecordFile},
};
use anyhow::{Context, Result, bail};
use galaxy_common::Strategy;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// One way to run a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Variant {
    /// The variant's name in tables and keys.
    pub name: &'static str,
    /// The strategy by which work is split.
    pub strategy: Strategy,
    /// The number of tiles of a split by hand: `galaxy` in proportion to speed, others equally. Without it
    /// the planner splits the work, by profiles that the devices measure, and predicts the latency.
    pub tiles: Option<u16>,
}

/// The paper's figure for a model in an environment.
type Paper = fn(environment: &str, model: &str) -> Option<f64>;

/// The form in which an experiment is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum View {
    /// The latency of each strategy, and how much faster than others `auto` is.
    Strategies,
    /// The latency of each strategy over the rates of links.
    Rates,
    /// Latency and hidden communication over tile counts.
    Tiles,
    /// The latency of runs that share nothing but their settings.
    Repeats,
    /// The speedup by more devices.
    Scaling,
}

/// The length of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Tokens {
    /// A number of tokens in all.
    All(u32),
    /// A number of tokens for each device that works on the text.
    Each(u32),
}

impl Tokens {
    /// The tokens of a text for so many devices; `local` uses one of them.
    fn of(self, strategy: Strategy, devices: usize) -> u32 {
        match (self, strategy) {
            (Self::All(tokens), _) | (Self::Each(tokens), Strategy::Local) => tokens,
            (Self::Each(tokens), _) => tokens * devices as u32,
        }
    }
}

/// An experiment over the latencies of models on environments.
#[derive(Clone, Copy)]
pub struct Experiment {
    /// The experiment's name.
    pub name: &'static str,
    /// One line on what the experiment shows.
    pub about: &'static str,
    /// The names of the environments.
    pub environments: &'static [&'static str],
    /// The names of the models.
    pub models: &'static [&'static str],
    /// The ways to run each model on each environment.
    pub variants: &'static [Variant],
    /// The length of the text.
    pub tokens: Tokens,
    /// The runs of each cell that must count.
    pub samples: usize,
    /// The runs in a row before the next variant has its turn.
    pub in_a_row: usize,
    /// How often everything is set up from scratch: testbed, calibration, workers, placement.
    pub anew: usize,
    /// The form in which the experiment is shown.
    pub view: View,
    /// The paper's figure for a cell.
    pub paper: Paper,
}

const LOCAL: Variant = planned("local", Strategy::Local);
const MEGATRON: Variant = planned("megatron", Strategy::Megatron);
const SEQUENCE: Variant = planned("sequence", Strategy::Sequence);
const PIPELINE: Variant = planned("pipeline", Strategy::Pipeline);
const GALAXY: Variant = planned("galaxy", Strategy::Galaxy);
const AUTO: Variant = planned(AUTO_NAME, Strategy::Auto);
/// The variant that is compared with all others.
const AUTO_NAME: &str = "auto";

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
const PLANNED: &[Variant] = &[LOCAL, MEGATRON, SEQUENCE, PIPELINE, GALAXY, AUTO];
/// The two strategies that the paper compares with, in equal parts as there (Galaxy, \u{a7}IV-A), and all
/// strategies as the planner makes them.
const UNLIKE: &[Variant] = &[
    LOCAL,
    by_hand(EQUAL[0], Strategy::Megatron, 1),
    by_hand(EQUAL[1], Strategy::Sequence, 1),
    MEGATRON,
    SEQUENCE,
    PIPELINE,
    GALAXY,
    AUTO,
];
/// The names of the two variants in equal parts.
const EQUAL: [&str; 2] = ["megatron-equal", "sequence-equal"];

/// The speedup of Galaxy over Megatron-LM at 125 Mbit/s (Galaxy, Table IV).
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

/// The latency of one device over that of four (Galaxy, Fig. 11).
fn figure_eleven(environment: &str, model: &str) -> Option<f64> {
    Some(match model {
        "gpt2-large-4" if environment.starts_with('C') => 3.05,
        "opt-2.7b-4" if environment.starts_with('C') => 3.24,
        _ => return None,
    })
}

/// The operations per second of four devices over four times those of one (Galaxy, Fig. 10).
fn figure_ten(environment: &str, model: &str) -> Option<f64> {
    Some(match model {
        "gpt2-large-4" if environment.starts_with('C') => 0.81,
        "opt-2.7b-4" if environment.starts_with('C') => 0.86,
        _ => return None,
    })
}

/// The fields that most experiments share: a text of the average length of the paper's (Galaxy, \u{a7}IV-A),
/// four runs of each cell, two in a row.
const USUAL: Experiment = Experiment {
    name: "",
    about: "",
    environments: &[],
    models: &["distilbert", "bert-large"],
    variants: PLANNED,
    tokens: Tokens::All(284),
    samples: 4,
    in_a_row: 2,
    anew: 1,
    view: View::Strategies,
    paper: |_, _| None,
};

/// Two, three and four equal boards on fast links, with memory for all: for what many devices gain.
const FAST: &[&str] =
    &["A@1000Mbit/s,memory=8GB", "B@1000Mbit/s,memory=8GB", "C@1000Mbit/s,memory=8GB"];
/// Models of some layers of the paper's models: a whole one does not fit on one board.
const LAYERS: &[&str] = &["gpt2-large-4", "opt-2.7b-4"];

/// All experiments over latency.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "table4",
        about: "every strategy and model on two, three and four equal boards (Galaxy, Table IV)",
        environments: &["A", "B", "C"],
        models: &["distilbert", "bert-large", "gpt2-large", "opt-1.3b", "opt-2.7b"],
        paper: table_four,
        ..USUAL
    },
    Experiment {
        name: "heterogeneous",
        about: "every strategy on unlike devices, beside equal parts for all (Galaxy, Fig. 9)",
        environments: &["D", "E", "F", "G", "H", "I"],
        models: &["distilbert", "bert-large", "gpt2-large"],
        variants: UNLIKE,
        ..USUAL
    },
    Experiment {
        name: "bandwidth",
        about: "every strategy over slow and fast links, with memory to spare (Galaxy, Fig. 8)",
        environments: &[
            "F@10Mbit/s,memory=8GB",
            "F@20Mbit/s,memory=8GB",
            "F@40Mbit/s,memory=8GB",
            "F@125Mbit/s,memory=8GB",
            "F@500Mbit/s,memory=8GB",
            "F@1000Mbit/s,memory=8GB",
            "A@10Mbit/s,memory=8GB",
            "A@20Mbit/s,memory=8GB",
            "A@40Mbit/s,memory=8GB",
            "A@125Mbit/s,memory=8GB",
            "A@500Mbit/s,memory=8GB",
            "A@1000Mbit/s,memory=8GB",
        ],
        view: View::Rates,
        ..USUAL
    },
    Experiment {
        name: "weak",
        about: "two, three and four devices with as many tokens each as one has (Galaxy, Fig. 10)",
        environments: FAST,
        models: LAYERS,
        variants: &[LOCAL, GALAXY, AUTO],
        tokens: Tokens::Each(96),
        view: View::Scaling,
        paper: figure_ten,
        ..USUAL
    },
    Experiment {
        name: "strong",
        about: "one text on one, two, three and four devices (Galaxy, Fig. 11)",
        environments: FAST,
        models: LAYERS,
        variants: &[LOCAL, GALAXY, AUTO],
        tokens: Tokens::All(384),
        view: View::Scaling,
        paper: figure_eleven,
        ..USUAL
    },
    Experiment {
        name: "overlap",
        about: "how much communication tiles hide (Galaxy, \u{a7}III-D)",
        environments: &["A", "C"],
        models: &["bert-large"],
        variants: &[tiles("1", 1), tiles("2", 2), tiles("4", 4), tiles("8", 8), tiles("16", 16)],
        view: View::Tiles,
        ..USUAL
    },
    Experiment {
        name: "repeats",
        about: "whether an experiment that is made anew gives the same: ten times from nothing",
        environments: &["A"],
        models: &["bert-large"],
        // As many tiles as hide all communication that can be hidden (`overlap`).
        variants: &[tiles("galaxy", 4)],
        samples: 3,
        in_a_row: 3,
        anew: 10,
        view: View::Repeats,
        ..USUAL
    },
];

/// The smoke form of an experiment: tiny models, few runs, every step.
fn smoke(experiment: &Experiment) -> Experiment {
    let few = Experiment {
        tokens: match experiment.tokens {
            Tokens::All(_) => Tokens::All(24),
            Tokens::Each(_) => Tokens::Each(8),
        },
        models: &["tiny-bert"],
        samples: 2,
        in_a_row: 1,
        anew: experiment.anew.min(2),
        ..*experiment
    };
    let (environments, models): (&[&str], &[&str]) = match experiment.name {
        "table4" => (&["A", "B"], &["tiny-bert", "tiny-gpt2"]),
        "heterogeneous" => (&["D"], few.models),
        "bandwidth" => (&["A@10Mbit/s,memory=1GB", "A@40Mbit/s,memory=1GB"], few.models),
        "weak" | "strong" => (&["A", "B"], few.models),
        _ => (&["A"], few.models),
    };
    Experiment { environments, models, ..few }
}

/// The options of `galaxy-testbed run`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The experiment's name; without it, all are listed.
    pub name: Option<String>,
    /// Tiny models and few runs: every step of it, in seconds.
    #[arg(long)]
    pub smoke: bool,
    /// Processes on this machine's loopback instead of devices and links: no root, nothing to compare.
    #[arg(long)]
    pub loopback: bool,
    /// The testbed's name [default: the experiment's].
    #[arg(long, value_name = "NAME")]
    pub testbed: Option<String>,
    /// Starts anew where a run was begun before.
    #[arg(long)]
    pub fresh: bool,
    /// Environments, names or files, instead of the experiment's own.
    #[arg(long, value_name = "NAME,NAME@CHANGE,...")]
    environments: Option<String>,
    /// Models instead of the experiment's own.
    #[arg(long, value_delimiter = ',')]
    pub models: Option<Vec<String>>,
    /// Counted runs of each cell instead of the experiment's own number.
    #[arg(long)]
    pub samples: Option<usize>,
    /// Ring links without TLS.
    #[arg(long)]
    pub plain: bool,
    /// The directory of models.
    #[arg(long, default_value = crate::models::CACHE)]
    pub cache: PathBuf,
    /// The directory of results.
    #[arg(long, default_value = "target/testbed-results")]
    pub output: PathBuf,
}

impl Options {
    /// The environments that were asked for. A change behind an `@` may contain commas.
    fn environments(&self) -> Option<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        for part in self.environments.as_ref()?.split(',') {
            let change = part.contains('=') || part.parse::<BitRate>().is_ok();
            let goes_on = change && !part.contains('@');
            match names.last_mut() {
                Some(name) if goes_on && name.contains('@') => *name = format!("{name},{part}"),
                _ => names.push(part.to_owned()),
            }
        }
        Some(names)
    }
}

/// Opens the record of an experiment, or makes it. `settings` are those that would make results incomparable when
/// changed.
fn open(name: &str, options: &Options, settings: Value) -> Result<RecordFile> {
    let wanted = Record::new(name, options.loopback, settings)?;
    RecordFile::open(&options.output, wanted, options.fresh)
}

/// Waits for a quiet machine before a sample that may count.
fn quiet(options: &Options) -> Result<()> {
    if options.smoke || options.loopback { Ok(()) } else { health::quiet() }
}

/// The most tries to mend the devices' shares on a machine that is too busy.
const UNSETTLED: usize = 4;

/// Mends the shares of devices once more, so that they have their speeds before samples are taken.
fn settle(
    testbed: &mut Testbed,
    options: &Options,
    record: &mut Record,
    anew: Option<usize>,
) -> Result<()> {
    let most = if options.smoke { 0 } else { UNSETTLED };
    for time in 1..=most {
        quiet(options)?;
        match testbed.settle(&options.cache) {
            Ok(()) => break,
            Err(error) if time == most => return Err(error),
            Err(error) => eprintln!("{error:#}"),
        }
    }
    let name = &testbed.environment.name;
    let key = anew.map_or(name.clone(), |n| format!("{name}/{}", n + 1));
    record.calibrations.insert(key, testbed.calibration.clone());
    Ok(())
}

/// An experiment that is not over latency.
struct Other {
    name: &'static str,
    about: &'static str,
    run: fn(&Options) -> Result<()>,
}

const OTHERS: &[Other] = &[
    Other { name: predictions::NAME, about: predictions::ABOUT, run: predictions::run },
    Other { name: transport::NAME, about: transport::ABOUT, run: transport::run },
    Other { name: decode::NAME, about: decode::ABOUT, run: decode::run },
    Other { name: memory::NAME, about: memory::ABOUT, run: memory::run },
    Other { name: embed::NAME, about: embed::ABOUT, run: embed::run },
    Other { name: peers::NAME, about: peers::ABOUT, run: peers::run },
];

/// Runs an experiment and shows what it found.
///
/// # Errors
/// When it cannot run here, or something fails on the way; what was measured until then is kept.
pub fn run(options: &Options) -> Result<()> {
    let all = EXPERIMENTS.iter().map(|e| (e.name, e.about));
    let all = all.chain(OTHERS.iter().map(|other| (other.name, other.about)));
    let Some(name) = options.name.as_deref() else {
        for (name, about) in all {
            println!("{name:13} {about}");
        }
        return Ok(());
    };
    let root = options.loopback || instance::is_root();
    anyhow::ensure!(
        root,
        "experiments make namespaces and groups, which needs root; --loopback runs without, unshaped and not to be compared"
    );
    if let Some(other) = OTHERS.iter().find(|other| other.name == name) {
        return (other.run)(options);
    }
    let Some(experiment) = EXPERIMENTS.iter().find(|e| e.name == name) else {
        let names: Vec<&str> = all.map(|(name, _)| name).collect();
        bail!("no experiment is named {name:?}; there are {}", names.join(", "))
    };
    let experiment = if options.smoke { smoke(experiment) } else { *experiment };
    let record = latency::run(&experiment, options)?;
    show::show(&experiment, &record, options).context("the results are kept, but not shown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_within_an_environment_do_not_split_the_list() {
        let options =
            |text: &str| Options { environments: Some(text.to_owned()), ..Options::default() };
        let names = |text: &str| options(text).environments();
        let owned =
            |names: &[&str]| Some(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>());
        assert_eq!(names("A,B"), owned(&["A", "B"]));
        assert_eq!(
            names("A@10Mbit/s,memory=8GB,B@memory=1GB,1Gbit/s,C"),
            owned(&["A@10Mbit/s,memory=8GB", "B@memory=1GB,1Gbit/s", "C"])
        );
        assert_eq!(Options::default().environments(), None);
    }
}
