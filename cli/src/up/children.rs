//! The programs that `galaxy up` starts, and ends with itself.

use crate::{failure::Failure, tell};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// How long a program may take to end: it answers what it took first.
const ENDS: Duration = Duration::from_secs(15);
/// The pause between two looks at programs that are to end.
const LOOK: Duration = Duration::from_millis(50);

/// The programs that run, in the order of their starts.
#[derive(Default)]
pub(super) struct Children {
    running: Vec<(&'static str, Child)>,
}

impl Children {
    /// Starts a program of Galaxy, whose output is printed behind its name. It ends when this process does.
    pub(super) fn start(
        &mut self,
        name: &'static str,
        arguments: &[&std::ffi::OsStr],
    ) -> Result<(), Failure> {
        let program = beside(name);
        let child = Command::new(&program)
            .args(arguments)
            .arg("--with-parent")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|error| {
            Failure::new(format!("{name} cannot be started: {error}"))
                .at(program.display())
                .todo("install all programs of Galaxy in one directory, as scripts/install does")
        })?;
        if let Some(output) = child.stdout.take() {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            let printed = move || lines.for_each(|line| tell(&format!("{name}: {line}")));
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(printed);
            thread.map_err(|error| {
                Failure::new(format!("no thread for what {name} says: {error}"))
            })?;
        }
        self.running.push((name, child));
        Ok(())
    }

    /// Checks that no program has ended.
    pub(super) fn all_live(&mut self) -> Result<(), Failure> {
        for (name, child) in &mut self.running {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(Failure::new(format!("{name} has ended: {status}"))
                    .todo("look at what it said above"));
            }
        }
        Ok(())
    }

    /// Signals all programs to end, the last one started first, and waits for them; then kills those that still run.
    pub(super) async fn end(mut self) {
        for (_, child) in self.running.iter().rev() {
            // One that has ended takes no signal.
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        }
        let begun = Instant::now();
        while begun.elapsed() < ENDS {
            self.running.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
            if self.running.is_empty() {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
        for (_, child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The path of a program in the directory of this one, else its name, for the PATH.
fn beside(name: &str) -> PathBuf {
    let own = env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(name)));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
}
