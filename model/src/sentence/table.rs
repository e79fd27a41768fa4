//! The fields of the files that sentence-transformers writes.

use crate::{
    error::ModelError,
    fields::{Fate, Table},
    store::{MAX_JSON_BYTES, read_bounded},
};
use serde_json::Value;
use std::path::Path;

const ONE_VECTOR: Fate = Fate::Only(
    &["\"sentence_embedding\""],
    "only the pooled vector of a text goes through modules: not tokens one by one, nor a second vector",
);

/// An entry of `modules.json`.
pub(super) const MODULE: Table = &[
    ("idx", Fate::Needless),
    ("name", Fate::Needless),
    ("path", Fate::Read),
    ("type", Fate::Read),
    ("kwargs", Fate::Needless),
];

/// `sentence_bert_config.json` and its namesakes.
pub(super) const TRANSFORMER: Table = &[
    ("max_seq_length", Fate::Read),
    ("do_lower_case", Fate::Read),
    (
        "transformer_task",
        Fate::Only(
            &["\"feature-extraction\"", "\"sequence-classification\""],
            "vectors are pooled from hidden states, and cross-encoders have a class head",
        ),
    ),
    ("modality_config", Fate::Read),
    (
        "module_output_name",
        Fate::Only(&["\"token_embeddings\"", "\"scores\""], "the model's own output is pooled"),
    ),
    ("model_args", Fate::Read),
    ("model_kwargs", Fate::Read),
    ("tokenizer_args", Fate::Read),
    ("processor_kwargs", Fate::Read),
    ("config_args", Fate::Read),
    ("config_kwargs", Fate::Read),
    (
        "processing_kwargs",
        Fate::Only(&["{}"], "texts are tokenized as the tokenizer's own files say"),
    ),
    // Whether rows of padding are left out: here there are none.
    ("unpad_inputs", Fate::Needless),
    // Of models that compare token by token, and of calls that name a task.
    ("query_length", Fate::Needless),
    ("document_length", Fate::Needless),
    ("query_expansion", Fate::Only(&[], "models that compare texts token by token are not known")),
];

/// What a saved model asks of the loading of its weights: none of it changes results that are computed in f32.
pub(super) const MODEL_ARGUMENTS: Table = &[
    ("trust_remote_code", Fate::Needless),
    ("torch_dtype", Fate::Needless),
    ("dtype", Fate::Needless),
    ("attn_implementation", Fate::Needless),
    ("add_pooling_layer", Fate::Needless),
    ("use_safetensors", Fate::Needless),
    ("low_cpu_mem_usage", Fate::Needless),
    ("device_map", Fate::Needless),
    ("unpad_inputs", Fate::Needless),
    ("use_memory_efficient_attention", Fate::Needless),
];

/// `config_sentence_transformers.json`.
pub(super) const SETTINGS: Table = &[
    ("__version__", Fate::Needless),
    ("requirements", Fate::Needless),
    ("model_type", Fate::Read),
    ("prompts", Fate::Read),
    ("default_prompt_name", Fate::Read),
    // Vectors are not compared here.
    ("similarity_fn_name", Fate::Needless),
    ("truncate_dim", Fate::Read),
    ("activation_fn", Fate::Read),
    // All is computed in f32.
    ("keep_in_fp32_modules", Fate::Needless),
];

/// `config.json` of a Pooling.
pub(super) const POOLING: Table = &[
    ("word_embedding_dimension", Fate::Read),
    ("embedding_dimension", Fate::Read),
    ("pooling_mode", Fate::Read),
    ("pooling_mode_cls_token", Fate::Read),
    ("pooling_mode_max_tokens", Fate::Read),
    ("pooling_mode_mean_tokens", Fate::Read),
    ("pooling_mode_mean_sqrt_len_tokens", Fate::Read),
    ("pooling_mode_weightedmean_tokens", Fate::Read),
    ("pooling_mode_lasttoken", Fate::Read),
    ("include_prompt", Fate::Read),
];

/// `config.json` of a Dense.
pub(super) const DENSE: Table = &[
    ("in_features", Fate::Read),
    ("out_features", Fate::Read),
    ("bias", Fate::Read),
    ("activation_function", Fate::Read),
    ("use_residual", Fate::Read),
    ("module_input_name", ONE_VECTOR),
    ("module_output_name", ONE_VECTOR),
];

/// `config.json` of a Normalize.
pub(super) const NORMALIZE: Table =
    &[("module_input_name", ONE_VECTOR), ("module_output_name", ONE_VECTOR)];

/// `config.json` of a LayerNorm.
pub(super) const LAYER_NORM: Table = &[("dimension", Fate::Read)];

/// `config.json` of a Dropout.
pub(super) const DROPOUT: Table = &[("dropout", Fate::Needless)];

/// A JSON file.
pub(super) fn json(path: &Path) -> Result<Value, ModelError> {
    serde_json::from_slice(&read_bounded(path, MAX_JSON_BYTES)?)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })
}
