//! A table of the cluster file: typed access to its keys, each error with key and line.

use super::ClusterError;
use std::time::Duration;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

/// Where a key stands: `cluster.tiles`, line 4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLocation {
    /// The key, with the table that it stands in.
    pub key: String,
    /// Its line, counted from 1.
    pub line: usize,
}

impl std::fmt::Display for KeyLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.key)
    }
}

/// The line of a byte of the text.
pub(super) fn line_of(text: &str, byte: usize) -> usize {
    text.bytes().take(byte).filter(|&b| b == b'\n').count() + 1
}

/// The names of the keys of a table, and former names of some with those that they have now.
pub(super) type Keys = (&'static [&'static str], &'static [(&'static str, &'static str)]);

/// One table, under the name that messages use.
pub(super) struct Section<'a> {
    text: &'a str,
    name: String,
    line: usize,
    table: &'a DeTable<'a>,
    renamed: &'static [(&'static str, &'static str)],
}

impl<'a> Section<'a> {
    /// A view of `table`, whose keys must all be `known`.
    pub(super) fn new(
        text: &'a str,
        name: String,
        line: usize,
        table: &'a DeTable<'a>,
        (known, renamed): Keys,
    ) -> Result<Self, ClusterError> {
        for key in table.keys() {
            let word: &str = key.get_ref();
            let at = || KeyLocation {
                key: format!("{name}.{word}"),
                line: line_of(text, key.span().start),
            };
            match renamed.iter().find(|(former, _)| *former == word) {
                Some((_, now)) if table.keys().any(|key| key.get_ref() == now) => {
                    let why = format!("this is the former name of {now}, which is there too");
                    return Err(ClusterError::Value { at: at(), why });
                }
                None if !known.contains(&word) => {
                    let suggestion = closest(word, known);
                    return Err(ClusterError::UnknownKey { at: at(), suggestion, known });
                }
                _ => {}
            }
        }
        Ok(Self { text, name, line, table, renamed })
    }

    /// A warning for each key that stands under its former name.
    pub(super) fn warnings(&self) -> Vec<String> {
        let former = |(former, now): &(&str, &str)| {
            let found = self.table.keys().find(|key| key.get_ref() == former)?;
            let (line, name) = (line_of(self.text, found.span().start), &self.name);
            Some(format!("line {line}: {name}.{former} is called {now} now: rename it"))
        };
        self.renamed.iter().filter_map(former).collect()
    }

    /// A key with its value, under the name that it has now or had before.
    fn entry(&self, key: &str) -> Option<(&'a toml::Spanned<DeString<'a>>, &'a DeValue<'a>)> {
        let former = self.renamed.iter().find(|(_, now)| *now == key).map(|(former, _)| *former);
        let names = |name: &str| name == key || Some(name) == former;
        self.table.iter().find(|(k, _)| names(k.get_ref())).map(|(k, v)| (k, v.get_ref()))
    }

    /// Where `key` stands, or where its table begins if the key is missing.
    pub(super) fn place(&self, key: &str) -> KeyLocation {
        let found = self.entry(key);
        let line = found.map_or(self.line, |(k, _)| line_of(self.text, k.span().start));
        let key = found.map_or(key, |(k, _)| k.get_ref());
        KeyLocation { key: format!("{}.{key}", self.name), line }
    }

    fn value(&self, key: &str) -> Option<&'a DeValue<'a>> {
        self.entry(key).map(|(_, value)| value)
    }

    fn wrong(&self, key: &str, wanted: &'static str) -> ClusterError {
        ClusterError::WrongType { at: self.place(key), wanted }
    }

    /// Turns a missing value into an error.
    pub(super) fn required<T>(
        &self,
        key: &'static str,
        found: Option<T>,
    ) -> Result<T, ClusterError> {
        found.ok_or_else(|| ClusterError::Missing {
            table: self.name.clone(),
            key,
            line: self.line,
        })
    }

