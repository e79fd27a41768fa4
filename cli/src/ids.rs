//! Token ids as arguments: `5,17,9`, or `@file.json`.

use super::failure::Failure;
use serde::Deserialize;
use std::{path::PathBuf, str::FromStr};

/// The largest file of ids that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The value of one `--ids`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ids {
    /// One sequence, on the command line.
    Inline(Vec<u32>),
    /// A JSON file: one sequence, or a list of sequences.
    File(PathBuf),
}

impl FromStr for Ids {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix('@') {
            if path.is_empty() {
                return Err("no file name follows the @".to_owned());
            }
            return Ok(Self::File(path.into()));
        }
        let id = |id: &str| {
            id.trim().parse::<u32>().map_err(|_| {
                format!("{id:?} is not a token id: write ids like 5,17,9, or @file.json")
            })
        };
        text.split(',').map(id).collect::<Result<_, _>>().map(Self::Inline)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

impl Ids {
    /// Reads the sequences that it names.
    pub fn read(&self) -> Result<Vec<Vec<u32>>, Failure> {
        let path = match self {
            Self::Inline(ids) => return Ok(vec![ids.clone()]),
            Self::File(path) => path,
        };
        let failed = |error: std::io::Error| {
            Failure::new(format!("cannot read ids: {error}")).at(path.display())
        };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(Failure::new(format!(
                "a file of ids of {bytes} bytes is above the limit of {MAX_FILE_BYTES}"
            ))
            .at(path.display())
            .todo("send it in parts"));
        }
        parse(&std::fs::read_to_string(path).map_err(failed)?)
            .map_err(|what| Failure::new(what).at(path.display()))
    }
}

fn parse(text: &str) -> Result<Vec<Vec<u32>>, String> {
    match serde_json::from_str(text) {
        // The empty list is no sequences rather than one without ids.
        Ok(Content::One(ids)) if ids.is_empty() => Ok(Vec::new()),
        Ok(Content::One(ids)) => Ok(vec![ids]),
        Ok(Content::Many(sequences)) => Ok(sequences),
        Err(_) => Err("neither a list of token ids like [5, 17, 9] \
                       nor a list of such lists, in JSON"
            .to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ids_parse() {
        assert_eq!("5,17, 9".parse(), Ok(Ids::Inline(vec![5, 17, 9])));
        assert_eq!("@a/b.json".parse(), Ok(Ids::File("a/b.json".into())));
        for bad in ["", "5,", "-1", "5;6", "4294967296", "@"] {
            assert!(bad.parse::<Ids>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_hold_one_or_many_sequences() {
        assert_eq!(parse("[5, 17]").unwrap(), [[5, 17]]);
        assert_eq!(parse("[[5], [17, 9]]").unwrap(), [vec![5], vec![17, 9]]);
        assert!(parse("[]").unwrap().is_empty());
        for bad in ["", "5", "{}", "[1.5]", "[-1]", "[\"a\"]", "[[1], 2]"] {
            assert!(parse(bad).unwrap_err().contains("list of token ids"), "{bad}");
        }
    }

    #[test]
    fn a_missing_ids_file_is_named_in_the_error() {
        let failure = Ids::File("no/such/ids.json".into()).read().unwrap_err();
        assert!(failure.to_string().ends_with("; no/such/ids.json"), "{failure}");
    }

    #[test]
    fn sequences_are_read_from_an_ids_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.json");
        std::fs::write(&path, "[[1,2],[3]]").unwrap();
        assert_eq!(Ids::File(path).read().unwrap(), [vec![1, 2], vec![3]]);
    }
}
