use super::*;
use crate::blocks::decode;
use crate::{
    Formats, Matrix, ModelDir,
    testing::{golden, rows},
};
use std::os::unix::fs::FileExt;

fn types() -> (File, Gguf, Vec<f32>) {
    let folder = golden("").parent().expect("a folder").join("gguf");
    let path = folder.join("types.gguf");
    let file = File::open(&path).expect("a file");
    let gguf = Gguf::read(&path, &file).expect("a head");
    let values = std::fs::read(folder.join("types.f32")).expect("values");
    let values = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    (file, gguf, values.collect())
}

#[test]
fn decoded_values_match_the_reference_to_the_bit() {
    let (file, gguf, mut values) = types();
    let mut kinds = Vec::new();
    for tensor in &gguf.tensors {
        assert_eq!(tensor.shape, [3, 512], "{}", tensor.name);
        let mut bytes = vec![0; tensor.bytes as usize];
        file.read_exact_at(&mut bytes, tensor.offset).expect("its bytes");
        let rest = values.split_off(3 * 512);
        let want = std::mem::replace(&mut values, rest);
        assert_eq!(tensor.kind.name(), tensor.name);
        let GgmlType::Known(format) = tensor.kind else { panic!("{} is known", tensor.name) };
        kinds.push(format);
        let mut out = vec![f32::NAN; 3 * 512];
        crate::widen::widen(format, &bytes, &mut out);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&out) == bits(&want), "{}", tensor.name);
    }
    // All formats in blocks, and two others.
    assert_eq!(kinds.len(), 13);
}

/// A file with these fields and tensors, as the format has them.
fn written(
    fields: &[(&str, MetadataValue)],
    tensors: &[(&str, &[u64], u32, u64)],
    data: usize,
) -> Vec<u8> {
    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn value(out: &mut Vec<u8>, value: &MetadataValue, typed: bool) {
        let kind: u32 = match value {
            MetadataValue::Whole(_) => 10,
            MetadataValue::Float(_) => 12,
            MetadataValue::Flag(_) => 7,
            MetadataValue::Text(_) => 8,
            MetadataValue::List(_) => 9,
        };
        if typed {
            out.extend(kind.to_le_bytes());
        }
        match value {
            MetadataValue::Whole(n) => out.extend((*n as u64).to_le_bytes()),
            MetadataValue::Float(x) => out.extend(x.to_le_bytes()),
            MetadataValue::Flag(flag) => out.push((*flag).into()),
            MetadataValue::Text(of) => text(out, of),
            MetadataValue::List(list) => {
                let mut first = Vec::new();
                list.iter().take(1).for_each(|of| value_kind(&mut first, of));
                out.extend(if first.is_empty() { 8u32.to_le_bytes().to_vec() } else { first });
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|of| value_of(out, of));
            }
        }
    }
    fn value_kind(out: &mut Vec<u8>, of: &MetadataValue) {
        let mut whole = Vec::new();
        value(&mut whole, of, true);
        out.extend(&whole[..4]);
    }
    fn value_of(out: &mut Vec<u8>, of: &MetadataValue) {
        value(out, of, false);
    }
    let mut out = MAGIC.to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((fields.len() as u64).to_le_bytes());
    for (name, of) in fields {
        text(&mut out, name);
        value(&mut out, of, true);
    }
    for (name, shape, kind, offset) in tensors {
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|side| out.extend(side.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32) + data, 0);
    out
}

fn read(bytes: &[u8]) -> Result<Gguf, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let file = File::open(&path).expect("a file");
    Gguf::read(&path, &file).map_err(|error| error.to_string())
}

