mod families;
#[cfg(feature = "tokenizer")]
mod tokenizers;

use super::*;
use crate::{
    Quantisation, Vector,
    gguf::{MetadataValue, tests::model},
    shape::Shape,
    testing::{golden, rows},
};
use std::{fs, path::PathBuf};

/// Rounds a model, writes it, and opens what was written.
fn again(model: ModelDir, to: Quantisation, path: &Path) -> (ModelDir, ModelDir, Vec<Rounded>) {
    let model = model.quantised(to).expect("it can be rounded");
    let mut told = Vec::new();
    let rounded = model.write_gguf(path, &mut |done, of| told.push((done, of)));
    let rounded = rounded.expect("it can be written");
    assert!(told.windows(2).all(|pair| pair[0].0 < pair[1].0), "{told:?}");
    assert_eq!(told.last().map(|(done, of)| done.next_multiple_of(32) == *of), Some(true));
    let written = ModelDir::open(path).expect("it can be read");
    assert!(!path.with_extension("gguf.new").exists());
    (model, written, rounded)
}

fn assert_same(model: &ModelDir, written: &ModelDir) {
    assert_eq!(model.formats().with_vectors_of(written), *written.formats());
    for which in Matrix::all(model.spec()) {
        assert!(rows(model, which) == rows(written, which), "{which:?}");
    }
    for which in Vector::all(model.spec()) {
        let vector = |of: &ModelDir| of.vector(which).expect("a vector");
        assert_eq!(vector(model), vector(written), "{which:?}");
    }
}

impl crate::Formats {
    /// These formats, with the vectors in the format that another model has them in.
    fn with_vectors_of(&self, other: &ModelDir) -> Self {
        self.clone().with_vectors(other.formats().vectors())
    }
}

fn shaped(family: &'static str, config: &'static str) -> Shape {
    let format = WeightFormat::Bf16;
    let bert = Shape::bert(2, 256, 4);
    Shape { family, kv_heads: 2, vocabulary: 300, intermediate: 512, format, config, ..bert }
}

#[test]
fn a_written_gguf_file_reads_as_the_same_model() {
    const LLAMA3: &str = r#"{"rope_theta": 500000.0, "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3" }}"#;
    const YARN: &str = r#"{"rope_scaling": { "factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "yarn" }}"#;
    const LINEAR: &str = r#"{"rope_scaling": { "factor": 2.0, "type": "linear" }}"#;
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (at, config) in ["{}", LLAMA3, YARN, LINEAR].into_iter().enumerate() {
        let from = dir.path().join(at.to_string());
        fs::create_dir(&from).expect("a directory");
        shaped("llama", config).write(&from, u64::MAX, &mut |_| {}).expect("a model");
        for to in Quantisation::ALL {
            let path = dir.path().join(format!("{at}-{to}.gguf"));
            let open = ModelDir::open(&from).expect("a model");
            let (model, written, rounded) = again(open, to, &path);
            assert_same(&model, &written);
            // The embedding table is the language head, and each matrix is reported.
            assert_eq!(rounded.len(), 2 * 7 + 1, "{to}");
            let told = model.rounding(&mut |_, _| {}).expect("errors");
            for one in &rounded {
                let other = told.iter().find(|other| other.matrix == one.matrix).expect("it too");
                assert_eq!((one.format, one.stored), (other.format, other.stored));
                assert!((one.error - other.error).abs() < 1e-9 && one.error > 0.0);
            }
            let mut rows = [0.0; 512];
            written.embedding_rows(Table::Word, &[299, 5], &mut rows).expect("rows");
            let mut want = [0.0; 512];
            model.embedding_rows(Table::Word, &[299, 5], &mut want).expect("rows");
            assert_eq!(rows, want);
        }
    }
}

/// Small checkpoints of transformers, whose rows are no multiples of 32: what cannot be rounded stays as it is.
#[test]
fn llama_and_qwen_checkpoints_survive_writing_as_gguf() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in ["llama", "qwen2", "qwen3"] {
        let model = ModelDir::open(&golden(name)).expect("a model");
        let path = dir.path().join(format!("{name}.gguf"));
        let rounded = model.write_gguf(&path, &mut |_, _| {}).expect("it can be written");
        assert!(rounded.iter().all(|one| one.error == 0.0), "as it is");
        let written = ModelDir::open(&path).expect("it can be read");
        assert_same(&model, &written);
        let ends = |model: &ModelDir| model.generation().expect("settings").ends;
        assert_eq!(ends(&written), ends(&model), "{name}");
    }
}

