//! Which files of a repository belong to a model directory, by their names.
//!
//! Names come from the network and become paths, so only names of a closed alphabet are accepted, and only files that
//! something here or `transformers` reads. Pickles and weights in other formats never belong.

use crate::{error::ModelError, store::MAX_SHARDS};
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// The file that lists the modules of a sentence-transformers model.
pub const MODULES: &str = "modules.json";
/// The settings of a sentence-transformers model as a whole.
pub(crate) const SENTENCE_CONFIG: &str = "config_sentence_transformers.json";
/// The config of a model, and of each module that has one.
pub const CONFIG: &str = "config.json";
/// Weights in one file, which has precedence over shards.
pub const WEIGHTS: &str = "model.safetensors";
/// The file that lists the shards of weights that are in several files.
pub const INDEX: &str = "model.safetensors.index.json";
/// The whole tokenizer in one file.
pub const TOKENIZER: &str = "tokenizer.json";

/// Files that belong to a model wherever they lie: in its directory, or in that of a module.
const PLAIN: [&str; 13] = [
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    MODULES,
    SENTENCE_CONFIG,
    WEIGHTS,
];
/// The names that sentence-transformers gives to the config of its Transformer module. The name depends on the class
/// that wrote it; the content is of the same kind.
pub(crate) const TRANSFORMER_CONFIGS: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];
/// Files that `transformers` builds a tokenizer from where there is no `tokenizer.json`.
const VOCABULARIES: [&str; 6] = [
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
];
/// The directory of named chat templates.
const TEMPLATES: &str = "additional_chat_templates";
/// Endings of files with weights in formats that are not fetched.
const OTHER_WEIGHTS: [&str; 10] =
    [".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".ckpt", ".npz"];
/// The longest name that is accepted; it becomes part of a file name with others.
const MAX_NAME: usize = 160;
/// The most modules that are accepted; a real pipeline has a handful.
const MAX_MODULES: usize = 64;

#[derive(Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether a name is a relative path of letters, digits, dots, underscores and hyphens, of which no part begins with a
/// dot. Joined to a directory, such a name stays inside it on every file system.
pub fn is_plain(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(known);
    name.len() <= MAX_NAME && name.split('/').all(part)
}

/// The directories of the modules that a `modules.json` lists, in its order; `""` is the directory of the model itself.
/// The first one has the transformer.
///
/// # Errors
/// When the text is not a list of modules, or a directory lies outside the model's.
pub fn modules(text: &[u8]) -> Result<Vec<String>, ModelError> {
    let path = || Path::new(MODULES).to_owned();
    let wrong =
        |problem: String| ModelError::Field { path: path(), field: "path".to_owned(), problem };
    let list: Vec<Module> =
        serde_json::from_slice(text).map_err(|source| ModelError::Json { path: path(), source })?;
    if list.is_empty() || list.len() > MAX_MODULES {
        return Err(wrong(format!("stands in {} modules: 1 to {MAX_MODULES} are", list.len())));
    }
    let mut directories = Vec::new();
    for Module { path } in list {
        let directory = path.strip_suffix('/').unwrap_or(&path);
        if !directory.is_empty() && !is_plain(directory) {
            let shown: String = directory.chars().take(MAX_NAME).collect();
            return Err(wrong(format!("is {shown:?}: a directory inside the model's is wanted")));
        }
        if !directories.iter().any(|known| known == directory) {
            directories.push(directory.to_owned());
        }
    }
    Ok(directories)
}

/// The files of weights that a `model.safetensors.index.json` lists.
///
/// # Errors
/// When the text is not an index, or names a file elsewhere.
pub fn shards(text: &[u8]) -> Result<BTreeSet<String>, ModelError> {
    let path = || Path::new(INDEX).to_owned();
    let Index { weight_map } =
        serde_json::from_slice(text).map_err(|source| ModelError::Json { path: path(), source })?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let harmless = |n: &&String| is_plain(n) && !n.contains('/') && n.ends_with(".safetensors");
    if let Some(name) = names.iter().find(|name| !harmless(name)) {
        let shard = name.chars().take(MAX_NAME).collect();
        return Err(ModelError::ShardName { path: path(), shard });
    }
    if names.is_empty() || names.len() > MAX_SHARDS {
        let problem = format!("names {} shards; 1 to {MAX_SHARDS} are known", names.len());
        return Err(ModelError::Field { path: path(), field: "weight_map".to_owned(), problem });
    }
    Ok(names)
}

/// The files of `directory`, which is one of [`modules`], that belong to the model, among `all` files of the
/// repository. Of sharded weights only the index is among them; [`shards`] says what else there is.
pub fn wanted(all: &BTreeSet<String>, directory: &str) -> Vec<String> {
    let has = |name: &str| all.contains(&inside(directory, name));
    let belongs = |name: &str| match name.split_once('/') {
        Some((folder, name)) => folder == TEMPLATES && name.ends_with(".jinja"),
        None if name == INDEX => !has(WEIGHTS),
        None if VOCABULARIES.contains(&name) => !has(TOKENIZER),
        None => PLAIN.contains(&name) || TRANSFORMER_CONFIGS.contains(&name),
    };
    let take = |name: &&String| {
        let local = match directory {
            "" => Some(name.as_str()),
            _ => name.strip_prefix(directory).and_then(|name| name.strip_prefix('/')),
        };
        is_plain(name) && local.is_some_and(|l| l.matches('/').count() < 2 && belongs(l))
    };
    all.iter().filter(take).cloned().collect()
}

/// The files of `directory` that hold weights in formats that are not fetched.
pub fn other_weights(all: &BTreeSet<String>, directory: &str) -> Vec<String> {
    let take = |name: &&String| {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        let adapter = file.starts_with("adapter_model.");
        let weights = OTHER_WEIGHTS.iter().any(|end| file.ends_with(end));
        // Optimizers and arguments of a training run are not weights.
        let state = ["training_args.bin", "optimizer.pt", "scheduler.pt"].contains(&file);
        folder == directory && is_plain(name) && (adapter || weights && !state)
    };
    all.iter().filter(take).cloned().collect()
}

/// The path of a file in a directory of the repository.
pub fn inside(directory: &str, file: &str) -> String {
    if directory.is_empty() { file.to_owned() } else { format!("{directory}/{file}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn only_files_that_a_model_needs_are_selected() {
        let names = all(&[
            "README.md",
            ".gitattributes",
            "config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "vocab.txt",
            "onnx/model.onnx",
            "onnx/config.json",
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "additional_chat_templates/rag.jinja",
            "additional_chat_templates/rag.txt",
            "../config.json",
            "/etc/config.json",
            "1_Pooling/../../config.json",
        ]);
        let right = [
            "additional_chat_templates/rag.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(wanted(&names, ""), right);
        assert_eq!(wanted(&names, "1_Pooling"), ["1_Pooling/config.json"]);
        let dense = ["2_Dense/config.json", "2_Dense/model.safetensors"];
        assert_eq!(wanted(&names, "2_Dense"), dense);
        assert_eq!(other_weights(&names, "2_Dense"), ["2_Dense/pytorch_model.bin"]);
        assert_eq!(wanted(&names, "3_Normalize"), Vec::<String>::new());
    }

    #[test]
    fn an_index_and_vocab_txt_replace_missing_weights_and_tokenizer() {
        let names = all(&[INDEX, "model-00001-of-00001.safetensors", "vocab.txt"]);
        assert_eq!(wanted(&names, ""), [INDEX, "vocab.txt"]);
    }

    #[test]
    fn module_paths_outside_the_model_directory_are_rejected() {
        let text =
            br#"[{"idx": 0, "path": "0_Transformer"}, {"path": "1_Pooling/"}, {}, {"path": ""}]"#;
        assert_eq!(modules(text).expect("modules"), ["0_Transformer", "1_Pooling", ""]);
        for path in ["..", "/etc", "a/../b", "a//b", ".git", "a\\b", "a b", "C:"] {
            let text = serde_json::json!([{ "path": path }]).to_string();
            let error = modules(text.as_bytes()).expect_err(path).to_string();
            assert!(error.contains(MODULES), "{error}");
        }
        for text in [&b"[]"[..], b"{}", b"[7]", b"", b"[{\"path\": 7}]"] {
            assert!(modules(text).is_err());
        }
    }

    #[test]
    fn weight_files_must_lie_beside_their_index() {
        let index = |name: &str| serde_json::json!({ "weight_map": { "a": name } }).to_string();
        let right = "model-00001-of-00002.safetensors";
        assert_eq!(shards(index(right).as_bytes()).expect("shards"), all(&[right]));
        let wrong = ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.bin", "", "."];
        for name in wrong {
            assert!(shards(index(name).as_bytes()).is_err(), "{name}");
        }
        assert!(shards(br#"{"weight_map": {}}"#).is_err());
    }
}
