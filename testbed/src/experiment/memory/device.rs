//! The process of the device, and the requests that it is sent.

use super::MemoryCase;
use crate::reader::{ReaderCommand, RequestCost};
use anyhow::{Context, Result, ensure};
use rustix::fs::{Advice, fadvise};
use std::{
    fs::File,
    io::{BufRead, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// Drops the files of a model from the page cache.
pub(super) fn forget(model: &Path) -> Result<()> {
    for entry in std::fs::read_dir(model)? {
        let file = File::open(entry?.path())?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// The process of the device, which answers one request after another.
pub(super) struct DeviceProcess {
    pub(super) child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl DeviceProcess {
    pub(super) fn start(
        case: &MemoryCase,
        plan: &Path,
        shards: &Path,
        limit: Option<f64>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("reader").arg(&case.path).arg(plan).arg(shards);
        if let Some(limit) = limit {
            command.args(["--limit", &limit.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("this program starts itself")?;
        let asks = child.stdin.take().context("its input is piped")?;
        let answers = BufReader::new(child.stdout.take().context("its output is piped")?);
        Ok(Self { child, asks, answers })
    }

    pub(super) fn ask(&mut self, ask: ReaderCommand) -> Result<RequestCost> {
        writeln!(self.asks, "{}", serde_json::to_string(&ask)?).context("the device ended")?;
        let mut line = String::new();
        let got = self.answers.read_line(&mut line)?;
        ensure!(got > 0, "the device ended: out of memory, or see above");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
