//! Models of each family as GGUF files: what is written reads as the same model, and says what llama.cpp asks for.

use super::*;
use crate::{
    config::Fields,
    family::{self, Described, full},
    gguf::Gguf,
    testing::{file, golden_copy},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs::File};

/// A golden checkpoint with other values in its config.
pub(super) fn changed(name: &str, changes: &Value) -> (ModelDir, tempfile::TempDir) {
    let copy = golden_copy(name);
    let path = copy.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&fs::read(&path).expect("a config")).expect("JSON");
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    fs::write(&path, config.to_string()).expect("a file");
    (ModelDir::open(copy.path()).expect(name), copy)
}

fn header(path: &Path) -> Gguf {
    Gguf::read(path, &File::open(path).expect("a file")).expect("a head")
}

/// All but what no file says of them, as it is: bits of tensors, and the description.
#[test]
fn golden_checkpoints_survive_writing_as_gguf() {
    let scalar = json!({ "query_pre_attn_scalar": 14 });
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (name, architecture, changes) in [
        ("gemma2", "gemma2", scalar.clone()),
        ("gemma3", "gemma3", scalar),
        ("gemma3-both-ways", "gemma-embedding", json!({ "architectures": ["Gemma3TextModel"] })),
        ("phi3", "phi3", json!({})),
        (
            "phi3",
            "phi3",
            json!({ "sliding_window": null, "rope_parameters": { "rope_theta": 500.0 } }),
        ),
        ("modernbert", "modern-bert", json!({ "architectures": ["ModernBertModel"] })),
        ("smollm3", "smollm3", json!({ "no_rope_layers": [1, 1, 1, 0, 1] })),
        ("mistral-longrope", "llama", json!({})),
        ("mistral-window", "llama", json!({ "sliding_window": null })),
        ("llama-yarn", "llama", json!({})),
        ("bert", "bert", json!({ "architectures": ["BertModel"] })),
    ] {
        let (model, _copy) = changed(name, &changes);
        let path = dir.path().join(format!("{name}.gguf"));
        let rounded = model.write_gguf(&path, &mut |_, _| {}).expect(name);
        assert!(rounded.iter().all(|one| one.error == 0.0), "{name} is as it is");
        let written = ModelDir::open(&path).expect(name);
        assert_same(&model, &written);
        let gguf = header(&path);
        assert_eq!(gguf.architecture(), Some(architecture));
        assert_eq!(gguf.unknown(), [""; 0], "{name}");
        // A file is as good a beginning as a checkpoint.
        let again = dir.path().join("again.gguf");
        written.write_gguf(&again, &mut |_, _| {}).expect(name);
        assert_same(&written, &ModelDir::open(&again).expect(name));
    }
}

/// A checkpoint with the tensors that a config asks for, and made-up values.
fn made_up(config: &Value) -> tempfile::TempDir {
    let path = Path::new("config.json");
    let described = family::read(&Fields::new(path, config).expect("an object"));
    let Described { family, spec, .. } = described.expect("a description");
    let (names, prefix) = (&family.names, family.prefixes.last().copied().unwrap_or_default());
    let mut shapes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let tied = matches!(spec.head, crate::HeadSpec::Language { tied: true, .. });
    for which in Matrix::all(&spec).filter(|of| !(tied && *of == Matrix::LanguageHead)) {
        let (pattern, layer) = match which {
            Matrix::Query(l) => (names.query, l),
            Matrix::Key(l) => (names.key, l),
            Matrix::Value(l) => (names.value, l),
            Matrix::AttentionOutput(l) => (names.attention_output, l),
            Matrix::Gate(l) => (names.gate, l),
            Matrix::Up(l) => (names.up, l),
            Matrix::Down(l) => (names.down, l),
            Matrix::LanguageHead => (names.language_head, 0),
            other => panic!("{other:?} is of no decoder"),
        };
        let (inputs, outputs) = which.shape(&spec).expect("a shape");
        let shape = shapes.entry(full(prefix, pattern, layer, ".weight"));
        let shape = shape.or_insert_with(|| vec![0, inputs.into()]);
        shape[0] += u64::from(outputs);
    }
    for which in Vector::all(&spec) {
        let (pattern, layer) = match which {
            Vector::QueryHeadNorm(l) => (names.query_norm, l),
            Vector::KeyHeadNorm(l) => (names.key_norm, l),
            Vector::AttentionNorm(l) => (names.attention_norm, l),
            Vector::AttentionSumNorm(l) => (names.attention_sum_norm, l),
            Vector::MlpNorm(l) => (names.mlp_norm, l),
            Vector::MlpSumNorm(l) => (names.mlp_sum_norm, l),
            Vector::EmbeddingNorm => (names.embedding_norm, 0),
            Vector::FinalNorm => (names.final_norm, 0),
            other => panic!("{other:?} is of no model here"),
        };
        let width = which.width(&spec).expect("a width");
        shapes.insert(full(prefix, pattern, layer, ".weight"), vec![width.into()]);
    }
    let word = full(prefix, names.word, 0, ".weight");
    shapes.insert(word, vec![spec.vocabulary.into(), spec.hidden.into()]);
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 4e7 - 0.2
    };
    let tensors: Vec<_> = shapes
        .iter()
        .map(|(name, shape)| {
            let count = shape.iter().product::<u64>();
            let bytes = (0..count).flat_map(|_| value().to_le_bytes()).collect();
            (name.as_str(), "F32", shape.clone(), bytes)
        })
        .collect();
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
    fs::write(directory.path().join("model.safetensors"), file(&tensors)).expect("a file");
    directory
}

