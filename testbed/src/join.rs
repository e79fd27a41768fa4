//! `galaxy-testbed join`: from two bare machines to an answer over both, by the four commands that a person
//! types.
//!
//! Each machine is a network namespace with a link, and has an empty home. Only the first one has the model,
//! and neither may hold all of it. The clock runs from the first command to the answer.

use crate::{
    instance, models,
    network::{Link, Network, NetworkGuard, NetworkNode},
    processes::{Process, program},
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{Bytes, LinkRate};
use galaxy_model::ModelDir;
use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// The goal: the seconds that all steps together may take.
const GOAL: f64 = 60.0;
/// The memory that each machine grants, as a share of what the model takes on one device.
const GRANTED: f64 = 0.7;
/// The memory that a device needs beside weights, measuring itself included, in bytes.
const BESIDE: u64 = 64_000_000;
/// How long a cluster may take to be ready: ten times the goal.
const PATIENCE: Duration = Duration::from_secs(600);
/// The time between two looks at the cluster's status.
const LOOK: Duration = Duration::from_millis(100);
/// The ports of the first machine's coordinator and of both workers, which are on machines of their own.
const PORTS: [u16; 3] = [7000, 7100, 7101];

/// The options of `galaxy-testbed join`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The rate of the links.
    #[arg(long, default_value = "1000Mbit/s")]
    pub rate: LinkRate,
    /// The model, of the catalogue of `models --list`.
    #[arg(long, default_value = "bert-large")]
    pub model: String,
    /// The directory of models.
    #[arg(long, default_value = models::CACHE)]
    pub cache: PathBuf,
    /// Without namespaces: both machines are on loopback.
    #[arg(long)]
    pub loopback: bool,
    /// A small model: every step, and no figures to publish.
    #[arg(long)]
    pub smoke: bool,
    /// Prints one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Measures the steps, and prints where the time went.
///
/// # Errors
/// Without root, or when a step fails.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.loopback || instance::is_root(),
        "namespaces need root; --loopback runs without, on one machine"
    );
    let model = match options.smoke {
        // Smaller models fit into the memory that measuring needs.
        true => models::bert(&options.cache, "join", 16, 512, 8)?,
        false => models::ensure(&options.cache, &options.model)?,
    };
    let model = model.canonicalize()?;
    let bytes = ModelDir::open(&model)?.pieces()?.total();
    let granted = Bytes((bytes as f64 * GRANTED) as u64 + BESIDE);
    let stand = JoinSetup::new(options, granted)?;
    let steps = stand.walk(&model)?;
    let total = steps.last().map_or(0.0, |(_, at)| *at);
    if options.json {
        let steps: Vec<Value> =
            steps.iter().map(|(what, at)| json!({ "after": what, "seconds": at })).collect();
        println!(
            "{}",
            json!({
                "model_bytes": bytes, "granted_bytes": granted.0, "loopback": options.loopback,
                "smoke": options.smoke, "steps": steps, "seconds": total, "goal_seconds": GOAL,
            })
        );
        return Ok(());
    }
    println!("{} of weights, {granted} granted on each of two machines", Bytes(bytes));
    for (what, at) in &steps {
        println!("{at:>7.2} s  {what}");
    }
    let reached = if total <= GOAL { "reached" } else { "not reached" };
    println!(
        "four commands, {total:.1} s to an answer over both; the goal of {GOAL:.0} s is {reached}"
    );
    Ok(())
}

/// The two machines, and the directory of their homes.
struct JoinSetup {
    network: Option<NetworkGuard>,
    granted: Bytes,
    dir: tempfile::TempDir,
}

impl JoinSetup {
    fn new(options: &Options, granted: Bytes) -> Result<Self> {
        let network = match options.loopback {
            true => None,
            false => {
                let link = Some(Link::of(options.rate.bits_per_second().round() as u64));
                let place = |name: &str| NetworkNode { name: name.to_owned(), link };
                let places = [place("first"), place("second")];
                Some(Network::held(&format!("join{}", std::process::id()), &places)?)
            }
        };
        Ok(Self { network, granted, dir: tempfile::tempdir_in(&options.cache)? })
    }

    /// Calls `call` on machine `i`, which has a home of its own.
    fn inside<T: Send>(&self, i: usize, call: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        match &self.network {
            Some(network) => network.inside(i, call)?,
            None => call(),
        }
    }

    fn command(&self, i: usize, name: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(program(name)?);
        command.args(arguments).env("GALAXY_HOME", self.dir.path().join(format!("home{i}")));
        command.env_remove("GALAXY_COORDINATOR").env_remove("GALAXY_IDENTITY");
        Ok(command)
    }

    /// Runs a command of `galaxy` on machine `i` to its end, with `input` on standard input.
    fn finish(&self, i: usize, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = self.command(i, "galaxy", arguments)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let Output { status, stdout, stderr } = self.inside(i, || {
            let mut child = command.spawn().context("galaxy")?;
            child.stdin.take().context("no standard input")?.write_all(input.as_bytes())?;
            Ok(child.wait_with_output()?)
        })?;
        ensure!(status.success(), "galaxy {arguments:?}: {}", String::from_utf8_lossy(&stderr));
        Ok(String::from_utf8(stdout)?)
    }

    fn status(&self) -> Option<Value> {
        let text = self.finish(0, &["status", "--json", "--timeout", "5s"], "").ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Runs the four commands, and returns the steps, each with the seconds from the first command to its
    /// end.
    fn walk(&self, model: &Path) -> Result<Vec<(String, f64)>> {
        let (granted, [coordinator, first, second]) = (format!("{}B", self.granted.0), PORTS);
        let begun = Instant::now();
        let mut steps = Vec::new();
        let mut done = |what: &str| steps.push((what.to_owned(), begun.elapsed().as_secs_f64()));

        let listen = match self.network {
            Some(_) => format!("0.0.0.0:{coordinator}"),
            None => format!("127.0.0.1:{coordinator}"),
        };
        let up = self.command(
            0,
            "galaxy",
            &[
                "up",
                "--model",
                &model.display().to_string(),
                "--name",
                "first",
                "--memory",
                &granted,
                "--listen",
                &listen,
                "--worker-port",
                &first.to_string(),
            ],
        )?;
        let mut up = self.inside(0, || Process::spawn("galaxy up", up))?;
        // The pin stands after the last address.
        let line = up.line(&format!(":{coordinator}."))?;
        done("galaxy up: the line for others is printed");

        self.finish(1, &["join", "--name", "second"], &format!("{line}\n"))?;
        done("galaxy join: the second machine has an identity");

        let worker = self.command(
            1,
            "galaxy-worker",
            &["--memory", &granted, "--listen", &format!("0.0.0.0:{second}")],
        )?;
        let _worker = self.inside(1, || Process::spawn("galaxy-worker", worker))?;
        done("galaxy-worker: started");

        loop {
            let status = self.status().unwrap_or_default();
            let devices = status["devices"].as_array().cloned().unwrap_or_default();
            let parts = devices.iter().filter(|device| device["state"] == "ready").count();
            if status["state"] == "ready" && parts == 2 {
                break;
            }
            if begun.elapsed() > PATIENCE {
                bail!("the cluster is not ready: {status}\n{}", up.output());
            }
            std::thread::sleep(LOOK);
        }
        done("the cluster is ready, with a part on both");

        self.finish(0, &["run", "--ids", "5,6,7,8", "--output", "hidden"], "")?;
        done("galaxy run: an answer");
        up.signal("TERM")?;
        up.ended()?;
        fs::remove_dir_all(self.dir.path().join("home1"))?;
        Ok(steps)
    }
}
