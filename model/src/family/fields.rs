//! The fields that `config.json` may have in each family, and what is made of each.
//!
//! The names are those of the config classes of `transformers`, of its generation settings, and those that
//! older versions wrote; `scripts/fields.py audit` says which are missing. What a family reads is read in
//! `config`; a test holds that against these tables.

use crate::fields::{
    Fate::{Inside, Needless, Only, Read, Said},
    Table,
};

/// The tables of a family, by its `model_type`.
pub(super) fn tables(model_type: &str) -> &'static [Table] {
    match model_type {
        "bert" | "roberta" | "xlm-roberta" => &[ALL, GENERATION, ENCODER, BERT],
        "mpnet" => &[ALL, GENERATION, ENCODER, MPNET],
        "distilbert" => &[ALL, GENERATION, DISTILBERT],
        "gpt2" => &[ALL, GENERATION, DECODER, GPT, GPT2],
        "gptj" => &[ALL, GENERATION, DECODER, GPT, GPTJ],
        "opt" => &[ALL, GENERATION, DECODER, OPT],
        "llama" => &[ALL, GENERATION, DECODER, GATED, SILU, LLAMA],
        "mistral" => &[ALL, GENERATION, DECODER, GATED, SILU, WINDOW],
        "qwen2" => &[ALL, GENERATION, DECODER, GATED, SILU, LAYER_TYPES, WINDOW, QWEN2],
        "qwen3" => &[ALL, GENERATION, DECODER, GATED, SILU, LAYER_TYPES, WINDOW, QWEN2, QWEN3],
        "smollm3" => &[ALL, GENERATION, DECODER, GATED, SILU, LAYER_TYPES, WINDOW, SMOLLM3],
        "phi3" => &[ALL, GENERATION, DECODER, GATED, SILU, WINDOW, PHI3],
        "gemma2" => &[ALL, GENERATION, DECODER, GATED, LAYER_TYPES, WINDOW, GEMMA, GEMMA2],
        "gemma3_text" => &[ALL, GENERATION, DECODER, GATED, LAYER_TYPES, WINDOW, GEMMA, GEMMA3],
        "modernbert" => &[ALL, GENERATION, LAYER_TYPES, MODERNBERT],
        "vit" => &[ALL, GENERATION, ENCODER, VIT],
        _ => &[],
    }
}

/// What every config may have.
const ALL: Table = &[
    ("architectures", Read),
    ("model_type", Read),
    ("id2label", Read),
    ("num_labels", Read),
    ("problem_type", Read),
    ("sentence_transformers", Read),
    ("sbert_ce_default_activation_function", Read),
    ("eos_token_id", Read),
    ("pad_token_id", Read),
    ("quantization_config", Read),
    (
        "quantization",
        Only(&["{}"], "weights that MLX has quantised are not read: use F32, F16 or BF16"),
    ),
    (
        "auto_map",
        Said("names code of the model's own, which is not run: it is run as its model_type says"),
    ),
    ("is_encoder_decoder", Only(&["false"], "only models of one stack of layers are run")),
    ("add_cross_attention", Only(&["false"], "only self-attention is run")),
    ("cross_attention_hidden_size", Only(&[], "only self-attention is run")),
    (
        "pruned_heads",
        Only(&["{}"], "only layers with all of their heads are run: save the pruned model anew"),
    ),
    ("per_layer_config", Only(&["{}"], "only layers that are alike are run")),
    // How the reference runs, and what it gives back.
    ("attn_implementation", Needless),
    ("_attn_implementation", Needless),
    ("_attn_implementation_autoset", Needless),
    ("_attn_implementation_internal", Needless),
    ("_flash_attn_2_enabled", Needless),
    ("experts_implementation", Needless),
    ("_experts_implementation", Needless),
    ("_experts_implementation_internal", Needless),
    ("chunk_size_feed_forward", Needless),
    ("dtype", Needless),
    ("torch_dtype", Needless),
    ("torchscript", Needless),
    ("use_bfloat16", Needless),
    ("use_cache", Needless),
    ("use_return_dict", Needless),
    ("return_dict", Needless),
    ("output_attentions", Needless),
    ("output_hidden_states", Needless),
    ("output_past", Needless),
    ("tie_last_hidden_states", Needless),
    ("tie_encoder_decoder", Needless),
    ("tf_legacy_loss", Needless),
    // Training, and where the model comes from.
    ("initializer_range", Needless),
    ("initializer_factor", Needless),
    ("gradient_checkpointing", Needless),
    ("classifier_dropout", Needless),
    ("finetuning_task", Needless),
    ("task_specific_params", Needless),
    ("label2id", Needless),
    ("_num_labels", Needless),
    ("name_or_path", Needless),
    ("_name_or_path", Needless),
    ("_commit_hash", Needless),
    ("transformers_version", Needless),
    ("transformers.js_config", Needless),
    ("unsloth_fixed", Needless),
    ("unsloth_version", Needless),
    // The tokenizer has its own files.
    ("bos_token_id", Needless),
    ("sep_token_id", Needless),
    ("cls_token_id", Needless),
    ("mask_token_id", Needless),
    ("unk_token_id", Needless),
    ("decoder_start_token_id", Needless),
    ("tokenizer_class", Needless),
    ("prefix", Needless),
];

