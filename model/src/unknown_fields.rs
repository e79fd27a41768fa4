//! Finds the fields that no table knows in the files of a model besides `config.json`.

use crate::{
    config::Fields,
    fields::{Table, unknown_fields},
    generation,
    small_file::{MAX_JSON_BYTES, read_bounded},
    tokenizer_fields,
    warning::Warning,
};
use serde_json::Value;
use std::path::Path;

/// Files besides `config.json`, and the tables of their fields.
const FILES: &[(&str, &[Table])] = &[
    ("generation_config.json", &[generation::FIELDS]),
    ("tokenizer_config.json", &[tokenizer_fields::CONFIG, tokenizer_fields::SPECIAL]),
    ("special_tokens_map.json", &[tokenizer_fields::SPECIAL]),
    #[cfg(feature = "image")]
    ("preprocessor_config.json", &[crate::image::FIELDS]),
];

/// Names the unknown fields in the files of a directory besides `config.json`.
///
/// Values are left to the code that reads each file; so are damaged files.
pub(crate) fn look_over(directory: &Path) -> Vec<Warning> {
    let mut warnings = Vec::new();
    for (name, tables) in FILES {
        let path = directory.join(name);
        let Ok(bytes) = read_bounded(&path, MAX_JSON_BYTES) else { continue };
        let Ok(value) = serde_json::from_slice::<Value>(&bytes) else { continue };
        let Ok(fields) = Fields::new(&path, &value) else { continue };
        let known = |name: &str| tables.iter().any(|t| t.iter().any(|known| known.0 == name));
        let names = fields.entries().map(|e| e.0).filter(|name| !known(name));
        let unknown: Vec<_> = names.map(ToOwned::to_owned).collect();
        warnings.extend(unknown_fields(&path, &unknown));
    }
    warnings
}
