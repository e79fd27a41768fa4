//! The commands `galaxy-testbed up`, `status`, `exec` and `down`.

use crate::{
    environment::{COORDINATOR, Environment, Hold},
    instance::{self, Testbed},
    network::Network,
    report::Table,
};
use anyhow::{Context, Result, bail};
use galaxy_common::Strategy;
use std::{fmt::Write as _, os::unix::process::CommandExt, path::PathBuf};

/// The options of `galaxy-testbed up`.
#[derive(Clone, Debug, clap::Args)]
pub struct Up {
    /// A file, or one of the environments that come with the testbed: A to I, pair.
    environment: String,
    /// The testbed's name [default: the environment's].
    #[arg(long)]
    name: Option<String>,
    /// Processes on this machine's loopback: no root, no shaping, no limits.
    #[arg(long)]
    loopback: bool,
    /// The model that its workers serve; a cluster file for it is written.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The strategy by which the model is split, in the cluster file.
    #[arg(long, default_value_t = Strategy::Galaxy)]
    strategy: Strategy,
    /// Ring links without TLS.
    #[arg(long)]
    plain: bool,
    /// The directory of the calibrating model.
    #[arg(long, default_value = crate::models::CACHE)]
    cache: PathBuf,
}

/// The options of `galaxy-testbed exec`.
#[derive(Clone, Debug, clap::Args)]
pub struct Exec {
    /// A device, or `coordinator`.
    place: String,
    /// The testbed, where several are up.
    #[arg(long)]
    name: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Brings a testbed up.
///
/// # Errors
/// When the machine lacks something, the name is taken, or a worker does not start.
pub fn up(options: &Up) -> Result<()> {
    let environment = Environment::open(&options.environment)?;
    let name = options.name.clone().unwrap_or_else(|| environment.name.clone());
    let model = match &options.model {
        Some(model) => Some(model.canonicalize().with_context(|| model.display().to_string())?),
        None => None,
    };
    let testbed = Testbed::up(environment, &name, options.loopback, &options.cache)?;
    let above = model.as_ref().and_then(|m| m.parent()).unwrap_or(testbed.directory()).to_owned();
    testbed.start_workers(&above, options.plain, None)?;
    if let Some(model) = &model {
        std::fs::write(
            testbed.directory().join("cluster.toml"),
            cluster_file(&testbed, model, options),
        )?;
    }
    println!("{}", table(&testbed)?);
    let exec = format!("galaxy-testbed exec --name {name}");
    if model.is_some() {
        let file = testbed.directory().join("cluster.toml");
        let client = testbed.identity("client");
        let address =
            if testbed.loopback { "127.0.0.1:7000".to_owned() } else { coordinator(&testbed) };
        println!(
            "start a coordinator: {exec} coordinator galaxy-coord --cluster {}\nask it:              {exec} coordinator galaxy status --address {address} --identity {}",
            file.display(),
            client.display()
        );
    }
    println!(
        "run on a device:     {exec} {} hostname\nremove all of it:    galaxy-testbed down {name}",
        testbed.environment.devices[0].name
    );
    Ok(())
}

/// The address of the coordinator's API within the testbed.
fn coordinator(testbed: &Testbed) -> String {
    format!("{}:7000", Network::address(testbed.environment.devices.len()))
}

fn cluster_file(testbed: &Testbed, model: &std::path::Path, options: &Up) -> String {
    let listen = if testbed.loopback { "127.0.0.1:7000".to_owned() } else { coordinator(testbed) };
    let mut text = format!(
        "[cluster]\nname = {:?}\nmodel = {model:?}\nidentity = {:?}\nstrategy = \"{}\"\nplain = {}\nlisten = {listen:?}\n",
        testbed.name,
        testbed.identity(COORDINATOR),
        options.strategy,
        options.plain,
    );
    for (device, worker) in testbed.environment.devices.iter().zip(testbed.workers()) {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n[[device]]\nname = \"{}\"\naddress = {:?}\nmemory = \"{}MB\"\nthreads = 1\n",
            device.name,
            worker.address,
            testbed.environment.memory(device).0 / 1_000_000
        );
        if options.strategy.takes_shares() {
            let share = testbed.environment.speed(device).map_or(1.0, |speed| speed.0);
            let _ = writeln!(text, "share = {share:?}");
        }
    }
    text
}