/// Settings of generation: `transformers` has dropped them from `config.json`, and ignores them there.
const GENERATION: Table = &[
    ("assistant_confidence_threshold", Needless),
    ("assistant_lookbehind", Needless),
    ("bad_words_ids", Needless),
    ("begin_suppress_tokens", Needless),
    ("diversity_penalty", Needless),
    ("do_sample", Needless),
    ("early_stopping", Needless),
    ("encoder_no_repeat_ngram_size", Needless),
    ("encoder_repetition_penalty", Needless),
    ("epsilon_cutoff", Needless),
    ("eta_cutoff", Needless),
    ("exponential_decay_length_penalty", Needless),
    ("forced_bos_token_id", Needless),
    ("forced_eos_token_id", Needless),
    ("length_penalty", Needless),
    ("max_length", Needless),
    ("min_length", Needless),
    ("no_repeat_ngram_size", Needless),
    ("num_assistant_tokens", Needless),
    ("num_assistant_tokens_schedule", Needless),
    ("num_beam_groups", Needless),
    ("num_beams", Needless),
    ("num_return_sequences", Needless),
    ("output_scores", Needless),
    ("remove_invalid_values", Needless),
    ("repetition_penalty", Needless),
    ("return_dict_in_generate", Needless),
    ("suppress_tokens", Needless),
    ("target_lookbehind", Needless),
    ("temperature", Needless),
    ("top_k", Needless),
    ("top_p", Needless),
    ("typical_p", Needless),
];

/// What BERT, MPNet and ViT have.
const ENCODER: Table = &[
    ("hidden_size", Read),
    ("num_hidden_layers", Read),
    ("num_attention_heads", Read),
    ("intermediate_size", Read),
    ("hidden_act", Read),
    ("layer_norm_eps", Read),
    ("hidden_dropout_prob", Needless),
    ("attention_probs_dropout_prob", Needless),
    // Encoders have no head that shares the table, and see all rows whatever this says.
    ("tie_word_embeddings", Needless),
    ("is_causal", Needless),
];

const BERT: Table = &[
    ("is_decoder", Read),
    ("position_embedding_type", Read),
    ("vocab_size", Read),
    ("max_position_embeddings", Read),
    ("type_vocab_size", Read),
    // Those of the first multilingual BERT.
    ("directionality", Needless),
    ("pooler_fc_size", Needless),
    ("pooler_num_attention_heads", Needless),
    ("pooler_num_fc_layers", Needless),
    ("pooler_size_per_head", Needless),
    ("pooler_type", Needless),
];

const MPNET: Table = &[
    ("is_decoder", Read),
    ("position_embedding_type", Read),
    ("vocab_size", Read),
    ("max_position_embeddings", Read),
    ("relative_attention_num_buckets", Read),
    ("type_vocab_size", Needless),
];

const DISTILBERT: Table = &[
    ("vocab_size", Read),
    ("dim", Read),
    ("hidden_size", Read),
    ("n_layers", Read),
    ("num_hidden_layers", Read),
    ("n_heads", Read),
    ("num_attention_heads", Read),
    ("hidden_dim", Read),
    ("activation", Read),
    ("max_position_embeddings", Read),
    ("dropout", Needless),
    ("attention_dropout", Needless),
    ("qa_dropout", Needless),
    ("seq_classif_dropout", Needless),
    ("tie_word_embeddings", Needless),
    ("tie_weights_", Needless),
    ("is_decoder", Needless),
    ("is_causal", Needless),
    // What they are, the file of weights says.
    ("sinusoidal_pos_embds", Needless),
    ("type_vocab_size", Needless),
];

