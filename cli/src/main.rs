//! The `galaxy` command: its arguments, and the commands that they name.

mod bench;
mod chat;
mod choice;
mod classify;
mod connection;
mod decoder;
mod demo;
mod devices;
mod failure;
mod generate;
mod generation_config;
mod ids;
mod images;
mod in_process;
mod invite;
mod join;
mod keys;
mod loopback;
#[cfg(test)]
mod messages;
mod networks;
mod npy;
mod pace;
mod plan;
mod profile;
mod progress;
mod pull;
mod quantise;
mod run;
mod serve;
mod status;
mod table;
mod tensors;
mod texts;
mod trace;
mod up;

use clap::{Args, Parser, Subcommand};
use connection::Connection;
use failure::Failure;
use galaxy_common::printable::lines;
use galaxy_engine::compute::kernels::instructions::{self, Instructions};
use std::{
    io::{ErrorKind, IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

/// One transformer request, run by all the devices in the room.
#[derive(Parser, Debug)]
#[command(name = "galaxy", disable_version_flag = true, arg_required_else_help = true)]
struct Cli {
    /// Print version, commit and protocol.
    #[arg(long, short = 'V')]
    version: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Embed texts, as one vector each.
    ///
    /// With --json: {"vectors": [[...], ...], "report": {...}}, in the order of the texts.
    Embed(texts::EmbedArgs),
    /// Classify texts or images by the model's classes.
    ///
    /// Shows what logits mean by the model's problem_type: probabilities that sum to one, a probability of each class
    /// by itself, or values.
    ///
    /// With --json: {"labels": [...], "logits": [[...], ...], "probabilities": [[...], ...], "report": {...}}, in the
    /// order of the texts. With --model "scores" says whether the network gives "logits" or "probabilities"; there are no
    /// logits in the second case.
    Classify(classify::ClassifyArgs),
    /// Rank texts by how well they answer a query.
    ///
    /// For cross-encoders: models that read a query and a text together and have one class.
    ///
    /// With --json: {"ranked": [{"index": 1, "score": 0.98}, ...], "report": {...}}, the best first.
    Rerank(texts::RerankArgs),
    /// Generate text from a prompt, token by token.
    Generate(generate::GenerateArgs),
    /// Chat with a model that has a chat template; a line is a message.
    Chat(chat::ChatArgs),
    /// Run a model on token ids or images, and print raw tensors.
    Run(run::RunArgs),
    /// Show the state of the cluster, and what each device holds.
    Status(status::StatusArgs),
    /// Create identities for devices, coordinators and clients.
    Keys(keys::KeysArgs),
    /// Show what every lane of every device did during a request.
    Trace(trace::TraceArgs),
    /// Embed a few sentences, and show how the cluster did it.
    Demo(demo::DemoArgs),
    /// Measure this device, a model, or a coordinator under load.
    Bench(bench::BenchArgs),
    /// Measure the devices of a cluster and the links between them, for planning.
    Profile(profile::ProfileArgs),
    /// Show how a cluster would split its model, how long that would take, and why.
    Plan(plan::PlanArgs),
    /// Round a model to few bits: show the error of its matrices, and write a GGUF file.
    Quantise(quantise::QuantiseArgs),
    /// Download a model from the Hugging Face Hub.
    Pull(pull::PullArgs),
    /// Start a cluster on this machine, for others to join.
    ///
    /// Starts an authority, a coordinator and a worker, which run as long as the command does.
    Up(up::UpArgs),
    /// Print an invitation by which other machines join the cluster.
    Invite(invite::InviteArgs),
    /// Join this machine to a cluster, by a line of `galaxy invite`.
    Join(join::JoinArgs),
    /// List the members of the cluster, or remove one.
    Devices(devices::DevicesArgs),
    /// Serve OpenAI's API over HTTP: completions, chats and embeddings.
    Serve(serve::ServeArgs),
    /// Let the coordinator finish what is queued and take no more requests.
    Drain(status::DrainArgs),
}

/// Arguments for the kernels of this process.
#[derive(Args, Debug, Clone)]
struct Kernels {
    /// Vector instructions of kernels: avx512, avx2, neon or portable [default: the best that there are].
    #[arg(long, global = true, value_name = "SET", env = "GALAXY_INSTRUCTIONS")]
    instructions: Option<Instructions>,
}

impl Kernels {
    /// Limits all kernels of this process to these instructions.
    fn limit(&self) -> Result<(), Failure> {
        let Some(set) = self.instructions else { return Ok(()) };
        instructions::limit(set)
            .map_err(|e| Failure::usage(e.to_string()).at("--instructions, GALAXY_INSTRUCTIONS"))
    }
}

/// Runs the command that the arguments mean.
fn main() -> ExitCode {
    let cli = Cli::parse();
    match execute(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_enough() => ExitCode::SUCCESS,
        Err(failure) => {
            tell(&failure.to_string());
            ExitCode::from(failure.exit_code())
        }
    }
}

fn execute(cli: Cli) -> Result<(), Failure> {
    if cli.version {
        return print(&format!("galaxy {}\n", galaxy_proto::version_line()));
    }
    let Some(command) = cli.command else {
        return Err(Failure::usage("no command is given").todo("`galaxy --help` lists them"));
    };
    // The command waits for one answer at a time; compute runs on threads of its own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| Failure::new(format!("the async runtime does not start: {e}")))?;
    runtime.block_on(async {
        match command {
            Command::Embed(args) => texts::embed(args).await,
            Command::Classify(args) => classify::classify(args).await,
            Command::Rerank(args) => texts::rerank(args).await,
            Command::Generate(args) => generate::generate(args).await,
            Command::Chat(args) => chat::chat(args).await,
            Command::Run(args) => run::run(args).await,
            Command::Status(args) => status::status(args).await,
            Command::Keys(args) => keys::keys(&args),
            Command::Trace(args) => trace::trace(args).await,
            Command::Demo(args) => demo::demo(args).await,
            Command::Bench(args) => bench::bench(args).await,
            Command::Profile(args) => profile::profile(args).await,
            Command::Serve(args) => serve::serve(args).await,
            Command::Drain(args) => status::drain(args).await,
            Command::Plan(args) => plan::plan(&args),
            Command::Up(args) => up::up(args).await,
            Command::Invite(args) => invite::invite(args).await,
            Command::Join(args) => join::join(args).await,
            Command::Devices(args) => devices::devices(args).await,
            Command::Pull(args) => pull::pull(args).await,
            Command::Quantise(args) => quantise::quantise(args).await,
        }
    })
}

/// Writes results to stdout: to a terminal what can be shown of them, elsewhere as they are. A reader that has
/// seen enough ends the command, and is no error.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { lines(text) } else { text.into() };
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure::enough(),
        _ => Failure::new(format!("cannot write the result: {error}")).at("stdout"),
    })
}

