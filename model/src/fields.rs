//! How each field of a model's files is treated: it is read, changes nothing here, or is refused where its value would
//! change the result. A field that no table knows is named in a [`Warning`].
//!
//! The tables stand beside the code that reads the file: of `config.json` in `family/`, of the others in
//! `sentence`, `tokenizer`, `generation` and `image`.

use crate::{
    config::{Fields, short},
    error::ModelError,
    warning::Warning,
};
use serde_json::Value;
use std::path::Path;

/// How a field is treated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Treatment {
    /// It is read, and the code that reads it refuses unsupported values.
    Read,
    /// It changes no result here, whatever its value is.
    Ignored,
    /// It would change the result: only null and these values, written as JSON, are accepted. The second part is the
    /// remedy in the error.
    Only(&'static [&'static str], &'static str),
    /// It is an object with fields of its own, which are in these tables.
    Inside(&'static [Table]),
    /// It is not supported, which this warning says.
    Warned(&'static str),
}

/// The fields that a file may have, by name.
pub(crate) type Table = &'static [(&'static str, Treatment)];

/// The most names that a single warning lists.
const MAX_NAMES: usize = 20;

/// Compares the fields of a file with its tables.
///
/// # Errors
/// When a field has a value that is not supported.
pub(crate) fn check(fields: &Fields<'_>, tables: &[Table]) -> Result<Vec<Warning>, ModelError> {
    let mut found = FieldFindings::default();
    found.look(fields, "", tables)?;
    let path = fields.path.to_owned();
    let said = found.said.into_iter().map(|text| Warning { path: path.clone(), text });
    Ok(said.chain(unknown_fields(fields.path, &found.unknown)).collect())
}

/// What a comparison found: unknown fields and warnings.
#[derive(Default)]
struct FieldFindings {
    unknown: Vec<String>,
    said: Vec<String>,
}

impl FieldFindings {
    /// Compares the fields of an object, and of the objects inside it. `within` is the prefix of nested names.
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
                Some((_, Treatment::Read | Treatment::Ignored)) => {}
                Some((field, Treatment::Inside(tables))) => {
                    // The code that reads the field decides what else it may be.
                    if value.is_object()
                        && let Some(inner) = fields.inner(&[field])?
                    {
                        self.look(&inner, &format!("{within}{name}."), tables)?;
                    }
                }
                Some((_, Treatment::Warned(text))) if !value.is_null() => {
                    self.said.push(format!("{within}{name} {text}"));
                }
                Some((_, Treatment::Warned(_))) => {}
                Some((field, Treatment::Only(values, remedy))) => {
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

/// A warning that names the fields that no table knows; `None` where there are none.
pub(crate) fn unknown_fields(path: &Path, names: &[String]) -> Option<Warning> {
    let (what, are) = match names {
        [] => return None,
        [_] => ("field", "is"),
        _ => ("fields", "are"),
    };
    let text = format!("{what} {} {are} not known here and not read", listed(names));
    Some(Warning { path: path.to_owned(), text })
}

/// Some of these names, quoted for a message, and how many more there are.
pub(crate) fn listed(names: &[String]) -> String {
    let quoted = names.iter().take(MAX_NAMES).map(|name| short(&Value::String(name.clone())));
    let quoted = quoted.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        0 => quoted,
        more => format!("{quoted} and {more} more"),
    }
}

/// Whether a value is null, or equal to one of these JSON texts.
pub(crate) fn accepted(value: &Value, values: &[&str]) -> bool {
    value.is_null() || values.iter().any(|&text| is(value, text))
}

/// Whether a value equals a JSON text; numbers are compared by value.
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

    const INNER: Table = &[("scale", Treatment::Only(&["1"], "only a scale of 1 is run"))];
    const TABLE: Table = &[
        ("read", Treatment::Read),
        ("needless", Treatment::Ignored),
        ("scale", Treatment::Only(&["1", "false", "\"none\""], "only a scale of 1 is run")),
        ("code", Treatment::Warned("is not run")),
        ("inner", Treatment::Inside(&[INNER])),
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
    fn nested_fields_are_checked_like_top_level_fields() {
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
