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
pub(crate) enum Fate {
    /// It is carried out, and whoever reads it refuses the values that are not.
    Read,
    /// It changes no result here, whatever its value is.
    Needless,
    /// It would change the result: only these values, written as JSON, are accepted, besides null.
    Only(&'static [&'static str], &'static str),
    /// It is an object, whose own fields are these.
    Inside(&'static [Table]),
    /// It is not carried out, which this warning says.
    Said(&'static str),
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
    #[cfg(feature = "image")]
    ("preprocessor_config.json", &[crate::image::FIELDS]),
];

/// Names that are told of in one warning at most.
const MAX_NAMES: usize = 20;

/// Holds a file's fields against the tables of it.
///
/// # Errors
/// When a field has a value that is not carried out.
pub(crate) fn check(fields: &Fields<'_>, tables: &[Table]) -> Result<Vec<Warning>, ModelError> {
    let mut found = Found::default();
    found.look(fields, "", tables)?;
    let path = fields.path.to_owned();
    let said = found.said.into_iter().map(|text| Warning { path: path.clone(), text });
    Ok(said.chain(unknown_fields(fields.path, &found.unknown)).collect())
}

/// What is to be said of a file's fields.
#[derive(Default)]
struct Found {
    unknown: Vec<String>,
    said: Vec<String>,
}

impl Found {
    /// `within` is the beginning of the names of fields inside others.
    fn look(
        &mut self,
        fields: &Fields<'_>,
        within: &str,
        tables: &[Table],
    ) -> Result<(), ModelError> {
        for (name, value) in fields.entries() {
            let known = tables.iter().flat_map(|table| table.iter()).find(|known| known.0 == name);
            match known {
                None => self.unknown.push(format!("{within}{name}")),
                Some((_, Fate::Read | Fate::Needless)) => {}
                Some((field, Fate::Inside(tables))) => {
                    // Whoever reads it says what else it may be.
                    if value.is_object()
                        && let Some(inner) = fields.inner(&[field])?
                    {
                        self.look(&inner, &format!("{within}{name}."), tables)?;
                    }
                }
                Some((_, Fate::Said(text))) if !value.is_null() => {
                    self.said.push(format!("{within}{name} {text}"));
                }
                Some((_, Fate::Said(_))) => {}
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
        Ok(())
    }
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
        let names = fields.entries().map(|e| e.0).filter(|name| !known(name));
        let unknown: Vec<_> = names.map(ToOwned::to_owned).collect();
        warnings.extend(unknown_fields(&path, &unknown));
    }
    warnings
}

fn unknown_fields(path: &Path, names: &[String]) -> Option<Warning> {
    let (what, are) = match names {
        [] => return None,
        [_] => ("field", "is"),
        _ => ("fields", "are"),
    };
    let text = format!("{what} {} {are} not known here and not read", listed(names));
    Some(Warning { path: path.to_owned(), text })
}

/// Some of these names for a message, and how many more there are.
pub(crate) fn listed(names: &[String]) -> String {
    let quoted = names.iter().take(MAX_NAMES).map(|name| short(&Value::String(name.clone())));
    let quoted = quoted.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        0 => quoted,
        more => format!("{quoted} and {more} more"),
    }
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

    const INNER: Table = &[("scale", Fate::Only(&["1"], "only a scale of 1 is run"))];
    const TABLE: Table = &[
        ("read", Fate::Read),
        ("needless", Fate::Needless),
        ("scale", Fate::Only(&["1", "false", "\"none\""], "only a scale of 1 is run")),
        ("code", Fate::Said("is not run")),
        ("inner", Fate::Inside(&[INNER])),
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
    fn fields_within_others_are_known_too() {
        let warnings = checked(&json!({ "inner": { "scale": 1, "colour": 2 }, "code": {} }));
        let told: Vec<_> = warnings.expect("accepted").iter().map(ToString::to_string).collect();
        let unknown = "config.json: field \"inner.colour\" is not known here and not read";
        assert_eq!(told, ["config.json: code is not run", unknown]);
        let error = checked(&json!({ "inner": { "scale": 2 } })).expect_err("refused").to_string();
        assert!(error.contains("scale = 2"), "{error}");
        for other in [json!(null), json!(3)] {
            assert_eq!(checked(&json!({ "inner": other, "code": null })).expect("accepted"), []);
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
