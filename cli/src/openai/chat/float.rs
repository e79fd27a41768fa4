//! Floats as Python writes them, where minijinja differs.

use minijinja::{
    Value,
    value::{Object, ObjectRepr, ValueKind},
};
use std::{fmt, sync::Arc};

/// A float that Python writes with an exponent.
///
/// minijinja writes all digits of one, and its operator `~` always does.
#[derive(Debug)]
pub(super) struct Scientific(pub f64);

impl Object for Scientific {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&float(self.0))
    }
}

/// The value as a float, if it is one.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if let Some(Scientific(float)) = value.downcast_object_ref() {
        return Some(*float);
    }
    let is = value.kind() == ValueKind::Number && !value.is_integer();
    if is { f64::try_from(value.clone()).ok() } else { None }
}

/// A float as Python's `repr` has it: the fewest digits that are read as the same number, with an exponent
/// below 1e-4 and from 1e16 on.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
