//! The body of a request, read field by field: each message says which field is at fault, what it takes and what
//! came.

use super::error::ApiError;
use axum::http::StatusCode;
use serde_json::{Map, Value, error::Category};
use std::io::{ErrorKind, Write};

/// The most characters of a value that a message repeats.
const SHORT: usize = 40;

/// Parses the body of a request, which must be an object.
///
/// # Errors
/// When it is no JSON, or no object.
pub fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if bytes.trim_ascii().is_empty() {
        return Err(ApiError::bad("the request has no body: send a JSON object"));
    }
    match serde_json::from_slice(bytes).map_err(|error| malformed(bytes, &error))? {
        Value::Object(object) => Ok(object),
        other => {
            let came = described(&other);
            Err(ApiError::bad(format!("the request must be a JSON object, not {came}")))
        }
    }
}

fn malformed(bytes: &[u8], error: &serde_json::Error) -> ApiError {
    let (line, column) = (error.line(), error.column());
    let what = match error.classify() {
        Category::Eof => "it ends before it is complete,",
        _ if error.to_string().starts_with("number out of range") => {
            "a number is beyond what a 64-bit float holds,"
        }
        _ if error.to_string().starts_with("recursion limit") => "it is nested too deeply,",
        _ => "what stands there is no JSON,",
    };
    let start =
        bytes.split_inclusive(|&b| b == b'\n').take(line.saturating_sub(1)).map(<[u8]>::len);
    let at = (start.sum::<usize>() + column).min(bytes.len());
    let near = String::from_utf8_lossy(&bytes[at.saturating_sub(SHORT / 2)..at]).into_owned();
    let message =
        format!("the request is not JSON: {what} at line {line}, column {column}, after {near:?}");
    ApiError::bad(message)
}

/// An object of a request, with its path for messages.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// The whole body of a request.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), map }
    }

    /// The field of this name; `null` is the same as absent.
    pub fn get(&self, name: &str) -> Field<'a> {
        let path = match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        };
        Field { path, value: self.map.get(name).filter(|value| !value.is_null()) }
    }

    /// Its entries, in their order.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, Field<'a>)> {
        self.map.keys().map(|name| (name.as_str(), self.get(name)))
    }
}

/// A field of a request, or an element of a list in it.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    path: String,
    value: Option<&'a Value>,
}

