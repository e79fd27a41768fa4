//! The messages of a chat and what else a request gives to templates, in the forms that these can read.

use super::{
    super::error::ApiError,
    template::Template,
    value::{Dict, Json, entries},
};
use minijinja::{Value, value::ValueKind};
use serde::{Deserialize, Deserializer};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// The fields for a model's reasoning, of which templates read one or another.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Marks the end of the text that the model is to continue, while the template is rendered: the same as in
/// transformers, as templates cut white space at the end of messages.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A message of a chat: its role, its content, and whatever else templates may read.
#[derive(Clone, Debug)]
pub struct Message(Value);

/// What a request gives to the template besides its messages, by name.
#[derive(Clone, Debug)]
pub struct TemplateArguments(Value);

/// How messages are given to the template.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// Whether content in parts stays a list, and is not joined to one text.
    pub parts: bool,
    /// Whether arguments of tool calls that are text are parsed to objects.
    pub objects: bool,
}

/// One attempt to render a chat.
pub(super) struct Rendering {
    variables: Vec<(Value, Value)>,
    /// Set once the template reads a part of a message.
    read: Arc<AtomicBool>,
    /// The text that the model is to continue, and the fields of the last message that have it.
    goes_on: Option<(String, Vec<String>)>,
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Json::deserialize(deserializer).map(|Json(value)| Self(value))
    }
}

impl<'de> Deserialize<'de> for TemplateArguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Json::deserialize(deserializer)?.0 {
            value if value.kind() == ValueKind::Map => Ok(Self(value)),
            value if value.is_none() => Ok(Self::default()),
            value => {
                let problem = format!("takes an object, and not {}", what(&value));
                Err(serde::de::Error::custom(problem))
            }
        }
    }
}

impl Default for TemplateArguments {
    fn default() -> Self {
        Self(Dict::value(Vec::new()))
    }
}

impl TemplateArguments {
    /// Whether the chat has tools.
    pub(super) fn has_tools(&self) -> bool {
        self.get("tools").is_some()
    }

    /// An argument that is there and not null.
    fn get(&self, name: &str) -> Option<Value> {
        self.0.as_object()?.get_value(&name.into()).filter(|value| !value.is_none())
    }

    /// Refuses what cannot be given to a template.
    fn check(&self) -> Result<(), ApiError> {
        for name in ["messages", "chat_template"] {
            if self.get(name).is_some() {
                return Err(ApiError::bad(format!(
                    "chat_template_kwargs.{name}: messages stand in the request, and the template is the model's"
                )));
            }
        }
        for name in ["tools", "documents"] {
            let Some(list) = self.get(name) else { continue };
            let objects = list.kind() == ValueKind::Seq
                && list.try_iter().is_ok_and(|mut all| all.all(|one| one.kind() == ValueKind::Map));
            if !objects {
                return Err(ApiError::bad(format!(
                    "chat_template_kwargs.{name} takes a list of objects"
                )));
            }
        }
        Ok(())
    }

    /// The field of the last message that the model is to continue; none if it is to begin an answer.
    fn continued_field(&self) -> Result<Option<String>, ApiError> {
        let field = match self.get("continue_final_message") {
            None => return Ok(None),
            Some(value) if value.kind() == ValueKind::Bool && !value.is_true() => return Ok(None),
            Some(value) if value.kind() == ValueKind::Bool => "content".to_owned(),
            Some(value) => match value.as_str() {
                Some("") => return Ok(None),
                Some(name) => name.to_owned(),
                None => {
                    let why =
                        "continue_final_message takes true, false or the name of a field, and not";
                    return Err(ApiError::bad(format!("{why} {}", what(&value))));
                }
            },
        };
        if self.get("add_generation_prompt").is_some_and(|value| value.is_true()) {
            return Err(ApiError::bad(
                "continue_final_message and add_generation_prompt exclude each other",
            ));
        }
        Ok(Some(field))
    }
}

impl Message {
    /// A message of text.
    pub fn new(role: &str, content: &str) -> Self {
        Self(Dict::value(vec![("role".into(), role.into()), ("content".into(), content.into())]))
    }

    pub(super) fn has_parts(&self) -> bool {
        entries(&self.0)
            .iter()
            .any(|(name, value)| name.as_str() == Some("content") && value.kind() == ValueKind::Seq)
    }

