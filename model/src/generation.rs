//! Where a text of a decoder ends, as `generation_config.json` and `config.json` say.

use crate::{
    directory::ModelDir,
    error::ModelError,
    store::{MAX_JSON_BYTES, read_bounded},
};
use serde_json::Value;

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
            let bytes = read_bounded(&path, MAX_JSON_BYTES)?;
            let value: Value = serde_json::from_slice(&bytes)
                .map_err(|source| ModelError::Json { path: path.clone(), source })?;
            let named = match &value["eos_token_id"] {
                Value::Null => continue,
                Value::Array(list) => list.clone(),
                one => vec![one.clone()],
            };
            let token = |value: &Value| {
                let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
                token.ok_or_else(|| ModelError::Field {
                    path: path.clone(),
                    field: "eos_token_id".to_owned(),
                    problem: format!("is {value}: a token id is wanted, or a list of them"),
                })
            };
            return named.iter().map(token).collect();
        }
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

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