impl<'a> Field<'a> {
    /// What stands there, if anything does.
    pub fn value(&self) -> Option<&'a Value> {
        self.value
    }

    /// Where it stands: `messages[2].content`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The error of a field that is not what it `takes`.
    pub fn wrong(&self, takes: &str) -> ApiError {
        let path = &self.path;
        let message = match self.value {
            Some(value) => format!("{path} must be {takes}, not {}", described(value)),
            None => format!("{path} is missing: it must be {takes}"),
        };
        ApiError::bad(message).of(path.as_str())
    }

    /// The error of a value that asks for what is not done, and why it is not.
    pub fn unsupported(&self, why: &str) -> ApiError {
        let value = self.value.map(short).unwrap_or_default();
        let message = format!("{} = {value} is not supported: {why}; leave it out", self.path);
        ApiError::new(StatusCode::BAD_REQUEST, "unsupported", message).of(self.path.as_str())
    }

    /// What `read` makes of the value, if there is one.
    fn read<T>(
        &self,
        takes: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        self.value.map(|value| read(value).ok_or_else(|| self.wrong(takes))).transpose()
    }

    /// The field as a text.
    pub fn text(&self) -> Result<Option<&'a str>, ApiError> {
        self.read("a text", Value::as_str)
    }

    /// The field as true or false.
    pub fn flag(&self) -> Result<Option<bool>, ApiError> {
        self.read("true or false", Value::as_bool)
    }

    /// The field as a whole number of at least `from`: what is negative counts as 0, and more than `u32` holds as the
    /// most that it holds.
    pub fn count(&self, from: i64) -> Result<Option<u32>, ApiError> {
        self.read(&format!("a whole number of at least {from}"), |value| {
            let number = value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX))?;
            (number >= from).then(|| u32::try_from(number.max(0)).unwrap_or(u32::MAX))
        })
    }

    /// The field as a whole number of 64 bits, with or without a sign.
    pub fn seed(&self) -> Result<Option<u64>, ApiError> {
        self.read("a whole number of 64 bits", |value| {
            value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned))
        })
    }

    /// The field as a signed whole number of 32 bits.
    pub fn whole(&self) -> Result<Option<i32>, ApiError> {
        self.read("a whole number of 32 bits", |value| i32::try_from(value.as_i64()?).ok())
    }

    /// The field as a finite number.
    pub fn number(&self) -> Result<Option<f32>, ApiError> {
        self.read("a number", |value| Some(value.as_f64()? as f32).filter(|n| n.is_finite()))
    }

    /// The elements of the field, which is a list.
    pub fn list(
        &self,
        takes: &str,
    ) -> Result<Option<impl Iterator<Item = Field<'a>> + use<'a>>, ApiError> {
        let list = self.read(takes, Value::as_array)?;
        let path = self.path.clone();
        Ok(list.map(|list| {
            let all = list.iter().enumerate();
            all.map(move |(at, value)| Field { path: format!("{path}[{at}]"), value: Some(value) })
        }))
    }

    /// What `read` makes of each element of a list.
    fn each<T>(
        &self,
        (takes, each_takes): (&str, &str),
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ApiError> {
        let Some(list) = self.read(takes, Value::as_array)? else { return Ok(None) };
        let element = |(at, value): (usize, &'a Value)| {
            read(value).ok_or_else(|| {
                let path = format!("{}[{at}]", self.path);
                Field { path, value: Some(value) }.wrong(each_takes)
            })
        };
        list.iter().enumerate().map(element).collect::<Result<_, _>>().map(Some)
    }

    /// The field as a list of token ids.
    pub fn ids(&self, takes: &str) -> Result<Option<Vec<u32>>, ApiError> {
        self.each((takes, "a token id"), |value| u32::try_from(value.as_u64()?).ok())
    }

    /// The field as an object.
    pub fn object(&self, takes: &str) -> Result<Option<Object<'a>>, ApiError> {
        let map = self.read(takes, Value::as_object)?;
        Ok(map.map(|map| Object { path: self.path.clone(), map }))
    }

    /// The field as a list of texts; a single text is a list of one.
    pub fn texts(&self, takes: &str) -> Result<Option<Vec<String>>, ApiError> {
        match self.value {
            Some(Value::String(text)) => Ok(Some(vec![text.clone()])),
            _ => self.each((takes, "a text"), |value| value.as_str().map(str::to_owned)),
        }
    }

    /// Whether the value is what one of these JSON texts says. Numbers are compared as such.
    pub fn is_one_of(&self, values: &[&str]) -> bool {
        let Some(have) = self.value else { return false };
        values.iter().any(|text| match (have.as_f64(), text.parse::<f64>()) {
            (Some(have), Ok(want)) => have == want,
            _ => serde_json::from_str::<Value>(text).is_ok_and(|want| want == *have),
        })
    }
}

/// What came, for a message: its type, and the beginning of its value.
fn described(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(flag) => return flag.to_string(),
        Value::Number(_) => "the number",
        Value::String(_) => "the text",
        Value::Array(_) => "the list",
        Value::Object(_) => "the object",
    };
    format!("{kind} {}", short(value))
}

/// The beginning of a value as JSON.
fn short(value: &Value) -> String {
    let mut beginning = Beginning(Vec::new());
    // It ends with an error where there is more than is kept.
    drop(serde_json::to_writer(&mut beginning, value));
    let text = String::from_utf8_lossy(&beginning.0);
    match text.char_indices().nth(SHORT) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.into_owned(),
    }
}

/// The first bytes of what is written.
struct Beginning(Vec<u8>);

