//! What a person, or a script, says: a line at a time.

use crate::failure::Failure;
use std::{
    io::{self, BufRead, IsTerminal, Read, Write},
    thread,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

/// Bytes of a line at most.
const MAX_BYTES: u64 = 1 << 20;
/// What stands before a line that is asked for.
const MARK: &str = "> ";

/// What a line says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input<'a> {
    /// It is empty.
    Nothing,
    /// The chat begins anew,
    Clear,
    /// or ends.
    Exit,
    /// A command that there is not.
    Unknown(&'a str),
    /// It is for the model.
    Message(&'a str),
}

impl<'a> Input<'a> {
    /// Of a line.
    pub fn of(line: &'a str) -> Self {
        let line = line.trim();
        let command = line.strip_prefix('/');
        let word = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase());
        match command {
            _ if line.is_empty() => Self::Nothing,
            Some("exit") => Self::Exit,
            Some("clear") => Self::Clear,
            Some(name) if word(name) => Self::Unknown(line),
            _ => Self::Message(line),
        }
    }
}

/// Lines of stdin, as they come.
pub struct Lines {
    terminal: bool,
    coming: Option<mpsc::Receiver<Result<String, Failure>>>,
}

impl Lines {
    /// Nothing is read before the first line is asked for.
    pub fn begin() -> Self {
        Self { terminal: io::stdin().is_terminal(), coming: None }
    }

    /// Whether a person types them.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// The next one; none at the end, or when a person interrupts it.
    pub async fn next(&mut self, interrupts: &mut Interrupts) -> Result<Option<String>, Failure> {
        if self.terminal {
            drop(write!(io::stderr(), "{MARK}"));
        }
        let coming = self.coming.get_or_insert_with(start);
        let next = tokio::select! {
            line = coming.recv() => line.transpose()?,
            () = interrupts.next() => None,
        };
        if self.terminal && next.is_none() {
            drop(writeln!(io::stderr()));
        }
        Ok(next)
    }
}

/// Reads on a thread that nobody waits for: a read of a terminal cannot be ended.
fn start() -> mpsc::Receiver<Result<String, Failure>> {
    let (lines, coming) = mpsc::channel(1);
    thread::spawn(move || {
        let mut input = io::stdin().lock();
        loop {
            let line = match line(&mut input) {
                Ok(Some(line)) => Ok(line),
                Ok(None) => return,
                Err(error) => Err(Failure::new(error.to_string()).at("stdin")),
            };
            let failed = line.is_err();
            if lines.blocking_send(line).is_err() || failed {
                return;
            }
        }
    });
    coming
}

/// A line; none at the end.
fn line(input: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    input.take(MAX_BYTES + 1).read_until(b'\n', &mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        let what = format!("a line has more than {MAX_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let text = String::from_utf8(bytes);
    let text = text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((!text.is_empty()).then_some(text))
}

/// Ctrl-C of a person. A script is ended by it, as any program.
pub struct Interrupts(Option<Signal>);

impl Interrupts {
    /// Watches for it from now on, if a person is there.
    pub fn watch(person: bool) -> Result<Self, Failure> {
        let signal = person.then(|| signal(SignalKind::interrupt())).transpose();
        signal.map(Self).map_err(|e| Failure::new(format!("signals cannot be waited for: {e}")))
    }

    /// Waits for the next one.
    ///
    /// # Cancel safety
    /// None is lost.
    pub async fn next(&mut self) {
        match &mut self.0 {
            Some(signal) => drop(signal.recv().await),
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        for (line, said) in [
            ("  \n", Input::Nothing),
            ("/exit\n", Input::Exit),
            (" /clear ", Input::Clear),
            ("/help\n", Input::Unknown("/help")),
            ("/etc/passwd is a file", Input::Message("/etc/passwd is a file")),
            ("/exit now", Input::Message("/exit now")),
            ("/", Input::Message("/")),
            ("why?\r\n", Input::Message("why?")),
        ] {
            assert_eq!(Input::of(line), said, "{line:?}");
        }
    }

    #[test]
    fn lines_are_bounded_and_end() {
        let mut input = "one\n\ntwo".as_bytes();
        let mut next = || line(&mut input).unwrap();
        assert_eq!([next(), next()], [Some("one\n".to_owned()), Some("\n".to_owned())]);
        assert_eq!([next(), next()], [Some("two".to_owned()), None]);
        let long = vec![b'a'; MAX_BYTES as usize + 1];
        assert!(line(&mut &long[..]).unwrap_err().to_string().contains("1048576 bytes"));
        assert!(line(&mut &b"\xff\n"[..]).is_err());
    }
}
