//! `config.json` read field by field: each is checked where it is read.

use crate::error::ModelError;
use serde_json::{Map, Value};
use std::path::Path;

/// An object of a JSON file, with the path for messages. `null` is the same as absent.
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

    /// The value of the first of these names that is there.
    pub(crate) fn get(&self, names: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        names
            .iter()
            .find_map(|&n| self.object.get(n).filter(|v| !v.is_null()).map(|value| (n, value)))
    }

    /// A count in 1..=limit.
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

    /// A positive, finite number.
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

    /// Whether a field of this name is there, be it null.
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

/// A value for a message: hostile files do not get to fill logs.
pub(crate) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
