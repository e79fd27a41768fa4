//! One device in a process of its own, for `run memory`: opens a plan, and runs what it is asked for on
//! standard input, a line each.

use anyhow::{Context, Result, bail};
use galaxy_common::{BatchShape, Plan, Sampling, Segment, Wanted};
use galaxy_engine::{choose::Text, compute::Inputs, local::LocalCluster};
use galaxy_graph::{program::Lane, timeline};
use galaxy_model::ModelDir;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufRead, Write as _},
    ops::ControlFlow,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long results are held, as on their way to a coordinator: long enough to be seen by who looks at memory.
const HELD: Duration = Duration::from_millis(12);

/// What it is started with.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The model's directory
    pub model: PathBuf,
    /// The plan, of one device, as JSON
    pub plan: PathBuf,
    /// Where files of shards are
    pub shards: PathBuf,
    /// Bytes per second that each loader reads at most
    #[arg(long)]
    pub limit: Option<f64>,
}

/// What it is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// To open the plan.
    Open,
    /// One text of so many rows.
    Run(u32),
    /// So many tokens behind a prompt of so many.
    Make(u32, u32),
    /// So many texts of up to so many rows, one after another.
    Many(u32, u32),
    /// All pieces by so many loaders, and nothing computed.
    Read(u16),
}

/// What that took.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Took {
    /// In all, ms.
    pub ms: f64,
    /// Kernels at work in the last program, ms.
    pub busy_ms: f64,
    /// Kernels idle until weights had come, in the last program, ms.
    pub stalled_ms: f64,
    /// The first loader at work in the last program, ms,
    pub loading_ms: f64,
    /// and what it read, in bytes.
    pub loaded: u64,
    /// Pieces that the shard's file did not give.
    pub remade: u64,
    /// The tokens that were made.
    pub tokens: Vec<u32>,
}

/// Serves until there are no more questions.
///
/// # Errors
/// When the plan cannot be opened or run.
pub fn serve(options: &Options) -> Result<()> {
    let plan: Plan = serde_json::from_reader(File::open(&options.plan)?)?;
    let model = Arc::new(ModelDir::open(&options.model)?);
    let mut cluster = None;
    for line in std::io::stdin().lock().lines() {
        let ask: Ask = serde_json::from_str(&line?)?;
        let begun = Instant::now();
        let mut took = Took::default();
        if ask == Ask::Open {
            let opened = LocalCluster::open_with(model.clone(), plan.clone(), &options.shards)?;
            if let Some(limit) = options.limit {
                opened.streams().for_each(|stream| stream.limit(limit));
            }
            cluster = Some(opened);
        } else {
            let cluster = cluster.as_ref().context("nothing is open")?;
            took = run(cluster, ask)?;
        }
        if took.ms == 0.0 {
            took.ms = begun.elapsed().as_secs_f64() * 1e3;
        }
        let mut out = std::io::stdout();
        writeln!(out, "{}", serde_json::to_string(&took)?)?;
        out.flush()?;
    }
    Ok(())
}

fn run(cluster: &LocalCluster, ask: Ask) -> Result<Took> {
    let spec = cluster.model().spec();
    let remade = || cluster.streams().map(|stream| stream.remade()).sum();
    match ask {
        Ask::Open => bail!("it is open"),
        Ask::Make(prompt, count) => {
            let tokens: Vec<u32> = (0..prompt).map(|at| 3 + at * 7 % 90).collect();
            let text = Text {
                slot: 0,
                rows: prompt + count,
                sampling: Sampling::greedy(),
                prompt: tokens.len(),
                tokens,
            };
            let mut made = Vec::new();
            let tell = &mut |told: &galaxy_engine::generate::Told| {
                made.push(told[0] as u32);
                ControlFlow::Continue(())
            };
            cluster.generate(&text, count, prompt, &[], tell)?;
            Ok(Took { remade: remade(), tokens: made, ..Took::default() })
        }
        Ask::Many(count, rows) => {
            // The longest first, and now and then again.
            for at in 0..count {
                run(cluster, Ask::Run(if at % 10 == 0 { rows } else { (rows / 8).max(1) }))?;
                if at % 100 == 99 {
                    eprintln!("{} of {count} requests", at + 1);
                }
            }
            Ok(Took { remade: remade(), ..Took::default() })
        }
        Ask::Read(loaders) => {
            let stream = cluster.streams().next().context("nothing comes from disk")?;
            let loaded = stream.read_all(loaders)?;
            Ok(Took { loaded, remade: remade(), ..Took::default() })
        }
        Ask::Run(rows) => {
            let rows = spec.patches.map_or(rows, |patches| patches.rows());
            let wanted = match spec.head.labels() {
                0 => Wanted::Hidden,
                _ => Wanted::Classes,
            };
            let segment = Segment { slot: 0, past: 0, kept: false, rows, wanted };
            let shape = BatchShape::new(vec![segment])?;
            let begun = Instant::now();
            let (programs, reports) = cluster.execute(&shape, Inputs::any(spec, rows, 1), None)?;
            let (program, report) = (&programs[0], &reports[0]);
            let took = begun.elapsed();
            let busy = |of: Lane| {
                let lane = report.lanes.iter().find(|lane| lane.lane == of);
                lane.map_or(0.0, |lane| lane.busy as f64 * 1e-6)
            };
            let first = program.lanes.iter().find(|(lane, _)| *lane == Lane::Load(0));
            let bytes = |id: &_| -> u64 {
                let writes = &program.operation(*id).writes;
                writes.iter().map(|region| program.region_bytes(region)).sum()
            };
            let took = Took {
                ms: took.as_secs_f64() * 1e3,
                busy_ms: busy(Lane::Compute),
                stalled_ms: timeline::stalled(program, &report.timeline) as f64 * 1e-6,
                loading_ms: busy(Lane::Load(0)),
                loaded: first.map_or(0, |(_, ids)| ids.iter().map(bytes).sum()),
                remade: remade(),
                tokens: Vec::new(),
            };
            std::thread::sleep(HELD);
            drop(reports);
            Ok(took)
        }
    }
}
