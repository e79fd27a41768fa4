use super::*;
use crate::testing::{edit, golden, golden_copy};
use std::fs;

#[test]
fn a_missing_config_or_tensor_is_named_in_the_error() {
    let error = ModelDir::open(Path::new("/nowhere/at-all")).expect_err("nothing there");
    assert!(error.to_string().contains("config.json"), "{error}");

    let copy = golden_copy("bert");
    let key = "layer.2.attention.self.key.bias";
    edit(&copy, "model.safetensors", key, "layer.2.attention.self.kez.bias");
    let error = ModelDir::open(copy.path()).expect_err("a tensor less");
    let want = format!("bert.encoder.{key}");
    assert!(matches!(&error, ModelError::MissingTensor { tensor, .. } if *tensor == want));

    let copy = golden_copy("gpt2");
    edit(&copy, "model.safetensors", "transformer.wte", "transformer.wtx");
    let error = ModelDir::open(copy.path()).expect_err("no table");
    assert!(error.to_string().contains("wte.weight"), "{error}");
}

#[test]
fn a_config_that_contradicts_the_weights_is_rejected() {
    let cases = [
        ("bert", "\"intermediate_size\": 50", "\"intermediate_size\": 51", "51"),
        ("bert", "\"vocab_size\": 97", "\"vocab_size\": 96", "word_embeddings"),
        ("bert", "\"type_vocab_size\": 2", "\"type_vocab_size\": 3", "token_type"),
        ("bert", "\"max_position_embeddings\": 160", "\"max_position_embeddings\": 161", "161"),
        ("gpt2", "\"n_layer\": 3", "\"n_layer\": 4", "h.3."),
        ("llama", "\"head_dim\": 10", "\"head_dim\": 8", "q_proj"),
        ("llama", "\"mlp_bias\": false", "\"mlp_bias\": true", "bias"),
    ];
    for (name, old, new, want) in cases {
        let copy = golden_copy(name);
        edit(&copy, "config.json", old, new);
        let error = ModelDir::open(copy.path()).expect_err(new).to_string();
        assert!(error.contains(want), "{error}\nlacks {want:?}");
    }
}

#[test]
fn norms_named_gamma_and_beta_are_read_as_weight_and_bias() {
    let copy = golden_copy("bert");
    let name = "bert.embeddings.LayerNorm.weight\"";
    edit(&copy, "model.safetensors", name, "bert.embeddings.LayerNorm.gamma\" ");
    edit(
        &copy,
        "model.safetensors",
        "bert.embeddings.LayerNorm.bias\"",
        "bert.embeddings.LayerNorm.beta\"",
    );
    let renamed = ModelDir::open(copy.path()).expect("a model");
    let model = ModelDir::open(&golden("bert")).expect("a model");
    for which in [Vector::EmbeddingNorm, Vector::EmbeddingNormBias] {
        let have = renamed.vector(which).expect("a vector");
        assert_eq!(have, model.vector(which).expect("a vector"));
    }
    assert_ne!(renamed.fingerprint(), model.fingerprint());
}

#[test]
fn the_fingerprint_depends_on_config_and_weights_not_on_the_path() {
    let model = ModelDir::open(&golden("llama-tied-bf16")).expect("a model");
    assert_eq!(model.fingerprint().len(), 64);
    let copy = golden_copy("llama-tied-bf16");
    let same = ModelDir::open(copy.path()).expect("a model");
    assert_eq!(same.fingerprint(), model.fingerprint());
    assert_ne!(same.name(), model.name());
    assert_eq!(model.name(), "llama-tied-bf16");
    edit(&copy, "config.json", "{", "{ ");
    let other = ModelDir::open(copy.path()).expect("a model");
    assert_ne!(other.fingerprint(), model.fingerprint());

    // A retrained model of the same shape is another one.
    let model = ModelDir::open(&golden("bert")).expect("a model");
    let copy = golden_copy("bert");
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).expect("a file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    for byte in &mut bytes[8 + header..] {
        *byte ^= 1;
    }
    fs::write(&path, bytes).expect("a file");
    let retrained = ModelDir::open(copy.path()).expect("a model");
    assert_ne!(retrained.fingerprint(), model.fingerprint());
}

#[test]
fn reads_outside_the_model_are_errors_of_the_caller() {
    let model = ModelDir::open(&golden("llama")).expect("a model");
    let mut out = vec![0.0; 48];
    let errors = [
        model.matrix(Matrix::Query(3)).err(),
        model.matrix(Matrix::ClassDense).err(),
        model.vector(Vector::QueryBias(0)).err(),
        model.vector(Vector::FinalNormBias).err(),
        model.vector(Vector::TokenTypes).err(),
        model.embedding_rows(Table::Position, &[0], &mut out).err(),
        model.embedding_rows(Table::Word, &[97], &mut out).err(),
        model.embedding_rows(Table::Word, &[u32::MAX, 0], &mut [0.0; 96]).err(),
        model.embedding_rows(Table::Word, &[1, 2], &mut out).err(),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("question {i} was answered"));
        assert!(error.is_caller(), "{error}");
    }
    assert!(model.embedding_rows(Table::Word, &[], &mut []).is_ok());
    let bert = ModelDir::open(&golden("bert")).expect("a model");
    assert!(bert.matrix(Matrix::Gate(0)).is_err());
    assert!(bert.matrix(Matrix::LanguageHead).is_err());
}

#[test]
fn embedding_rows_can_be_read_in_any_order() {
    let model = ModelDir::open(&golden("bert-f16")).expect("a model");
    let ids = [5, 6, 7, 7, 8, 0, 96, 95, 96, 1];
    let mut together = vec![0.0; ids.len() * 42];
    model.embedding_rows(Table::Word, &ids, &mut together).expect("rows");
    for (i, &id) in ids.iter().enumerate() {
        let mut one = vec![0.0; 42];
        model.embedding_rows(Table::Word, &[id], &mut one).expect("a row");
        assert_eq!(one, together[i * 42..][..42]);
    }
}
