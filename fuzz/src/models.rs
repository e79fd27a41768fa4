//! Files of a model directory.

use super::{Input, good, said};
use galaxy_graph::least_memory::{MemoryError, MemoryGraph};
use galaxy_model::{
    HeadSpec, Matrix, ModelDir, ModelSpec, Patches, Positions, Table, Vector, fuzz,
    image::ImageProcessor,
    manifest::Manifest,
    onnx::{Fixed, Network, OnnxFile},
    sentence::VectorForm,
    tokenizer::Tokenizer,
};
use std::{fs, io::Write, path::Path};
use tempfile::TempDir;

/// The JSON of a safetensors header.
pub(crate) fn header(bytes: &[u8]) {
    match fuzz::header(bytes) {
        // An entry has a name, a type, a shape and a place.
        Ok(tensors) => assert!(tensors <= bytes.len() / 40),
        Err(error) => said(&error),
    }
}

/// The text of a `config.json`.
pub(crate) fn config(bytes: &[u8]) {
    match fuzz::config(bytes) {
        Ok(spec) => {
            sound(&spec);
            let text = serde_json::to_vec(&spec).expect("a spec has a JSON form");
            assert_eq!(serde_json::from_slice::<ModelSpec>(&text).expect("its own"), spec);
        }
        Err(error) => said(&error),
    }
}

/// Checks what all code that uses a spec takes for granted.
fn sound(spec: &ModelSpec) {
    assert!(spec.layers > 0 && spec.hidden > 0 && spec.intermediate > 0);
    assert!(spec.patches.is_some() != (spec.vocabulary > 0));
    assert_eq!(spec.group() * spec.kv_heads, spec.heads);
    assert!(spec.heads.checked_mul(spec.head_width).is_some_and(|width| width > 0));
    assert!(spec.norm_epsilon > 0.0 && spec.norm_epsilon.is_finite());
    if let Positions::Rotary { inverse_frequencies, long, scale, .. } = &spec.positions {
        assert!(2 * inverse_frequencies.len() <= spec.head_width as usize);
        assert!(inverse_frequencies.iter().all(|f| f.is_finite()), "{inverse_frequencies:?}");
        assert!(scale.is_finite());
        if let Some(long) = long {
            assert_eq!(long.inverse_frequencies.len(), inverse_frequencies.len());
            assert!(long.inverse_frequencies.iter().all(|f| f.is_finite()), "{long:?}");
        }
    }
    if let HeadSpec::Classes(head) = &spec.head {
        assert!(head.labels > 0 && head.labels as usize == head.names.len());
    }
}

/// The files that [`checkpoint`] knows, by number. Of safetensors files only the header is given.
const FILES: [&str; 5] = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];
/// The zeros behind each header, in bytes.
const DATA: u64 = 1 << 20;

/// A model directory: numbers of files, each followed by the file's content.
pub(crate) fn checkpoint(bytes: &[u8]) {
    let mut input = Input(bytes);
    let dir = directory();
    while !input.is_empty() {
        let name = input.pick(&FILES);
        let content = input.piece();
        write(&dir.path().join(name), content, DATA);
    }
    match ModelDir::open(dir.path()) {
        Ok(model) => read(&model),
        Err(error) => said(&error),
    }
}

/// A GGUF file, which zeros follow.
pub(crate) fn gguf(bytes: &[u8]) {
    let dir = directory();
    let path = dir.path().join("m.gguf");
    write(&path, bytes, 0);
    let file = fs::OpenOptions::new().write(true).open(&path).expect("a file");
    file.set_len(bytes.len() as u64 + DATA).expect("room for it");
    match ModelDir::open(&path) {
        Ok(model) => read(&model),
        Err(error) => said(&error),
    }
}

/// An ONNX file, beside a file of zeros for external tensors.
pub(crate) fn onnx(bytes: &[u8]) {
    let dir = directory();
    let path = dir.path().join("m.onnx");
    write(&path, bytes, 0);
    let file = fs::File::create(dir.path().join("w")).expect("a file");
    file.set_len(DATA).expect("room for it");
    let opened = OnnxFile::open(&path);
    if let Ok(Err(error)) = opened.as_ref().map(OnnxFile::labels) {
        said(&error);
    }
    match opened.and_then(|file| Network::of(&file, &Fixed::default())) {
        Ok(network) => {
            let graph = MemoryGraph::of_network(&network);
            let order: Vec<usize> = (0..graph.operators.len()).collect();
            match graph.peak(&order) {
                Ok(_) | Err(MemoryError::TooManyBytes) => {}
                Err(error) => panic!("the order of the file is none: {error}"),
            }
        }
        Err(error) => said(&error),
    }
}

/// Writes a file. Of a safetensors file `content` is the header, and `data` zeros follow.
fn write(path: &Path, content: &[u8], data: u64) {
    let mut file = fs::File::create(path).expect("a file");
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        let length = content.len() as u64;
        file.write_all(&length.to_le_bytes()).expect("room for it");
        file.set_len(8 + length + data).expect("room for it");
    }
    file.write_all(content).expect("room for it");
}