#[test]
fn damaged_gguf_headers_are_rejected_with_their_cause() {
    let good = written(&[("a", MetadataValue::Flag(true))], &[("t", &[32, 2], 2, 0)], 36);
    assert_eq!(read(&good).expect("a head").tensors[0].bytes, 36);
    let refused = |bytes: &[u8], why: &str| {
        let error = read(bytes).expect_err("refused");
        assert!(error.contains(why), "{error}: lacks {why}");
    };
    for end in 4..good.len() - 36 {
        refused(&good[..end], "cut short");
    }
    refused(&good[..good.len() - 1], "cut short");
    refused(b"GGML", "GGUF");
    let mut version = good.clone();
    version[4] = 1;
    refused(&version, "version 1");
    let mut many = good.clone();
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&many, "tensors");
    refused(&written(&[], &[("t", &[33, 2], 2, 0)], 64), "cannot be Q4_0");
    refused(&written(&[], &[("t", &[u64::MAX / 2, 5], 0, 0)], 64), "cannot be F32");
    refused(&written(&[], &[("t", &[32], 2, 0), ("t", &[32], 2, 32)], 64), "twice");
    refused(&written(&[], &[("t", &[64], 2, 0), ("u", &[32], 2, 32)], 64), "over one another");
    refused(&written(&[], &[("t", &[32], 2, 8)], 64), "odd place");
    // The end of each would overflow.
    let far = u64::MAX - 31;
    refused(&written(&[], &[("t", &[32], 2, far), ("u", &[32], 2, far)], 64), "cut short");
    refused(&written(&[], &[("t", &[32], 2, far)], 64), "cut short");
    refused(&written(&[("general.alignment", MetadataValue::Whole(3))], &[], 64), "alignment");
    refused(
        &written(&[("a", MetadataValue::Flag(true)), ("a", MetadataValue::Flag(true))], &[], 0),
        "twice",
    );
    // An unknown type is refused when its tensor is needed.
    assert_eq!(
        read(&written(&[], &[("t", &[256], 10, 0)], 0)).expect("a head").tensors[0].kind.name(),
        "Q2_K"
    );
}

