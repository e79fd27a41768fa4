//! Reads the fields of `config.json`, and of other JSON files: each value is checked where it is
//! read.

use crate::{error::ModelError, recognise};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};
use std::{collections::HashSet, fmt, path::Path};

/// An object of a JSON file, with the path of the file for messages. A field that is `null` counts
/// as absent.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub(crate) path: &'a Path,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, value: &'a Value) -> Result<Self, ModelError> {
        let object = value.as_object().ok_or_else(|| ModelError::Field {
            path: path.to_owned(),
            field: String::new(),
            problem: "is missing: the file is not an object".to_owned(),
        })?;
        Ok(Self { path, object })
    }

    pub(crate) fn wrong(&self, field: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Field {
            path: self.path.to_owned(),
            field: field.to_owned(),
            problem: problem.into(),
        }
    }

    pub(crate) fn unknown(
        &self,
        what: &'static str,
        found: &str,
        known: impl Into<String>,
    ) -> ModelError {
        ModelError::Unknown {
            path: self.path.to_owned(),
            what,
            found: found.to_owned(),
            known: known.into(),
        }
    }

    /// The first of these names that the object has, and its value.
    pub(crate) fn get(&self, names: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        #[cfg(test)]
        read::note(names);
        names
            .iter()
            .find_map(|&n| self.object.get(n).filter(|v| !v.is_null()).map(|value| (n, value)))
    }

    /// A count in 1..=limit, under the first of these names that is there.
    pub(crate) fn count(&self, names: &[&'static str], limit: u32) -> Result<u32, ModelError> {
        self.count_or_none(names, limit)?.ok_or_else(|| self.wrong(names[0], "is missing"))
    }

    /// A count in 1..=limit, if it is there.
    pub(crate) fn count_or_none(
        &self,
        names: &[&'static str],
        limit: u32,
    ) -> Result<Option<u32>, ModelError> {
        let Some((name, value)) = self.get(names) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=u64::from(limit)).contains(&n) => Ok(Some(n as u32)),
            _ if value.is_f64() => {
                Err(self.wrong(name, format!("is {}: a whole number is wanted", short(value))))
            }
            _ => Err(self.wrong(name, format!("is {}: 1 to {limit} make sense", short(value)))),
        }
    }

    /// Two counts in 1..=limit, or one for both, if they are there.
    pub(crate) fn two(
        &self,
        name: &'static str,
        limit: u32,
    ) -> Result<Option<[u32; 2]>, ModelError> {
        let Some((_, Value::Array(list))) = self.get(&[name]) else {
            return Ok(self.count_or_none(&[name], limit)?.map(|one| [one; 2]));
        };
        let count = |value: &Value| {
            let count = value.as_u64().filter(|n| (1..=u64::from(limit)).contains(n));
            count.map(|n| n as u32)
        };
        match &list[..] {
            [first, second] => count(first).zip(count(second)).map(|(a, b)| Some([a, b])),
            _ => None,
        }
        .ok_or_else(|| self.wrong(name, format!("must be one or two numbers of 1 to {limit}")))
    }

    /// A positive, finite number, if it is there.
    pub(crate) fn positive_or_none(
        &self,
        names: &[&'static str],
    ) -> Result<Option<f64>, ModelError> {
        let Some((name, value)) = self.get(names) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(name, format!("is {}: a positive number is wanted", short(value)))),
        }
    }

    /// A finite number, if it is there.
    pub(crate) fn number_or_none(&self, names: &[&'static str]) -> Result<Option<f64>, ModelError> {
        let Some((name, value)) = self.get(names) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(name, format!("is {}: a number is wanted", short(value)))),
        }
    }

    /// Whether a field of this name is there, even if it is null.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    pub(crate) fn positive(&self, names: &[&'static str]) -> Result<f64, ModelError> {
        self.positive_or_none(names)?.ok_or_else(|| self.wrong(names[0], "is missing"))
    }

    pub(crate) fn flag(&self, name: &'static str, default: bool) -> Result<bool, ModelError> {
        match self.get(&[name]) {
            None => Ok(default),
            Some((_, Value::Bool(b))) => Ok(*b),
            Some((_, v)) => {
                Err(self.wrong(name, format!("is {}: true or false is wanted", short(v))))
            }
        }
    }

    pub(crate) fn text(&self, names: &[&'static str]) -> Result<Option<&'a str>, ModelError> {
        match self.get(names) {
            None => Ok(None),
            Some((_, Value::String(s))) => Ok(Some(s)),
            Some((name, v)) => Err(self.wrong(name, format!("is {}: text is wanted", short(v)))),
        }
    }

    pub(crate) fn inner(&self, names: &[&'static str]) -> Result<Option<Self>, ModelError> {
        match self.get(names) {
            None => Ok(None),
            Some((_, Value::Object(object))) => Ok(Some(Self { path: self.path, object })),
            Some((name, v)) => {
                Err(self.wrong(name, format!("is {}: an object is wanted", short(v))))
            }
        }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.object.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Refuses a flag that is not `want`.
    pub(crate) fn must_be(
        &self,
        name: &'static str,
        want: bool,
        remedy: &'static str,
    ) -> Result<(), ModelError> {
        if self.flag(name, want)? == want {
            return Ok(());
        }
        Err(ModelError::Unsupported {
            path: self.path.to_owned(),
            field: name,
            value: (!want).to_string(),
            remedy,
        })
    }
}

/// Parses a JSON file. Python's NaN and Infinity, and comments, are refused by name.
///
/// # Errors
/// When the file is no JSON, or not of the form of `T`.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, ModelError> {
    recognise::stand_in(path, bytes)?;
    serde_json::from_slice(bytes).map_err(|source| {
        let line = bytes.split(|&b| b == b'\n').nth(source.line().saturating_sub(1));
        let rest = line.and_then(|line| line.get(source.column().saturating_sub(2)..));
        let rest = String::from_utf8_lossy(rest.unwrap_or_default());
        let rest = rest.trim_start_matches([' ', '\t', ':', ',', '[', '{', '-']);
        let begins = |words: &[&str]| words.iter().any(|word| rest.starts_with(word));
        let (found, remedy) = if begins(&["NaN", "Infinity"]) {
            ("not valid: JSON has no NaN and no Infinity", "write a number or null")
        } else if begins(&["//", "/*", "#"]) {
            ("not valid: JSON has no comments", "remove them")
        } else {
            return ModelError::Json { path: path.to_owned(), source };
        };
        let found = format!("{found} (line {})", source.line());
        ModelError::Another { path: path.to_owned(), found, remedy: remedy.to_owned() }
    })
}

/// The fields that stand twice in a JSON object; parsers read the last of each.
pub(crate) fn doubled(text: &[u8]) -> Vec<String> {
    serde_json::from_slice(text).map(|Doubled(names)| names).unwrap_or_default()
}

struct Doubled(Vec<String>);

impl<'de> Deserialize<'de> for Doubled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Doubled;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Doubled, A::Error> {
                let (mut seen, mut doubled) = (HashSet::new(), Vec::new());
                while let Some(name) = map.next_key::<String>()? {
                    map.next_value::<IgnoredAny>()?;
                    if !seen.insert(name.clone()) {
                        doubled.push(name);
                    }
                }
                Ok(Doubled(doubled))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// A value shortened for a message, so that hostile files cannot fill logs.
pub(crate) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// Notes which fields were asked for, for tests.
#[cfg(test)]
pub(crate) mod read {
    use std::{cell::RefCell, collections::BTreeSet};

    thread_local! {
        static NAMES: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
    }

    pub(super) fn note(names: &[&'static str]) {
        NAMES.with_borrow_mut(|known| known.extend(names));
    }

    /// The fields that were asked for since this was called last.
    pub(crate) fn take() -> BTreeSet<&'static str> {
        NAMES.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_json_is_rejected_with_its_cause() {
        let cases: &[(&[u8], &str)] = &[
            (b"{\n\"a\": NaN}", "(line 2)"),
            (b"{\"a\": [1, -Infinity]}", "no Infinity"),
            (b"{\"a\": Infinity}", "no Infinity"),
            (b"{\n// half of it\n\"a\": 1}", "no comments"),
            (b"{\"a\": 1 /* one */}", "no comments"),
            (b"# of mine\n{}", "no comments"),
            (b"\xef\xbb\xbf{}", "byte order mark"),
            (b"\xff\xfe{\0}\0", "UTF-16"),
            (b"", "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
            (b"{\"a\": 1,}", "trailing comma"),
            (b"{\"a\": None}", "line 1"),
            (b"{", "EOF"),
        ];
        for (text, want) in cases {
            let result: Result<Value, _> = parse(Path::new("config.json"), text);
            let error = result.expect_err("no JSON").to_string();
            assert!(error.contains(want) && error.contains("config.json"), "{error}\nlacks {want}");
        }
        assert!(parse::<Value>(Path::new("config.json"), b" {} \n").is_ok());
    }

    #[test]
    fn duplicate_top_level_keys_are_found() {
        assert_eq!(doubled(br#"{"a": 1, "b": {"a": 2, "a": 3}, "a": 4}"#), ["a"]);
        for none in [&b"{}"[..], b"[1]", b"{", b"{\"a\": 1}"] {
            assert!(doubled(none).is_empty());
        }
    }
}