    /// The value of a key as a text; none if the key is missing.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ClusterError> {
        match self.value(key) {
            None => Ok(None),
            Some(DeValue::String(text)) if !text.trim().is_empty() => Ok(Some(text.as_ref())),
            Some(_) => Err(self.wrong(key, "a text in quotes")),
        }
    }

    /// The value of a key as true or false; none if the key is missing.
    pub(super) fn switch(&self, key: &str) -> Result<Option<bool>, ClusterError> {
        match self.value(key) {
            None => Ok(None),
            Some(DeValue::Boolean(value)) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// The value of a key as a whole number from `low` to `high`; none if the key is missing.
    pub(super) fn whole(
        &self,
        key: &str,
        low: u32,
        high: u32,
    ) -> Result<Option<u32>, ClusterError> {
        match self.value(key) {
            None => Ok(None),
            Some(DeValue::Integer(number)) => self.within(key, number, low, high).map(Some),
            Some(_) => Err(self.wrong(key, "a whole number")),
        }
    }

    /// The value of a key as a list of 1 to `most` whole numbers from `low` to `high`; none if the key is missing.
    pub(super) fn wholes(
        &self,
        key: &str,
        low: u32,
        high: u32,
        most: usize,
    ) -> Result<Option<Vec<u32>>, ClusterError> {
        let wrong = || ClusterError::List { at: self.place(key), most };
        let list = match self.value(key) {
            None => return Ok(None),
            Some(DeValue::Array(list)) if (1..=most).contains(&list.len()) => list,
            Some(_) => return Err(wrong()),
        };
        let number = |item: &toml::Spanned<DeValue<'_>>| match item.get_ref() {
            DeValue::Integer(number) => self.within(key, number, low, high),
            _ => Err(wrong()),
        };
        list.iter().map(number).collect::<Result<_, _>>().map(Some)
    }

    /// The value of a key as a list of at most `most` texts; empty if the key is missing.
    pub(super) fn texts(&self, key: &str, most: usize) -> Result<Vec<&'a str>, ClusterError> {
        let wrong = || self.wrong(key, "a list of a few texts in quotes");
        let list = match self.value(key) {
            None => return Ok(Vec::new()),
            Some(DeValue::Array(list)) if list.len() <= most => list,
            Some(_) => return Err(wrong()),
        };
        let text = |item: &'a toml::Spanned<DeValue<'a>>| match item.get_ref() {
            DeValue::String(text) => Ok(text.as_ref()),
            _ => Err(wrong()),
        };
        list.iter().map(text).collect()
    }

    fn within(
        &self,
        key: &str,
        number: &DeInteger<'_>,
        low: u32,
        high: u32,
    ) -> Result<u32, ClusterError> {
        let value = i128::from_str_radix(number.as_str(), number.radix()).ok();
        value.and_then(|v| u32::try_from(v).ok()).filter(|v| (low..=high).contains(v)).ok_or_else(
            || ClusterError::Range {
                at: self.place(key),
                value: number.as_str().to_owned(),
                low,
                high,
            },
        )
    }

    /// The value of a key as a number, whole or not, which may be NaN; none if the key is missing.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ClusterError> {
        let text = match self.value(key) {
            None => return Ok(None),
            Some(DeValue::Integer(number)) if number.radix() == 10 => number.as_str(),
            Some(DeValue::Float(number)) => number.as_str(),
            Some(_) => return Err(self.wrong(key, "a number")),
        };
        text.parse().map(Some).map_err(|_| self.wrong(key, "a number"))
    }

    /// The value of a key as a text that `T` can parse; none if the key is missing.
    pub(super) fn parsed<T>(&self, key: &str) -> Result<Option<T>, ClusterError>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        let Some(text) = self.text(key)? else { return Ok(None) };
        text.parse().map(Some).map_err(|why: T::Err| ClusterError::Value {
            at: self.place(key),
            why: why.to_string(),
        })
    }

    /// The value of a key as a duration like "200ms", "60s", "5min"; none if the key is missing.
    pub(super) fn duration(&self, key: &str) -> Result<Option<Duration>, ClusterError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        parse_duration(text).map(Some).ok_or_else(|| ClusterError::Value {
            at: self.place(key),
            why: format!(
                "{text:?} is not a duration: write a number above zero and one of ms, s, min, like \"60s\""
            ),
        })
    }
}

/// Parses a duration like "200ms", "1.5s", "5min", which is above zero and at most a day.
pub(super) fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let split = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "ms" => 1e-3,
        "s" => 1.0,
        "min" => 60.0,
        _ => return None,
    };
    let seconds = number.trim().parse::<f64>().ok()? * scale;
    // Far below a nanosecond it is zero.
    let within = (0.0..=86_400.0).contains(&seconds).then(|| Duration::from_secs_f64(seconds));
    within.filter(|duration| !duration.is_zero())
}

/// The known key that is nearest to `word`, if it is near enough to be meant.
fn closest(word: &str, known: &[&'static str]) -> Option<&'static str> {
    known
        .iter()
        .map(|k| (distance(word, k), *k))
        .min()
        .filter(|(d, k)| *d <= 1 + k.len().min(word.len()) / 3)
        .map(|(_, k)| k)
}

/// The Levenshtein distance, by one row of the table.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let next = (diagonal + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_keys_are_suggested_and_others_are_not() {
        let known = &["strategy", "tiles", "wire"];
        assert_eq!(closest("stratgy", known), Some("strategy"));
        assert_eq!(closest("tile", known), Some("tiles"));
        assert_eq!(closest("quux", known), None);
    }

    #[test]
    fn durations_have_a_known_unit_and_a_positive_value() {
        assert_eq!(parse_duration("200ms"), Some(Duration::from_millis(200)));
        assert_eq!(parse_duration("1.5 s"), Some(Duration::from_millis(1500)));
        for bad in ["", "60", "0s", "1e-99s", "-1s", "nans", "2h"] {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }
}
