//! Builds a tokenizer from all files of a directory, as `AutoTokenizer` of transformers does.

use super::class::Class;
use crate::{
    config::{Fields, short},
    error::ModelError,
    recognise,
    small_file::{MAX_JSON_BYTES, read_bounded},
};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use tokenizers::{AddedToken, PostProcessorWrapper, TruncationDirection};

/// The largest `tokenizer.json` that is read; the largest real ones have 35 MB.
const MAX_BYTES: u64 = 256 << 20;
/// The largest limit on tokens that counts: files write larger numbers where there is no limit.
const MAX_TOKENS: f64 = (1 << 24) as f64;
/// The special tokens with a name, in the order in which they are added.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A tokenizer, and the settings in its files.
pub(super) struct Settled {
    pub(super) inner: tokenizers::Tokenizer,
    /// The end at which texts are cut.
    pub(super) direction: TruncationDirection,
    /// Whether the model reads token types.
    pub(super) types: bool,
    pub(super) max_tokens: Option<u32>,
    /// Whether decoding removes spaces before punctuation.
    pub(super) clean_up: bool,
}

/// A special token in the two forms that files have it in: its text alone, or with how it is found in texts.
#[derive(Clone, PartialEq)]
enum Special {
    Text(String),
    Token(AddedToken),
}

impl Special {
    fn content(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Token(token) => &token.content,
        }
    }
}

/// Builds the tokenizer of a directory from all of its files.
pub(super) fn build(directory: &Path) -> Result<Settled, ModelError> {
    let path = directory.join("tokenizer.json");
    if !path.is_file() {
        let remedy = recognise::tokenizer_files(directory);
        return Err(ModelError::NoTokenizer { path: directory.to_owned(), remedy });
    }
    let bytes = read_bounded(&path, MAX_BYTES)?;
    let damaged = |problem: String| ModelError::Tokenizer { path: path.clone(), problem };
    let (config_path, config) = optional(directory, "tokenizer_config.json")?;
    let config = merged(directory, config)?;
    let fields = Fields::new(&config_path, &config)?;
    let (model_path, model) = optional(directory, "config.json")?;
    let model = Fields::new(&model_path, &model)?;
    let family = model.text(&["model_type"])?.unwrap_or_default();
    let byte_level = || {
        let text = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
        text("\"ByteLevel\"")
    };
    let class = Class::find(&fields, model.text(&["tokenizer_class"])?, family, byte_level)?;
    let named = named(&fields, class)?;
    let mut inner = match class {
        Class::Plain => tokenizers::Tokenizer::from_bytes(&bytes),
        _ => {
            let json = |source| ModelError::Json { path: path.clone(), source };
            let mut content: Map<String, Value> = serde_json::from_slice(&bytes).map_err(json)?;
            let unknown = named.iter().find(|token| token.0 == "unk_token");
            let unknown = unknown.map_or("None", |token| token.1.content());
            class.rebuild(&fields, &mut content, unknown)?;
            tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&content).map_err(json)?)
        }
    }
    .map_err(|error| damaged(error.to_string()))?;
    let extra = extra(&fields)?;
    let added = added(directory, (&path, &bytes), &fields, &named, &extra, class)?;
    add(&mut inner, &added, &named, &extra);
    if class == Class::Qwen2 {
        let all = named.iter().map(|token| &token.1).chain(&extra);
        let again: Vec<_> = all.map(|token| AddedToken::from(token.content(), true)).collect();
        inner.add_tokens(&again);
    }
    let token = |name: &'static str| {
        let found = named.iter().find(|token| token.0 == name).map(|token| token.1.content());
        let found = found.and_then(|text| Some((text.to_owned(), inner.token_to_id(text)?)));
        found.ok_or_else(|| fields.wrong(name, "is null, and every text begins or ends with it"))
    };
    if let Some(around) = class.around(&fields, token)? {
        let around: PostProcessorWrapper =
            serde_json::from_value(around).map_err(|error| damaged(error.to_string()))?;
        inner.with_post_processor(Some(around));
    }
    inner.set_encode_special_tokens(fields.flag("split_special_tokens", false)?);
    let of_file = inner.get_truncation().map_or(TruncationDirection::Right, |t| t.direction);
    let direction = match fields.text(&["truncation_side"])? {
        None => of_file,
        Some("right") => TruncationDirection::Right,
        Some("left") => TruncationDirection::Left,
        Some(other) => return Err(fields.unknown("truncation side", other, "left, right")),
    };
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|error| damaged(error.to_string()))?;
    Ok(Settled {
        direction,
        types: types(&fields, class)?,
        max_tokens: max_tokens(&fields)?,
        // With BPE, the reference leaves all spaces where they are.
        clean_up: fields.flag("clean_up_tokenization_spaces", false)?
            && !matches!(inner.get_model(), tokenizers::ModelWrapper::BPE(_)),
        inner,
    })
}