/// Writes a line for people to stderr, as it can be shown. Nobody may be left to read it.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", lines(text));
}

/// A value as one line of JSON.
fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map(|text| text + "\n")
        .map_err(|e| Failure::new(format!("cannot write the result as JSON: {e}")))
}

/// A time in milliseconds, for people.
fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// Parses `500ms`, `60s`, `5m`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "{text:?} is not a time: write a number above zero and one of ms, s, m, like \"60s\""
        )
    };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
    let (number, unit) = trimmed.split_at(split);
    let scale = match unit {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => return Err(wrong()),
    };
    let seconds = number.trim().parse::<f64>().map_err(|_| wrong())? * scale;
    // A day: longer waits are mistakes.
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(wrong())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_parse() {
        for line in [
            "galaxy --version",
            "galaxy embed hello world --truncate --json",
            "galaxy embed --file texts.txt",
            "galaxy embed --prompt query --dimensions 256 --normalize hello",
            "galaxy rerank hello world there --json",
            "galaxy classify fine --coordinator 10.0.0.1:7000 --identity keys/laptop",
            "galaxy classify --image a.png --model m.onnx --resize 256 --mean 104,117,123 --scale 1 --channels bgr",
            "galaxy classify --image a.png --model m.onnx --labels l.txt --resize stretch --std 1 --scores logits",
            "galaxy chat --system brief --max-tokens 9 --temperature 0.5 --json",
            "galaxy chat --model m.gguf --devices 2 --cache f16",
            "galaxy chat --cluster c.toml --template m --coordinator 10.0.0.1:7000",
            "galaxy run --ids 5,17,9 --output logits --all-rows -o out.safetensors",
            "galaxy run --ids @ids.json --model m --devices 3 --strategy galaxy --tiles 5 --wire f16 --share 2,1,1 --threads 1",
            "galaxy status --json --timeout 200ms",
            "galaxy keys init --dir keys --cluster home",
            "galaxy keys issue pi-1 --role device --days 30",
            "galaxy trace last -o trace.json",
            "galaxy trace 17 --summary --link-rate 125Mbit/s",
            "galaxy demo --model m",
            "galaxy drain --off",
            "galaxy bench kernels",
            "galaxy bench kernels --shape llama-1b --rows 1,16 --format bf16 --threads 1 --json",
            "galaxy bench kernels --model m --instructions portable",
            "galaxy bench serve --clients 1,4 --requests 2 --prompt 16-64 --tokens 8 --plot p.svg --json",
            "galaxy bench serve --embed --clients 64 --coordinator 10.0.0.1:7000",
            "galaxy bench pairs p.txt --against 127.0.0.1:7001 --rounds 2 --tokens 48 --json",
            "galaxy profile --cluster c.toml --fresh --json",
            "galaxy profile show --cluster c.toml",
            "galaxy plan --cluster cluster.toml --compare --json",
            "galaxy plan --cluster cluster.toml --what-if pi-2.memory=2GB --what-if pi-1->pi-2.rate=1Gbit/s",
            "galaxy plan --simulate hundred.toml",
            "galaxy plan",
            "galaxy serve --listen 127.0.0.1:8080 --model m --coordinator 10.0.0.1:7000",
            "galaxy pull org/name --revision v2 --to models/name --json",
            "galaxy up --model m --name nuc --listen 0.0.0.0:7000 --memory 4GB",
            "galaxy invite --role client --uses 3 --for 15m --json",
            "galaxy invite --name kitchen",
            "galaxy join --name pi-1",
            "galaxy devices --json",
            "galaxy devices remove pi-1",
        ] {
            parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
    }

    #[test]
    fn bad_usage_exits_with_2() {
        for line in [
            "galaxy run --output hidden",
            "galaxy embed --prompt query --prompt-text q: hello",
            "galaxy embed --dimensions 0 hello",
            "galaxy classify fine --model m.onnx",
            "galaxy classify --image a.png --mean 0.5",
            "galaxy classify --image a.png --model m.onnx --mean 1,2",
            "galaxy classify --image a.png --model m.onnx --std 0",
            "galaxy classify --image a.png --model m.onnx --resize 0",
            "galaxy rerank",
            "galaxy run --ids 5,x",
            "galaxy run --ids 5 --devices 2",
            "galaxy run --ids 5 --output tokens",
            "galaxy run --ids 5 --model m --wire f64",
            "galaxy chat --devices 2",
            "galaxy chat --model m --cluster c.toml",
            "galaxy chat hello",
            "galaxy keys issue pi-1 --role king",
            "galaxy invite --role coordinator",
            "galaxy invite --uses 0",
            "galaxy devices remove Pi_1",
            "galaxy up",
            "galaxy keys issue Pi_1 --role device",
            "galaxy trace yesterday",
            "galaxy status --timeout 10",
            "galaxy serve --listen here",
            "galaxy ebmed hello",
            "galaxy bench kernels --shape bert-huge",
            "galaxy bench kernels --model m --shape bert-large",
            "galaxy bench kernels --model m --format f16",
            "galaxy bench kernels --rows 0",
            "galaxy bench serve --prompt 64-16",
            "galaxy bench pairs p.txt",
            "galaxy bench pairs p.txt --against 127.0.0.1:7001 --tokens 1",
            "galaxy bench serve --embed --plot p.svg",
            "galaxy bench kernels --instructions sse9",
            "galaxy status --instructions portable",
            "galaxy plan --cluster a.toml --simulate b.toml",
        ] {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn times_parse() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1.5 s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        for bad in ["", "5", "s", "-1s", "0s", "1h", "nans", "1e9s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
