//! Recognises what lies where a model or one of its files was expected: pointers, error pages, and the formats and
//! layouts that are not read, each named for what it is.

use crate::{error::ModelError, warning::Warning};
use serde_json::Value;
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// The bytes at the start of a file by which it is recognised.
const START_BYTES: usize = 512;
/// The most files of a directory that are looked at.
const MAX_FILES: usize = 10_000;
/// The largest JSON file that is read for a message.
const MAX_BYTES: u64 = 1 << 20;

const FETCH: &str = "fetch it again (`galaxy pull`, or the model's page): a login may be needed";
const CONVERT: &str = "convert it to safetensors: load it with transformers and save_pretrained";

/// Refuses a file that stands for another one, judged by its first bytes.
///
/// # Errors
/// When it is a pointer of git-lfs, an HTML page, empty, or text in another encoding.
pub(crate) fn stand_in(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    let start = &bytes[..bytes.len().min(START_BYTES)];
    let found = if start.is_empty() {
        ("empty".to_owned(), FETCH)
    } else if let Some(rest) = start.strip_prefix(b"version https://git-lfs.github.com/") {
        let text = String::from_utf8_lossy(rest);
        let size = text.lines().find_map(|line| line.strip_prefix("size ")).map(str::trim);
        let size = size.and_then(|size| size.parse::<u64>().ok());
        let of = size.map_or_else(String::new, |bytes| format!(" of {bytes} bytes"));
        let remedy = "run `git lfs install` and `git lfs pull` in its directory, or fetch the model \
                      with `galaxy pull`";
        (format!("a pointer of git-lfs that stands for the file{of}"), remedy)
    } else if is_page(start) {
        ("an HTML page, no file of a model".to_owned(), FETCH)
    } else if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        ("text in UTF-16".to_owned(), "save it as UTF-8 without a byte order mark")
    } else if start.starts_with(b"\xef\xbb\xbf") {
        let remedy = "save it as UTF-8 without a byte order mark";
        ("text that begins with a byte order mark".to_owned(), remedy)
    } else {
        return Ok(());
    };
    Err(another(path, found.0, found.1))
}

/// Refuses a file of weights that is not in safetensors: as [`stand_in`] does, or because it is in another format.
///
/// # Errors
/// As for `stand_in`, and when it is of a known format that is not read.
pub(crate) fn weights(path: &Path) -> Result<(), ModelError> {
    let start = start_of(path);
    stand_in(path, &start)?;
    match format(&start) {
        Some((found, remedy)) => Err(another(path, found.to_owned(), remedy)),
        None => Ok(()),
    }
}

/// The error for a directory that has no file `wanted`: what it is instead, where that is known.
pub(crate) fn directory(path: &Path, wanted: &str) -> ModelError {
    let not_there = || ModelError::NotThere { path: path.to_owned(), wanted: wanted.to_owned() };
    let Ok(metadata) = std::fs::metadata(path) else {
        return match hub_id(path) {
            Some(id) => {
                let remedy = format!("`galaxy pull {id}` fetches the model of this name");
                another(path, "no directory on this machine".to_owned(), remedy)
            }
            None => not_there(),
        };
    };
    if metadata.is_file() {
        let is_onnx = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("onnx"));
        return match weights(path) {
            Err(error) => error,
            Ok(()) if is_onnx => {
                let remedy = "run it with `galaxy run --model FILE.onnx --input x=@in.npy`; \
                              clusters, texts and chats take a model directory or a GGUF file";
                another(path, "an ONNX file".to_owned(), remedy)
            }
            Ok(()) => {
                let directory = path.parent().unwrap_or(path).display();
                let remedy =
                    format!("give the directory that holds it and config.json ({directory})");
                another(path, "a file".to_owned(), remedy)
            }
        };
    }
    match layout(path) {
        Some((found, remedy)) => another(path, found, remedy),
        None => not_there(),
    }
}

