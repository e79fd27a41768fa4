//! The API key of `galaxy serve`: from a file, standard input or the environment. The arguments of a process can be
//! read by every user of the machine.

use crate::{failure::Failure, tell};
use clap::Args;
use std::{
    ffi::OsString,
    fs::File,
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The environment variable with the key, if no argument gives one.
const VARIABLE: &str = "GALAXY_API_KEY";
/// The most bytes that are read for the key.
const MAX_BYTES: u64 = 64 << 10;

/// Arguments that give the API key.
#[derive(Args, Debug)]
pub struct KeyArgs {
    /// File with the API key that programs must show, in its first line; - is stdin.
    ///
    /// Programs send it as `Authorization: Bearer KEY`. Without this option, the environment variable GALAXY_API_KEY
    /// has the key. HTTP is not encrypted: on a network that others read, put a proxy with TLS before it.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// The API key itself; every user of this machine can then read it.
    #[arg(long, value_name = "KEY", hide = true, conflicts_with = "api_key_file")]
    api_key: Option<OsString>,
}

impl KeyArgs {
    /// The key, if there is one.
    ///
    /// # Errors
    /// When the file cannot be read, or has no key.
    pub fn read(self) -> Result<Option<String>, Failure> {
        let key = match (self.api_key_file, self.api_key) {
            (Some(path), _) if path == Path::new("-") => {
                return first_line(std::io::stdin().lock(), "stdin").map(Some);
            }
            (Some(path), _) => return of_file(&path).map(Some),
            (None, Some(key)) => {
                warn(
                    "every user of this machine can read what --api-key says; put the key into a file \
                     for --api-key-file, or into GALAXY_API_KEY",
                );
                Some(key)
            }
            (None, None) => std::env::var_os(VARIABLE),
        };
        let key = key.filter(|key| !key.is_empty()).map(OsString::into_string).transpose();
        key.map_err(|_| Failure::usage("the API key is not UTF-8"))
    }
}

fn of_file(path: &Path) -> Result<String, Failure> {
    let place = path.display();
    let unread = |error: std::io::Error| {
        Failure::new(format!("cannot read the API key: {error}")).at(&place)
    };
    let file = File::open(path).map_err(unread)?;
    let mode = file.metadata().map_err(unread)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        warn(&format!(
            "other users of this machine may reach {place} (mode {mode:o}): `chmod 600 {place}`"
        ));
    }
    first_line(file, &place.to_string())
}

/// The first line, without white space around it.
fn first_line(from: impl Read, place: &str) -> Result<String, Failure> {
    let mut text = String::new();
    let read = from.take(MAX_BYTES).read_to_string(&mut text);
    read.map_err(|error| Failure::new(format!("cannot read the API key: {error}")).at(place))?;
    match text.lines().next().map(str::trim).unwrap_or_default() {
        "" => Err(Failure::new("the first line has no API key").at(place)),
        key => Ok(key.to_owned()),
    }
}

fn warn(text: &str) {
    tell(&format!("warning: {text}"));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::fs;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        key: KeyArgs,
    }

    fn of(arguments: &[&str]) -> Result<Option<String>, Failure> {
        let all = ["galaxy"].iter().chain(arguments);
        Only::try_parse_from(all).unwrap().key.read()
    }

    #[test]
    fn a_key_comes_from_the_first_line_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let file = path.to_str().unwrap();
        fs::write(&path, " sesame \r\nof the house\n").unwrap();
        assert_eq!(of(&["--api-key-file", file]).unwrap().as_deref(), Some("sesame"));
        assert_eq!(of(&["--api-key", "sesame"]).unwrap().as_deref(), Some("sesame"));
        for wrong in ["", "\nsesame\n", "  \n"] {
            fs::write(&path, wrong).unwrap();
            let error = of(&["--api-key-file", file]).unwrap_err().to_string();
            assert!(error.contains("no API key") && error.contains(file), "{error}");
        }
        fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
        assert!(of(&["--api-key-file", file]).is_err());
        assert!(of(&["--api-key-file", "/nowhere/key"]).is_err());
        assert!(
            Only::try_parse_from(["galaxy", "--api-key", "a", "--api-key-file", file]).is_err()
        );
        assert_eq!(first_line(&b"sesame"[..], "stdin").unwrap(), "sesame");
    }
}
