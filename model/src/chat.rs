//! What a model directory has for chats: its templates, and the special tokens that stand in them.

use crate::{error::ModelError, small_file::read_bounded};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The largest file that is read: templates have some kilobytes, and a list of all special tokens some
/// hundred.
const MAX_BYTES: u64 = 16 << 20;
/// How many templates of `additional_chat_templates` are read at most.
const MAX_TEMPLATES: usize = 64;
/// The special tokens that every tokenizer may have.
const STANDARD: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The chat templates of a model, and the special tokens that they may name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChatFiles {
    /// The model's templates by name: empty where it has no chats. A model with a single template calls it `default`.
    pub templates: BTreeMap<String, ChatTemplate>,
    /// The texts of the model's special tokens, by the names that templates call them, like `bos_token`.
    pub tokens: BTreeMap<String, String>,
}

/// A chat template, which is Jinja, and the file in which it stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChatTemplate {
    /// The file that the template was read from.
    pub path: PathBuf,
    /// The template itself, in Jinja.
    pub text: String,
}

/// Chat templates in the two forms that JSON files have them in: a single text, or a list of named ones.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl ChatFiles {
    /// Reads the templates and the special tokens of a model directory, as transformers does.
    ///
    /// Templates that have files of their own, `chat_template.jinja` and `additional_chat_templates/*.jinja`,
    /// come before those of `tokenizer_config.json`, and these before the one of `chat_template.json`.
    ///
    /// # Errors
    /// When a file cannot be read, or is not what it should be.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let path = directory.join("tokenizer_config.json");
        let mut config = object(&path)?.unwrap_or_default();
        let mut templates = own_files(directory)?;
        if templates.is_empty() {
            templates = named(&path, config.remove("chat_template"))?;
        }
        if templates.is_empty() {
            let path = directory.join("chat_template.json");
            let mut legacy = object(&path)?.unwrap_or_default();
            templates = named(&path, legacy.remove("chat_template"))?;
        }
        // Newer models have everything in the one file, and then the other is not looked at.
        let map = match config.contains_key("added_tokens_decoder") {
            true => None,
            false => object(&directory.join("special_tokens_map.json"))?,
        };
        Ok(Self { templates, tokens: special_tokens(&config, map.as_ref()) })
    }
}

/// The templates that are files of their own.
fn own_files(directory: &Path) -> Result<BTreeMap<String, ChatTemplate>, ModelError> {
    let mut templates = BTreeMap::new();
    let extra = directory.join("additional_chat_templates");
    for entry in fs::read_dir(&extra).into_iter().flatten().flatten().take(MAX_TEMPLATES) {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "jinja")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            templates.insert(name.to_owned(), text(path.clone())?);
        }
    }
    let default = directory.join("chat_template.jinja");
    if default.exists() {
        templates.insert("default".to_owned(), text(default)?);
    }
    Ok(templates)
}

fn text(path: PathBuf) -> Result<ChatTemplate, ModelError> {
    let text = String::from_utf8(read_bounded(&path, MAX_BYTES)?);
    match text {
        Ok(text) => Ok(ChatTemplate { path, text }),
        Err(error) => Err(ModelError::Tokenizer { path, problem: error.to_string() }),
    }
}

/// The templates under `chat_template` of a JSON file.
fn named(path: &Path, value: Option<Value>) -> Result<BTreeMap<String, ChatTemplate>, ModelError> {
    let template = |text| ChatTemplate { path: path.to_owned(), text };
    match value {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(value) => match Templates::deserialize(value) {
            Ok(Templates::One(text)) => Ok([("default".to_owned(), template(text))].into()),
            Ok(Templates::Named(all)) => {
                Ok(all.into_iter().map(|named| (named.name, template(named.template))).collect())
            }
            Err(_) => Err(ModelError::Tokenizer {
                path: path.to_owned(),
                problem: "chat_template is neither a text nor a list of {name, template}"
                    .to_owned(),
            }),
        },
    }
}

/// The object that a JSON file holds; none where there is no such file.
fn object(path: &Path) -> Result<Option<Map<String, Value>>, ModelError> {
    if !path.exists() {
        return Ok(None);
    }
    let wrong = |problem| ModelError::Tokenizer { path: path.to_owned(), problem };
    let bytes = read_bounded(path, MAX_BYTES)?;
    serde_json::from_slice(&bytes).map(Some).map_err(|error| wrong(error.to_string()))
}