/// What all decoders have.
const DECODER: Table = &[
    ("vocab_size", Read),
    ("tie_word_embeddings", Read),
    ("is_causal", Read),
    ("is_decoder", Needless),
    ("type_vocab_size", Needless),
];

/// What GPT-2 and GPT-J have.
const GPT: Table = &[
    ("n_embd", Read),
    ("hidden_size", Read),
    ("n_head", Read),
    ("num_attention_heads", Read),
    ("n_layer", Read),
    ("num_hidden_layers", Read),
    ("n_positions", Read),
    ("max_position_embeddings", Read),
    ("n_inner", Read),
    ("activation_function", Read),
    ("layer_norm_epsilon", Read),
    ("n_ctx", Needless),
    ("reorder_and_upcast_attn", Needless),
    ("resid_pdrop", Needless),
    ("embd_pdrop", Needless),
    ("attn_pdrop", Needless),
    ("summary_type", Needless),
    ("summary_use_proj", Needless),
    ("summary_activation", Needless),
    ("summary_proj_to_labels", Needless),
    ("summary_first_dropout", Needless),
];

const GPT2: Table = &[("scale_attn_weights", Read), ("scale_attn_by_inverse_layer_idx", Read)];

const GPTJ: Table = &[
    ("rotary_dim", Read),
    ("rotary", Only(&["true"], "GPT-J is run with rotary positions")),
    ("scale_attn_weights", Needless),
    ("scale_attn_by_inverse_layer_idx", Needless),
];

const OPT: Table = &[
    ("hidden_size", Read),
    ("num_hidden_layers", Read),
    ("num_attention_heads", Read),
    ("ffn_dim", Read),
    ("max_position_embeddings", Read),
    ("word_embed_proj_dim", Read),
    ("activation_function", Read),
    ("do_layer_norm_before", Read),
    ("_remove_final_layer_norm", Read),
    ("layer_norm_elementwise_affine", Read),
    ("enable_bias", Read),
    ("dropout", Needless),
    ("attention_dropout", Needless),
    ("activation_dropout", Needless),
    ("layerdrop", Needless),
    ("init_std", Needless),
];

/// What Llama and those like it have.
const GATED: Table = &[
    ("hidden_size", Read),
    ("num_hidden_layers", Read),
    ("num_attention_heads", Read),
    ("num_key_value_heads", Read),
    ("head_dim", Read),
    ("intermediate_size", Read),
    ("rms_norm_eps", Read),
    ("max_position_embeddings", Read),
    ("original_max_position_embeddings", Read),
    ("rope_parameters", Inside(&[ROTARY, LAYERS])),
    ("rope_scaling", Inside(&[ROTARY, LAYERS])),
    ("rope_theta", Read),
    ("partial_rotary_factor", Read),
    ("attention_dropout", Needless),
];

/// What `rope_parameters` holds, and `rope_scaling` in older files.
const ROTARY: Table = &[
    ("rope_type", Read),
    ("type", Read),
    ("rope_theta", Read),
    ("partial_rotary_factor", Read),
    ("factor", Read),
    ("original_max_position_embeddings", Read),
    ("low_freq_factor", Read),
    ("high_freq_factor", Read),
    ("attention_factor", Read),
    ("beta_fast", Read),
    ("beta_slow", Read),
    ("mscale", Read),
    ("mscale_all_dim", Read),
    ("truncate", Read),
    ("short_factor", Read),
    ("long_factor", Read),
    ("mrope_section", Only(&["[]"], "only positions of text are run")),
    ("finetuned", Needless),
];

/// Kinds of layers, each of which may have its own.
const LAYERS: Table =
    &[("full_attention", Inside(&[ROTARY])), ("sliding_attention", Inside(&[ROTARY]))];

const LLAMA: Table = &[
    ("attention_bias", Read),
    ("mlp_bias", Read),
    // The reference no longer slices products by it, which changed rounding alone.
    ("pretraining_tp", Needless),
    ("max_sequence_length", Needless),
];

/// The activation of most of them.
const SILU: Table = &[("hidden_act", Read)];

/// Of families whose layers are of several kinds.
const LAYER_TYPES: Table = &[("layer_types", Read)];

const WINDOW: Table = &[("sliding_window", Read)];

