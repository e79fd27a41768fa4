//! The fields of the files that sentence-transformers writes, and how each is treated.

use crate::{
    error::ModelError,
    fields::{Table, Treatment},
    small_file::{MAX_JSON_BYTES, read_bounded},
};
use serde_json::Value;
use std::path::Path;

const ONE_VECTOR: Treatment = Treatment::Only(
    &["\"sentence_embedding\""],
    "only the pooled vector of a text goes through modules: not tokens one by one, nor a second vector",
);

/// The fields of an entry of `modules.json`.
pub(super) const MODULE: Table = &[
    ("idx", Treatment::Ignored),
    ("name", Treatment::Ignored),
    ("path", Treatment::Read),
    ("type", Treatment::Read),
    ("kwargs", Treatment::Ignored),
];

/// The fields of `sentence_bert_config.json`, and of the same file under other names.
pub(super) const TRANSFORMER: Table = &[
    ("max_seq_length", Treatment::Read),
    ("do_lower_case", Treatment::Read),
    (
        "transformer_task",
        Treatment::Only(
            &["\"feature-extraction\"", "\"sequence-classification\""],
            "vectors are pooled from hidden states, and cross-encoders have a class head",
        ),
    ),
    ("modality_config", Treatment::Read),
    (
        "module_output_name",
        Treatment::Only(
            &["\"token_embeddings\"", "\"scores\""],
            "the model's own output is pooled",
        ),
    ),
    ("model_args", Treatment::Read),
    ("model_kwargs", Treatment::Read),
    ("tokenizer_args", Treatment::Read),
    ("processor_kwargs", Treatment::Read),
    ("config_args", Treatment::Read),
    ("config_kwargs", Treatment::Read),
    (
        "processing_kwargs",
        Treatment::Only(&["{}"], "texts are tokenized as the tokenizer's own files say"),
    ),
    // Whether rows of padding are left out; there are none here.
    ("unpad_inputs", Treatment::Ignored),
    // For models that compare token by token, and for calls that name a task.
    ("query_length", Treatment::Ignored),
    ("document_length", Treatment::Ignored),
    (
        "query_expansion",
        Treatment::Only(&[], "models that compare texts token by token are not known"),
    ),
];

/// The arguments for loading weights that a saved model may have; none changes results that are computed in f32.
pub(super) const MODEL_ARGUMENTS: Table = &[
    ("trust_remote_code", Treatment::Ignored),
    ("torch_dtype", Treatment::Ignored),
    ("dtype", Treatment::Ignored),
    ("attn_implementation", Treatment::Ignored),
    ("add_pooling_layer", Treatment::Ignored),
    ("use_safetensors", Treatment::Ignored),
    ("low_cpu_mem_usage", Treatment::Ignored),
    ("device_map", Treatment::Ignored),
    ("unpad_inputs", Treatment::Ignored),
    ("use_memory_efficient_attention", Treatment::Ignored),
];

/// The fields of `config_sentence_transformers.json`.
pub(super) const SETTINGS: Table = &[
    ("__version__", Treatment::Ignored),
    ("requirements", Treatment::Ignored),
    ("model_type", Treatment::Read),
    ("prompts", Treatment::Read),
    ("default_prompt_name", Treatment::Read),
    // Vectors are not compared here.
    ("similarity_fn_name", Treatment::Ignored),
    ("truncate_dim", Treatment::Read),
    ("activation_fn", Treatment::Read),
    // Everything is computed in f32.
    ("keep_in_fp32_modules", Treatment::Ignored),
];

/// The fields of the `config.json` of a Pooling.
pub(super) const POOLING: Table = &[
    ("word_embedding_dimension", Treatment::Read),
    ("embedding_dimension", Treatment::Read),
    ("pooling_mode", Treatment::Read),
    ("pooling_mode_cls_token", Treatment::Read),
    ("pooling_mode_max_tokens", Treatment::Read),
    ("pooling_mode_mean_tokens", Treatment::Read),
    ("pooling_mode_mean_sqrt_len_tokens", Treatment::Read),
    ("pooling_mode_weightedmean_tokens", Treatment::Read),
    ("pooling_mode_lasttoken", Treatment::Read),
    ("include_prompt", Treatment::Read),
];

/// The fields of the `config.json` of a Dense.
pub(super) const DENSE: Table = &[
    ("in_features", Treatment::Read),
    ("out_features", Treatment::Read),
    ("bias", Treatment::Read),
    ("activation_function", Treatment::Read),
    ("use_residual", Treatment::Read),
    ("module_input_name", ONE_VECTOR),
    ("module_output_name", ONE_VECTOR),
];

/// The fields of the `config.json` of a Normalize.
pub(super) const NORMALIZE: Table =
    &[("module_input_name", ONE_VECTOR), ("module_output_name", ONE_VECTOR)];

/// The fields of the `config.json` of a LayerNorm.
pub(super) const LAYER_NORM: Table = &[("dimension", Treatment::Read)];

/// The fields of the `config.json` of a Dropout.
pub(super) const DROPOUT: Table = &[("dropout", Treatment::Ignored)];

/// Parses a JSON file of bounded size.
pub(super) fn json(path: &Path) -> Result<Value, ModelError> {
    serde_json::from_slice(&read_bounded(path, MAX_JSON_BYTES)?)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })
}
