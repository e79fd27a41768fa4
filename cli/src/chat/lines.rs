//! The input of a chat, by a person or a script, a line at a time.

use crate::failure::Failure;
use std::{
    io::{self, BufRead, IsTerminal, Read, Write},
    thread,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

/// The most bytes of a line.
const MAX_BYTES: u64 = 1 << 20;
/// The prompt that is shown on a terminal.
const MARK: &str = "> ";

/// What a line of input means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input<'a> {
    /// A line without text.
    Nothing,
    /// `/clear`: the chat begins anew.
    Clear,
    /// `/exit`: the chat ends.
    Exit,
    /// A command that does not exist.
    Unknown(&'a str),
    /// A message for the model.
    Message(&'a str),
}

impl<'a> Input<'a> {
    /// Parses a line of input.
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

/// The lines of standard input, as they come.
pub struct Lines {
    terminal: bool,
    coming: Option<mpsc::Receiver<Result<String, Failure>>>,
}

impl Lines {
    /// The lines of this process; nothing is read before the first one is asked for.
    pub fn begin() -> Self {
        Self { terminal: io::stdin().is_terminal(), coming: None }
    }

    /// Whether standard input is a terminal, where a person types.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// The next line; none at the end of the input, or when a person interrupts.
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

/// Reads lines on a thread that nobody joins, since a read of a terminal cannot be cancelled.
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

/// Reads a line; none at the end of the input.
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

/// Ctrl-C by a person. A script is ended by it, as any program is.
pub struct Interrupts(Option<Signal>);

impl Interrupts {
    /// Watches for Ctrl-C from now on, if a person is there.
    pub fn watch(person: bool) -> Result<Self, Failure> {
        let signal = person.then(|| signal(SignalKind::interrupt())).transpose();
        signal.map(Self).map_err(|e| Failure::new(format!("signals cannot be waited for: {e}")))
    }

    /// Waits for the next Ctrl-C; for ever where none is watched for.
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
    fn commands_are_distinguished_from_messages() {
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
    fn lines_are_read_to_the_end_and_too_long_lines_are_errors() {
        let mut input = "one\n\ntwo".as_bytes();
        let mut next = || line(&mut input).unwrap();
        assert_eq!([next(), next()], [Some("one\n".to_owned()), Some("\n".to_owned())]);
        assert_eq!([next(), next()], [Some("two".to_owned()), None]);
        let long = vec![b'a'; MAX_BYTES as usize + 1];
        assert!(line(&mut &long[..]).unwrap_err().to_string().contains("1048576 bytes"));
        assert!(line(&mut &b"\xff\n"[..]).is_err());
    }
}