/// The special tokens of `tokenizer_config.json` and, in `map`, of `special_tokens_map.json`: the standard
/// ones, whatever else has a name that ends with `_token`, and those that `extra_special_tokens` names.
fn special_tokens(
    config: &Map<String, Value>,
    map: Option<&Map<String, Value>>,
) -> BTreeMap<String, String> {
    let mut tokens = BTreeMap::new();
    let mut add = |name: &str, value: &Value| match token_text(value) {
        Some(text) => drop(tokens.insert(name.to_owned(), text.to_owned())),
        // A token that is null is not there.
        None if value.is_null() => drop(tokens.remove(name)),
        None => {}
    };
    let is_standard = |name: &str| STANDARD.contains(&name);
    let ours = |name: &str| name.ends_with("_token") && !is_standard(name);
    // The later ones win: the map has the last word on standard tokens, and the first on others.
    let of_map = || map.into_iter().flatten();
    of_map().filter(|(name, _)| ours(name)).for_each(|(name, value)| add(name, value));
    config
        .iter()
        .filter(|(name, _)| is_standard(name) || ours(name))
        .for_each(|(name, value)| add(name, value));
    of_map().filter(|(name, _)| is_standard(name)).for_each(|(name, value)| add(name, value));
    for extra in [Some(config), map].into_iter().flatten() {
        let named = extra.get("extra_special_tokens").and_then(Value::as_object);
        named.into_iter().flatten().for_each(|(name, value)| add(name, value));
    }
    tokens
}

/// A token's text. Files have it as a string, or as an object with the text and how the token is found in texts.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn open(files: &[(&str, &str)]) -> Result<ChatFiles, String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        ChatFiles::open(dir.path()).map_err(|error| error.to_string())
    }

    fn texts(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let templates = open(files).unwrap().templates;
        templates.into_iter().map(|(name, template)| (name, template.text)).collect()
    }

    #[test]
    fn chat_templates_are_found_in_every_file_that_may_have_them() {
        let own = ("chat_template.jinja", "own");
        let tools = ("additional_chat_templates/tool_use.jinja", "tools");
        let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
        let list = (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
        );
        let legacy = ("chat_template.json", r#"{"chat_template": "legacy"}"#);
        let want = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect()
        };
        assert_eq!(texts(&[]), []);
        assert_eq!(texts(&[own, config, legacy]), want(&[("default", "own")]));
        assert_eq!(texts(&[own, tools]), want(&[("default", "own"), ("tool_use", "tools")]));
        assert_eq!(texts(&[tools, config]), want(&[("tool_use", "tools")]));
        assert_eq!(texts(&[config, legacy]), want(&[("default", "config")]));
        assert_eq!(texts(&[list]), want(&[("default", "d"), ("rag", "r")]));
        assert_eq!(texts(&[legacy]), want(&[("default", "legacy")]));
        let wrong = open(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)]).unwrap_err();
        assert!(wrong.contains("chat_template is neither a text nor a list"), "{wrong}");
    }

    #[test]
    fn special_tokens_are_read_from_tokenizer_config_and_token_map() {
        let config = (
            "tokenizer_config.json",
            r#"{"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "pad_token": null,
                "unk_token": "<u>", "image_token": "<image>", "audio_token": "<a>", "add_bos_token": true,
                "additional_special_tokens": ["<x>"], "extra_special_tokens": {"boi": "<boi>"}}"#,
        );
        let map = (
            "special_tokens_map.json",
            r#"{"eos_token": {"content": "<end>", "lstrip": false}, "unk_token": null, "audio_token": "<b>",
                "video_token": "<v>"}"#,
        );
        let tokens = |files: &[(&str, &str)]| -> Vec<String> {
            let tokens = open(files).unwrap().tokens;
            tokens.into_iter().map(|(name, text)| format!("{name}={text}")).collect()
        };
        let common = ["audio_token=<a>", "boi=<boi>", "bos_token=<s>"];
        let alone = ["eos_token=</s>", "image_token=<image>", "unk_token=<u>"];
        assert_eq!(tokens(&[config]), [common, alone].concat());
        let both = ["eos_token=<end>", "image_token=<image>", "video_token=<v>"];
        assert_eq!(tokens(&[config, map]), [common, both].concat());
        let newer = config.1.replacen('{', r#"{"added_tokens_decoder": {}, "#, 1);
        let newer = ("tokenizer_config.json", &*newer);
        assert_eq!(tokens(&[newer, map]), [common, alone].concat());
    }
}
