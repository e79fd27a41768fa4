//! One device in a process of its own, for `run memory`: opens a plan, and serves one request from each line
//! of standard input.

use anyhow::{Context, Result, bail};
use galaxy_common::{BatchShape, Plan, Sampling, Segment, Wanted};
use galaxy_engine::{compute::Inputs, local::LocalCluster, sampler::Sequence};
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

/// The time for which results are held, as on their way to a coordinator: long enough for a look at memory to
/// see them.
const HELD: Duration = Duration::from_millis(12);

/// The options of `galaxy-testbed reader`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The model's directory.
    pub model: PathBuf,
    /// The plan, of one device, as JSON.
    pub plan: PathBuf,
    /// The directory of the shards' files.
    pub shards: PathBuf,
    /// Bytes per second that each loader reads at most.
    #[arg(long)]
    pub limit: Option<f64>,
}

/// A request to the reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ReaderCommand {
    /// Opens the plan.
    Open,
    /// Runs one text of this many rows.
    Run(u32),
    /// Generates tokens behind a prompt: the length of the prompt, and the number of tokens.
    Make(u32, u32),
    /// Runs texts one after another: how many, and their most rows.
    Many(u32, u32),
    /// Reads all pieces with this many loaders, and computes nothing.
    Read(u16),
}

/// The costs of one request.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct RequestCost {
    /// The time of the whole request, in ms.
    pub ms: f64,
    /// The time that kernels worked in the last program, in ms.
    pub busy_ms: f64,
    /// The time that kernels were idle until weights had come, in the last program, in ms.
    pub stalled_ms: f64,
    /// The time that the first loader worked in the last program, in ms.
    pub loading_ms: f64,
    /// The bytes that were read: by the first loader in the last program, or by all loaders for
    /// [`ReaderCommand::Read`].
    pub loaded: u64,
    /// The pieces that the shard's file did not give.
    pub remade: u64,
    /// The generated tokens.
    pub tokens: Vec<u32>,
}

/// Serves requests until standard input ends.
///
/// # Errors
/// When the plan cannot be opened or run.
pub fn serve(options: &Options) -> Result<()> {
    let plan: Plan = serde_json::from_reader(File::open(&options.plan)?)?;
    let model = Arc::new(ModelDir::open(&options.model)?);
    let mut cluster = None;
    for line in std::io::stdin().lock().lines() {
        let ask: ReaderCommand = serde_json::from_str(&line?)?;
        let begun = Instant::now();
        let mut took = RequestCost::default();
        if ask == ReaderCommand::Open {
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

fn run(cluster: &LocalCluster, ask: ReaderCommand) -> Result<RequestCost> {
    let spec = cluster.model().spec();
    let remade = || cluster.streams().map(|stream| stream.remade()).sum();
    match ask {
        ReaderCommand::Open => bail!("it is open"),
        ReaderCommand::Make(prompt, count) => {
            let tokens: Vec<u32> = (0..prompt).map(|at| 3 + at * 7 % 90).collect();
            let text = Sequence {
                slot: 0,
                rows: prompt + count,
                sampling: Sampling::greedy(),
                prompt: tokens.len(),
                tokens,
            };
            let mut made = Vec::new();
            let tell = &mut |told: &galaxy_engine::generate::TokenEvent| {
                made.push(told[0] as u32);
                ControlFlow::Continue(())
            };
            cluster.generate(&text, count, prompt, &[], tell)?;
            Ok(RequestCost { remade: remade(), tokens: made, ..RequestCost::default() })
        }
        ReaderCommand::Many(count, rows) => {
            // The longest first, and now and then again.
            for at in 0..count {
                run(
                    cluster,
                    ReaderCommand::Run(if at % 10 == 0 { rows } else { (rows / 8).max(1) }),
                )?;
                if at % 100 == 99 {
                    eprintln!("{} of {count} requests", at + 1);
                }
            }
            Ok(RequestCost { remade: remade(), ..RequestCost::default() })
        }
        ReaderCommand::Read(loaders) => {
            let stream = cluster.streams().next().context("nothing comes from disk")?;
            let loaded = stream.read_all(loaders)?;
            Ok(RequestCost { loaded, remade: remade(), ..RequestCost::default() })
        }
        ReaderCommand::Run(rows) => {
            let rows = spec.patches.map_or(rows, |patches| patches.rows());
            let wanted = match spec.head.labels() {
                0 => Wanted::Hidden,
                _ => Wanted::Classes,
            };
            let segment = Segment { slot: 0, context_len: 0, cached: false, rows, wanted };
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
            let took = RequestCost {
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
