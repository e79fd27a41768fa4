//! What a model directory has for chats.

use crate::{error::ModelError, store::read_bounded};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Templates have some kilobytes, and a list of all special tokens some hundred.
const MAX_BYTES: u64 = 16 << 20;

/// How a model wants its chats written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ChatFiles {
    /// Its template, which is Jinja, and the file that it stands in; none where the model has no chats.
    pub template: Option<(PathBuf, String)>,
    /// The text of the token that begins texts; empty where there is none.
    pub bos: String,
    /// The text of the token that ends them; empty where there is none.
    pub eos: String,
}

/// What of `tokenizer_config.json` is read.
#[derive(Deserialize, Default)]
struct Config {
    chat_template: Option<Templates>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
}

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

#[derive(Deserialize)]
#[serde(untagged)]
enum Special {
    Text(String),
    Token { content: String },
}

impl ChatFiles {
    /// Reads `chat_template.jinja` and `tokenizer_config.json`, as far as they are there. Where both have
    /// a template, the first, which is the newer place, has the one.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let path = directory.join("tokenizer_config.json");
        let wrong = |problem: String| ModelError::Tokenizer { path: path.clone(), problem };
        let config: Config = match path.exists() {
            true => serde_json::from_slice(&read_bounded(&path, MAX_BYTES)?)
                .map_err(|e| wrong(e.to_string()))?,
            false => Config::default(),
        };
        let newer = directory.join("chat_template.jinja");
        let template = if newer.exists() {
            let text = String::from_utf8(read_bounded(&newer, MAX_BYTES)?);
            let text = text.map_err(|e| ModelError::Tokenizer {
                path: newer.clone(),
                problem: e.to_string(),
            })?;
            Some((newer, text))
        } else {
            let template = config.chat_template.and_then(|templates| match templates {
                Templates::One(template) => Some(template),
                Templates::Named(all) => {
                    all.into_iter().find(|t| t.name == "default").map(|t| t.template)
                }
            });
            template.map(|template| (path, template))
        };
        let text = |token: Option<Special>| match token {
            Some(Special::Text(text) | Special::Token { content: text }) => text,
            None => String::new(),
        };
        Ok(Self { template, bos: text(config.bos_token), eos: text(config.eos_token) })
    }
}
