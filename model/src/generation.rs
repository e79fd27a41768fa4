//! Where a text of a decoder ends, as `generation_config.json` and `config.json` say, or as whoever asks for
//! it does.

use crate::{
    directory::ModelDir,
    error::ModelError,
    store::{MAX_JSON_BYTES, read_bounded},
};
use serde_json::Value;
use std::path::Path;

impl ModelDir {
    /// The tokens that end a text; none where the model names none.
    ///
    /// # Errors
    /// When a file is there and cannot be read, or names what is no token.
    pub fn end_tokens(&self) -> Result<Vec<u32>, ModelError> {
        // What is said for generating holds more than what is said of the model.
        for name in ["generation_config.json", "config.json"] {
            let path = self.path().join(name);
            if !path.is_file() {
                continue;
            }
            if let Some(tokens) = named(&path, &read_bounded(&path, MAX_JSON_BYTES)?)? {
                return Ok(tokens);
            }
        }
        Ok(Vec::new())
    }
}

/// The tokens that a file names; nothing where it says nothing of them.
pub(crate) fn named(path: &Path, text: &[u8]) -> Result<Option<Vec<u32>>, ModelError> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
    let named = match &value["eos_token_id"] {
        Value::Null => return Ok(None),
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.ok_or_else(|| ModelError::Field {
            path: path.to_owned(),
            field: "eos_token_id".to_owned(),
            problem: format!("is {value}: a token id is wanted, or a list of them"),
        })
    };
    named.iter().map(token).collect::<Result<_, _>>().map(Some)
}

/// Text as it is made, held back where it may be the beginning of a string that ends it.
#[derive(Debug, Default)]
pub struct Ending {
    stop: Vec<String>,
    text: String,
    /// Bytes of it that were told.
    told: usize,
    stopped: bool,
}

impl Ending {
    /// A text that ends before any of these; empty ones end nothing.
    pub fn new(stop: Vec<String>) -> Self {
        let stop = stop.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stop, ..Self::default() }
    }

    /// Adds a piece. Gives what is sure now.
    pub fn add(&mut self, piece: &str) -> &str {
        self.text.push_str(piece);
        // No end begins in what was told.
        let new = &self.text[self.told..];
        let found = self.stop.iter().filter_map(|stop| new.find(stop.as_str())).min();
        if let Some(end) = found {
            self.text.truncate(self.told + end);
            self.stopped = true;
        }
        let held = if self.stopped { 0 } else { begun(&self.text, &self.stop) };
        self.tell(self.text.len() - held)
    }

    /// What was held back, when nothing more comes.
    pub fn rest(&mut self) -> &str {
        self.tell(self.text.len())
    }

    fn tell(&mut self, end: usize) -> &str {
        let end = end.max(self.told).min(self.text.len());
        let from = std::mem::replace(&mut self.told, end).min(end);
        &self.text[from..end]
    }

    /// Whether a string has ended it.
    pub fn stopped(&self) -> bool {
        self.stopped
    }
    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Bytes at the end of a text with which one of these may begin.
fn begun(text: &str, stop: &[String]) -> usize {
    let begins = |stop: &String| {
        let starts = stop.char_indices().map(|(at, _)| at).skip(1);
        starts.filter(|at| text.ends_with(&stop[..*at])).max().unwrap_or(0)
    };
    stop.iter().map(begins).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_begin_an_end_is_held_back() {
        let mut ending = Ending::new(vec!["END".to_owned(), "€ur".to_owned(), String::new()]);
        let pieces = ["a E", "N", "X b €", "u", "n EN"].map(|piece| ending.add(piece).to_owned());
        assert_eq!(pieces, ["a ", "", "ENX b ", "", "€un "]);
        assert_eq!(ending.add("D more"), "");
        assert!(ending.stopped());
        assert_eq!(ending.rest(), "");
        assert_eq!(ending.text(), "a ENX b €un ");
        let mut ending = Ending::new(vec!["END".to_owned()]);
        assert_eq!(ending.add("EN"), "");
        assert_eq!(ending.rest(), "EN");
    }

    #[test]
    fn the_end_is_where_the_files_say() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/llama");
        let directory = tempfile::tempdir().expect("a temporary directory");
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(golden.join(name), directory.path().join(name)).expect("a copy");
        }
        let write = |text: &str| {
            std::fs::write(directory.path().join("generation_config.json"), text).expect("a file");
            ModelDir::open(directory.path()).expect("a model").end_tokens()
        };
        assert_eq!(write(r#"{"eos_token_id": 7}"#).expect("tokens"), [7]);
        assert_eq!(write(r#"{"eos_token_id": [7, 9]}"#).expect("tokens"), [7, 9]);
        for bad in [r#"{"eos_token_id": -1}"#, r#"{"eos_token_id": ["</s>"]}"#] {
            let error = write(bad).expect_err("no token").to_string();
            assert!(error.contains("eos_token_id"), "{error}");
        }
        assert!(write("{").is_err());
    }
}