fn table(testbed: &Testbed) -> Result<Table> {
    let Testbed { name, environment, loopback, .. } = testbed;
    let mode = if *loopback { " on loopback: nothing is shaped or limited" } else { "" };
    let title = format!("testbed {name}: {}{mode}", environment.about);
    let mut table = Table::new(
        &title,
        &["device", "stands for", "speed", "quota", "link", "delay", "memory", "peak", "worker"],
    );
    let workers = testbed.workers();
    for (i, device) in environment.devices.iter().enumerate() {
        let usage = testbed.usage(i)?;
        let set = &testbed.calibration.devices[i];
        let worker = workers.iter().find(|w| w.device == device.name.as_str());
        let state = match worker {
            None => "none".to_owned(),
            Some(worker) if worker.alive() => format!("{} at {}", worker.pid, worker.address),
            Some(_) => format!("ended; see {}", testbed.log(device.name.as_str()).display()),
        };
        let state = match usage.oom_kills {
            0 => state,
            1 => format!("{state}; 1 process killed for its memory"),
            kills => format!("{state}; {kills} processes killed for their memory"),
        };
        let speed = set
            .measured
            .or(set.wanted_speed)
            .map_or("a core".to_owned(), |s| format!("{s:.2} GFLOP/s"));
        let quota = set.quota.map_or("none".to_owned(), |q| format!("{:.1}%", q * 100.0));
        let (link, delay) = match loopback {
            true => ("none".to_owned(), "none".to_owned()),
            false => (
                environment.rate(device).to_string(),
                format!("{:.2} ms", environment.delay(device).as_secs_f64() * 1e3),
            ),
        };
        let memory = environment.memory(device).to_string();
        let peak = usage.memory_peak.map_or("-".to_owned(), |p| p.to_string());
        let kind = device.kind.clone();
        table.row([device.name.to_string(), kind, speed, quota, link, delay, memory, peak, state]);
    }
    Ok(table)
}

/// Prints the testbeds that are up, and their devices.
///
/// # Errors
/// When no testbed of that name is up.
pub fn status(name: Option<&str>) -> Result<()> {
    let names = name.map_or_else(instance::names, |name| vec![name.to_owned()]);
    if names.is_empty() {
        println!("no testbed is up; `galaxy-testbed up ENVIRONMENT` makes one");
    }
    for each in names {
        match Testbed::open(&each) {
            Ok(testbed) => println!("{}", table(&testbed)?),
            Err(error) if name.is_some() => return Err(error),
            Err(_) => {
                println!(
                    "testbed {each}: left half-made by a crash; `galaxy-testbed down {each}` removes it"
                );
            }
        }
    }
    Ok(())
}

/// Replaces this process by a command on a device.
///
/// # Errors
/// When there is no such device or command.
pub fn exec(options: &Exec) -> Result<()> {
    let testbed = Testbed::find(options.name.as_deref())?;
    let (program, arguments) = options.command.split_first().context("no command is given")?;
    // Programs of this workspace are found without a path.
    let program = crate::processes::program(program).unwrap_or_else(|_| PathBuf::from(program));
    let mut command = testbed.command(&options.place, Hold::Process, &program)?;
    Err(command.args(arguments).exec()).context("the command does not start")
}

/// Removes testbeds.
///
/// # Errors
/// When one is in use, or something of it stays.
pub fn down(name: Option<&str>, all: bool) -> Result<()> {
    let up = instance::names();
    let names = match (name, all, up.as_slice()) {
        (Some(name), false, _) => vec![name.to_owned()],
        (None, true, _) => up,
        (None, false, [_]) => up,
        (None, false, []) => {
            println!("no testbed is up");
            return Ok(());
        }
        (None, false, many) => bail!("several are up ({}): name one, or --all", many.join(", ")),
        (Some(_), true, _) => bail!("a name, or --all"),
    };
    for name in names {
        instance::down(&name)?;
        println!("testbed {name} is down");
    }
    Ok(())
}
