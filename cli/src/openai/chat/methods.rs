//! Methods of Python's strings, lists and dictionaries that templates call, where minijinja's own set lacks one or
//! works otherwise.

use super::{arguments::arguments, python::wrong, value::entries};
use minijinja::{
    Error, State, Value,
    value::{Kwargs, Rest, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Methods that change a dictionary or a list, which templates may not.
const CHANGING: [&str; 12] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "fromkeys",
];
/// The widest that a text is padded to.
const MAX_WIDTH: usize = 10_000;

/// Calls a method of a value that is none of minijinja's objects.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let done = match value.kind() {
        ValueKind::String => of_text(state, value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq | ValueKind::Iterable => of_list(value, method, args)?,
        ValueKind::Map => of_dictionary(value, method, args)?,
        _ => None,
    };
    match done {
        Some(value) => Ok(value),
        None => unknown_method_callback(state, value, method, args),
    }
}

fn of_dictionary(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let pick = |pick: fn((Value, Value)) -> Value| -> Result<Option<Value>, Error> {
        let () = from_args(args)?;
        Ok(Some(entries(value).into_iter().map(pick).collect()))
    };
    match method {
        "keys" => pick(|(key, _)| key),
        "values" => pick(|(_, value)| value),
        "items" => pick(|(key, value)| Tuple::from([key, value]).into()),
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ if CHANGING.contains(&method) => Err(changes(method)),
        _ => Ok(None),
    }
}

fn of_list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            Ok(Some(value.try_iter()?.filter(|item| item == wanted).count().into()))
        }
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            found
                .map(|index| Some(index.into()))
                .ok_or_else(|| wrong("index: it is not in the list"))
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ if CHANGING.contains(&method) => Err(changes(method)),
        _ => Ok(None),
    }
}

fn changes(method: &str) -> Error {
    wrong(format!("{method} would change a value, which chat templates may not"))
}

/// What Python takes for white space.
fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

fn of_text(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (letters,): (Option<&str>,) = from_args(args)?;
            strip(text, method, letters).into()
        }
        "split" | "rsplit" => split(state, text, method == "rsplit", args)?,
        "splitlines" => splitlines(state, text, args)?,
        "partition" | "rpartition" => partition(text, method == "rpartition", args)?,
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, method, args)?,
        "startswith" | "endswith" => affix(text, method == "startswith", args)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "center" | "ljust" | "rjust" | "zfill" => fill(text, method, args)?,
        "title" | "capitalize" | "swapcase" | "casefold" => {
            let () = from_args(args)?;
            letters(text, method).into()
        }
        "isdecimal" => {
            let () = from_args(args)?;
            (!text.is_empty() && text.chars().all(|letter| letter.is_ascii_digit())).into()
        }
        _ => return Ok(None),
    }))
}

/// A text without these letters, or without white space, at its ends.
pub(super) fn strip<'a>(text: &'a str, method: &str, letters: Option<&str>) -> &'a str {
    let strips = |letter: char| match letters {
        Some(letters) => letters.contains(letter),
        None => is_space(letter),
    };
    match method {
        "lstrip" => text.trim_start_matches(strips),
        "rstrip" => text.trim_end_matches(strips),
        _ => text.trim_matches(strips),
    }
}

