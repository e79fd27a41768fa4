//! What is made of each field of a model's files: whether it is carried out, changes nothing here, or is
//! refused where its value would change the result. A field that no table knows is named in a [`Warning`].
//!
//! The tables stand beside the code that reads the file: of `config.json` in `family/`, of the others in
//! `sentence`, `tokenizer`, `generation` and `image`.

use crate::{
    config::{Fields, short},
    error::ModelError,
    generation,
    store::{MAX_JSON_BYTES, read_bounded},
    tokenizer_fields,
};
use serde_json::Value;
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// What is made of a field.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)]
pub(crate) enum Fate {
    /// It is carried out, and whoever reads it refuses the values that are not.
    Read,
    /// It changes no result here, whatever its value is.
    Needless,
    /// It would change the result: only these values, written as JSON, are accepted, besides null.
    Only(&'static [&'static str], &'static str),
}

/// The fields that one file may have.
pub(crate) type Table = &'static [(&'static str, Fate)];

/// Something in a model's files that may not do what its author meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The file.
    pub path: PathBuf,
    /// What stands there, and what is made of it.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.text)
    }
}

/// Files besides `config.json`, and the tables of their fields.
const FILES: &[(&str, &[Table])] = &[
    ("generation_config.json", &[generation::FIELDS]),
    ("tokenizer_config.json", &[tokenizer_fields::CONFIG, tokenizer_fields::SPECIAL]),
    ("special_tokens_map.json", &[tokenizer_fields::SPECIAL]),
];

/// Names that are told of in one warning at most.
const MAX_NAMES: usize = 20;

/// Holds a file's fields against the tables of it.
///
/// # Errors
/// When a field has a value that is not carried out.
pub(crate) fn check(fields: &Fields<'_>, tables: &[Table]) -> Result<Vec<Warning>, ModelError> {
    let mut unknown = Vec::new();
    for (name, value) in fields.entries() {
        let known = tables.iter().flat_map(|table| table.iter()).find(|known| known.0 == name);
        match known {
            None => unknown.push(name),
            Some((_, Fate::Read | Fate::Needless)) => {}
            Some((field, Fate::Only(values, remedy))) => {
                if !accepted(value, values) {
                    return Err(ModelError::Unsupported {
                        path: fields.path.to_owned(),
                        field,
                        value: short(value),
                        remedy,
                    });
                }
            }
        }
    }
    Ok(unknown_fields(fields.path, &unknown).into_iter().collect())
}

/// Names the fields that nothing is known of in the files of a directory besides `config.json`.
///
/// Values are left to whoever reads the file for what it says; so are files that are damaged.
pub(crate) fn look_over(directory: &Path) -> Vec<Warning> {
    let mut warnings = Vec::new();
    for (name, tables) in FILES {
        let path = directory.join(name);
        let Ok(bytes) = read_bounded(&path, MAX_JSON_BYTES) else { continue };
        let Ok(value) = serde_json::from_slice::<Value>(&bytes) else { continue };
        let Ok(fields) = Fields::new(&path, &value) else { continue };
        let known = |name: &str| tables.iter().any(|t| t.iter().any(|known| known.0 == name));
        let unknown: Vec<_> = fields.entries().map(|e| e.0).filter(|name| !known(name)).collect();
        warnings.extend(unknown_fields(&path, &unknown));
    }
    warnings
}

fn unknown_fields(path: &Path, names: &[&str]) -> Option<Warning> {
    let quoted: Vec<_> = names
        .iter()
        .take(MAX_NAMES)
        .map(|name| short(&Value::String((*name).to_owned())))
        .collect();
    let more = match names.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (what, are) = match names {
        [] => return None,
        [_] => ("field", "is"),
        _ => ("fields", "are"),
    };
    let text = format!("{what} {}{more} {are} not known here and not read", quoted.join(", "));
    Some(Warning { path: path.to_owned(), text })
}

/// Whether a value is null, or one of those that these JSON texts say.
pub(crate) fn accepted(value: &Value, values: &[&str]) -> bool {
    value.is_null() || values.iter().any(|&text| is(value, text))
}

/// Whether a value is what a JSON text says; numbers are compared as such.
fn is(value: &Value, text: &str) -> bool {
    match (value.as_f64(), text.parse::<f64>()) {
        (Some(have), Ok(want)) => have == want,
        _ => serde_json::from_str::<Value>(text).is_ok_and(|want| want == *value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TABLE: Table = &[
        ("read", Fate::Read),
        ("needless", Fate::Needless),
        ("scale", Fate::Only(&["1", "false", "\"none\""], "only a scale of 1 is run")),
    ];

    fn checked(value: &Value) -> Result<Vec<Warning>, ModelError> {
        let fields = Fields::new(Path::new("config.json"), value).expect("an object");
        check(&fields, &[TABLE])
    }

    #[test]
    fn a_value_that_changes_the_result_is_refused_by_name() {
        for fine in [json!(1), json!(1.0), json!(false), json!("none"), json!(null)] {
            let value = json!({ "scale": fine, "read": 3, "needless": [] });
            assert_eq!(checked(&value).expect("accepted"), []);
        }
        for bad in [json!(2), json!(true), json!("all"), json!([1])] {
            let error = checked(&json!({ "scale": bad })).expect_err("refused").to_string();
            assert!(error.contains("scale = ") && error.contains("a scale of 1"), "{error}");
        }
    }

    #[test]
    fn an_unknown_field_is_named_in_a_warning() {
        let warnings = checked(&json!({ "read": 1, "colour": 2 })).expect("accepted");
        let told: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["config.json: field \"colour\" is not known here and not read"]);
        let many: serde_json::Map<_, _> = (0..30).map(|i| (format!("x{i}"), json!(0))).collect();
        let told = checked(&Value::Object(many)).expect("accepted")[0].to_string();
        assert!(
            told.contains("\"x0\", ")
                && told.ends_with("and 10 more are not known here and not read"),
            "{told}"
        );
    }
}