/// What a directory without a model is, and what to do, judged by its files.
fn layout(path: &Path) -> Option<(String, String)> {
    let text = |name: &str| small_json(&path.join(name));
    if let Some(adapter) = text("adapter_config.json") {
        let kind = adapter["peft_type"].as_str().unwrap_or("LoRA");
        let base = adapter["base_model_name_or_path"].as_str().unwrap_or("another model");
        let found = format!("an adapter ({}) on {}, no whole model", short(kind), short(base));
        let remedy = "merge the two and save what results: peft's \
                      AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload()\
                      .save_pretrained(OUT)";
        return Some((found, remedy.to_owned()));
    }
    if path.join("model_index.json").is_file() {
        let remedy = "give one model of transformers: of those in it, a text encoder may be one";
        return Some(("a pipeline of diffusers, of several models".to_owned(), remedy.to_owned()));
    }
    if let Some(snapshot) = snapshot(path) {
        let remedy = format!("give the snapshot in it: {}", snapshot.display());
        return Some(("a directory of the Hub's cache".to_owned(), remedy));
    }
    let names = names(path);
    let ending = |endings: &[&str]| {
        let ends = |name: &&String| endings.iter().any(|end| name.to_lowercase().ends_with(end));
        names.iter().find(ends).map(|name| short(name))
    };
    let shard = names.iter().find(|name| name.contains("-of-") && name.ends_with(".safetensors"));
    if let Some(shard) = shard {
        let found =
            format!("without model.safetensors.index.json, which names the shards ({shard}, ...)");
        return Some((found, "fetch that file too".to_owned()));
    }
    let other = |found: String, remedy: &str| Some((found, remedy.to_owned()));
    if let Some(name) = ending(&[".gguf", ".ggml"]) {
        return other(format!("a directory with weights in GGUF ({name})"), GGUF);
    }
    if let Some(name) = ending(&[".bin", ".pt", ".pth", ".ckpt"]) {
        return other(
            format!("a directory with weights of PyTorch ({name}) and no safetensors"),
            CONVERT,
        );
    }
    if let Some(name) = ending(&[".h5", ".msgpack"]) {
        return other(format!("a directory with weights of TensorFlow or Flax ({name})"), CONVERT);
    }
    if let Some(name) = ending(&[".onnx", ".npz", ".tflite", ".mlmodel", ".mlpackage"]) {
        let remedy = "give the safetensors that it was made of";
        return other(format!("a directory with a model for another runtime ({name})"), remedy);
    }
    let name = ending(&[".safetensors"])?;
    other(
        format!("a directory whose weights are called {name}"),
        "only model.safetensors, or the shards of model.safetensors.index.json, are read",
    )
}

/// The directory of the snapshot in a Hub cache that is called main, or else of the first one.
fn snapshot(path: &Path) -> Option<PathBuf> {
    let snapshots = path.join("snapshots");
    let names = names(&snapshots);
    let main = start_of(&path.join("refs/main"));
    let main = String::from_utf8_lossy(&main).trim().to_owned();
    let name = names.iter().find(|name| **name == main).or(names.first())?;
    Some(snapshots.join(name))
}

/// Refuses a directory with the files of quantisers that leave no trace in `config.json`.
///
/// # Errors
/// When there is such a file.
pub(crate) fn quantised(directory: &Path) -> Result<(), ModelError> {
    for (name, method) in [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")] {
        if directory.join(name).is_file() {
            let found = format!("a model that {method} has quantised ({name})");
            return Err(another(directory, found, "use a checkpoint in F32, F16 or BF16"));
        }
    }
    Ok(())
}

/// A warning about an adapter that lies beside a whole model.
pub(crate) fn beside(directory: &Path) -> Option<Warning> {
    let path = directory.join("adapter_config.json");
    let text = "an adapter lies beside the model, and is not applied: merge the two \
                (merge_and_unload) if it should be";
    path.is_file().then(|| Warning { path, text: text.to_owned() })
}

/// A sentence about what to do where text is to be read and there is no `tokenizer.json`, given the files that there
/// are.
#[cfg(feature = "tokenizer")]
pub(crate) fn tokenizer_files(directory: &Path) -> String {
    let names = names(directory);
    let has = |name: &str| names.iter().any(|have| have == name);
    let other = names.iter().find(|name| name.ends_with(".model") || name.ends_with(".tiktoken"));
    let found = match other {
        Some(name) => short(name),
        None if has("vocab.json") && has("merges.txt") => "vocab.json and merges.txt".to_owned(),
        None if has("vocab.txt") => "vocab.txt".to_owned(),
        None => return "add one, or give token ids instead of text".to_owned(),
    };
    format!(
        "it has {found}, of which transformers makes one: \
         AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR); or give token ids instead of text"
    )
}

