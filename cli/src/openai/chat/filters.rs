//! Filters of Jinja that take other arguments than minijinja's, or work otherwise.

use super::{
    arguments::arguments,
    float::as_float,
    methods::{lines, strip},
    python,
};
use minijinja::{
    Error, State, Value,
    value::{Kwargs, Rest},
};

/// The widest indent.
const MAX_INDENT: usize = 1000;

/// The filter `value|join(d='', attribute=None)`.
pub(super) fn join(
    state: &State<'_, '_>,
    value: &Value,
    given: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [between, attribute] = arguments(&given, &named, ["d", "attribute"])?;
    let between = between.map_or(Ok(String::new()), |between| python::text(state, &between))?;
    let mut out = String::new();
    for (index, item) in value.try_iter()?.enumerate() {
        let item = match &attribute {
            Some(name) => item.get_item(name)?,
            None => item,
        };
        let before = out.len();
        if index > 0 {
            out.push_str(&between);
        }
        out.push_str(&python::text(state, &item)?);
        // What is joined may be much longer than what it is joined of.
        state.consume_fuel(1 + (out.len() - before) as u64 / 64)?;
    }
    Ok(out)
}

/// The filter `value|default(default_value='', boolean=False)`.
pub(super) fn default(value: Value, given: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other, falsy] = arguments(&given, &named, ["default_value", "boolean"])?;
    let falsy = falsy.is_some_and(|falsy| falsy.is_true());
    let missing = value.is_undefined() || falsy && !value.is_true();
    Ok(if missing { other.unwrap_or_else(|| "".into()) } else { value })
}

/// The filter `value|trim(chars=None)`.
pub(super) fn trim(
    state: &State<'_, '_>,
    value: &Value,
    letters: Option<&str>,
) -> Result<String, Error> {
    Ok(strip(&python::text(state, value)?, "strip", letters).to_owned())
}

/// The filter `value|indent(width=4, first=False, blank=False)`.
pub(super) fn indent(
    state: &State<'_, '_>,
    value: &Value,
    given: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [width, first, blank] = arguments(&given, &named, ["width", "first", "blank"])?;
    let width = width.unwrap_or_else(|| 4.into());
    let [first, blank] = [first, blank].map(|value| value.is_some_and(|value| value.is_true()));
    let indent = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(i64::try_from(width)?).unwrap_or(0)),
    };
    if indent.len() > MAX_INDENT {
        return Err(python::wrong(format!("indent: the width is more than {MAX_INDENT}")));
    }
    let text = python::text(state, value)? + "\n";
    let mut out = String::new();
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        state.consume_fuel(1 + indent.len() as u64 / 64)?;
        out.push_str(if index > 0 { "\n" } else { "" });
        let indented = if index == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if indented { &indent } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// The filter `value|int(default=0, base=10)`.
pub(super) fn int(value: Value, given: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other, base] = arguments(&given, &named, ["default", "base"])?;
    let other = other.unwrap_or_else(|| 0.into());
    let base = base.map_or(Ok(10), u32::try_from)?;
    if !(2..=36).contains(&base) {
        return Err(python::wrong("int: the base is from 2 to 36"));
    }
    if let Some(text) = value.as_str() {
        let digits = text.trim().replace('_', "");
        let prefix = [(16, "0x"), (8, "0o"), (2, "0b")].into_iter().find(|(of, _)| *of == base);
        let digits = prefix.and_then(|(_, prefix)| digits.strip_prefix(prefix)).unwrap_or(&digits);
        if let Ok(number) = i128::from_str_radix(digits, base) {
            return Ok(number.into());
        }
    } else if let Ok(number) = i128::try_from(value.clone()) {
        return Ok(number.into());
    }
    match number(&value).filter(|number| number.abs() < 1e38) {
        // It fits, as was just asked.
        #[allow(clippy::cast_possible_truncation)]
        Some(number) => Ok((number.trunc() as i128).into()),
        None => Ok(other),
    }
}

/// The filter `value|float(default=0.0)`.
pub(super) fn float(value: Value, given: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other] = arguments(&given, &named, ["default"])?;
    let other = other.unwrap_or_else(|| 0.0.into());
    Ok(number(&value).map_or(other, Value::from))
}

/// The result of Python's `float(value)`; none where that fails.
fn number(value: &Value) -> Option<f64> {
    let text = value.as_str().map(|text| text.trim().replace('_', ""));
    match text {
        Some(text) => text.parse().ok(),
        None => as_float(value).or_else(|| f64::try_from(value.clone()).ok()),
    }
}