impl Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let left = (8 * SHORT).saturating_sub(self.0.len());
        self.0.extend_from_slice(&bytes[..left.min(bytes.len())]);
        if left == 0 { Err(ErrorKind::WriteZero.into()) } else { Ok(left.min(bytes.len())) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(value: &Value) -> Map<String, Value> {
        parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn null_counts_as_absent_for_every_kind_of_field() {
        let map = body(&json!({ "a": null }));
        let field = Object::new(&map).get("a");
        assert_eq!(field.text().unwrap(), None);
        assert_eq!(field.flag().unwrap(), None);
        assert_eq!(field.count(1).unwrap(), None);
        assert_eq!(field.number().unwrap(), None);
        assert!(field.list("a list").unwrap().is_none());
        assert!(field.object("an object").unwrap().is_none());
        assert_eq!(field.texts("texts").unwrap(), None);
    }

    #[test]
    fn type_errors_name_the_field_and_the_value() {
        let long = "x".repeat(5000);
        let map = body(&json!({ "a": [{ "b": 5, "c": long, "d": 1.5, "e": [true], "f": -3 }] }));
        let mut list = Object::new(&map).get("a").list("a list").unwrap().unwrap();
        let object = list.next().unwrap().object("an object").unwrap().unwrap();
        let said = |error: ApiError| (error.message, error.param.unwrap());
        let (message, param) = said(object.get("b").text().unwrap_err());
        assert_eq!(
            (message.as_str(), param.as_str()),
            ("a[0].b must be a text, not the number 5", "a[0].b")
        );
        let (message, _) = said(object.get("c").flag().unwrap_err());
        assert!(
            message.starts_with("a[0].c must be true or false, not the text \"xxx"),
            "{message}"
        );
        assert!(message.len() < 120, "{message}");
        for (error, says) in [
            (
                object.get("d").count(1).unwrap_err(),
                "a whole number of at least 1, not the number 1.5",
            ),
            (object.get("f").count(-1).unwrap_err(), "at least -1, not the number -3"),
            (object.get("c").number().unwrap_err(), "must be a number, not the text"),
            (
                object.get("e").ids("a list of ids").unwrap_err(),
                "a[0].e[0] must be a token id, not true",
            ),
            (
                object.get("e").texts("a text or a list of texts").unwrap_err(),
                "a[0].e[0] must be a text, not true",
            ),
            (object.get("g").wrong("a text"), "a[0].g is missing: it must be a text"),
        ] {
            let (message, _) = said(error);
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn numbers_at_the_edges_of_their_range_are_clamped_or_refused() {
        let map =
            body(&json!({ "a": -1, "b": 0, "c": u64::MAX, "d": 1e30, "e": 1.0, "f": i64::MIN }));
        let object = Object::new(&map);
        let count = |name, from| object.get(name).count(from).ok().flatten();
        assert_eq!(
            [count("a", -1), count("b", -1), count("c", 1)],
            [Some(0), Some(0), Some(u32::MAX)]
        );
        assert_eq!([count("a", 0), count("b", 1), count("d", 0), count("e", 0)], [None; 4]);
        let seed = |name| object.get(name).seed().ok().flatten();
        assert_eq!([seed("a"), seed("c")], [Some(u64::MAX); 2]);
        assert_eq!([seed("f"), seed("d")], [Some(1 << 63), None]);
        let map = body(&json!({ "a": 1e39, "b": 1e38, "c": 0.0 }));
        let number = |name| Object::new(&map).get(name).number().ok().flatten();
        assert_eq!([number("a"), number("b"), number("c")], [None, Some(1e38), Some(0.0)]);
        let accepted = |name, values: &[&str]| Object::new(&map).get(name).is_one_of(values);
        assert!(accepted("c", &["false", "0"]) && !accepted("b", &["0"]) && !accepted("d", &["0"]));
    }

    #[test]
    fn a_malformed_json_body_is_refused_with_the_place() {
        for (text, says) in [
            ("", "no body"),
            ("[1]", "must be a JSON object, not the list [1]"),
            ("{\"a\": 1", "ends before it is complete, at line 1, column 7"),
            ("{\"a\": 1,\n \"b\": x}", "at line 2, column 7, after"),
            ("{\"a\": 1e400}", "beyond what a 64-bit float holds"),
            ("{\"a\": \"\u{1}\"}", "no JSON"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.message.contains(says), "{text}: {}", error.message);
        }
        let deep = "[".repeat(500);
        assert!(parse(deep.as_bytes()).unwrap_err().message.contains("nested"));
        assert!(parse(b"{\"a\": \"\xff\"}").is_err());
    }
}