/// Parses a file that may be missing; it is an empty object then.
fn optional(directory: &Path, name: &str) -> Result<(PathBuf, Value), ModelError> {
    let path = directory.join(name);
    if !path.is_file() {
        return Ok((path, Value::Object(Map::new())));
    }
    let json = |source| ModelError::Json { path: path.clone(), source };
    let value = serde_json::from_slice(&read_bounded(&path, MAX_JSON_BYTES)?).map_err(json)?;
    Ok((path, value))
}

/// Adds `special_tokens_map.json` to the config, unless the config lists added tokens itself.
fn merged(directory: &Path, mut config: Value) -> Result<Value, ModelError> {
    let Some(object) = config.as_object_mut() else { return Ok(config) };
    // This is an older name of extra_special_tokens.
    if let Some(list) = object.remove("additional_special_tokens")
        && object.get("extra_special_tokens").is_none_or(Value::is_null)
    {
        object.insert("extra_special_tokens".to_owned(), list);
    }
    if object.contains_key("added_tokens_decoder") {
        return Ok(config);
    }
    let (_, special) = optional(directory, "special_tokens_map.json")?;
    let Value::Object(special) = special else { return Ok(config) };
    for (name, mut value) in special {
        if let Some(token) = value.as_object_mut()
            && name != "extra_special_tokens"
        {
            token.insert("special".to_owned(), Value::Bool(true));
        }
        let name = match name.as_str() {
            "additional_special_tokens" if object.contains_key("extra_special_tokens") => continue,
            "additional_special_tokens" => "extra_special_tokens".to_owned(),
            _ => name,
        };
        // The two lists are joined.
        if let Value::Array(more) = &value
            && let Some(Value::Array(list)) = object.get_mut(&name)
        {
            let new: Vec<_> = more.iter().filter(|&t| !list.contains(t)).cloned().collect();
            list.extend(new);
        } else {
            object.insert(name, value);
        }
    }
    Ok(config)
}

/// The special tokens with a name: those that transformers knows, and those that the files define.
fn named(fields: &Fields<'_>, class: Class) -> Result<Vec<(String, Special)>, ModelError> {
    let mut named = Vec::new();
    for name in NAMED {
        let found = fields.entries().find(|entry| entry.0 == name);
        let token = match found {
            Some((_, Value::Null)) => None,
            Some((_, value)) => Some(token(fields, name, value)?),
            None => {
                let default = class.special().iter().find(|special| special.0 == name);
                default.map(|special| Special::Text(special.1.to_owned()))
            }
        };
        let token = token.map(|token| match token {
            // This class strips the space before its mask.
            Special::Text(text) if class == Class::MpNet => {
                Special::Token(AddedToken::from(text, true).lstrip(name == "mask_token"))
            }
            token => token,
        });
        named.extend(token.map(|token| (name.to_owned(), token)));
    }
    for (name, value) in fields.entries() {
        let own = name.ends_with("_token") && !NAMED.contains(&name);
        if own && (value.is_string() || value.is_object()) {
            named.push((name.to_owned(), token(fields, name, value)?));
        }
    }
    if let Some(Value::Object(more)) = fields.get(&["extra_special_tokens"]).map(|found| found.1) {
        for (name, value) in more {
            named.push((name.clone(), token(fields, name, value)?));
        }
    }
    Ok(named)
}

/// The special tokens without a name.
fn extra(fields: &Fields<'_>) -> Result<Vec<Special>, ModelError> {
    match fields.get(&["extra_special_tokens"]) {
        None | Some((_, Value::Object(_))) => Ok(Vec::new()),
        Some((name, Value::Array(list))) => {
            list.iter().map(|value| token(fields, name, value)).collect()
        }
        Some((name, value)) => {
            Err(fields.wrong(name, format!("is {}: a list of tokens is wanted", short(value))))
        }
    }
}

