//! Chats become text as the model's own template says.

use super::error::ApiError;
use galaxy_model::{ModelError, chat::ChatFiles, tokenizer::Tokenizer};
use minijinja::{
    Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Serde,
};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Deserialize;
use serde_json::Map;
use std::path::Path;

/// Steps that a template may take: a thousand messages take some hundred thousand.
const FUEL: u64 = 20_000_000;
const TEMPLATE: &str = "chat";

/// A model's chat template and tokenizer.
pub struct Chat {
    tokenizer: Tokenizer,
    /// None where the model has no template.
    template: Option<Template>,
}

/// A chat template, and the tokens that stand in it.
pub struct Template {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A message of a chat.
#[derive(Deserialize, Debug)]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Content,
    /// What else templates may read, like `name`.
    #[serde(flatten)]
    more: Map<String, serde_json::Value>,
}

#[derive(Deserialize, Debug, Default)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
    #[default]
    None,
}

#[derive(Deserialize, Debug)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
}

impl Chat {
    /// Opens what a model directory has for chats.
    ///
    /// # Errors
    /// When there is no tokenizer, or a file cannot be read.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let tokenizer = Tokenizer::open(directory)?;
        let ChatFiles { template, bos, eos } = ChatFiles::open(directory)?;
        let template = template.map(|(path, template)| {
            Template::new(template, bos, eos).map_err(|error| ModelError::Tokenizer {
                path,
                problem: format!("its chat template: {error}"),
            })
        });
        Ok(Self { tokenizer, template: template.transpose()? })
    }

    /// The tokens of a chat to which the model is to answer.
    ///
    /// # Errors
    /// When there is no template, or it refuses the messages.
    pub fn tokens(
        &self,
        messages: Vec<Message>,
        more: &Map<String, serde_json::Value>,
    ) -> Result<Vec<u32>, ApiError> {
        let text = self.text(messages, more)?;
        self.tokenizer.encode_alone(&text).map_err(|e| ApiError::bad(e.to_string()))
    }

    fn text(
        &self,
        messages: Vec<Message>,
        more: &Map<String, serde_json::Value>,
    ) -> Result<String, ApiError> {
        let none = || ApiError::bad("the model has no chat template; use /v1/completions");
        self.template.as_ref().ok_or_else(none)?.text(messages, more)
    }
}

impl Template {
    /// Reads a template, which is Jinja; `bos` and `eos` are what begins and ends texts.
    ///
    /// # Errors
    /// When it is not.
    pub fn new(template: String, bos: String, eos: String) -> Result<Self, Error> {
        Ok(Self { environment: environment(template)?, bos, eos })
    }

    /// A chat as the model is to read it, with `more` for the template.
    ///
    /// # Errors
    /// When the template refuses it.
    pub fn text(
        &self,
        messages: Vec<Message>,
        more: &Map<String, serde_json::Value>,
    ) -> Result<String, ApiError> {
        let messages = messages.into_iter().map(Message::plain).collect::<Result<Vec<_>, _>>()?;
        let given = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        // The first that has a name is the one.
        let all = context! { ..given, ..Value::from(Serde(more)) };
        self.environment
            .get_template(TEMPLATE)
            .and_then(|template| template.render(all))
            .map_err(|e| ApiError::bad(format!("the model's chat template refuses this: {e}")))
    }
}

impl Message {
    /// With its content as one text, as templates expect it.
    fn plain(self) -> Result<serde_json::Value, ApiError> {
        let content = match self.content {
            Content::Text(text) => text.into(),
            Content::None => serde_json::Value::Null,
            Content::Parts(parts) => {
                if let Some(part) = parts.iter().find(|part| part.kind != "text") {
                    return Err(ApiError::unsupported(&format!("content of type {}", part.kind)));
                }
                parts.into_iter().map(|part| part.text).collect::<String>().into()
            }
        };
        let mut message = self.more;
        message.insert("role".to_owned(), self.role.into());
        message.insert("content".to_owned(), content);
        Ok(message.into())
    }
}

/// As the templates' home, Hugging Face's transformers, sets it up.
fn environment(template: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_template_owned(TEMPLATE, template)?;
    Ok(environment)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

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
        let messages = serde_json::from_str(messages).unwrap();
        chat.text(messages, &serde_json::from_str(more).unwrap()).map_err(|e| e.message)
    }

    const SPECIAL: &str =
        r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}"#;

    #[test]
    fn a_template_says_how_a_chat_is_written() {
        let chat =
            chat(&[("tokenizer_config.json", SPECIAL), ("chat_template.jinja", TURNS)]).unwrap();
        let messages = r#"[
            {"role": "system", "content": " be brief "}, {"role": "assistant", "content": "skipped"},
            {"role": "user", "content": [{"type": "text", "text": "who "}, {"type": "text", "text": "are you"}]}
        ]"#;
        let want = "<s>[SYSTEM] be brief</s>\n[USER] who are you</s>\n[ASSISTANT]";
        assert_eq!(say(&chat, messages, "{}").unwrap(), want);
        let more = r#"{"thinking": false, "messages": [], "add_generation_prompt": false}"#;
        assert_eq!(say(&chat, messages, more).unwrap(), format!("{want} at once"));
        let error = say(&chat, r#"[{"role": "king", "content": "x"}]"#, "{}").unwrap_err();
        assert!(error.contains("no role king"), "{error}");
        let picture = r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#;
        let error = say(&chat, picture, "{}").unwrap_err();
        assert!(error.contains("content of type image_url is not supported"), "{error}");
    }

    #[test]
    fn a_template_is_found_where_models_have_it() {
        let messages = r#"[{"role": "user", "content": "x"}]"#;
        let one = r#"{"chat_template": "one {{ messages|length }}"}"#;
        let named = r#"{"chat_template": [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": "named{{ bos_token }}"}
        ]}"#;
        for (config, template, want) in
            [(one, None, "one 1"), (named, None, "named"), (one, Some("newer"), "newer")]
        {
            let template = template.map(|text| ("chat_template.jinja", text));
            let files: Vec<_> =
                [("tokenizer_config.json", config)].into_iter().chain(template).collect();
            assert_eq!(say(&chat(&files).unwrap(), messages, "{}").unwrap(), want);
        }
        let none = chat(&[]).unwrap();
        assert!(say(&none, messages, "{}").unwrap_err().contains("no chat template"));
        let broken = chat(&[("chat_template.jinja", "{% for %}")]);
        assert!(broken.err().unwrap().to_string().contains("chat template"));
    }

    #[test]
    fn a_template_that_does_not_end_is_ended() {
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let chat = chat(&[("chat_template.jinja", endless)]).unwrap();
        let error = say(&chat, r#"[{"role": "user", "content": "x"}]"#, "{}").unwrap_err();
        assert!(error.contains("fuel"), "{error}");
    }
}