#[test]
fn tokenizers_survive_writing_as_gguf() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let texts = |all: &[&str]| {
        MetadataValue::List(all.iter().map(|t| MetadataValue::Text((*t).into())).collect())
    };
    let wholes =
        |all: &[i128]| MetadataValue::List(all.iter().map(|n| MetadataValue::Whole(*n)).collect());
    let cuts = ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "llama", "none"];
    for (at, kind) in cuts.into_iter().enumerate() {
        let read = model(|fields| {
            let mut set = |name: &'static str, value: MetadataValue| {
                fields.retain(|(field, _)| *field != name);
                fields.push((name, value));
            };
            set("tokenizer.chat_template", MetadataValue::Text("{{ messages }}".to_owned()));
            set("tokenizer.ggml.eot_token_id", MetadataValue::Whole(2));
            match kind {
                "llama" => {
                    set("tokenizer.ggml.model", MetadataValue::Text(kind.to_owned()));
                    set("tokenizer.ggml.tokens", texts(&["<unk>", "a", "b", "ab"]));
                    set("tokenizer.ggml.token_type", wholes(&[2, 1, 1, 1]));
                    let scores = [0.0, -7.0, -8.0, -1.5].map(MetadataValue::Float).to_vec();
                    set("tokenizer.ggml.scores", MetadataValue::List(scores));
                    set("tokenizer.ggml.unknown_token_id", MetadataValue::Whole(0));
                }
                "none" => {
                    fields.retain(|(field, _)| !field.starts_with("tokenizer.ggml."));
                    fields.push(("tokenizer.ggml.model", MetadataValue::Text(kind.to_owned())));
                }
                pre => set("tokenizer.ggml.pre", MetadataValue::Text(pre.to_owned())),
            }
        });
        let path = dir.path().join(format!("{at}.gguf"));
        let (model, written, _) = again(read.expect("a model"), Quantisation::Q8, &path);
        assert_same(&model, &written);
        for file in if kind == "none" { &[][..] } else { &FILES } {
            let text = |model: &ModelDir| fs::read_to_string(model.path().join(file)).expect(file);
            assert_eq!(text(&written), text(&model), "{kind}: {file}");
        }
        assert_eq!(written.path().join("tokenizer.json").exists(), kind != "none");
    }
}

/// A small BERT with a WordPiece tokenizer and the files of sentence-transformers, one of them with more fields.
fn encoder(name: &str, fields: serde_json::Value) -> (ModelDir, tempfile::TempDir) {
    let from = tempfile::tempdir().expect("a temporary directory");
    let shape = Shape { vocabulary: 12, intermediate: 512, ..Shape::bert(2, 256, 4) };
    shape.write(from.path(), u64::MAX, &mut |_| {}).expect("a model");
    let put = |name: &str, json: serde_json::Value| {
        let path = from.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, json.to_string()).expect("a file");
    };
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let vocabulary = special.iter().chain(&["a", "##b", "##", "\u{e4}", "cat", "##s", "."]);
    let added = (0..).zip(special).map(|(id, text): (u32, _)| {
        serde_json::json!({ "id": id, "content": text, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false })
    });
    put(
        "tokenizer.json",
        serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": false, "lowercase": true },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2] },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": vocabulary.zip(0u32..).map(|(text, id)| ((*text).to_owned(), id.into()))
                    .collect::<serde_json::Map<_, _>>() },
        }),
    );
    put(
        "tokenizer_config.json",
        serde_json::json!({ "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]",
            "pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]" }),
    );
    let module = |at: u32, path: &str, kind: &str| {
        let kind = format!("sentence_transformers.models.{kind}");
        serde_json::json!({ "idx": at, "name": at.to_string(), "path": path, "type": kind })
    };
    let modules =
        [(0, "", "Transformer"), (1, "1_Pooling", "Pooling"), (2, "2_Normalize", "Normalize")];
    let modules = modules.map(|(at, path, kind)| module(at, path, kind));
    put("modules.json", serde_json::json!(modules));
    put(
        "1_Pooling/config.json",
        serde_json::json!({ "word_embedding_dimension": 256, "pooling_mode_cls_token": true }),
    );
    put("sentence_bert_config.json", serde_json::json!({ "max_seq_length": 7 }));
    if name == "prompts" {
        put("config_sentence_transformers.json", fields);
    }
    (ModelDir::open(from.path()).expect("a model"), from)
}