/// Reads something of every tensor that a model has.
fn read(model: &ModelDir) {
    sound(model.spec());
    assert!(model.shape_key().starts_with(&model.spec().family));
    let mut row = vec![0.0; model.spec().hidden as usize];
    let table = if model.spec().patches.is_some() { Table::Position } else { Table::Word };
    model.embedding_rows(table, &[0], &mut row).expect("a row");
    for which in Matrix::all(model.spec()) {
        let matrix = model.matrix(which).expect("opened");
        let (inputs, outputs) = (matrix.rows(), matrix.columns());
        let mut value = [0.0];
        let last = (inputs - 1..inputs, outputs - 1..outputs);
        matrix
            .read_f32((last.0, last.1), &mut value, 1, 0, &mut Vec::new())
            .expect("its last value");
    }
    for which in Vector::all(model.spec()) {
        let vector = model.vector(which).expect("opened");
        assert_eq!(Some(vector.len() as u32), which.width(model.spec()));
    }
}

/// The files of a sentence model, by number. Of safetensors files only the header is given.
const SENTENCE: [&str; 10] = [
    "modules.json",
    "1_Pooling/config.json",
    "config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Norm/config.json",
    "3_Norm/model.safetensors",
    "0_Transformer/sentence_bert_config.json",
];
/// The zeros behind each header of a sentence model, in bytes: its modules are read as a whole.
const FEW: u64 = 1 << 12;

/// A directory of a sentence model: numbers of files, each followed by the file's content.
pub(crate) fn sentence(bytes: &[u8]) {
    let mut input = Input(bytes);
    let dir = directory();
    for folder in ["0_Transformer", "1_Pooling", "2_Dense", "3_Norm"] {
        fs::create_dir(dir.path().join(folder)).expect("a directory");
    }
    while !input.is_empty() {
        let name = input.pick(&SENTENCE);
        write(&dir.path().join(name), input.piece(), FEW);
    }
    match fuzz::sentence(dir.path()) {
        Ok(sentence) => {
            assert!(sentence.max_tokens != Some(0));
            // Two rows of the two values that it was read for.
            let pooled = sentence.pool(&[1.0, -2.0, 3.0, 4.0], 2, 0).expect("rows that count");
            let form = VectorForm { dimensions: None, normalise: true };
            assert!(sentence.finish(pooled, form).len() <= sentence.width(2) as usize);
        }
        Err(error) => said(&error),
    }
}

/// The files beside a `tokenizer.json`, by number.
const TOKENIZER: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"];
/// A `tokenizer.json` with a vocabulary of five pieces.
const PIECES: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "+",
        "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}}}"#;

/// A tokenizer as the files beside it change it: numbers of files, each followed by the file's content.
pub(crate) fn tokenizer(bytes: &[u8]) {
    let mut input = Input(bytes);
    let dir = directory();
    fs::write(dir.path().join("tokenizer.json"), PIECES).expect("a file");
    while !input.is_empty() {
        let name = input.pick(&TOKENIZER);
        fs::write(dir.path().join(name), input.piece()).expect("a file");
    }
    let Some(tokenizer) = good(Tokenizer::open(dir.path())) else { return };
    assert!(tokenizer.max_tokens() != Some(0));
    if let Some(pair) = good(tokenizer.encode_pair("a b [SEP]", "b a", Some(9))) {
        assert!(pair.ids.len() <= 9);
        assert!(pair.types.is_empty() || pair.types.len() == pair.ids.len());
        good(tokenizer.decode(&pair.ids));
    }
}

/// A manifest: what a model consists of, as one device tells another.
pub(crate) fn manifest(bytes: &[u8]) {
    let Some(manifest) = good(Manifest::from_bytes(bytes)) else { return };
    let again = manifest.to_bytes().expect("its own form");
    assert_eq!(Manifest::from_bytes(&again).expect("its own"), manifest);
    let Some(pieces) = good(manifest.pieces(Path::new("model"))) else { return };
    let mut end = 0;
    for piece in 0..pieces.count() {
        let span = pieces.span(piece);
        assert!(span.start == end && span.end > end && span.end - end == pieces.bytes(piece));
        assert!(pieces.covering(span.clone()).contains(&piece));
        end = span.end;
    }
    assert_eq!(end, pieces.total());
}

/// A `preprocessor_config.json`, and an image for it.
pub(crate) fn image(bytes: &[u8]) {
    let mut input = Input(bytes);
    let dir = directory();
    fs::write(dir.path().join("preprocessor_config.json"), input.piece()).expect("a file");
    let patches = Patches { width: 32, height: 24, channels: 3, size: 8 };
    if let Some(processor) = good(ImageProcessor::open(dir.path(), patches))
        && let Some(values) = good(processor.pixels(input.0))
    {
        assert_eq!(values.len(), 3 * 24 * 32);
        assert!(values.iter().all(|value| !value.is_nan()));
    }
}

/// A temporary directory, in memory where the system has such a place.
pub(crate) fn directory() -> TempDir {
    let memory = Path::new("/dev/shm");
    let at = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::tempdir_in(at).expect("a temporary directory")
}
