//! The peers that galaxy is compared with. This module runs llama.cpp over its RPC servers on a testbed's
//! devices: the same model, prompts and links.
//!
//! `testbed/peers/llama-cpp/build` makes its programs; without them there is none to compare with.

pub mod gloo;

use crate::{
    driver::GeneratedText,
    environment::{COORDINATOR, Hold},
    instance::Testbed,
    namespaces,
    network::Network,
    processes::{PATIENCE, Process, root},
};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::{
    fs::File,
    io::{BufRead, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// The port on which a server listens; on loopback each server takes one port further.
const PORT: u16 = 50_052;
/// The time between two looks at a server that does not report that it listens.
const LOOK: Duration = Duration::from_millis(20);
/// The script that builds llama.cpp, as errors name it.
const BUILD: &str = "testbed/peers/llama-cpp/build";

/// The version of llama.cpp, by the name of the package that it was built from; none where it was not built.
pub fn version() -> Option<String> {
    let entries = std::fs::read_dir(directory()).ok()?.flatten();
    let mut names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let package = names.find_map(|name| Some(name.strip_suffix(".tar.gz")?.to_owned()))?;
    program("driver").is_file().then_some(package)
}

fn directory() -> PathBuf {
    root().join("target/peers/llama-cpp")
}

fn program(name: &str) -> PathBuf {
    directory().join("bin").join(name)
}

/// The file of the model in llama.cpp's format, written first where it is not there yet.
fn converted(model: &Path) -> Result<PathBuf> {
    let name = model.file_name().context("a model has a name")?.to_string_lossy();
    let file = directory().join(format!("{name}-bf16.gguf"));
    if !file.is_file() {
        eprintln!("{name} is converted for llama.cpp");
        let converter = root().join("testbed/peers/llama-cpp/convert.py");
        let mut command = Command::new(directory().join("venv/bin/python"));
        command.arg(converter).arg(model).arg(&file).args(["--type", "bf16"]);
        let done = command.stdin(Stdio::null()).stdout(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{name} cannot be converted: {said}");
    }
    Ok(file)
}

/// A process that is ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running llama.cpp, with a model placed.
pub struct LlamaCpp {
    driver: Running,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
    _servers: Vec<Process>,
}

impl LlamaCpp {
    /// Starts a server on every device, one thread each, and places a model with a context length of
    /// `positions`. From then on all that the servers do is under the devices' quotas.
    ///
    /// # Errors
    /// When llama.cpp is not built, or something does not start.
    pub fn start(testbed: &Testbed, model: &Path, positions: u32) -> Result<Self> {
        let model = converted(model)?;
        let (mut servers, mut addresses) = (Vec::new(), Vec::new());
        for (i, device) in testbed.environment.devices.iter().enumerate() {
            let name = device.name.as_str();
            let server = program("ggml-rpc-server");
            let mut command = testbed.command(name, Hold::Compute, &server)?;
            let (host, port) = match testbed.loopback {
                true => ("127.0.0.1".to_owned(), PORT + i as u16),
                false => (Network::address(i), PORT),
            };
            command.args(["-H", &host, "-p", &port.to_string(), "-t", "1", "-c"]);
            // Weights that were sent once are kept, as a user would have it.
            command.env("LLAMA_CACHE", directory().join("cache"));
            let server = Process::spawn(&format!("the server of llama.cpp on {name}"), command);
            servers.push(server.context(format!("{BUILD} makes it"))?);
            addresses.push(format!("{host}:{port}"));
        }
        let mut command = testbed.command(COORDINATOR, Hold::Compute, &program("driver"))?;
        command.arg(model).arg(positions.to_string()).arg(addresses.join(","));
        let log = testbed.directory().join("llama-cpp.log");
        command.stderr(File::create(&log)?).stdin(Stdio::piped()).stdout(Stdio::piped());
        listening(testbed, &addresses)?;
        let mut driver = Running(command.spawn()?);
        let asks = driver.0.stdin.take().context("its input is piped")?;
        let answers = BufReader::new(driver.0.stdout.take().context("its output is piped")?);
        let mut peer = Self { driver, asks, answers, log, _servers: servers };
        let said = peer.line()?;
        ensure!(said == "ready", "the driver of llama.cpp says {said:?}");
        for (device, server) in testbed.environment.devices.iter().zip(&peer._servers) {
            testbed.hold_all(device.name.as_str(), server.id())?;
        }
        Ok(peer)
    }

    /// The id of the process at the coordinator's place.
    pub fn driver(&self) -> u32 {
        self.driver.0.id()
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let said = std::fs::read_to_string(&self.log).unwrap_or_default();
            bail!("llama.cpp ended; it said:\n{said}");
        }
        Ok(line.trim().to_owned())
    }

    /// Generates `count` tokens behind a prompt, the likeliest each time, even past one that ends a text.
    ///
    /// # Errors
    /// When llama.cpp fails, with what it printed.
    pub fn generate(&mut self, prompt: &[u32], count: u32) -> Result<GeneratedText> {
        #[derive(Deserialize)]
        struct Answer {
            tokens: Vec<u32>,
            at_ns: Vec<u64>,
        }
        let ids: Vec<String> = prompt.iter().map(ToString::to_string).collect();
        writeln!(self.asks, "{count} {}", ids.join(" ")).context("llama.cpp ended")?;
        let line = self.line()?;
        let Answer { tokens, at_ns } =
            serde_json::from_str(&line).with_context(|| format!("llama.cpp says {line:?}"))?;
        let at = at_ns.into_iter().map(Duration::from_nanos).collect();
        Ok(GeneratedText { tokens, at, report: None })
    }
}

/// Waits until all servers listen.
fn listening(testbed: &Testbed, addresses: &[String]) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let open = |address: &String| -> Result<bool> {
        let address: SocketAddr = address.parse()?;
        let call = || TcpStream::connect_timeout(&address, PATIENCE).is_ok();
        match testbed.loopback {
            true => Ok(call()),
            false => {
                let place = namespaces::namespace(&testbed.name, COORDINATOR);
                namespaces::inside(&place, call)
            }
        }
    };
    for address in addresses {
        while !open(address)? {
            ensure!(Instant::now() < deadline, "no server of llama.cpp listens at {address}");
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}
