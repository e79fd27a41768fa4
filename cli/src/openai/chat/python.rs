//! How Python writes values, and what it takes them for, where minijinja differs.

use super::float::{as_float, float};
use minijinja::{
    Error, ErrorKind, Output, State, Value, escape_formatter,
    value::{DynObject, ObjectRepr, ValueKind},
};
use std::fmt::{self, Write};

/// The bytes that one step of fuel pays for.
const BYTES_OF_FUEL: u64 = 64;
/// The deepest nesting of a value that is written.
const MAX_DEPTH: usize = 200;

/// Whether the value is a number.
pub(super) fn is_number(value: &Value) -> bool {
    as_float(value).is_some() || matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Writes what `{{ value }}` renders to.
pub(super) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            write_paid(out, state, value)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// The text of Python's `str(value)`.
pub(super) fn text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_paid(&mut out, state, value)?;
    Ok(out)
}

/// Writes a value, but no more than the fuel that is left pays for: nested lists that each hold the next one twice are
/// small, and their text is not. Each value in it takes a step of fuel.
fn write_paid(out: &mut dyn Write, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let left = state.fuel_levels().map_or(0, |(_, left)| left);
    let mut paid = Paid { out, room: left.saturating_mul(BYTES_OF_FUEL), values: 0 };
    match write_text(&mut paid, value) {
        // The bytes that were written are paid for by who takes them.
        Ok(()) => state.consume_fuel(paid.values),
        Err(_) if paid.room == 0 => state.consume_fuel(left.saturating_add(1)),
        Err(error) => Err(error.into()),
    }
}

/// A writer that fails after `room` bytes.
struct Paid<'a> {
    out: &'a mut dyn Write,
    room: u64,
    /// How many values were written.
    values: u64,
}

impl Paid<'_> {
    /// Pays for a value, whose time would not be paid for by its few bytes.
    fn pay_value(&mut self) -> fmt::Result {
        self.values += 1;
        self.pay(BYTES_OF_FUEL)
    }

    fn pay(&mut self, bytes: u64) -> fmt::Result {
        let left = self.room.checked_sub(bytes);
        self.room = left.unwrap_or(0);
        left.map(drop).ok_or(fmt::Error)
    }
}

impl Write for Paid<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.pay(text.len() as u64)?;
        self.out.write_str(text)
    }
}

/// Whether Python takes the value for a sequence, with a length and items; undefined values count, too.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
}

/// Whether the value can be called, as functions, macros and methods can; undefined values count, too.
pub(super) fn is_callable(value: &Value) -> bool {
    let plain = value.as_object().is_some_and(|object| object.repr() == ObjectRepr::Plain);
    value.is_undefined() || plain && as_float(value).is_none()
}

fn write_text(out: &mut Paid<'_>, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => write_repr(out, value, 0),
        ValueKind::Iterable if value.len().is_some() => write_repr(out, value, 0),
        _ => write!(out, "{value}"),
    }
}

/// Writes Python's `repr(value)`.
fn write_repr(out: &mut Paid<'_>, value: &Value, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return Err(fmt::Error);
    }
    out.pay_value()?;
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number => match as_float(value) {
            Some(value) => out.write_str(&float(value)),
            None => write!(out, "{value}"),
        },
        // Parts and multiples of lists are iterables of a known length.
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            let tuple = value.is_tuple();
            out.write_char(if tuple { '(' } else { '[' })?;
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                out.write_str(if count > 0 { ", " } else { "" })?;
                write_repr(out, &item, depth + 1)?;
                count += 1;
            }
            out.write_str(if tuple && count == 1 { "," } else { "" })?;
            out.write_char(if tuple { ')' } else { ']' })
        }
        ValueKind::Map => {
            out.write_char('{')?;
            let entries = value.as_object().and_then(DynObject::try_iter_pairs);
            for (index, (name, value)) in entries.into_iter().flatten().enumerate() {
                out.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(out, &name, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value, depth + 1)?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value:?}"),
    }
}

fn write_quoted(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for letter in text.chars() {
        match letter {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            _ if letter == quote => write!(out, "\\{letter}")?,
            _ if is_printable(letter) => out.write_char(letter)?,
            '\0'..='\u{ff}' => write!(out, "\\x{:02x}", u32::from(letter))?,
            '\0'..='\u{ffff}' => write!(out, "\\u{:04x}", u32::from(letter))?,
            _ => write!(out, "\\U{:08x}", u32::from(letter))?,
        }
    }
    out.write_char(quote)
}

/// Whether a letter is shown as it is in what Rust, as Python, writes for people to look at. Marks that change
/// the letter before them are.
fn is_printable(letter: char) -> bool {
    letter.is_ascii_graphic() || letter == ' ' || {
        let text: String = ['a', letter].iter().collect();
        !letter.is_ascii() && text.escape_debug().count() == 2
    }
}

/// An error of a template that asks for what cannot be done.
pub(super) fn wrong(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}