/// Python's `split` and `rsplit`. Fuel is consumed for each piece before it exists: pieces of a text with two bytes for
/// each take twenty times as much memory.
fn split(
    state: &State<'_, '_>,
    text: &str,
    from_right: bool,
    args: &[Value],
) -> Result<Value, Error> {
    let (given, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let [separator, most] = arguments(&given, &named, ["sep", "maxsplit"])?;
    let most = most.map_or(Ok(-1), i64::try_from)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let pieces: Vec<&str> = match separator.filter(|separator| !separator.is_none()) {
        None => {
            state
                .consume_fuel(text.split(is_space).filter(|word| !word.is_empty()).count() as u64)?;
            words(text, most, from_right)
        }
        Some(separator) => match separator.as_str() {
            Some("") => return Err(wrong("split: the separator is empty")),
            Some(separator) => {
                state.consume_fuel(text.matches(separator).take(most).count() as u64)?;
                let mut pieces: Vec<_> = match from_right {
                    true => text.rsplitn(most + 1, separator).collect(),
                    false => text.splitn(most + 1, separator).collect(),
                };
                if from_right {
                    pieces.reverse();
                }
                pieces
            }
            None => return Err(wrong("split: the separator is no text")),
        },
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

/// Splits at white space, at most `most` times. The rest keeps the white space at its other end.
fn words(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let trim = |text| {
        if from_right {
            str::trim_end_matches(text, is_space)
        } else {
            text.trim_start_matches(is_space)
        }
    };
    let mut words = Vec::new();
    let mut rest = trim(text);
    while !rest.is_empty() {
        let cut = match (words.len() == most, from_right) {
            (true, _) => None,
            (false, false) => rest.split_once(is_space),
            (false, true) => rest.rsplit_once(is_space).map(|(rest, word)| (word, rest)),
        };
        let (word, left) = cut.unwrap_or((rest, ""));
        words.push(word);
        rest = trim(left);
    }
    if from_right {
        words.reverse();
    }
    words
}

fn splitlines(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (given, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let [keep] = arguments(&given, &named, ["keepends"])?;
    let keep = keep.is_some_and(|keep| keep.is_true());
    state.consume_fuel(text.matches(ends_line).count() as u64)?;
    Ok(lines(text, keep).into_iter().map(Value::from).collect())
}

fn ends_line(letter: char) -> bool {
    matches!(
        letter,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// The lines of a text, with their ends if these are to be kept.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends_line) {
        let end = match rest[at..].starts_with("\r\n") {
            true => at + 2,
            false => at + rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

fn partition(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(wrong("partition: the separator is empty"));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let three = match (found, from_right) {
        (Some((before, behind)), _) => [before, separator, behind],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(Tuple::from(three.map(Value::from)).into())
}

/// The part of a text from one letter to before another, and how many letters stand before it; nothing where
/// the first is behind the end. Negative ones count from the end.
fn window(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(&str, usize)> {
    if start.unwrap_or(0) == 0 && end.is_none() {
        return Some((text, 0));
    }
    let length = text.chars().count();
    let place = |index: i64| match usize::try_from(index) {
        Ok(index) => index,
        Err(_) => {
            length.saturating_sub(usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX))
        }
    };
    let (start, end) = (place(start.unwrap_or(0)), end.map_or(length, place).min(length));
    if start > length || start > end {
        return None;
    }
    let byte = |letter: usize| text.char_indices().nth(letter).map_or(text.len(), |(byte, _)| byte);
    Some((&text[byte(start)..byte(end)], start))
}

fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let window = window(text, start, end);
    if method == "count" {
        return Ok(window.map_or(0, |(part, _)| part.matches(wanted).count()).into());
    }
    let found = window.and_then(|(part, before)| {
        let byte = if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
        byte.map(|byte| before + part[..byte].chars().count())
    });
    match found {
        Some(index) => Ok(index.into()),
        None if method.ends_with("find") => Ok((-1).into()),
        None => Err(wrong(format!("{method}: {wanted:?} is not in the text"))),
    }
}

fn affix(text: &str, at_start: bool, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((part, _)) = window(text, start, end) else { return Ok(false.into()) };
    let has = |wanted: &Value| match wanted.as_str() {
        Some(wanted) if at_start => Ok(part.starts_with(wanted)),
        Some(wanted) => Ok(part.ends_with(wanted)),
        None => Err(wrong("startswith and endswith take a text or a tuple of texts")),
    };
    if !wanted.is_tuple() {
        return has(wanted).map(Value::from);
    }
    for wanted in wanted.try_iter()? {
        if has(&wanted)? {
            return Ok(true.into());
        }
    }
    Ok(false.into())
}

fn fill(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, filler): (i64, Option<char>) = from_args(args)?;
    let width = usize::try_from(width).unwrap_or(0);
    if width > MAX_WIDTH {
        return Err(wrong(format!("{method}: {width} letters are more than {MAX_WIDTH}")));
    }
    let missing = width.saturating_sub(text.chars().count());
    let filled = |count: usize| filler.unwrap_or(' ').to_string().repeat(count);
    Ok(match method {
        "ljust" => format!("{text}{}", filled(missing)),
        "rjust" => format!("{}{text}", filled(missing)),
        "zfill" => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", "0".repeat(missing))
        }
        _ => {
            // Python's own rule for which side gets the odd one.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", filled(left), filled(missing - left))
        }
    }
    .into())
}

/// A text with its letters in upper or lower case, by `method`.
fn letters(text: &str, method: &str) -> String {
    let mut out = String::new();
    let mut begins = true;
    for letter in text.chars() {
        let large = match method {
            "title" | "capitalize" => begins,
            "swapcase" => letter.is_lowercase(),
            _ => false,
        };
        if large {
            out.extend(letter.to_uppercase())
        } else {
            out.extend(letter.to_lowercase())
        }
        begins = method == "title" && !letter.is_alphabetic();
    }
    out
}
