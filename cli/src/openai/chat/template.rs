//! A chat template, in the environment that transformers gives it.

use super::{clock, filters, float::as_float, methods, python, tojson::tojson};
use minijinja::{Environment, Error, State, Value, syntax::SyntaxConfig};
use std::{borrow::Cow, collections::BTreeMap};
use time::OffsetDateTime;

/// Steps that a template may take: a thousand messages take some hundred thousand. Each pays for 64 bytes of values,
/// too, so that a template holds at most 256 MB.
const FUEL: u64 = 4_000_000;
const NAME: &str = "chat";

/// A chat template, and the tokens that stand in it.
pub struct Template {
    environment: Environment<'static>,
    source: String,
    tokens: BTreeMap<String, String>,
}

impl Template {
    /// Reads a template, which is Jinja; `tokens` are the special tokens by their names.
    ///
    /// # Errors
    /// When it is no valid template.
    pub fn new(source: String, tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        Self::at(source, tokens, clock::local)
    }

    /// Like [`new`](Self::new), with another clock.
    pub(super) fn at(
        source: String,
        tokens: BTreeMap<String, String>,
        clock: fn() -> OffsetDateTime,
    ) -> Result<Self, Error> {
        // Jinja reads every end of a line as the one.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        Ok(Self { environment: environment(&source, clock)?, source, tokens })
    }

    /// The template as its author wrote it.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Renders the template with these variables.
    pub(super) fn render(&self, variables: Vec<(Value, Value)>) -> Result<String, Error> {
        let tokens =
            self.tokens.iter().map(|(name, text)| (name.as_str().into(), text.as_str().into()));
        // Of two variables with one name the later one counts.
        let all = Value::from_pairs(tokens.chain(variables).collect::<Vec<(Value, Value)>>());
        self.environment.get_template(NAME)?.render(all)
    }
}

fn environment(source: &str, clock: fn() -> OffsetDateTime) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(python::print);
    environment.set_fuel(Some(FUEL));
    minijinja_contrib::add_to_environment(&mut environment);
    environment.add_function("raise_exception", |message: Value| -> Result<String, Error> {
        Err(python::wrong(message.to_string()))
    });
    environment.add_function("strftime_now", move |format: &str| clock::strftime(format, clock()));
    environment.add_filter("tojson", tojson);
    environment
        .add_filter("string", |state: &State<'_, '_>, value: &Value| python::text(state, value));
    environment.add_filter("join", filters::join);
    environment.add_filter("default", filters::default);
    environment.add_filter("d", filters::default);
    environment.add_filter("trim", filters::trim);
    environment.add_filter("indent", filters::indent);
    environment.add_filter("int", filters::int);
    environment.add_filter("float", filters::float);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_sequence);
    environment.add_test("callable", python::is_callable);
    environment.add_test("number", python::is_number);
    environment.add_test("float", |value: &Value| as_float(value).is_some());
    environment.add_template_owned(NAME, without_generation(source).into_owned())?;
    Ok(environment)
}

/// A template with `{% with %}` for each `{% generation %}`.
///
/// That tag is transformers' own and marks the model's own text, for training. What it encloses has its own variables,
/// as has what `with` encloses.
fn without_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return source.into();
    }
    let mut out = String::new();
    let mut rest = source;
    while let Some((before, tag)) = next_tag(rest) {
        let (tag, behind) = tag.split_at(tag_length(tag));
        out.push_str(before);
        match block_name(tag) {
            Some(name @ "generation") => out.push_str(&tag.replacen(name, "with", 1)),
            Some(name @ "endgeneration") => out.push_str(&tag.replacen(name, "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = behind;
    }
    (out + rest).into()
}

/// Splits a template before its first tag.
fn next_tag(source: &str) -> Option<(&str, &str)> {
    let start =
        source.match_indices('{').find(|(at, _)| source[at + 1..].starts_with(['#', '{', '%']));
    start.map(|(at, _)| source.split_at(at))
}

/// The length of the tag with which a text begins; that of `{% raw %}` counts with all that it encloses.
fn tag_length(text: &str) -> usize {
    if text.starts_with("{#") {
        return text.find("#}").map_or(text.len(), |end| end + 2);
    }
    let end = if text.starts_with("{%") { "%}" } else { "}}" };
    let (mut depth, mut quote) = (0_usize, None);
    let mut letters = text.char_indices().skip(2);
    while let Some((at, letter)) = letters.next() {
        match (letter, quote) {
            ('\\', Some(_)) => drop(letters.next()),
            (_, Some(open)) if letter == open => quote = None,
            (_, Some(_)) => {}
            ('"' | '\'', None) => quote = Some(letter),
            _ if depth == 0 && text[at..].starts_with(end) => {
                let length = at + end.len();
                return length
                    + if block_name(&text[..length]) == Some("raw") {
                        raw(&text[length..])
                    } else {
                        0
                    };
            }
            ('(' | '[' | '{', None) => depth += 1,
            (')' | ']' | '}', None) => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    text.len()
}

/// The length of what `{% raw %}` encloses.
fn raw(text: &str) -> usize {
    let begins = |at: usize| {
        let before = text[..at].trim_end();
        before.strip_suffix(['-', '+']).unwrap_or(before).strip_suffix("{%").map(str::len)
    };
    text.match_indices("endraw").find_map(|(at, _)| begins(at)).unwrap_or(text.len())
}

/// The name of a block whose tag holds nothing else.
fn block_name(tag: &str) -> Option<&str> {
    let inside = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    Some(inside.strip_suffix(['-', '+']).unwrap_or(inside).trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_of_generation_are_rewritten() {
        for (source, want) in [
            ("{% generation %}a{% endgeneration %}", "{% with %}a{% endwith %}"),
            ("{%-generation-%} a {%- endgeneration +%}", "{%-with-%} a {%- endwith +%}"),
            (
                "{# {% generation %} #}{{ '{% generation %}' }}{% generation %}{% endgeneration %}",
                "{# {% generation %} #}{{ '{% generation %}' }}{% with %}{% endwith %}",
            ),
            (
                "{% raw %}{% generation %}{% endgeneration %}{% endraw %}",
                "{% raw %}{% generation %}{% endgeneration %}{% endraw %}",
            ),
            (
                "{{ {'a': {'b': '\\'}}'}} }}{% set x = \"%}\" %}{% endgeneration %}",
                "{{ {'a': {'b': '\\'}}'}} }}{% set x = \"%}\" %}{% endwith %}",
            ),
            ("{% if endgeneration %}{", "{% if endgeneration %}{"),
            ("endgeneration {% generation", "endgeneration {% generation"),
            ("{{ 'endgeneration", "{{ 'endgeneration"),
        ] {
            assert_eq!(without_generation(source), want);
        }
    }
}