/// The id of a model on the Hub that a path may be meant as: two plain names.
fn hub_id(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let (owner, name) = text.split_once('/')?;
    let plain = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && part.len() <= 96 && part.chars().all(known) && !part.starts_with('.')
    };
    // A path into a directory that exists was meant as a path.
    (plain(owner) && plain(name) && !Path::new(owner).exists()).then_some(text)
}

const GGUF: &str = "give one .gguf file by its name";

/// Recognises a format of weights by its first bytes, and says what to do.
fn format(start: &[u8]) -> Option<(&'static str, &'static str)> {
    let known: [(&[u8], _, _); 6] = [
        (b"GGUF", "a file of GGUF", GGUF),
        (b"PK\x03\x04", "a zip archive, as PyTorch saves its weights", CONVERT),
        (b"\x80\x02\x8a\x0a", "a pickle, as older PyTorch saves its weights", CONVERT),
        (b"\x89HDF", "a file of HDF5, as TensorFlow saves its weights", CONVERT),
        (b"\x1f\x8b", "compressed (gzip)", "decompress it"),
        (b"\x28\xb5\x2f\xfd", "compressed (zstd)", "decompress it"),
    ];
    known.iter().find(|known| start.starts_with(known.0)).map(|known| (known.1, known.2))
}

fn is_page(start: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&start[..start.len().min(64)]).to_lowercase();
    let text = text.trim_start_matches(['\u{feff}', ' ', '\n', '\r', '\t']);
    ["<!doctype html", "<html", "<?xml"].iter().any(|page| text.starts_with(page))
}

fn another(path: &Path, found: String, remedy: impl Into<String>) -> ModelError {
    ModelError::Another { path: path.to_owned(), found, remedy: remedy.into() }
}

/// The first bytes of a file; none where it cannot be read.
fn start_of(path: &Path) -> Vec<u8> {
    let mut start = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(START_BYTES as u64).read_to_end(&mut start);
    }
    start
}

fn small_json(path: &Path) -> Option<Value> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Names of the files in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let names = entries.flatten().take(MAX_FILES).map(|e| e.file_name());
    let mut names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A text of a file, shortened for a message and without control characters.
fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelDir, testing::golden_copy};
    use std::fs;

    const POINTER: &str =
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 440473133\n";

    fn told(path: &Path) -> String {
        ModelDir::open(path).expect_err("no model").to_string()
    }

    /// The names and contents of files.
    type Files<'a> = &'a [(&'a str, &'a str)];

    /// The error for a directory with these files.
    fn of_files(files: Files<'_>) -> String {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        told(directory.path())
    }

    #[test]
    fn lfs_pointers_html_pages_and_empty_files_are_recognised() {
        let page = "\n<!DOCTYPE html><html><body>Sign in</body></html>";
        for (text, want) in [
            (POINTER, ["git-lfs", "440473133 bytes", "git lfs pull"]),
            (page, ["an HTML page", "login", "fetch it again"]),
            ("", ["is empty", "", "fetch it again"]),
        ] {
            for file in ["model.safetensors", "config.json"] {
                let copy = golden_copy("bert");
                fs::write(copy.path().join(file), text).expect("a file");
                let error = told(copy.path());
                let all = want.iter().all(|want| error.contains(want));
                assert!(all && error.contains(file), "{error}\nlacks {want:?}");
            }
        }
        let copy = golden_copy("llama-tied-bf16");
        for file in ["model-00002-of-00002.safetensors", "model.safetensors.index.json"] {
            fs::write(copy.path().join(file), POINTER).expect("a file");
            let error = told(copy.path());
            assert!(error.contains(file) && error.contains("git-lfs"), "{error}");
        }
    }

    #[test]
    fn weight_files_of_other_formats_are_named_in_the_error() {
        for (start, want) in [
            (&b"GGUF\x03\0\0\0aaaaaaaa"[..], "a file of GGUF"),
            (b"PK\x03\x04aaaaaaaaaa", "PyTorch"),
            (b"\x80\x02\x8a\x0aaaaaaaaaaaa", "a pickle"),
            (b"\x89HDF\r\n\x1a\naaaaaaa", "TensorFlow"),
            (b"\x1f\x8baaaaaaaaaaaaa", "gzip"),
        ] {
            let copy = golden_copy("bert");
            fs::write(copy.path().join("model.safetensors"), start).expect("a file");
            let error = told(copy.path());
            assert!(error.contains(want), "{error}\nlacks {want}");
        }
    }

    #[test]
    fn a_directory_without_a_usable_model_is_explained_in_the_error() {
        let adapter = r#"{"peft_type": "LORA", "base_model_name_or_path": "org/base"}"#;
        let config = ("config.json", r#"{"model_type": "bert"}"#);
        let cases: &[(Files<'_>, &[&str])] = &[
            (&[("adapter_config.json", adapter)], &["LORA", "org/base", "merge_and_unload"]),
            (&[config, ("adapter_config.json", adapter)], &["adapter", "org/base"]),
            (&[("model_index.json", "{}")], &["diffusers"]),
            (&[("m.Q4_K_M.gguf", "GGUF")], &["m.Q4_K_M.gguf", "cut short"]),
            (&[("m.Q4.gguf", ""), ("m.Q8.gguf", "")], &["m.Q4.gguf", "give one .gguf file"]),
            (&[config, ("pytorch_model.bin", "PK")], &["pytorch_model.bin", "save_pretrained"]),
            (&[config, ("tf_model.h5", "")], &["tf_model.h5", "TensorFlow"]),
            (&[config, ("flax_model.msgpack", "")], &["flax_model.msgpack", "Flax"]),
            (&[config, ("model.onnx", "")], &["model.onnx", "runtime"]),
            (&[config, ("model-00001-of-00002.safetensors", "")], &["index.json", "00001-of"]),
            (&[config, ("consolidated.safetensors", "")], &["consolidated.safetensors"]),
            (&[("snapshots/abc/config.json", "{}")], &["cache", "snapshots/abc"]),
            (
                &[("snapshots/abc/x", ""), ("snapshots/def/x", ""), ("refs/main", "def\n")],
                &["snapshots/def"],
            ),
            (&[config, ("quantize_config.json", "{}")], &["GPTQ", "F32"]),
            (&[config, ("quant_config.json", "{}")], &["AWQ"]),
            (&[config], &["model.safetensors"]),
            (&[], &["config.json"]),
        ];
        for (files, want) in cases {
            let error = of_files(files);
            assert!(want.iter().all(|want| error.contains(want)), "{error}\nlacks {want:?}");
        }
    }

    #[test]
    fn a_model_path_that_is_no_directory_is_explained_in_the_error() {
        let error = told(Path::new("sentence-transformers/all-MiniLM-L6-v2"));
        assert!(error.contains("galaxy pull sentence-transformers/all-MiniLM-L6-v2"), "{error}");
        for path in ["/nowhere/at-all", "./org/name", "src/none", "one/two/three"] {
            let error = told(Path::new(path));
            assert!(error.contains("config.json") && !error.contains("galaxy pull"), "{error}");
        }
        let copy = golden_copy("bert");
        let error = told(&copy.path().join("model.safetensors"));
        assert!(error.contains("give the directory"), "{error}");
        fs::write(copy.path().join("m.onnx"), "any").expect("a file");
        assert!(told(&copy.path().join("m.onnx")).contains("galaxy run --model FILE.onnx"));
        fs::write(copy.path().join("model.gguf"), "GGUF").expect("a file");
        assert!(told(&copy.path().join("model.gguf")).contains("cut short"));
    }

    #[test]
    fn an_adapter_beside_a_model_gives_a_warning() {
        let copy = golden_copy("bert");
        fs::write(copy.path().join("adapter_config.json"), "{}").expect("a file");
        let warnings = ModelDir::open(copy.path()).expect("a model").warnings().to_vec();
        let told: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        assert!(told.iter().any(|warning| warning.contains("adapter")), "{told:?}");
    }

    #[cfg(feature = "tokenizer")]
    #[test]
    fn vocabulary_files_without_tokenizer_json_are_named_in_the_error() {
        for (files, want) in [
            (&["vocab.txt"][..], "it has vocab.txt"),
            (&["sentencepiece.bpe.model"], "sentencepiece.bpe.model"),
            (&["vocab.json", "merges.txt"], "vocab.json and merges.txt"),
            (&[], "add one"),
        ] {
            let directory = tempfile::tempdir().expect("a temporary directory");
            for file in files {
                fs::write(directory.path().join(file), "").expect("a file");
            }
            let text = tokenizer_files(directory.path());
            assert!(text.contains(want) && text.contains("token ids"), "{text}");
            assert_eq!(text.contains("save_pretrained"), !files.is_empty());
        }
    }
}