#[test]
fn an_encoder_survives_writing_as_gguf() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let prompts = serde_json::json!({ "prompts": { "query": "q: \n", "text": "" }, "default_prompt_name": "text" });
    let (model, _from) = encoder("prompts", prompts);
    let sentence = model.sentence().expect("settings");
    let path = dir.path().join("x.gguf");
    let (model, written, _) = again(model, Quantisation::Q8, &path);
    // The table of token embeddings is rounded in the file, and not in the model.
    assert_same(&model, &written);
    assert_eq!(written.sentence().expect("settings"), sentence);
    assert_eq!(sentence.max_tokens, Some(7));
    assert_eq!(sentence.prompt(Some("query")), Ok("q: \n"));
    let positions = |model: &ModelDir| {
        let mut rows = vec![0.0; 3 * 256];
        model.embedding_rows(Table::Position, &[0, 1, 511], &mut rows).expect("rows");
        rows
    };
    assert_eq!(positions(&written), positions(&model));
    #[cfg(feature = "tokenizer")]
    for text in ["A cats.", "ab \u{c4} dog", "", "##a [MASK]"] {
        let tokens = |model: &ModelDir| {
            let tokenizer = crate::tokenizer::Tokenizer::open(model.path()).expect("a tokenizer");
            (tokenizer.encode(text, None).expect("tokens"), tokenizer.encode(text, Some(4)).ok())
        };
        assert_eq!(tokens(&written), tokens(&model), "{text:?}");
    }
}

const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

#[test]
fn models_that_gguf_cannot_express_are_rejected_by_name() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path: PathBuf = dir.path().join("x.gguf");
    let refused = |model: ModelDir, why: &str| {
        let error = model.write_gguf(&path, &mut |_, _| {}).expect_err(why);
        assert!(matches!(error, ModelError::Unwritten { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}: lacks {why}");
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0, "nothing is left");
    };
    refused(ModelDir::open(&golden("vit")).expect("a model"), "weights_format");
    for (name, why) in [
        (
            "gpt2",
            "bert, gemma2, gemma3_text, llama, mistral, modernbert, phi3, qwen2, qwen3, smollm3",
        ),
        ("bert", "its head is"),
        ("llama-tied-bf16", "mlp_bias is true"),
        ("gemma2", "its scores is"),
        ("smollm3", "each fourth one"),
        ("mistral-window", "a sliding window, which llama.cpp does not compute in files of llama"),
        ("qwen2-both-ways", "its rows see the rows behind them, too"),
        ("modernbert-biases", "biases, which llama.cpp does not read in files of modern-bert"),
    ] {
        refused(ModelDir::open(&golden(name)).expect("a model"), why);
    }
    for (name, config, why) in [
        (
            "qwen2-window",
            serde_json::json!({ "is_causal": true }),
            "a sliding window, which llama.cpp does not compute in files of qwen2",
        ),
        (
            "gemma2",
            serde_json::json!({ "query_pre_attn_scalar": 14, "attn_logit_softcapping": null }),
            "its score_cap is null",
        ),
        (
            "gemma3",
            serde_json::json!({ "query_pre_attn_scalar": 14, "sliding_window": null }),
            "positions of their own and no window",
        ),
        (
            "phi3",
            serde_json::json!({ "rope_parameters": { "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64 } }),
            "files of phi3 do not divide frequencies of positions like this",
        ),
    ] {
        refused(families::changed(name, &config).0, why);
    }
    let (model, _from) = encoder("prompts", serde_json::json!({ "truncate_dim": 8 }));
    refused(model, "to what its vectors are cut");
    let bpe = |change: Change<'_>| {
        let from = tempfile::tempdir().expect("a temporary directory");
        shaped("llama", "{}").write(from.path(), u64::MAX, &mut |_| {}).expect("a model");
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-galaxy");
        let text = fs::read_to_string(tiny.join("tokenizer.json")).expect("a tokenizer");
        let mut json = serde_json::from_str(&text).expect("a tokenizer");
        change(&mut json);
        fs::write(from.path().join("tokenizer.json"), json.to_string()).expect("a file");
        (ModelDir::open(from.path()).expect("a model"), from)
    };
    let merge = serde_json::json!([["\u{100}", "\u{101}"]]);
    let cases: [(Change<'_>, &str); 5] = [
        (&|json| json["model"]["type"] = "Unigram".into(), "Unigram"),
        (&|json| json["model"]["merges"] = merge.clone(), "does not cut texts"),
        (&|json| json["added_tokens"][0]["single_word"] = true.into(), "single_word"),
        (&|json| json["added_tokens"][0]["id"] = 300.into(), "300 rows"),
        (&|json| json["post_processor"]["type"] = "RobertaProcessing".into(), "RobertaProcessing"),
    ];
    for (change, why) in cases {
        let (model, _from) = bpe(change);
        refused(model, why);
    }
}

/// A function that changes a `tokenizer.json`.
type Change<'a> = &'a dyn Fn(&mut serde_json::Value);
