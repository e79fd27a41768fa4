//! Chats become text as the model's own template says, rendered as transformers renders it.

mod arguments;
mod clock;
mod filters;
mod float;
mod message;
mod methods;
mod python;
mod template;
mod tojson;
mod value;

pub use message::{Message, TemplateArguments};
pub use template::Template;

use super::error::ApiError;
use galaxy_model::{
    ModelDir, ModelError,
    chat::{ChatFiles, ChatTemplate},
    gguf_file,
    tokenizer::Tokenizer,
};
use message::{Form, Rendering};
use std::{collections::BTreeMap, path::Path};

/// A model's chat templates and tokenizer.
pub struct Chat {
    tokenizer: Tokenizer,
    /// The template called `default`, and the one for chats with tools, as far as the model has them.
    default: Option<Template>,
    tool_use: Option<Template>,
    /// What all its templates are called.
    names: Vec<String>,
}

impl Chat {
    /// Opens what a model directory, or a GGUF file, has for chats.
    ///
    /// # Errors
    /// When there is no tokenizer, or a file cannot be read.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        match gguf_file(path) {
            Some(file) => Self::read(ModelDir::open(&file)?.path()),
            None => Self::read(path),
        }
    }

    fn read(directory: &Path) -> Result<Self, ModelError> {
        let tokenizer = Tokenizer::open(directory)?;
        let ChatFiles { mut templates, tokens } = ChatFiles::open(directory)?;
        let names = templates.keys().cloned().collect();
        let mut take = |name| templates.remove(name).map(|file| read(file, &tokens)).transpose();
        Ok(Self { tokenizer, default: take("default")?, tool_use: take("tool_use")?, names })
    }

    /// The tokens of a chat to which the model is to answer.
    ///
    /// # Errors
    /// When there is no template, or it refuses the messages.
    pub fn tokens(
        &self,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<Vec<u32>, ApiError> {
        let text = self.text(messages, arguments)?;
        self.tokenizer.encode_alone(&text).map_err(|e| ApiError::bad(e.to_string()))
    }

    /// The text of such a chat, as the template has it.
    ///
    /// # Errors
    /// When there is no template, or it refuses the messages.
    pub fn text(
        &self,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<String, ApiError> {
        let for_tools = self.tool_use.as_ref().filter(|_| arguments.has_tools());
        match for_tools.or(self.default.as_ref()) {
            Some(template) => template.text(messages, arguments),
            None if self.names.is_empty() => Err(ApiError::bad(
                "the model has no chat template: have it continue a prompt (/v1/completions, galaxy generate)",
            )),
            None => Err(ApiError::bad(format!(
                "of the model's chat templates, {}, none is called default; put the one that you mean into \
                 chat_template.jinja of the model's directory",
                self.names.join(", ")
            ))),
        }
    }
}

impl Template {
    /// A chat as the model is to read it.
    ///
    /// Messages go to the template as they came, but for two things. Content in parts goes as one text to a
    /// template that does not look into parts. And where the template fails with the arguments of tool calls as
    /// text, in which OpenAI's API has them, they go as the object which that text says.
    ///
    /// # Errors
    /// When the template refuses it.
    pub fn text(
        &self,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<String, ApiError> {
        let has_parts = messages.iter().any(Message::has_parts);
        let has_text_arguments = messages.iter().any(Message::has_text_arguments);
        let mut unread = None;
        let mut refusal = None;
        for objects in [false, true] {
            for parts in [true, false] {
                if objects && !has_text_arguments || parts && !has_parts {
                    continue;
                }
                let rendering = Rendering::new(messages, arguments, Form { parts, objects })?;
                match rendering.text(self) {
                    Ok(text) if !parts || rendering.parts_were_read() => return Ok(text),
                    Ok(text) => unread = unread.or(Some(text)),
                    Err(error) => refusal = refusal.or(Some(error)),
                }
            }
        }
        match (unread, refusal) {
            (Some(text), _) => Ok(text),
            (None, Some(error)) => Err(error),
            (None, None) => Err(ApiError::bad("there are no messages")),
        }
    }
}

fn read(file: ChatTemplate, tokens: &BTreeMap<String, String>) -> Result<Template, ModelError> {
    let ChatTemplate { path, text } = file;
    Template::new(text, tokens.clone()).map_err(|error| ModelError::Tokenizer {
        path,
        problem: format!("its chat template: {error}"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use time::Date;

    /// Written for this test: what templates in the wild do with messages.
    const TURNS: &str = "\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {%- if message.role == 'assistant' and not loop.last %}
        {%- continue %}
    {%- endif %}
    {{- '[' + message.role.upper() + '] ' + message.content.strip() + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[ASSISTANT]' }}
    {%- if thinking is defined and thinking is false %}
        {{- ' at once' }}
    {%- endif %}
{%- endif %}
";

    fn chat(files: &[(&str, &str)]) -> Result<Chat, ModelError> {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-galaxy");
        let dir = tempfile::tempdir().unwrap();
        fs::copy(tiny.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        Chat::open(dir.path())
    }

    fn say(chat: &Chat, messages: &str, more: &str) -> Result<String, String> {
        let messages: Vec<Message> = serde_json::from_str(messages).unwrap();
        chat.text(&messages, &serde_json::from_str(more).unwrap()).map_err(|e| e.message)
    }

    const SPECIAL: &str =
        r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}"#;

    #[test]
    fn a_chat_is_rendered_with_the_template_of_the_model() {
        let chat =
            chat(&[("tokenizer_config.json", SPECIAL), ("chat_template.jinja", TURNS)]).unwrap();
        let messages = r#"[
            {"role": "system", "content": " be brief "}, {"role": "assistant", "content": "skipped"},
            {"role": "user", "content": [{"type": "text", "text": "who "}, {"type": "text", "text": "are you"}]}
        ]"#;
        let want = "<s>[SYSTEM] be brief</s>\n[USER] who are you</s>\n[ASSISTANT]";
        assert_eq!(say(&chat, messages, "{}").unwrap(), want);
        let more = r#"{"thinking": false}"#;
        assert_eq!(say(&chat, messages, more).unwrap(), format!("{want} at once"));
        let more = r#"{"add_generation_prompt": false}"#;
        let without = want.strip_suffix("[ASSISTANT]").unwrap();
        assert_eq!(say(&chat, messages, more).unwrap(), without);
        let error = say(&chat, r#"[{"role": "king", "content": "x"}]"#, "{}").unwrap_err();
        assert!(error.contains("no role king"), "{error}");
        let picture = r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#;
        let error = say(&chat, picture, "{}").unwrap_err();
        assert!(
            error.contains("messages[0].content[0] of type image_url is not supported"),
            "{error}"
        );
    }

    #[test]
    fn a_template_is_chosen_by_its_name() {
        let messages = r#"[{"role": "user", "content": "x"}]"#;
        let tools = r#"{"tools": []}"#;
        let both = r#"{"chat_template": [
            {"name": "rag", "template": "{% no %}"}, {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "default{{ bos_token }}"}]}"#;
        let both = chat(&[("tokenizer_config.json", both)]).unwrap();
        assert_eq!(say(&both, messages, "{}").unwrap(), "default");
        assert_eq!(say(&both, messages, tools).unwrap(), "tools");
        let rag = r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "b", "template": "b"}]}"#;
        let error =
            say(&chat(&[("tokenizer_config.json", rag)]).unwrap(), messages, "{}").unwrap_err();
        assert!(error.contains("b, rag, none is called default"), "{error}");
        let none = chat(&[]).unwrap();
        assert!(say(&none, messages, "{}").unwrap_err().contains("no chat template"));
        let broken = chat(&[("chat_template.jinja", "{% for %}")]);
        assert!(broken.err().unwrap().to_string().contains("chat template"));
    }

    #[test]
    fn malformed_messages_and_arguments_are_named_in_the_error() {
        let chat = chat(&[("chat_template.jinja", "{{ messages[0].content }}")]).unwrap();
        for (messages, more, says) in [
            ("[7]", "{}", "messages[0] takes an object, and not a number"),
            (r#"[{"content": "x"}]"#, "{}", "messages[0].role takes a text, and not nothing"),
            (r#"[{"role": 1}]"#, "{}", "messages[0].role takes a text, and not a number"),
            (
                r#"[{"role": "a"}, {"role": "a", "content": {}}]"#,
                "{}",
                "messages[1].content takes a text or a list",
            ),
            (
                r#"[{"role": "a", "content": [1]}]"#,
                "{}",
                "messages[0].content[0] takes an object with a type",
            ),
            (
                r#"[{"role": "a", "content": [{"type": "text"}]}]"#,
                "{}",
                "messages[0].content[0].text takes",
            ),
            (r#"[{"role": "a"}]"#, r#"{"messages": []}"#, "chat_template_kwargs.messages"),
            (
                r#"[{"role": "a"}]"#,
                r#"{"chat_template": "x"}"#,
                "chat_template_kwargs.chat_template",
            ),
            (
                r#"[{"role": "a"}]"#,
                r#"{"tools": {}}"#,
                "chat_template_kwargs.tools takes a list of objects",
            ),
            (r#"[{"role": "a"}]"#, r#"{"continue_final_message": 7}"#, "and not a number"),
            (r#"[{"role": "a"}]"#, r#"{"continue_final_message": true}"#, "no text as its content"),
            (
                r#"[{"role": "a", "content": "x"}]"#,
                r#"{"continue_final_message": true, "add_generation_prompt": true}"#,
                "exclude each other",
            ),
        ] {
            let error = say(&chat, messages, more).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let error = serde_json::from_str::<TemplateArguments>("[]").unwrap_err().to_string();
        assert!(error.contains("takes an object, and not a list"), "{error}");
    }

    #[test]
    fn tool_call_arguments_work_as_text_and_as_objects_in_templates() {
        let messages = r#"[{"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": \"<é>\"}"}}]}]"#;
        let call = "messages[0].tool_calls[0].function.arguments";
        for (template, want) in [
            (format!("{{{{ {call} }}}}"), r#"{"z": 1, "a": "<é>"}"#),
            (
                format!("{{% for k, v in {call} | items %}}{{{{ k }}}}={{{{ v }}}} {{% endfor %}}"),
                "z=1 a=<é> ",
            ),
            (
                format!("{{% for k, v in {call}.items() %}}{{{{ k }}}}={{{{ v }}}} {{% endfor %}}"),
                "z=1 a=<é> ",
            ),
        ] {
            let chat = chat(&[("chat_template.jinja", &template)]).unwrap();
            assert_eq!(say(&chat, messages, "{}").unwrap(), want);
        }
    }

    /// What transformers makes of our own templates, at one moment.
    #[test]
    fn rendered_chats_match_transformers() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/chat");
        let text = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
        let requests: BTreeMap<String, Request> =
            serde_json::from_str(&text("conversations.json")).unwrap();
        let rendered: BTreeMap<String, BTreeMap<String, Rendered>> =
            serde_json::from_str(&text("rendered.json")).unwrap();
        assert!(rendered.len() >= 12);
        let tokens = [
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
            ("pad_token", "<pad>"),
            ("image_token", "<image>"),
        ];
        let tokens: BTreeMap<_, _> =
            tokens.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        let clock = || {
            let date = Date::from_calendar_date(2027, time::Month::January, 3).unwrap();
            date.with_hms_micro(7, 8, 9, 4321).unwrap().assume_utc()
        };
        let mut wrong = Vec::new();
        for (name, chats) in &rendered {
            let template =
                Template::at(text(&format!("{name}.jinja")), tokens.clone(), clock).unwrap();
            for (kind, want) in chats {
                let request = &requests[kind];
                let have = template.text(&request.messages, &request.chat_template_kwargs);
                match (want, have.map_err(|error| error.message)) {
                    (Rendered::Text(want), Ok(have)) if *want == have => {}
                    (Rendered::Refused(true), Err(_)) => {}
                    (want, have) => wrong.push(format!("{name}, {kind}\n{want:?}\n{have:?}\n")),
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.concat());
    }

    #[derive(serde::Deserialize)]
    struct Request {
        messages: Vec<Message>,
        #[serde(default)]
        chat_template_kwargs: TemplateArguments,
    }

    #[derive(serde::Deserialize, Debug)]
    #[serde(rename_all = "lowercase")]
    enum Rendered {
        Text(String),
        Refused(bool),
    }

    #[test]
    fn an_endless_template_is_stopped() {
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let chat = chat(&[("chat_template.jinja", endless)]).unwrap();
        let error = say(&chat, r#"[{"role": "user", "content": "x"}]"#, "{}").unwrap_err();
        assert!(error.contains("fuel"), "{error}");
    }

    /// Each would take gigabytes, and long.
    #[test]
    fn a_template_that_would_take_too_much_memory_is_stopped() {
        let doubled = |start: &str, twice: &str, then: &str| {
            format!(
                "{{% set n = namespace(a={start}) %}}{{% for _ in range(40) %}}\
                 {{% set n.a = {twice} %}}{{% endfor %}}{then}"
            )
        };
        let lists = |then: &str| doubled("[1]", "[n.a, n.a]", then);
        let texts = |then: &str| doubled("'a b '", "n.a + n.a", then);
        let templates = [
            "{{ 'x' * 99999999 * 99 }}".to_owned(),
            "{% set t = 'x' * 99999999 %}{{ (t | upper) ~ (t | upper) ~ (t | upper) }}".to_owned(),
            lists("{{ n.a }}"),
            lists("{{ n.a[:] }}"),
            lists("{{ n.a * 1 }}"),
            lists("{{ n.a | string | length }}"),
            lists("{{ n.a | trim | length }}"),
            lists("{{ [n.a] | join | length }}"),
            lists("{{ n.a | indent | length }}"),
            lists("{{ n.a | tojson | length }}"),
            texts("{{ n.a | length }}"),
            "{% set t = 'x ' * 40000000 %}{{ t.split() | length }}".to_owned(),
            "{% set t = 'x ' * 40000000 %}{{ t.split(' ') | length }}".to_owned(),
            "{% set t = 'x\\n' * 40000000 %}{{ t.splitlines() | length }}".to_owned(),
        ];
        for template in templates {
            let chat = chat(&[("chat_template.jinja", &template)]).unwrap();
            let error = say(&chat, r#"[{"role": "user", "content": "x"}]"#, "{}").unwrap_err();
            let bounded = error.contains("fuel") || error.contains("too large");
            assert!(bounded, "{template}: {error}");
        }
    }
}