const SMOLLM3: Table = &[
    ("attention_bias", Read),
    ("mlp_bias", Read),
    ("use_sliding_window", Read),
    ("no_rope_layers", Read),
    ("no_rope_layer_interval", Read),
    ("max_window_layers", Needless),
    ("pretraining_tp", Needless),
];

const PHI3: Table = &[
    ("embd_pdrop", Needless),
    ("resid_pdrop", Needless),
    // No bias is there whatever this says.
    ("attention_bias", Needless),
    ("full_attn_mod", Only(&["1"], "only attention that is alike in all layers is run")),
    ("interpolate_factor", Only(&["1"], "only positions as they are counted are run")),
    ("lm_head_bias", Only(&["false"], "only language heads without a bias are run")),
    ("mlp_bias", Only(&["false"], "only products without biases are run in this family")),
];

/// What Gemma 2 and 3 have.
const GEMMA: Table = &[
    ("hidden_activation", Read),
    ("attention_bias", Read),
    ("query_pre_attn_scalar", Read),
    ("final_logit_softcapping", Read),
    ("use_bidirectional_attention", Read),
    // What counts is hidden_activation.
    ("hidden_act", Needless),
    ("cache_implementation", Needless),
    ("sliding_window_size", Needless),
];

const GEMMA2: Table = &[("attn_logit_softcapping", Read)];

const GEMMA3: Table = &[
    ("attn_logit_softcapping", Only(&[], "Gemma 3 is run without caps of scores")),
    ("sliding_window_pattern", Read),
    // Of saved files, which have layer_types, too.
    ("_sliding_window_pattern", Needless),
    ("rope_local_base_freq", Read),
];

const MODERNBERT: Table = &[
    ("vocab_size", Read),
    ("hidden_size", Read),
    ("intermediate_size", Read),
    ("num_hidden_layers", Read),
    ("num_attention_heads", Read),
    ("hidden_activation", Read),
    ("max_position_embeddings", Read),
    ("norm_eps", Read),
    ("norm_bias", Read),
    ("attention_bias", Read),
    ("mlp_bias", Read),
    ("global_attn_every_n_layers", Read),
    ("local_attention", Read),
    ("global_rope_theta", Read),
    ("local_rope_theta", Read),
    ("rope_parameters", Inside(&[ROTARY, LAYERS])),
    ("rope_scaling", Inside(&[ROTARY, LAYERS])),
    ("original_max_position_embeddings", Read),
    ("partial_rotary_factor", Read),
    ("classifier_pooling", Read),
    ("classifier_activation", Read),
    ("classifier_bias", Read),
    ("attention_dropout", Needless),
    ("embedding_dropout", Needless),
    ("mlp_dropout", Needless),
    ("decoder_bias", Needless),
    ("deterministic_flash_attn", Needless),
    ("initializer_cutoff_factor", Needless),
    ("layer_norm_eps", Needless),
    ("position_embedding_type", Needless),
    ("reference_compile", Needless),
    ("repad_logits_with_grad", Needless),
    ("sparse_prediction", Needless),
    ("sparse_pred_ignore_index", Needless),
    ("tie_word_embeddings", Needless),
    ("is_causal", Needless),
];

const QWEN2: Table = &[
    ("use_sliding_window", Read),
    ("max_window_layers", Read),
    ("use_mrope", Only(&["false"], "only positions of text are run")),
];

const QWEN3: Table = &[("attention_bias", Read)];

const VIT: Table = &[
    ("image_size", Read),
    ("patch_size", Read),
    ("num_channels", Read),
    ("qkv_bias", Read),
    ("is_decoder", Needless),
    ("encoder_stride", Needless),
    ("pooler_output_size", Needless),
    ("pooler_act", Needless),
];

/// Ends of names of tensors that change nothing: constants that older versions stored.
const NEEDLESS_ENDS: &[&str] = &[
    "embeddings.position_ids",
    "embeddings.mask_token",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".attn.embed_positions",
    // What a model was pretrained with, or what it is asked for only with a head of classes.
    "pooler.dense.weight",
    "pooler.dense.bias",
];

/// Beginnings of names of heads that are not needed where the architecture names none, or another.
const NEEDLESS_STARTS: &[&str] = &[
    "cls.",
    "lm_head.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "head.dense.",
    "head.norm.",
    "decoder.bias",
    "decoder.weight",
];

