//! Reads the files of a sentence-transformers directory.

use super::{
    SentenceConfig,
    layers::{Layer, MAX_VALUES},
    pooling::PoolingMode,
    table::{MODEL_ARGUMENTS, MODULE, POOLING, SETTINGS, TRANSFORMER, json},
};
use crate::{
    config::{Fields, short},
    error::ModelError,
    fields::{Table, check},
    files::{CONFIG, MODULES, SENTENCE_CONFIG, TRANSFORMER_CONFIGS},
    warning::Warning,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

const MAX_TOKENS: u32 = 1 << 24;
/// The most modules and prompts of a model; far above any that is real.
const MAX_ENTRIES: usize = 1024;
const KNOWN: &str = "Transformer, Pooling, Dense, LayerNorm, Normalize, Dropout";

/// A module that `modules.json` lists.
pub(super) struct Module {
    /// The last part of the name of its class.
    pub(super) kind: String,
    /// The whole name of its class.
    full: String,
    pub(super) place: PathBuf,
}

/// The settings of the first module, for texts.
#[derive(Default)]
pub(super) struct Transformer {
    pub(super) max_tokens: Option<u32>,
    pub(super) lower_case: bool,
}

/// The settings in `config_sentence_transformers.json`.
#[derive(Default)]
pub(super) struct Settings {
    /// The class that reads the model; `None` in older files.
    pub(super) model_type: Option<String>,
    pub(super) prompts: BTreeMap<String, String>,
    pub(super) default_prompt: Option<String>,
    dimensions: Option<u32>,
}

/// The directory of the model's own files: older versions of sentence-transformers put them into a directory inside.
pub(crate) fn model_place(root: &Path) -> PathBuf {
    let listed = || {
        let modules = modules(root).ok()??;
        let first = modules.into_iter().next().filter(|first| first.kind == "Transformer")?;
        Some(first.place).filter(|place| place.is_dir())
    };
    listed().unwrap_or_else(|| root.to_owned())
}

/// Reads all settings of a directory, for hidden states of `hidden` values where that is known.
pub(crate) fn read(root: &Path, hidden: Option<u32>) -> Result<SentenceConfig, ModelError> {
    let Some(modules) = modules(root)? else { return plain(root) };
    let path = root.join(MODULES);
    let wrong = |problem: String| ModelError::Field {
        path: path.clone(),
        field: "modules".to_owned(),
        problem,
    };
    let settings = settings(root)?;
    if let Some(other) = settings.model_type.filter(|kind| kind != "SentenceTransformer") {
        let problem = format!(
            "is {}: only a SentenceTransformer gives vectors of texts, and a CrossEncoder ranks them",
            short(&Value::String(other))
        );
        let path = root.join(SENTENCE_CONFIG);
        return Err(ModelError::Field { path, field: "model_type".to_owned(), problem });
    }
    let mut sentence = SentenceConfig {
        prompts: settings.prompts,
        default_prompt: settings.default_prompt,
        dimensions: settings.dimensions,
        ..SentenceConfig::default()
    };
    let mut modules = modules.into_iter();
    match modules.next() {
        Some(first) if first.kind == "Transformer" => {
            let transformer = transformer(&first.place)?;
            sentence.max_tokens = transformer.max_tokens;
            sentence.lower_case = transformer.lower_case;
        }
        Some(first) => return Err(unknown(&path, &first)),
        None => return Err(wrong("is empty: a Transformer and a Pooling are wanted".to_owned())),
    }
    // The number of values of the vector so far; none before it is pooled.
    let mut width = None;
    let mut pooled = false;
    for module in modules {
        if module.kind == "Pooling" && !pooled {
            let file = module.place.join(CONFIG);
            (sentence.pooling, sentence.include_prompt) = pooling(&file, hidden)?;
            width = hidden.map(|hidden| hidden.saturating_mul(sentence.pooling.len() as u32));
            pooled = true;
            continue;
        }
        let layer = Layer::read(&module.kind, &module.place, width);
        let known = layer.is_some() || ["Transformer", "Pooling"].contains(&module.kind.as_str());
        let layer = match layer.filter(|_| pooled) {
            Some(layer) => layer?,
            None if known => {
                let problem = format!(
                    "has {} out of order: first comes a Transformer, then a Pooling, then what \
                     stands on vectors",
                    module.kind
                );
                return Err(wrong(problem));
            }
            None => return Err(unknown(&path, &module)),
        };
        width = width.map(|width| layer.as_ref().map_or(width, |layer| layer.width(width)));
        sentence.layers.extend(layer);
    }
    if !pooled {
        return Err(wrong("has no Pooling, and so no vector of a text".to_owned()));
    }
    Ok(sentence)
}

/// The defaults for a model without modules: a causal one takes its last row, any other the mean.
fn plain(root: &Path) -> Result<SentenceConfig, ModelError> {
    let path = root.join(CONFIG);
    if !path.is_file() {
        return Ok(SentenceConfig::default());
    }
    let value = json(&path)?;
    let name = value["architectures"][0].as_str().unwrap_or_default();
    let causal = name.ends_with("ForCausalLM") && value["is_causal"] != Value::Bool(false);
    let mode = if causal { PoolingMode::LastToken } else { PoolingMode::Mean };
    Ok(SentenceConfig { pooling: vec![mode], ..SentenceConfig::default() })
}

/// The modules of a model in their order; `None` without `modules.json`.
pub(super) fn modules(root: &Path) -> Result<Option<Vec<Module>>, ModelError> {
    let path = root.join(MODULES);
    if !path.exists() {
        return Ok(None);
    }
    let value = json(&path)?;
    let wrong = |problem: String| ModelError::Field {
        path: path.clone(),
        field: "modules".to_owned(),
        problem,
    };
    let list = value.as_array().ok_or_else(|| wrong("is missing: a list is wanted".to_owned()))?;
    if list.len() > MAX_ENTRIES {
        return Err(wrong(format!("has {} entries; at most {MAX_ENTRIES} are read", list.len())));
    }
    let module = |value: &Value| {
        let fields = Fields::new(&path, value)?;
        let full = fields.text(&["type"])?.unwrap_or_default();
        let kind = full.rsplit('.').next().unwrap_or(full).to_owned();
        let place = module_place(root, &fields)?;
        Ok(Module { kind, full: full.to_owned(), place })
    };
    list.iter().map(module).collect::<Result<_, _>>().map(Some)
}

pub(super) fn unknown(path: &Path, module: &Module) -> ModelError {
    ModelError::Unknown {
        path: path.to_owned(),
        what: "module",
        found: module.full.clone(),
        known: KNOWN.to_owned(),
    }
}

/// The directory of a module, inside the model's.
fn module_place(directory: &Path, fields: &Fields<'_>) -> Result<PathBuf, ModelError> {
    let inner = Path::new(fields.text(&["path"])?.unwrap_or_default());
    if inner.components().all(|c| matches!(c, Component::Normal(_))) {
        Ok(if inner.as_os_str().is_empty() { directory.to_owned() } else { directory.join(inner) })
    } else {
        Err(fields.wrong("path", format!("is {inner:?}: it must lie inside the directory")))
    }
}

/// Reads the first config of a Transformer module that is not empty.
pub(super) fn transformer(place: &Path) -> Result<Transformer, ModelError> {
    let Some((path, value)) = transformer_file(place)? else { return Ok(Transformer::default()) };
    let fields = Fields::new(&path, &value)?;
    check(&fields, &[TRANSFORMER])?;
    check_modalities(&fields)?;
    for names in [&["model_args", "model_kwargs"], &["config_args", "config_kwargs"]] {
        if let Some(inner) = fields.inner(names)? {
            only(&inner, names[0], MODEL_ARGUMENTS.iter().map(|known| known.0))?;
        }
    }
    let mut max_tokens = fields.count_or_none(&["max_seq_length"], MAX_TOKENS)?;
    if let Some(inner) = fields.inner(&["tokenizer_args", "processor_kwargs"])? {
        let needless = ["trust_remote_code", "use_fast", "padding_side"];
        only(&inner, "tokenizer_args", ["model_max_length"].into_iter().chain(needless))?;
        max_tokens = inner.count_or_none(&["model_max_length"], MAX_TOKENS)?.or(max_tokens);
    }
    Ok(Transformer { max_tokens, lower_case: fields.flag("do_lower_case", false)? })
}

/// The path and content of the first config of a Transformer module that is not empty.
fn transformer_file(place: &Path) -> Result<Option<(PathBuf, Value)>, ModelError> {
    for name in TRANSFORMER_CONFIGS {
        let path = place.join(name);
        if path.is_file() {
            let value = json(&path)?;
            if value.as_object().is_none_or(|object| !object.is_empty()) {
                return Ok(Some((path, value)));
            }
        }
    }
    Ok(None)
}

/// Refuses a model whose texts are rendered as messages of a chat, or whose output is not that of the last layer.
fn check_modalities(fields: &Fields<'_>) -> Result<(), ModelError> {
    let Some(modalities) = fields.inner(&["modality_config"])? else { return Ok(()) };
    let refuse = |value: &Value, remedy| ModelError::Unsupported {
        path: fields.path.to_owned(),
        field: "modality_config",
        value: short(value),
        remedy,
    };
    if let Some((_, message)) = modalities.get(&["message"]) {
        return Err(refuse(message, "texts are not rendered as messages of a chat"));
    }
    let Some(text) = modalities.inner(&["text"])? else { return Ok(()) };
    for (name, known) in
        [("method", &["forward"][..]), ("method_output_name", &["last_hidden_state", "logits"])]
    {
        if let Some((_, value)) = text.get(&[name])
            && !value.as_str().is_some_and(|text| known.contains(&text))
        {
            return Err(refuse(value, "the output of the last layer is pooled, and no other"));
        }
    }
    Ok(())
}

/// Refuses an object with fields besides the known ones.
fn only(
    inner: &Fields<'_>,
    field: &'static str,
    known: impl Iterator<Item = &'static str> + Clone,
) -> Result<(), ModelError> {
    let other = inner.entries().find(|(name, _)| !known.clone().any(|known| known == *name));
    match other {
        None => Ok(()),
        Some((name, value)) => Err(ModelError::Unsupported {
            path: inner.path.to_owned(),
            field,
            value: format!("{{{name:?}: {}}}", short(value)),
            remedy: "say it in the model's own config.json or tokenizer_config.json",
        }),
    }
}

pub(super) fn settings(root: &Path) -> Result<Settings, ModelError> {
    let path = root.join(SENTENCE_CONFIG);
    if !path.is_file() {
        return Ok(Settings::default());
    }
    let value = json(&path)?;
    let fields = Fields::new(&path, &value)?;
    check(&fields, &[SETTINGS])?;
    let mut prompts = BTreeMap::new();
    for (name, text) in fields.inner(&["prompts"])?.iter().flat_map(Fields::entries) {
        let text = match text {
            Value::Null => "",
            Value::String(text) => text,
            other => {
                let problem = format!("has {} for {name:?}: text is wanted", short(other));
                return Err(fields.wrong("prompts", problem));
            }
        };
        if prompts.len() == MAX_ENTRIES {
            let problem = format!("has too many entries: at most {MAX_ENTRIES} are read");
            return Err(fields.wrong("prompts", problem));
        }
        prompts.insert(name.to_owned(), text.to_owned());
    }
    let default_prompt = fields.text(&["default_prompt_name"])?.map(str::to_owned);
    if let Some(name) = default_prompt.as_ref().filter(|name| !prompts.contains_key(*name)) {
        let problem = format!("is {name:?}, which prompts lacks");
        return Err(fields.wrong("default_prompt_name", problem));
    }
    Ok(Settings {
        model_type: fields.text(&["model_type"])?.map(str::to_owned),
        prompts,
        default_prompt,
        dimensions: fields.count_or_none(&["truncate_dim"], MAX_VALUES)?,
    })
}

/// Reads the modes of a Pooling, and whether it pools prompts.
fn pooling(path: &Path, hidden: Option<u32>) -> Result<(Vec<PoolingMode>, bool), ModelError> {
    let value = json(path)?;
    let fields = Fields::new(path, &value)?;
    check(&fields, &[POOLING])?;
    let names = &["embedding_dimension", "word_embedding_dimension"];
    if let (Some(width), Some(hidden)) = (fields.count_or_none(names, MAX_VALUES)?, hidden)
        && width != hidden
    {
        let problem = format!("is {width}, and the model's hidden states have {hidden} values");
        return Err(fields.wrong("embedding_dimension", problem));
    }
    let known = || PoolingMode::ALL.map(|mode| mode.0).join(", ");
    let named = |value: &Value| {
        let name = value.as_str().map_or_else(|| short(value), str::to_owned);
        let found = PoolingMode::ALL.iter().find(|mode| mode.0 == name);
        found.map(|mode| mode.2).ok_or_else(|| fields.unknown("pooling mode", &name, known()))
    };
    // Newer files have one name, or a list. Older ones have a flag for each mode, and mean the mean where none is set.
    let modes = match fields.get(&["pooling_mode"]) {
        Some((_, Value::Array(list))) if list.len() <= MAX_ENTRIES => {
            list.iter().map(named).collect::<Result<_, _>>()?
        }
        Some((_, value)) => vec![named(value)?],
        None => {
            let mut modes = Vec::new();
            for (_, flag, mode) in PoolingMode::ALL {
                if fields.flag(flag, false)? {
                    modes.push(mode);
                }
            }
            if modes.is_empty() { vec![PoolingMode::Mean] } else { modes }
        }
    };
    if modes.is_empty() {
        return Err(fields.wrong("pooling_mode", format!("is empty; known are {}", known())));
    }
    Ok((modes, fields.flag("include_prompt", true)?))
}

/// Warnings about the unknown fields in the files of all modules.
pub(super) fn look_over(root: &Path) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let above = root.parent().filter(|above| above.join(MODULES).is_file());
    if above.is_some_and(|above| above != root && model_place(above) == root) {
        let text =
            "is a part of the sentence-transformers model in the directory above: open that \
            one for its pooling, lengths and prompts"
                .to_owned();
        warnings.push(Warning { path: root.to_owned(), text });
    }
    let path = root.join(MODULES);
    let Ok(list) = json(&path) else { return warnings };
    let mut look = |path: &Path, value: &Value, table: Table| {
        let found = Fields::new(path, value).and_then(|fields| check(&fields, &[table]));
        warnings.extend(found.unwrap_or_default());
    };
    list.as_array().into_iter().flatten().take(MAX_ENTRIES).for_each(|m| look(&path, m, MODULE));
    let path = root.join(SENTENCE_CONFIG);
    json(&path).iter().for_each(|value| look(&path, value, SETTINGS));
    for module in modules(root).ok().flatten().unwrap_or_default() {
        let table = match module.kind.as_str() {
            "Transformer" => {
                if let Ok(Some((path, value))) = transformer_file(&module.place) {
                    look(&path, &value, TRANSFORMER);
                }
                continue;
            }
            "Pooling" => Some(POOLING),
            kind => super::layers::table(kind),
        };
        let path = module.place.join(CONFIG);
        if let (Some(table), Ok(value)) = (table, json(&path)) {
            look(&path, &value, table);
        }
    }
    warnings
}