    /// Whether there are tool calls whose arguments are an object, written as text.
    pub(super) fn has_text_arguments(&self) -> bool {
        let calls = self.0.get_attr("tool_calls").ok().and_then(|calls| calls.try_iter().ok());
        calls.into_iter().flatten().any(|call| with_objects(&call).is_some())
    }

    /// Its entries as templates get them: without what is null, and with the model's reasoning under every name that
    /// templates have for it.
    fn entries(
        &self,
        index: usize,
        form: Form,
        read: &Arc<AtomicBool>,
    ) -> Result<Vec<(Value, Value)>, ApiError> {
        if self.0.kind() != ValueKind::Map {
            let what = what(&self.0);
            return Err(ApiError::bad(format!(
                "messages[{index}] takes an object, and not {what}"
            )));
        }
        let mut message = entries(&self.0);
        message.retain(|(_, value)| !value.is_none());
        match get(&message, "role") {
            Some(role) if role.as_str().is_some() => {}
            role => {
                let what = role.map_or("nothing".to_owned(), |role| what(role).to_owned());
                let why = format!("messages[{index}].role takes a text, and not {what}");
                return Err(ApiError::bad(why));
            }
        }
        for (name, value) in &mut message {
            match name.as_str() {
                Some("content") => *value = content(value, index, form, read)?,
                Some("tool_calls") if form.objects && value.kind() == ValueKind::Seq => {
                    let calls = value.try_iter().into_iter().flatten();
                    *value = calls.map(|call| with_objects(&call).unwrap_or(call)).collect();
                }
                _ => {}
            }
        }
        if let Some(thought) = REASONING.iter().find_map(|name| get(&message, name)).cloned() {
            // In the places that transformers gives them, which show where a template writes whole messages.
            let thinking = get(&message, "thinking").unwrap_or(&thought).clone();
            message.retain(|(name, _)| name.as_str() != Some("thinking"));
            message.insert(0, ("thinking".into(), thinking));
            set(&mut message, "reasoning_content", thought);
        }
        Ok(message)
    }
}

impl Rendering {
    /// Puts together the variables that the template gets.
    ///
    /// # Errors
    /// When messages or arguments are not what they should be.
    pub fn new(
        messages: &[Message],
        arguments: &TemplateArguments,
        form: Form,
    ) -> Result<Self, ApiError> {
        arguments.check()?;
        let read = Arc::new(AtomicBool::new(false));
        let chat = messages.iter().enumerate().map(|(index, m)| m.entries(index, form, &read));
        let mut chat = chat.collect::<Result<Vec<_>, _>>()?;
        let goes_on = match (arguments.continued_field()?, chat.last_mut()) {
            (Some(field), Some(last)) => Some(mark(last, &field, &read)?),
            _ => None,
        };
        let messages: Value = chat.into_iter().map(Dict::value).collect();
        let mut variables: Vec<(Value, Value)> = vec![
            ("messages".into(), messages),
            ("tools".into(), ().into()),
            ("documents".into(), ().into()),
            ("add_generation_prompt".into(), goes_on.is_none().into()),
        ];
        let given = entries(&arguments.0).into_iter();
        let hidden = ["messages", "chat_template", "continue_final_message"];
        variables.extend(
            given.filter(|(name, _)| !name.as_str().is_some_and(|name| hidden.contains(&name))),
        );
        Ok(Self { variables, read, goes_on })
    }

    /// Renders the chat.
    ///
    /// # Errors
    /// When the template refuses it.
    pub fn text(&self, template: &Template) -> Result<String, ApiError> {
        if let Some((_, fields)) = &self.goes_on
            && !fields.iter().any(|field| template.source().contains(field))
        {
            return Err(ApiError::bad(format!(
                "continue_final_message: the model's chat template does not read {}",
                fields.join(" or ")
            )));
        }
        let mut text = template
            .render(self.variables.clone())
            .map_err(|e| ApiError::bad(format!("the model's chat template refuses this: {e}")))?;
        if let Some((last, _)) = &self.goes_on {
            let at = text.rfind(MARK.trim_end()).filter(|_| text.contains(last.trim()));
            let Some(at) = at else {
                let why = "continue_final_message: the model's chat template leaves out parts of the last message";
                return Err(ApiError::bad(why));
            };
            let kept = text[at..].starts_with(MARK);
            text.truncate(at);
            if !kept {
                text.truncate(text.trim_end().len());
            }
        }
        Ok(text)
    }