/// Whether a tensor that is not used is known to change nothing.
pub(crate) fn needless(tensor: &str) -> bool {
    NEEDLESS_ENDS.iter().any(|end| tensor.ends_with(end))
        || NEEDLESS_STARTS.iter().any(|start| tensor.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Fields, read},
        family::{Family, table::FAMILIES},
        fields::Fate,
        testing::golden,
    };
    use serde_json::{Value, json};
    use std::{collections::BTreeSet, path::Path};

    /// Read where tensors are.
    const ELSEWHERE: [&str; 1] = ["type_vocab_size"];

    /// Configs that lead its reader into every corner.
    fn configs(family: &Family) -> Vec<Value> {
        let checkpoint = match family.model_type {
            "xlm-roberta" => "roberta",
            "gemma3_text" => "gemma3",
            name => name,
        };
        let text = std::fs::read(golden(checkpoint).join("config.json")).expect("a config");
        let mut base: Value = serde_json::from_slice(&text).expect("JSON");
        base["model_type"] = json!(family.model_type);
        let with = |name: &str, value: Value| {
            let mut config = base.clone();
            config[name] = value;
            config
        };
        let mut configs = vec![
            with("id2label", Value::Null),
            with("use_sliding_window", json!(true)),
            with("layer_types", Value::Null),
        ];
        let number = |name: &str| base[name].as_u64().filter(|&n| n > 0);
        let shared = number("hidden_size").zip(number("num_attention_heads"));
        let width = number("head_dim").or(shared.map(|(hidden, heads)| hidden / heads));
        let pairs = vec![1; width.unwrap_or(2) as usize / 2];
        configs.extend(family.architectures.iter().map(|a| with("architectures", json!([a.0]))));
        for kind in ["default", "linear", "dynamic", "llama3", "yarn", "longrope"] {
            let dictionary = json!({ "rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "mscale": 1.0, "short_factor": pairs, "long_factor": pairs });
            configs.push(with("rope_parameters", dictionary.clone()));
            configs.push(with("rope_parameters", Value::Null));
            configs.push(with("rope_scaling", dictionary));
        }
        configs
    }

    fn known(tables: &[Table], reads: bool) -> BTreeSet<&'static str> {
        let mut names = BTreeSet::new();
        for (name, fate) in tables.iter().flat_map(|table| table.iter()) {
            match fate {
                Fate::Inside(tables) => {
                    names.insert(*name);
                    names.extend(known(tables, reads));
                }
                Fate::Read => drop(names.insert(*name)),
                _ if reads => {}
                _ => drop(names.insert(*name)),
            }
        }
        names
    }

    /// A field that is read stands in the family's tables, and a field of which they say so is read.
    #[test]
    fn the_tables_are_those_of_the_readers() {
        for family in &FAMILIES {
            let tables = tables(family.model_type);
            read::take();
            for config in configs(family) {
                let path = Path::new("config.json");
                let fields = Fields::new(path, &config).expect("an object");
                // Most have something wrong, after what matters here was read.
                let _ = crate::family::read(&fields);
            }
            let asked = read::take();
            let unknown: Vec<_> = asked.difference(&known(tables, false)).copied().collect();
            assert!(unknown.is_empty(), "{}: no table has {unknown:?}", family.model_type);
            // What all have is read by some.
            let claimed = known(&tables[1..], true);
            let unread = claimed.difference(&asked).filter(|name| !ELSEWHERE.contains(name));
            let unread: Vec<_> = unread.collect();
            assert!(unread.is_empty(), "{}: {unread:?} are not read", family.model_type);
        }
    }

    #[test]
    fn no_field_is_in_two_tables_of_a_family() {
        for family in &FAMILIES {
            let mut seen = BTreeSet::new();
            for (name, _) in tables(family.model_type).iter().flat_map(|table| table.iter()) {
                assert!(seen.insert(name), "{}: {name} is there twice", family.model_type);
            }
        }
    }

    #[test]
    fn what_changes_nothing_is_known() {
        for name in [
            "bert.embeddings.position_ids",
            "transformer.h.3.attn.bias",
            "h.0.attn.masked_bias",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "cls.predictions.decoder.weight",
            "roberta.pooler.dense.bias",
            "lm_head.weight",
        ] {
            assert!(needless(name), "{name}");
        }
        for name in
            ["h.0.attn.c_attn.bias", "classifier.weight", "model.layers.9.mlp.up_proj.weight"]
        {
            assert!(!needless(name), "{name}");
        }
    }
}