/// The config of a small model of a family, with fields that differ.
fn config(family: &str, class: &str, fields: &Value) -> Value {
    let mut config = json!({
        "model_type": family, "architectures": [class], "hidden_size": 256, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 288,
        "vocab_size": 300, "max_position_embeddings": 512, "tie_word_embeddings": true,
    });
    for (key, value) in fields.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

/// What is read from the file is what quantisation on load gives: the same bits, and so the same results.
#[test]
fn rounded_models_of_each_family_survive_writing_as_gguf() {
    let gemma = json!({ "query_pre_attn_scalar": 64, "sliding_window": 16 });
    let with = |more: Value| {
        let mut all = gemma.clone();
        all.as_object_mut().expect("an object").extend(more.as_object().cloned().expect("one"));
        all
    };
    let types = |whole: &[u32]| {
        let kind =
            |at: u32| if whole.contains(&at) { "full_attention" } else { "sliding_attention" };
        json!({ "layer_types": (0..7).map(kind).collect::<Vec<_>>() })
    };
    let both_ways = json!({ "use_bidirectional_attention": true });
    let encoder = json!({ "num_key_value_heads": null, "head_dim": null });
    let dir = tempfile::tempdir().expect("a temporary directory");
    let pattern = |number: i128| Some(MetadataValue::Whole(number));
    let flags = [true, false, true, true, false, true, true].map(MetadataValue::Flag);
    let untied = json!({ "tie_word_embeddings": false });
    let formats = Quantisation::ALL.into_iter().cycle();
    for ((family, class, fields, windows), to) in [
        ("gemma2", "Gemma2ForCausalLM", gemma.clone(), None),
        ("gemma2", "Gemma2ForCausalLM", with(types(&[2, 5])), pattern(3)),
        ("gemma3_text", "Gemma3ForCausalLM", gemma.clone(), None),
        ("gemma3_text", "Gemma3ForCausalLM", with(untied.clone()), None),
        ("gemma3_text", "Gemma3ForCausalLM", with(types(&[0, 1, 2, 3, 4, 5, 6])), pattern(1)),
        ("gemma3_text", "Gemma3ForCausalLM", with(types(&[])), pattern(8)),
        (
            "gemma3_text",
            "Gemma3ForCausalLM",
            with(types(&[1, 4])),
            Some(MetadataValue::List(flags.to_vec())),
        ),
        ("gemma3_text", "Gemma3TextModel", with(both_ways), None),
        ("phi3", "Phi3ForCausalLM", untied, None),
        ("smollm3", "SmolLM3ForCausalLM", json!({}), None),
        ("modernbert", "ModernBertModel", encoder, None),
    ]
    .into_iter()
    .zip(formats)
    {
        let from = made_up(&config(family, class, &fields));
        let path = dir.path().join("m.gguf");
        let (model, written, rounded) =
            again(ModelDir::open(from.path()).expect(family), to, &path);
        assert_same(&model, &written);
        assert!(rounded.iter().all(|one| one.error > 0.0 && one.format.block().is_some()));
        let told = model.rounding(&mut |_, _| {}).expect("errors");
        for one in &told {
            let same = |other: &Rounded| {
                other.matrix == one.matrix && (other.error - one.error).abs() < 1e-9
            };
            assert!(rounded.iter().any(same), "{one:?}");
        }
        let field = format!("{}.attention.sliding_window_pattern", header(&path).own(""));
        let field = field.replace("..", ".");
        assert_eq!(header(&path).fields.get(&field), windows.as_ref(), "{family} {fields}");
    }
}

#[test]
fn norms_of_gemma_are_written_whole() {
    let (model, _copy) = changed("gemma2", &json!({ "query_pre_attn_scalar": 14 }));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("m.gguf");
    model.write_gguf(&path, &mut |_, _| {}).expect("a file");
    let (file, gguf) = (File::open(&path).expect("a file"), header(&path));
    let stored = fs::read(golden("gemma2").join("model.safetensors")).expect("weights");
    let stored = safetensors::SafeTensors::deserialize(&stored).expect("tensors");
    for (here, there) in [
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.2.ffn_norm.weight", "model.layers.2.pre_feedforward_layernorm.weight"),
        ("blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ] {
        let tensor = gguf.tensors.iter().find(|tensor| tensor.name == here).expect(here);
        let mut bytes = vec![0; tensor.bytes as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, tensor.offset).expect("bytes");
        let numbers = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let there = numbers(stored.tensor(there).expect(there).data());
        let there: Vec<f32> = there.into_iter().map(|value| value + 1.0).collect();
        assert_eq!(numbers(&bytes), there, "{here}");
    }
}

#[test]
fn fields_of_positions_are_those_of_converters() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("m.gguf");
    let (model, _copy) = changed("phi3", &json!({}));
    model.write_gguf(&path, &mut |_, _| {}).expect("a file");
    let gguf = header(&path);
    let whole = |field: &str| gguf.whole(&format!("phi3.{field}"));
    assert_eq!(whole("rope.dimension_count"), Some(6));
    assert_eq!(whole("rope.scaling.original_context_length"), Some(64));
    assert_eq!(whole("attention.sliding_window"), Some(40));
    let scale = (1.0 + 4f64.ln() / 64f64.ln()).sqrt() as f32;
    assert_eq!(gguf.number("phi3.rope.scaling.attn_factor"), Some(scale.into()));
    assert_eq!(gguf.text("phi3.rope.scaling.type"), None);
    let shape = |name: &str| {
        let found = gguf.tensors.iter().find(|tensor| tensor.name == name);
        found.map(|tensor| tensor.shape.clone())
    };
    assert_eq!(shape("rope_factors_long.weight"), Some(vec![3]));
    assert_eq!(shape("blk.0.attn_qkv.weight"), Some(vec![48 + 2 * 16, 48]));
    assert_eq!(shape("blk.0.ffn_up.weight"), Some(vec![2 * 58, 48]));
    assert_eq!(shape("blk.0.ffn_gate.weight"), None);
    let (model, _copy) = changed("gemma3", &json!({ "query_pre_attn_scalar": 14 }));
    model.write_gguf(&path, &mut |_, _| {}).expect("a file");
    let gguf = header(&path);
    assert_eq!(gguf.number("gemma3.rope.freq_base"), Some(5000.0));
    assert_eq!(gguf.number("gemma3.rope.freq_base_swa"), Some(300.0));
    assert_eq!(gguf.text("gemma3.rope.scaling.type"), Some("linear"));
    assert_eq!(gguf.whole("gemma3.attention.sliding_window"), Some(23));
    assert_eq!(gguf.whole("gemma3.attention.sliding_window_pattern"), Some(3));
}

/// The layers that EmbeddingGemma has behind the pooling, and its prompts.
#[test]
fn dense_layers_behind_the_pooling_survive_writing_as_gguf() {
    let changes = json!({ "architectures": ["Gemma3TextModel"] });
    let (_, copy) = changed("gemma3-both-ways", &changes);
    let put = |name: &str, json: Value| {
        let path = copy.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, json.to_string()).expect("a file");
    };
    let modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        ("2_Dense", "Dense"),
        ("3_Dense", "Dense"),
        ("4_Normalize", "Normalize"),
    ];
    let module = |(at, (path, kind)): (usize, &(&str, &str))| json!({ "idx": at, "name": at.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}") });
    put("modules.json", modules.iter().enumerate().map(module).collect());
    let pooling = json!({ "word_embedding_dimension": 24, "pooling_mode_mean_tokens": true });
    put("1_Pooling/config.json", pooling);
    put("config_sentence_transformers.json", json!({ "prompts": { "query": "task: " } }));
    let dense = |name: &str, inputs: u64, outputs: u64, activation: &str| {
        put(
            &format!("{name}/config.json"),
            json!({ "in_features": inputs, "out_features": outputs, "bias": false,
                "activation_function": format!("torch.nn.modules.{activation}") }),
        );
        let values = (0..inputs * outputs).flat_map(|at| (at as f32 / 64.0).sin().to_le_bytes());
        let bytes = file(&[("linear.weight", "F32", vec![outputs, inputs], values.collect())]);
        fs::write(copy.path().join(name).join("model.safetensors"), bytes).expect("a file");
    };
    dense("2_Dense", 24, 40, "linear.Identity");
    dense("3_Dense", 40, 24, "linear.Identity");
    let model = ModelDir::open(copy.path()).expect("a model");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("m.gguf");
    model.write_gguf(&path, &mut |_, _| {}).expect("a file");
    let written = ModelDir::open(&path).expect("a model");
    assert_eq!(written.warnings(), []);
    let sentence = |model: &ModelDir| model.sentence().expect("settings");
    assert_eq!(sentence(&written), sentence(&model));
    assert_eq!(sentence(&written).prompt(Some("query")), Ok("task: "));
    assert_eq!(header(&path).whole("gemma-embedding.dense_2_feat_out"), Some(40));
    let again = dir.path().join("again.gguf");
    written.write_gguf(&again, &mut |_, _| {}).expect("a file");
    // No field says that such a layer has an activation.
    dense("3_Dense", 40, 24, "activation.Tanh");
    let model = ModelDir::open(copy.path()).expect("a model");
    let error = model.write_gguf(&path, &mut |_, _| {}).expect_err("refused");
    assert!(error.to_string().contains("what its vectors go through"), "{error}");
}
