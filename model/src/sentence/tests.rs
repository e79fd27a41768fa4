use super::*;
use crate::ModelError;
use galaxy_common::Pooling;
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};
use std::fs;
use tempfile::TempDir;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    directory
}

fn sentence(files: &[(&str, &str)]) -> Result<SentenceConfig, ModelError> {
    read(directory(files).path(), Some(2))
}

/// A `modules.json` with these modules behind a Transformer and a Pooling, each in a directory of
/// its name.
fn modules(behind: &[&str]) -> String {
    let module = |kind: &&str| format!(r#"{{"path": "{kind}", "type": "st.models.{kind}"}}"#);
    let mut list = vec![r#"{"path": "", "type": "st.models.Transformer"}"#.to_owned()];
    list.extend(["Pooling"].iter().chain(behind).map(module));
    format!("[{}]", list.join(", "))
}

fn weights(place: &Path, tensors: &[(&str, &[usize], &[f32])]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|tensor| tensor.2.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("a tensor"))
    });
    serialize_to_file(views, None, &place.join("model.safetensors")).expect("a file");
}

const MEAN: (&str, &str) = ("Pooling/config.json", r#"{"pooling_mode": "mean"}"#);

#[test]
fn a_usual_sentence_transformers_directory_is_read() {
    assert_eq!(sentence(&[]).expect("a plain model"), SentenceConfig::default());
    let flags = r#"{"word_embedding_dimension": 2, "pooling_mode_cls_token": false,
        "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false}"#;
    let full = sentence(&[
        ("modules.json", &modules(&["Normalize"])),
        ("Pooling/config.json", flags),
        ("sentence_bert_config.json", r#"{"max_seq_length": 256, "do_lower_case": false}"#),
        (
            "config_sentence_transformers.json",
            r#"{"prompts": {"q": "query: ", "d": null}, "default_prompt_name": "q", "truncate_dim": 1}"#,
        ),
    ]);
    let full = full.expect("a config");
    assert_eq!((full.wanted(), full.max_tokens), (Wanted::Pooled(Pooling::Mean), Some(256)));
    assert_eq!(full.prompt(None), Ok("query: "));
    assert_eq!(full.prompt(Some("d")), Ok(""));
    assert_eq!(full.prompt(Some("x")), Err(vec!["d", "q"]));
    // A vector that is cut is not scaled again, unless a request asks for it.
    let finish = |form| full.finish(vec![3.0, 4.0], form);
    assert_eq!(finish(VectorForm::default()), [0.6]);
    assert_eq!(finish(VectorForm { dimensions: Some(2), normalise: false }), [0.6, 0.8]);
    assert_eq!(finish(VectorForm { dimensions: None, normalise: true }), [1.0]);
}

#[test]
fn a_plain_causal_model_is_pooled_at_its_last_row() {
    let wanted = |text: &str| sentence(&[("config.json", text)]).expect(text).wanted();
    let last = Wanted::Pooled(Pooling::LastToken);
    assert_eq!(wanted(r#"{"architectures": ["LlamaForCausalLM"]}"#), last);
    let mean = Wanted::Pooled(Pooling::Mean);
    assert_eq!(wanted(r#"{"architectures": ["BertModel"]}"#), mean);
    assert_eq!(wanted(r#"{"architectures": ["LlamaForCausalLM"], "is_causal": false}"#), mean);
}

#[test]
fn every_pooling_config_is_read() {
    use PoolingMode::*;
    let cases = [
        (r#"{"pooling_mode_cls_token": true}"#, vec![Cls]),
        (r#"{"pooling_mode_mean_tokens": true}"#, vec![Mean]),
        (r#"{"pooling_mode_mean_sqrt_len_tokens": true}"#, vec![MeanSqrtLen]),
        (r#"{"pooling_mode_weightedmean_tokens": true}"#, vec![WeightedMean]),
        (r#"{"pooling_mode_lasttoken": true}"#, vec![LastToken]),
        (r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}"#, vec![Cls, Mean]),
        (r#"{"pooling_mode": "lasttoken", "include_prompt": true}"#, vec![LastToken]),
        (r#"{"pooling_mode": ["mean", "max"]}"#, vec![Mean, Max]),
        ("{}", vec![Mean]),
    ];
    for (text, want) in cases {
        let have = sentence(&[("modules.json", &modules(&[])), ("Pooling/config.json", text)]);
        assert_eq!(have.expect(text).pooling, want);
    }
    let text = r#"{"pooling_mode": "max", "include_prompt": false}"#;
    let files = [("modules.json", &*modules(&[])), ("Pooling/config.json", text)];
    let without = sentence(&files).expect("a config");
    assert_eq!(without.wanted(), Wanted::Pooled(Pooling::Max));
    assert_eq!(without.wanted_behind_prompts(), Wanted::Hidden);
    assert_eq!(without.pool(&[9.0, 9.0, 1.0, 2.0], 2, 1), Some(vec![1.0, 2.0]));
    assert_eq!(without.pool(&[9.0, 9.0], 2, 1), None);
}

#[test]
fn modules_after_the_pooling_run_in_their_order() {
    let directory = directory(&[
        ("modules.json", &modules(&["Normalize", "Dense", "LayerNorm", "Dropout"])),
        MEAN,
        ("Dense/config.json", r#"{"in_features": 2, "out_features": 3, "bias": false}"#),
        ("LayerNorm/config.json", r#"{"dimension": 3}"#),
    ]);
    let dense = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
    let place = directory.path().join("Dense");
    weights(&place, &[("linear.weight", &[3, 2], &dense)]);
    let ones = [1.0; 3];
    let norm: [(&str, &[usize], &[f32]); 2] =
        [("norm.weight", &[3], &ones), ("norm.bias", &[3], &ones)];
    weights(&directory.path().join("LayerNorm"), &norm);
    let read_again = || read(directory.path(), Some(2));
    let config = read_again().expect("a config");
    assert_eq!(config.width(2), 3);
    let have = config.finish(vec![3.0, 4.0], VectorForm::default());
    let values = [0.6_f64, 0.8, 1.4].map(f64::tanh);
    let mean = values.iter().sum::<f64>() / 3.0;
    let deviation = (values.map(|v| (v - mean).powi(2)).iter().sum::<f64>() / 3.0 + 1e-5).sqrt();
    for (have, value) in have.iter().zip(values) {
        let want = (value - mean) / deviation + 1.0;
        assert!((f64::from(*have) - want).abs() < 1e-5, "{have}, wanted {want}");
    }
    let error = read(directory.path(), Some(3)).expect_err("a wrong width").to_string();
    assert!(error.contains("in_features") && error.contains("have 3 values"), "{error}");
    fs::rename(place.join("model.safetensors"), place.join("pytorch_model.bin")).expect("moved");
    let error = read_again().expect_err("pickled").to_string();
    assert!(
        error.contains("pytorch_model.bin") && error.contains("save the model again"),
        "{error}"
    );
}

#[test]
fn unsupported_sentence_modules_and_settings_are_rejected_by_name() {
    let poolings = [
        (r#"{"pooling_mode": 3}"#, "known are cls, max"),
        (r#"{"pooling_mode": []}"#, "known are cls"),
        (r#"{"pooling_mode": "median"}"#, "median"),
        (r#"{"embedding_dimension": 3}"#, "hidden states have 2"),
        ("[", "not valid"),
    ];
    for (text, want) in poolings {
        let files = [("modules.json", &*modules(&[])), ("Pooling/config.json", text)];
        let error = sentence(&files).expect_err(text).to_string();
        assert!(error.contains(want), "{error}");
    }
    let transformer = r#"{"path": "", "type": "a.Transformer"}"#;
    let listed = [
        (format!("[{transformer}]"), "no Pooling"),
        (format!(r#"[{transformer}, {{"path": "2_Dense", "type": "a.Dense"}}]"#), "order"),
        (format!(r#"[{transformer}, {{"path": "1", "type": "a.WordWeights"}}]"#), "WordWeights"),
        (r#"[{"path": "", "type": "a.WordEmbeddings"}]"#.to_owned(), "WordEmbeddings"),
        (format!(r#"[{transformer}, {{"path": "../x", "type": "a.Pooling"}}]"#), "inside"),
        (format!(r#"[{transformer}, {{"path": "/x", "type": "a.Pooling"}}]"#), "inside"),
        ("{}".to_owned(), "a list"),
        ("[]".to_owned(), "empty"),
        (modules(&["LSTM"]), "LSTM"),
        (modules(&["Pooling"]), "order"),
    ];
    for (text, want) in listed {
        let files = [("modules.json", &*text), MEAN];
        let error = sentence(&files).expect_err(&text).to_string();
        assert!(error.contains(want), "{error}");
    }
    let tokens = "token_embeddings";
    let files = [
        ("Dense/config.json", format!(r#"{{"module_input_name": "{tokens}"}}"#), tokens),
        ("Normalize/config.json", format!(r#"{{"module_input_name": "{tokens}"}}"#), tokens),
        (
            "Dense/config.json",
            r#"{"in_features": 2, "out_features": 2, "activation_function": "my.Own"}"#.to_owned(),
            "my.Own",
        ),
        (
            "Dense/config.json",
            r#"{"in_features": 131072, "out_features": 131072}"#.to_owned(),
            "at most",
        ),
        ("sentence_bert_config.json", r#"{"modality_config": {"message": {}}}"#.to_owned(), "chat"),
        (
            "sentence_bert_config.json",
            r#"{"modality_config": {"text": {"method": "encode"}}}"#.to_owned(),
            "last layer",
        ),
        (
            "sentence_bert_config.json",
            r#"{"transformer_task": "fill-mask"}"#.to_owned(),
            "fill-mask",
        ),
        (
            "sentence_bert_config.json",
            r#"{"processing_kwargs": {"text": {}}}"#.to_owned(),
            "processing_kwargs",
        ),
        (
            "sentence_bert_config.json",
            r#"{"tokenizer_args": {"do_lower_case": true}}"#.to_owned(),
            "do_lower_case",
        ),
        (
            "config_sentence_transformers.json",
            r#"{"model_type": "SparseEncoder"}"#.to_owned(),
            "SparseEncoder",
        ),
        (
            "config_sentence_transformers.json",
            r#"{"default_prompt_name": "q"}"#.to_owned(),
            "lacks",
        ),
    ];
    for (name, text, want) in files {
        let list = modules(&["Dense", "Normalize"]);
        let mut all = vec![("modules.json", &*list), MEAN, ("Normalize/config.json", "{}")];
        all.retain(|file| file.0 != name);
        all.push((name, &text));
        let directory = directory(&all);
        if !name.starts_with("Dense") {
            let place = directory.path().join("Dense");
            fs::create_dir(&place).expect("a directory");
            let config = r#"{"in_features": 2, "out_features": 1, "bias": false}"#;
            fs::write(place.join("config.json"), config).expect("a file");
            weights(&place, &[("linear.weight", &[1, 2], &[1.0, 1.0])]);
        }
        let error = read(directory.path(), None).expect_err(&text).to_string();
        assert!(error.contains(want), "{error}\nlacks {want:?}");
    }
}

#[test]
fn the_token_limit_is_read_from_older_files_and_arguments() {
    let of = |name: &str, text: &str| {
        let files = [("modules.json", &*modules(&[])), MEAN, (name, text)];
        sentence(&files).expect(text).max_tokens
    };
    assert_eq!(of("sentence_xlm-roberta_config.json", r#"{"max_seq_length": 99}"#), Some(99));
    let both = r#"{"max_seq_length": 99, "tokenizer_args": {"model_max_length": 32}}"#;
    assert_eq!(of("sentence_bert_config.json", both), Some(32));
    assert_eq!(of("sentence_bert_config.json", r#"{"max_seq_length": null}"#), None);
}

#[test]
fn unread_fields_are_named_in_warnings() {
    let directory = directory(&[
        ("modules.json", &modules(&["Normalize"])),
        ("Pooling/config.json", r#"{"pooling_mode": "mean", "colour": 1}"#),
        ("sentence_bert_config.json", r#"{"max_seq_length": 9, "shape": 2}"#),
        ("config_sentence_transformers.json", r#"{"prompts": {}, "taste": 3}"#),
    ]);
    let warnings = look_over(directory.path());
    let told: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    for word in ["colour", "shape", "taste"] {
        assert!(told.iter().any(|line| line.contains(word)), "{told:?} lacks {word}");
    }
    assert_eq!(told.len(), 3, "{told:?}");
}

#[test]
fn a_model_in_a_transformer_subdirectory_is_found() {
    let list = r#"[{"path": "0_Transformer", "type": "st.models.Transformer"},
        {"path": "1_Pooling", "type": "st.models.Pooling"}]"#;
    let directory = directory(&[
        ("modules.json", list),
        ("0_Transformer/sentence_bert_config.json", r#"{"max_seq_length": 64}"#),
        ("1_Pooling/config.json", r#"{"pooling_mode_cls_token": true}"#),
    ]);
    assert_eq!(model_place(directory.path()), directory.path().join("0_Transformer"));
    let config = read(directory.path(), None).expect("a config");
    assert_eq!(look_over(directory.path()), []);
    let warnings = look_over(&directory.path().join("0_Transformer"));
    assert!(warnings[0].to_string().contains("directory above"), "{warnings:?}");
    assert_eq!(config.max_tokens, Some(64));
    assert_eq!(config.wanted(), Wanted::Pooled(Pooling::Cls));
}