/// A small model in f32, with rows of queries in pairs.
pub(super) fn model(
    change: impl Fn(&mut Vec<(&'static str, MetadataValue)>),
) -> Result<ModelDir, String> {
    model_in(change, |_| 0)
}

/// The same model, with the types of tensors that `kind` gives.
fn model_in(
    change: impl Fn(&mut Vec<(&'static str, MetadataValue)>),
    kind: impl Fn(&str) -> u32,
) -> Result<ModelDir, String> {
    let number = |n: u64| MetadataValue::Whole(n.into());
    let texts = |all: &[&str]| {
        MetadataValue::List(all.iter().map(|t| MetadataValue::Text((*t).to_owned())).collect())
    };
    let mut fields = vec![
        ("general.architecture", MetadataValue::Text("llama".to_owned())),
        ("llama.block_count", number(1)),
        ("llama.context_length", number(64)),
        ("llama.embedding_length", number(32)),
        ("llama.feed_forward_length", number(32)),
        ("llama.attention.head_count", number(2)),
        ("llama.attention.head_count_kv", number(1)),
        ("llama.attention.layer_norm_rms_epsilon", MetadataValue::Float(1e-5)),
        ("tokenizer.ggml.model", MetadataValue::Text("gpt2".to_owned())),
        ("tokenizer.ggml.pre", MetadataValue::Text("smollm".to_owned())),
        ("tokenizer.ggml.tokens", texts(&["<s>", "a", "b", "ab"])),
        ("tokenizer.ggml.token_type", MetadataValue::List([3, 1, 1, 1].map(number).to_vec())),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.bos_token_id", number(0)),
        ("tokenizer.ggml.eos_token_id", number(0)),
    ];
    change(&mut fields);
    let tensors: [(&str, &[u64]); 11] = [
        ("token_embd.weight", &[32, 4]),
        ("output_norm.weight", &[32]),
        ("blk.0.attn_q.weight", &[32, 32]),
        ("blk.0.attn_k.weight", &[32, 16]),
        ("blk.0.attn_v.weight", &[32, 16]),
        ("blk.0.attn_output.weight", &[32, 32]),
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.ffn_gate.weight", &[32, 32]),
        ("blk.0.ffn_up.weight", &[32, 32]),
        ("blk.0.ffn_down.weight", &[32, 32]),
    ];
    let mut at = 0;
    let listed = tensors.map(|(name, shape)| {
        let (offset, kind) = (at, kind(name));
        at +=
            GgmlType::of(kind).bytes(shape[0], shape[1..].iter().product()).expect("a known type");
        at = at.next_multiple_of(ALIGNMENT);
        (name, shape, kind, offset)
    });
    let mut bytes = written(&fields, &listed, at as usize);
    let start = bytes.len() - at as usize;
    for (value, bytes) in (0u32..).zip(bytes[start..].as_chunks_mut().0) {
        *bytes = (value as f32).to_le_bytes();
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).expect("a file");
    ModelDir::open(&path).map_err(|error| error.to_string())
}

#[test]
fn a_gguf_file_without_tokenizer_opens_as_a_model_of_token_ids() {
    let model = model(|fields| {
        fields.retain(|(name, _)| !name.starts_with("tokenizer."));
        fields.push(("tokenizer.ggml.model", MetadataValue::Text("none".to_owned())));
    });
    let model = model.expect("a model");
    assert_eq!(model.spec().vocabulary, 4);
    assert!(!model.path().join("tokenizer.json").exists());
}

#[test]
fn interleaved_query_rows_are_reordered_and_value_rows_are_not() {
    let model = model(|_| ()).expect("a model");
    assert_eq!(model.name(), "m.gguf");
    assert_eq!((model.spec().heads, model.spec().head_width, model.spec().vocabulary), (2, 16, 4));
    let source = model.matrix(crate::Matrix::Query(0)).expect("queries");
    let (mut out, mut scratch) = (vec![0.0; 2 * 32], Vec::new());
    source.read_f32((0..2, 0..32), &mut out, 32, 0, &mut scratch).expect("it is there");
    let first = 32.0 * 4.0 + 32.0;
    // In a head of 16 rows, row 2i of the file is row i, and row 2i + 1 is row 8 + i.
    let want = (0..32u32).map(|row| {
        let (head, within) = (row / 16, row % 16);
        first + 32.0 * (head * 16 + within % 8 * 2 + within / 8) as f32
    });
    assert!(want.eq(out[..32].iter().copied()), "{out:?}");
    let values = model.matrix(crate::Matrix::Value(0)).expect("values");
    values.read_f32((0..1, 0..16), &mut out, 16, 0, &mut scratch).expect("it is there");
    assert!(out[..16].windows(2).all(|pair| pair[1] - pair[0] == 32.0));
}

#[test]
fn each_matrix_has_the_format_of_its_tensor() {
    let formats = |name| {
        let path = golden("").parent().expect("a folder").join("gguf").join(name);
        ModelDir::open(&path).expect("a model").formats().clone()
    };
    let (four, eight) = (WeightFormat::Q4_0, WeightFormat::Q8_0);
    assert_eq!(formats("tiny.gguf"), Formats::all(four).with_vectors(WeightFormat::F32));
    let kind = |name: &str| match name {
        "blk.0.attn_v.weight" | "blk.0.attn_q.weight" => 8,
        name if name.contains("norm") => 0,
        _ => 2,
    };
    let model = model_in(|_| (), kind).expect("a model");
    let mixed = Formats::all(four).with_vectors(WeightFormat::F32);
    let mixed = mixed.with(Matrix::Value(0), eight).with(Matrix::Query(0), eight);
    assert_eq!((model.formats(), model.format()), (&mixed, four));
    // Rows of queries are reordered, whether they are widened or read as blocks.
    let source = model.matrix(Matrix::Query(0)).expect("queries");
    assert_eq!(source.format(), eight);
    let (mut wide, mut raw) = (vec![0.0; 32 * 32], Vec::new());
    source.read_f32((0..32, 0..32), &mut wide, 32, 0, &mut Vec::new()).expect("it is there");
    source.read_raw_rows(0..32, 0..32, &mut raw).expect("it is there");
    let mut own = [0.0; 32];
    for (output, bytes) in raw.chunks_exact(34).enumerate() {
        decode(eight, bytes, &mut own);
        let same =
            |(input, value): (usize, &f32)| value.to_bits() == wide[32 * input + output].to_bits();
        assert!(own.iter().enumerate().all(same), "output {output}");
    }
}

/// Builds that keep the order of JSON keys and builds that sort them compute the same fingerprint.
#[test]
fn keys_of_the_config_from_gguf_are_sorted() {
    fn ordered(json: &serde_json::Value) -> bool {
        json.as_object().is_none_or(|map| map.keys().is_sorted() && map.values().all(ordered))
    }
    let yarn = |fields: &mut Vec<(&'static str, MetadataValue)>| {
        fields.push(("llama.rope.scaling.type", MetadataValue::Text("yarn".to_owned())));
        fields.push(("llama.rope.scaling.factor", MetadataValue::Float(4.0)));
        fields.push(("llama.rope.scaling.original_context_length", MetadataValue::Whole(16)));
    };
    let model = model(yarn).expect("a model");
    let text = std::fs::read(model.path().join("config.json")).expect("its config");
    let config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    assert!(config["rope_scaling"].is_object() && ordered(&config), "{config}");
}

#[test]
fn unsupported_gguf_metadata_is_rejected_by_name() {
    let refused = |field: &'static str, value: Option<MetadataValue>, why: &str| {
        let change = |fields: &mut Vec<(&'static str, MetadataValue)>| {
            fields.retain(|(name, _)| *name != field);
            fields.extend(value.clone().map(|value| (field, value)));
        };
        let Err(error) = model(change) else { panic!("refused: {why}") };
        assert!(error.contains(why), "{error}: lacks {why}");
    };
    let text = |text: &str| Some(MetadataValue::Text(text.to_owned()));
    refused("general.architecture", text("mamba"), "\"mamba\" is not read");
    refused("general.architecture", None, "general.architecture");
    refused("llama.block_count", None, "llama.block_count");
    refused("llama.logit_scale", Some(MetadataValue::Float(0.5)), "llama.logit_scale");
    refused("llama.attention.causal", Some(MetadataValue::Flag(false)), "attention.causal");
    refused("general.type", text("adapter"), "adapter");
    refused("llama.pooling_type", Some(MetadataValue::Whole(4)), "pooling_type = 4");
    refused("llama.expert_count", Some(MetadataValue::Whole(8)), "experts");
    refused("tokenizer.ggml.pre", text("made-up"), "\"made-up\"");
    refused("tokenizer.ggml.model", text("rwkv"), "\"rwkv\"");
    refused("tokenizer.ggml.tokens", None, "no tokens");
    refused("llama.rope.scaling.type", text("longrope"), "longrope");
    let kv = MetadataValue::List(vec![MetadataValue::Whole(1)]);
    refused("llama.attention.head_count_kv", Some(kv), "other numbers of heads");
}

/// Converters set the flags of WordPiece in several ways; readers add both tokens in any case.
#[test]
fn texts_of_word_piece_have_a_token_before_and_behind_whatever_flags_say() {
    let text = |text: &str| MetadataValue::Text(text.to_owned());
    let tokens = ["[CLS]", "[SEP]", "[UNK]", "\u{2581}a", "b"].map(text).to_vec();
    let mut fields = vec![
        ("general.architecture", text("bert")),
        ("tokenizer.ggml.model", text("bert")),
        ("tokenizer.ggml.tokens", MetadataValue::List(tokens)),
        ("tokenizer.ggml.unknown_token_id", MetadataValue::Whole(2)),
        ("tokenizer.ggml.cls_token_id", MetadataValue::Whole(0)),
        ("tokenizer.ggml.add_sep_token", MetadataValue::Flag(false)),
        ("tokenizer.ggml.add_bos_token", MetadataValue::Flag(false)),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    let read = |fields: &[(&str, MetadataValue)]| {
        std::fs::write(&path, written(fields, &[], 0)).expect("a file");
        let gguf = Gguf::read(&path, &File::open(&path).expect("a file")).expect("a head");
        gguf.tokenizer()
    };
    assert!(read(&fields).expect_err("no token ends texts").contains("begins or ends"));
    fields.push(("tokenizer.ggml.seperator_token_id", MetadataValue::Whole(1)));
    let json = read(&fields).expect("a tokenizer");
    let around = json["post_processor"]["single"].to_string();
    assert!(around.contains("[CLS]") && around.contains("[SEP]"), "{around}");
    assert_eq!(json["model"]["vocab"]["##b"], 4);
    assert_eq!(json["model"]["vocab"]["a"], 3);
}

/// Compares with the vocabularies and expected tokens of llama.cpp: `models/ggml-vocab-*` of the source package of
/// llama-cpp-python, in the directory that `VOCABULARIES` names.
#[cfg(feature = "tokenizer")]
#[test]
#[ignore = "needs files that are not kept here"]
fn tokens_match_llama_cpp() {
    let directory = std::env::var("VOCABULARIES").expect("a directory");
    let mut seen = Vec::new();
    for name in [
        "gpt-2",
        "llama-bpe",
        "qwen2",
        "llama-spm",
        "phi-3",
        "starcoder",
        "refact",
        "command-r",
        "mpt",
        "bert-bge",
    ] {
        let path = Path::new(&directory).join(format!("ggml-vocab-{name}.gguf"));
        let gguf = Gguf::read(&path, &File::open(&path).expect("a file")).expect("a head");
        let folder = tempfile::tempdir().expect("a folder");
        let put = |name: &str, json: serde_json::Value| {
            std::fs::write(folder.path().join(name), json.to_string()).expect("a file");
        };
        put("tokenizer.json", gguf.tokenizer().expect(name));
        put("tokenizer_config.json", gguf.tokenizer_config());
        let tokenizer = crate::tokenizer::Tokenizer::open(folder.path()).expect("a tokenizer");
        let beside = |ending: &str| {
            let path = format!("{}.{ending}", path.display());
            String::from_utf8(std::fs::read(path).expect("beside it")).expect("text")
        };
        let (texts, tokens) = (beside("inp"), beside("out"));
        let texts = texts.split("\n__ggml_vocab_test__\n");
        let (mut right, mut wrong) = (0, Vec::new());
        for (text, tokens) in texts.zip(tokens.lines()) {
            let want: Vec<u32> =
                tokens.split_whitespace().map(|t| t.parse().expect("ids")).collect();
            let mut got = tokenizer.encode(text, None).expect("tokens");
            if gguf.begins() && !got.is_empty() {
                got.remove(0);
            }
            if gguf.ends() {
                got.pop();
            }
            match got == want {
                true => right += 1,
                false => wrong.push((text.to_owned(), got, want)),
            }
        }
        println!("{name}: {right} right, {} wrong", wrong.len());
        for (text, got, want) in wrong.iter().take(4) {
            println!("    {text:?}\n        {got:?}\n        {want:?}");
        }
        seen.push((name, wrong.len()));
    }
    assert!(seen.iter().all(|(_, wrong)| *wrong == 0), "{seen:?}");
}

/// The golden checkpoint of a family, converted to a GGUF file: fields of `architecture`, tensors by their names there,
/// and the weights of norms whole.
fn converted(
    name: &str,
    architecture: &str,
    fields: Vec<(String, MetadataValue)>,
) -> (ModelDir, ModelDir) {
    let there = ModelDir::open(&golden(name)).expect("a checkpoint");
    let spec = there.spec().clone();
    let bytes = std::fs::read(golden(name).join("model.safetensors")).expect("its weights");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let parts = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_output",
        "attn_q_norm",
        "attn_k_norm",
        "attn_norm",
        "post_attention_norm",
        "ffn_norm",
        "post_ffw_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "attn_output_norm",
        "layer_output_norm",
    ];
    let both = |part: String| [format!("{part}.weight"), format!("{part}.bias")];
    let layers = (0..there.spec().layers)
        .flat_map(|layer| parts.map(|part| both(format!("blk.{layer}.{part}"))));
    let whole =
        ["token_embd", "output_norm", "output", "token_embd_norm", "position_embd", "token_types"]
            .map(|part| both(part.to_owned()));
    let (mut listed, mut data) = (Vec::new(), Vec::new());
    let mut put = |name: String, shape: Vec<u64>, values: Vec<f32>| {
        listed.push((name, shape, data.len() as u64));
        data.extend(values.into_iter().flat_map(f32::to_le_bytes));
        data.resize(data.len().next_multiple_of(ALIGNMENT as usize), 0);
    };
    for name in whole.into_iter().chain(layers).flatten() {
        let there = renamed(architecture, &name);
        let found = ["", "bert.", "model."]
            .iter()
            .find_map(|prefix| tensors.tensor(&format!("{prefix}{there}")).ok());
        let Some(tensor) = found else { continue };
        let values: Vec<f32> = match tensor.dtype() {
            safetensors::Dtype::F32 => {
                tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
            _ => {
                let bits = tensor.data().as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
                bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
            }
        };
        let more = spec.norms_from_one && name.contains("norm");
        let values = values.into_iter().map(|value| if more { value + 1.0 } else { value });
        put(name, tensor.shape().iter().rev().map(|n| *n as u64).collect(), values.collect());
    }
    if architecture == "phi3" {
        put(STRETCHES[0].to_owned(), vec![3], vec![1.0, 1.1, 1.3]);
        put(STRETCHES[1].to_owned(), vec![3], vec![1.5, 2.0, 4.0]);
    }
    let number = |n: u32| MetadataValue::Whole(n.into());
    let mut all: Vec<(String, MetadataValue)> = [
        ("block_count", number(spec.layers)),
        ("context_length", number(spec.position_limit())),
        ("embedding_length", number(spec.hidden)),
        ("feed_forward_length", number(spec.intermediate)),
        ("attention.head_count", number(spec.heads)),
        ("attention.head_count_kv", number(spec.kv_heads)),
        ("attention.key_length", number(spec.head_width)),
        ("attention.layer_norm_rms_epsilon", MetadataValue::Float(spec.norm_epsilon.into())),
    ]
    .map(|(field, value)| (format!("{architecture}.{field}"), value))
    .into();
    all.push(("general.architecture".to_owned(), MetadataValue::Text(architecture.to_owned())));
    all.push(("tokenizer.ggml.model".to_owned(), MetadataValue::Text("none".to_owned())));
    all.extend(fields);
    let fields: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let tensors: Vec<_> = listed.iter().map(|(n, s, at)| (n.as_str(), &s[..], 0, *at)).collect();
    let mut bytes = written(&fields, &tensors, data.len());
    let start = bytes.len() - data.len();
    bytes[start..].copy_from_slice(&data);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).expect("a file");
    let model = ModelDir::open(&path).expect("a model");
    // The model keeps its files open, and its view is in a directory of its own.
    drop(folder);
    (there, model)
}

#[test]
fn gguf_files_of_other_architectures_equal_their_checkpoints() {
    let (number, float) = (|n: i128| MetadataValue::Whole(n), MetadataValue::Float);
    for (name, architecture, fields) in [
        (
            "bert",
            "bert",
            vec![
                ("attention.causal", MetadataValue::Flag(false)),
                ("attention.layer_norm_epsilon", float(1e-12)),
            ],
        ),
        (
            "modernbert",
            "modern-bert",
            vec![
                ("attention.layer_norm_epsilon", float(1e-5)),
                ("attention.sliding_window", number(20)),
                ("attention.sliding_window_pattern", number(3)),
            ],
        ),
        (
            "gemma3-both-ways",
            "gemma-embedding",
            vec![
                ("attention.causal", MetadataValue::Flag(false)),
                ("attention.sliding_window", number(30)),
                ("attention.sliding_window_pattern", number(2)),
                ("rope.freq_base", float(5000.0)),
                ("rope.freq_base_swa", float(300.0)),
            ],
        ),
        (
            "gemma2",
            "gemma2",
            vec![
                ("attention.sliding_window", number(23)),
                ("attn_logit_softcapping", float(4.0)),
                ("final_logit_softcapping", float(12.0)),
            ],
        ),
        (
            "gemma3",
            "gemma3",
            vec![
                ("attention.sliding_window", number(23)),
                ("attention.sliding_window_pattern", number(3)),
                ("rope.freq_base", float(5000.0)),
                ("rope.freq_base_swa", float(300.0)),
                ("rope.scaling.type", MetadataValue::Text("linear".to_owned())),
                ("rope.scaling.factor", float(2.0)),
            ],
        ),
        (
            "phi3",
            "phi3",
            vec![
                ("attention.sliding_window", number(40)),
                ("rope.dimension_count", number(6)),
                ("rope.scaling.original_context_length", number(64)),
                ("rope.scaling.attn_factor", float((1.0 + 4f64.ln() / 64f64.ln()).sqrt())),
            ],
        ),
    ] {
        let fields = fields.into_iter().map(|(f, value)| (format!("{architecture}.{f}"), value));
        let (there, here) = converted(name, architecture, fields.collect());
        let mut want = there.spec().clone();
        // GGUF files store the weights of norms whole, and scale scores by the width of heads.
        want.norms_from_one = false;
        // The heads of encoders are not in files.
        if ["bert", "gemma3-both-ways", "modernbert"].contains(&name) {
            want.head = crate::HeadSpec::None;
            want.headless.clone_from(&here.spec().headless);
        }
        want.scores.over_root = here.spec().scores.over_root;
        // Divisors of frequencies have 32 bits there.
        let frequencies = |spec: &crate::ModelSpec| match &spec.positions {
            crate::Positions::Rotary { inverse_frequencies, long, .. } => {
                let long = long.iter().flat_map(|long| &long.inverse_frequencies);
                inverse_frequencies.iter().chain(long).copied().collect()
            }
            crate::Positions::Learned { .. } => Vec::<f32>::new(),
        };
        let (one, other) = (frequencies(here.spec()), frequencies(&want));
        assert!(one.iter().zip(&other).all(|(a, b)| (a / b - 1.0).abs() < 1e-6), "{name}");
        want.positions = here.spec().positions.clone();
        let texts = (format!("{:#?}", here.spec()), format!("{want:#?}"));
        let unlike = texts.0.lines().zip(texts.1.lines()).find(|(have, want)| have != want);
        assert_eq!(unlike, None, "{name}");
        for vector in crate::Vector::all(&want) {
            let (one, other) = (there.vector(vector), here.vector(vector));
            assert_eq!(one.expect("there"), other.expect("here"), "{name} {vector:?}");
        }
        for matrix in Matrix::all(&want) {
            assert!(rows(&there, matrix) == rows(&here, matrix), "{name} {matrix:?}");
        }
    }
}