/// Reads a token: a text, or an object with its text and how it is found in texts.
fn token(fields: &Fields<'_>, name: &str, value: &Value) -> Result<Special, ModelError> {
    let wrong = || fields.wrong(name, format!("is {}: a token is wanted", short(value)));
    match value {
        Value::String(text) => Ok(Special::Text(text.clone())),
        Value::Object(_) => added_token(value).map(Special::Token).ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

fn added_token(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str| match value.get(name) {
        None | Some(Value::Null) => Some(None),
        Some(value) => value.as_bool().map(Some),
    };
    let special = flag("special")?.unwrap_or(false);
    let token = AddedToken::from(value.get("content")?.as_str()?, special)
        .single_word(flag("single_word")?.unwrap_or(false))
        .lstrip(flag("lstrip")?.unwrap_or(false))
        .rstrip(flag("rstrip")?.unwrap_or(false))
        .normalized(flag("normalized")?.unwrap_or(!special));
    Some(token)
}

/// The tokens that the files of `directory` add to the vocabulary, sorted by id; `path` is `tokenizer.json`.
fn added(
    directory: &Path,
    (path, bytes): (&Path, &[u8]),
    fields: &Fields<'_>,
    named: &[(String, Special)],
    extra: &[Special],
    class: Class,
) -> Result<Vec<AddedToken>, ModelError> {
    let mut added = std::collections::BTreeMap::new();
    if let Some(decoder) = fields.inner(&["added_tokens_decoder"])? {
        for (id, value) in decoder.entries() {
            let token = id.parse::<u32>().ok().zip(added_token(value));
            let (id, token) = token.ok_or_else(|| {
                let problem = format!("has {} for {id:?}: a token is wanted", short(value));
                fields.wrong("added_tokens_decoder", problem)
            })?;
            added.insert(id, token);
        }
        return Ok(added.into_values().collect());
    }
    let (older, list) = optional(directory, "added_tokens.json")?;
    let older = Fields::new(&older, &list)?;
    for (text, id) in older.entries() {
        let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) else {
            return Err(older.wrong(text, format!("is {}: an id is wanted", short(id))));
        };
        let mut all = named.iter().map(|token| &token.1).chain(extra);
        let special = all.any(|token| token.content() == text);
        added.insert(id, AddedToken::from(text, special));
    }
    // A class that rebuilds the tokenizer would lose them; a plain one has them already.
    if class != Class::Plain || !added.is_empty() {
        #[derive(serde::Deserialize)]
        struct Content {
            #[serde(default)]
            added_tokens: Vec<Value>,
        }
        let json = |source| ModelError::Json { path: path.to_owned(), source };
        let content: Content = serde_json::from_slice(bytes).map_err(json)?;
        for value in content.added_tokens {
            let id = value.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
            if let Some((id, token)) = id.zip(added_token(&value)) {
                added.insert(id, token);
            }
        }
    }
    Ok(added.into_values().collect())
}

/// Adds the tokens that are not there already, as transformers does.
fn add(
    inner: &mut tokenizers::Tokenizer,
    added: &[AddedToken],
    named: &[(String, Special)],
    extra: &[Special],
) {
    let have = inner.get_added_tokens_decoder();
    let there = |token: &&AddedToken| !have.values().any(|known| same(known, token));
    let mut new: Vec<Special> =
        added.iter().filter(there).map(|token| Special::Token(token.clone())).collect();
    let known = |text: &str| {
        have.values().any(|known| known.content == text)
            || added.iter().any(|token| token.content == text)
    };
    let all = || named.iter().map(|token| &token.1).chain(extra);
    // A token that the files add counts in their form of it, whatever else names it.
    let formed = |token: &Special| {
        let found = added.iter().find(|known| known.content == token.content());
        found.map_or_else(|| token.clone(), |found| Special::Token(found.clone()))
    };
    for token in all().map(formed) {
        if !known(token.content()) && !new.contains(&token) {
            new.push(token);
        }
    }
    let tokens: Vec<AddedToken> = new
        .into_iter()
        .map(|token| match token {
            Special::Text(text) => AddedToken::from(text, true),
            Special::Token(mut token) => {
                token.special |= named.iter().any(|named| named.1.content() == token.content);
                token
            }
        })
        .collect();
    if !tokens.is_empty() {
        inner.add_tokens(&tokens);
    }
}

fn same(a: &AddedToken, b: &AddedToken) -> bool {
    let of = |t: &AddedToken| (t.single_word, t.lstrip, t.rstrip, t.normalized, t.special);
    a.content == b.content && of(a) == of(b)
}

fn types(fields: &Fields<'_>, class: Class) -> Result<bool, ModelError> {
    match fields.get(&["model_input_names"]) {
        None => Ok(class.gives_types()),
        Some((_, Value::Array(names))) => Ok(names.iter().any(|name| name == "token_type_ids")),
        Some((name, value)) => {
            Err(fields.wrong(name, format!("is {}: a list of names is wanted", short(value))))
        }
    }
}

/// The most tokens of a text, if the files say. An older name of the field is max_len.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ModelError> {
    let most = fields.positive_or_none(&["model_max_length", "max_len"])?;
    match most.filter(|most| *most <= MAX_TOKENS) {
        Some(most) if most.fract() == 0.0 => Ok(Some(most as u32)),
        Some(most) => {
            Err(fields.wrong("model_max_length", format!("is {most}: a whole number is wanted")))
        }
        None => Ok(None),
    }
}