    /// Whether the template has looked into a part of a message.
    pub fn parts_were_read(&self) -> bool {
        self.read.load(Ordering::Relaxed)
    }
}

fn get<'a>(message: &'a [(Value, Value)], name: &str) -> Option<&'a Value> {
    message.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

fn set(message: &mut Vec<(Value, Value)>, name: &str, value: Value) {
    match message.iter_mut().find(|(key, _)| key.as_str() == Some(name)) {
        Some((_, old)) => *old = value,
        None => message.push((name.into(), value)),
    }
}

/// What a value is, for messages.
fn what(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::None => "null",
        ValueKind::Bool => "true or false",
        ValueKind::Number | ValueKind::Plain => "a number",
        ValueKind::String => "a text",
        ValueKind::Seq => "a list",
        _ => "an object",
    }
}

/// The content of a message, in the form that is asked for.
fn content(
    value: &Value,
    index: usize,
    form: Form,
    read: &Arc<AtomicBool>,
) -> Result<Value, ApiError> {
    match value.kind() {
        ValueKind::String => return Ok(value.clone()),
        ValueKind::Seq => {}
        _ => {
            let what = what(value);
            return Err(ApiError::bad(format!(
                "messages[{index}].content takes a text or a list of parts, and not {what}"
            )));
        }
    }
    let mut list = Vec::new();
    let mut joined = String::new();
    for (number, part) in value.try_iter().into_iter().flatten().enumerate() {
        let place = format!("messages[{index}].content[{number}]");
        let part = entries(&part);
        match get(&part, "type").and_then(Value::as_str) {
            Some("text") => {}
            Some(kind) => return Err(ApiError::unsupported(&format!("{place} of type {kind}"))),
            None => {
                return Err(ApiError::bad(format!("{place} takes an object with a type")));
            }
        }
        match get(&part, "text").and_then(Value::as_str) {
            Some(text) => joined.push_str(text),
            None => return Err(ApiError::bad(format!("{place}.text takes a text"))),
        }
        list.push(Dict::watched(part, read.clone()));
    }
    Ok(if form.parts { list.into() } else { joined.into() })
}

/// A tool call with its arguments as an object, if they are the text of one.
fn with_objects(call: &Value) -> Option<Value> {
    let mut call = entries(call);
    let mut function = entries(get(&call, "function")?);
    let Json(object) = serde_json::from_str(get(&function, "arguments")?.as_str()?).ok()?;
    if object.kind() != ValueKind::Map {
        return None;
    }
    set(&mut function, "arguments", object);
    set(&mut call, "function", Dict::value(function));
    Some(Dict::value(call))
}

/// Marks the end of the text that the model is to continue. Returns that text, and the fields of the message that have
/// it.
fn mark(
    message: &mut Vec<(Value, Value)>,
    field: &str,
    read: &Arc<AtomicBool>,
) -> Result<(String, Vec<String>), ApiError> {
    let none = || {
        ApiError::bad(format!(
            "continue_final_message: the last message has no text as its {field}"
        ))
    };
    let value = get(message, field).cloned().ok_or_else(none)?;
    let mut fields = vec![field.to_owned()];
    if REASONING.contains(&field) {
        fields = REASONING.map(str::to_owned).to_vec();
        fields.retain(|name| get(message, name) == Some(&value));
    }
    let (text, marked): (String, Value) = if let Some(text) = value.as_str() {
        (text.to_owned(), format!("{text}{MARK}").into())
    } else {
        let mut parts: Vec<Value> = value.try_iter().map_err(|_| none())?.collect();
        let last = parts.iter_mut().rev().find(|part| get(&entries(part), "text").is_some());
        let last = last.ok_or_else(none)?;
        let mut part = entries(last);
        let text = get(&part, "text").and_then(Value::as_str).ok_or_else(none)?.to_owned();
        set(&mut part, "text", format!("{text}{MARK}").into());
        *last = Dict::watched(part, read.clone());
        (text, parts.into())
    };
    fields.iter().for_each(|name| set(message, name, marked.clone()));
    Ok((text, fields))
}
