//! The `tojson` of transformers: Python's `json.dumps`, and not Jinja's own, which escapes HTML.

use super::{
    arguments::arguments,
    float::{as_float, float},
    python::{self, wrong},
    value::entries,
};
use minijinja::{
    Error, State, Value,
    value::{Kwargs, Rest, ValueKind},
};

/// The deepest nesting of a value.
const MAX_DEPTH: usize = 500;
/// The widest indent.
const MAX_INDENT: i64 = 100;

/// How JSON is written.
struct Style {
    ascii: bool,
    /// The indent of each level, with a line for each item; none writes all on one line.
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

/// `value|tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: Value,
    given: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let all = arguments(&given, &named, names)?;
    let [ascii, indent, separators, sorted] =
        all.map(|value| value.filter(|value| !value.is_none()));
    let indent = indent.map(indentation).transpose()?;
    let (item, key) = match separators {
        Some(two) => pair(&two)?,
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let is = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let style = Style { ascii: is(ascii), indent, item, key, sorted: is(sorted) };
    let mut writer = Writer { state, style, out: String::new() };
    writer.value(&value, 0)?;
    Ok(writer.out.into())
}

fn indentation(value: Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    match i64::try_from(value) {
        Ok(count) if count <= MAX_INDENT => Ok(" ".repeat(usize::try_from(count).unwrap_or(0))),
        _ => Err(wrong(format!("tojson: indent takes a text or a number up to {MAX_INDENT}"))),
    }
}

fn pair(value: &Value) -> Result<(String, String), Error> {
    let texts: Vec<Value> = value.try_iter()?.collect();
    match &texts[..] {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(wrong("tojson: separators takes two texts")),
        },
        _ => Err(wrong("tojson: separators takes two texts")),
    }
}

struct Writer<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    style: Style,
    out: String,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(wrong("tojson: the value is nested too deeply"));
        }
        let before = self.out.len();
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number | ValueKind::Plain if python::is_number(value) => {
                self.out.push_str(&number(value));
            }
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.dict(value, depth)?,
            other => return Err(wrong(format!("tojson: what is {other} has no JSON"))),
        }
        // Values may hold one another many times, so that what is written is paid for here.
        self.state.consume_fuel(1 + (self.out.len() - before) as u64 / 64)
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut any = false;
        for item in value.try_iter()? {
            self.begin_item(any, depth);
            any = true;
            self.value(&item, depth + 1)?;
        }
        self.end(any, depth, ']');
        Ok(())
    }

    fn dict(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = entries(value);
        if self.style.sorted {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.out.push('{');
        let any = !entries.is_empty();
        for (index, (name, value)) in entries.into_iter().enumerate() {
            self.begin_item(index > 0, depth);
            match name.kind() {
                ValueKind::String => self.text(name.as_str().unwrap_or_default()),
                ValueKind::None => self.text("null"),
                ValueKind::Bool => self.text(if name.is_true() { "true" } else { "false" }),
                ValueKind::Number => self.text(&number(&name)),
                other => return Err(wrong(format!("tojson: {other} is no name of an entry"))),
            }
            self.out.push_str(&self.style.key);
            self.value(&value, depth + 1)?;
        }
        self.end(any, depth, '}');
        Ok(())
    }

    fn begin_item(&mut self, further: bool, depth: usize) {
        if further {
            self.out.push_str(&self.style.item);
        }
        self.line(depth + 1);
    }

    fn end(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    /// Begins a line, if lines are indented.
    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..=' ' if letter != ' ' => self.escape(letter),
                '\u{7f}'.. if self.style.ascii => self.escape(letter),
                _ => self.out.push(letter),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, letter: char) {
        for unit in letter.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn number(value: &Value) -> String {
    match as_float(value) {
        Some(value) if value.is_nan() => "NaN".to_owned(),
        Some(value) if value.is_infinite() => {
            if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Some(value) => float(value),
        None => value.to_string(),
    }
}
