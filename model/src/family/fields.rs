//! The fields that the `config.json` of each family may have, and how each is treated.
//!
//! The names are those of the config classes of `transformers`, of its generation settings, and those that older
//! versions wrote; `scripts/fields.py audit` says which are missing. The fields that are read are read in `config`; a
//! test compares that with these tables.

use crate::fields::{
    Table,
    Treatment::{Ignored, Inside, Only, Read, Warned},
};

/// The tables that hold for a family, by its `model_type`.
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

/// The fields that every config may have.
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
    ("compression_config", Read),
    ("quantization_config", Read),
    (
        "quantization",
        Only(&["{}"], "weights that MLX has quantised are not read: use F32, F16 or BF16"),
    ),
    (
        "auto_map",
        Warned("names code of the model's own, which is not run: it is run as its model_type says"),
    ),
    ("is_encoder_decoder", Only(&["false"], "only models of one stack of layers are run")),
    ("add_cross_attention", Only(&["false"], "only self-attention is run")),
    ("cross_attention_hidden_size", Only(&[], "only self-attention is run")),
    (
        "pruned_heads",
        Only(&["{}"], "only layers with all of their heads are run: save the pruned model anew"),
    ),
    ("per_layer_config", Only(&["{}"], "only layers that are alike are run")),
    // How the reference runs, and what it returns.
    ("attn_implementation", Ignored),
    ("_attn_implementation", Ignored),
    ("_attn_implementation_autoset", Ignored),
    ("_attn_implementation_internal", Ignored),
    ("_flash_attn_2_enabled", Ignored),
    ("experts_implementation", Ignored),
    ("_experts_implementation", Ignored),
    ("_experts_implementation_internal", Ignored),
    ("chunk_size_feed_forward", Ignored),
    ("dtype", Ignored),
    ("torch_dtype", Ignored),
    ("torchscript", Ignored),
    ("use_bfloat16", Ignored),
    ("use_cache", Ignored),
    ("use_return_dict", Ignored),
    ("return_dict", Ignored),
    ("output_attentions", Ignored),
    ("output_hidden_states", Ignored),
    ("output_past", Ignored),
    ("tie_last_hidden_states", Ignored),
    ("tie_encoder_decoder", Ignored),
    ("tf_legacy_loss", Ignored),
    // How the model was trained, and where it comes from.
    ("initializer_range", Ignored),
    ("initializer_factor", Ignored),
    ("gradient_checkpointing", Ignored),
    ("classifier_dropout", Ignored),
    ("finetuning_task", Ignored),
    ("task_specific_params", Ignored),
    ("label2id", Ignored),
    ("_num_labels", Ignored),
    ("name_or_path", Ignored),
    ("_name_or_path", Ignored),
    ("_commit_hash", Ignored),
    ("transformers_version", Ignored),
    ("transformers.js_config", Ignored),
    ("unsloth_fixed", Ignored),
    ("unsloth_version", Ignored),
    // The tokenizer has its own files.
    ("bos_token_id", Ignored),
    ("sep_token_id", Ignored),
    ("cls_token_id", Ignored),
    ("mask_token_id", Ignored),
    ("unk_token_id", Ignored),
    ("decoder_start_token_id", Ignored),
    ("tokenizer_class", Ignored),
    ("prefix", Ignored),
];

/// Settings of generation. `transformers` no longer keeps them in `config.json`, and ignores them there.
const GENERATION: Table = &[
    ("assistant_confidence_threshold", Ignored),
    ("assistant_lookbehind", Ignored),
    ("bad_words_ids", Ignored),
    ("begin_suppress_tokens", Ignored),
    ("diversity_penalty", Ignored),
    ("do_sample", Ignored),
    ("early_stopping", Ignored),
    ("encoder_no_repeat_ngram_size", Ignored),
    ("encoder_repetition_penalty", Ignored),
    ("epsilon_cutoff", Ignored),
    ("eta_cutoff", Ignored),
    ("exponential_decay_length_penalty", Ignored),
    ("forced_bos_token_id", Ignored),
    ("forced_eos_token_id", Ignored),
    ("length_penalty", Ignored),
    ("max_length", Ignored),
    ("min_length", Ignored),
    ("no_repeat_ngram_size", Ignored),
    ("num_assistant_tokens", Ignored),
    ("num_assistant_tokens_schedule", Ignored),
    ("num_beam_groups", Ignored),
    ("num_beams", Ignored),
    ("num_return_sequences", Ignored),
    ("output_scores", Ignored),
    ("remove_invalid_values", Ignored),
    ("repetition_penalty", Ignored),
    ("return_dict_in_generate", Ignored),
    ("suppress_tokens", Ignored),
    ("target_lookbehind", Ignored),
    ("temperature", Ignored),
    ("top_k", Ignored),
    ("top_p", Ignored),
    ("typical_p", Ignored),
];

/// The fields of BERT, MPNet and ViT.
const ENCODER: Table = &[
    ("hidden_size", Read),
    ("num_hidden_layers", Read),
    ("num_attention_heads", Read),
    ("intermediate_size", Read),
    ("hidden_act", Read),
    ("layer_norm_eps", Read),
    ("hidden_dropout_prob", Ignored),
    ("attention_probs_dropout_prob", Ignored),
    // Encoders have no tied head, and see all rows whatever this says.
    ("tie_word_embeddings", Ignored),
    ("is_causal", Ignored),
];

const BERT: Table = &[
    ("is_decoder", Read),
    ("position_embedding_type", Read),
    ("vocab_size", Read),
    ("max_position_embeddings", Read),
    ("type_vocab_size", Read),
    // Fields of the first multilingual BERT.
    ("directionality", Ignored),
    ("pooler_fc_size", Ignored),
    ("pooler_num_attention_heads", Ignored),
    ("pooler_num_fc_layers", Ignored),
    ("pooler_size_per_head", Ignored),
    ("pooler_type", Ignored),
];

const MPNET: Table = &[
    ("is_decoder", Read),
    ("position_embedding_type", Read),
    ("vocab_size", Read),
    ("max_position_embeddings", Read),
    ("relative_attention_num_buckets", Read),
    ("type_vocab_size", Ignored),
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
    ("dropout", Ignored),
    ("attention_dropout", Ignored),
    ("qa_dropout", Ignored),
    ("seq_classif_dropout", Ignored),
    ("tie_word_embeddings", Ignored),
    ("tie_weights_", Ignored),
    ("is_decoder", Ignored),
    ("is_causal", Ignored),
    // The weights in the file say what they are.
    ("sinusoidal_pos_embds", Ignored),
    ("type_vocab_size", Ignored),
];

/// The fields of all decoders.
const DECODER: Table = &[
    ("vocab_size", Read),
    ("tie_word_embeddings", Read),
    ("is_causal", Read),
    ("is_decoder", Ignored),
    ("type_vocab_size", Ignored),
];

/// The fields of GPT-2 and GPT-J.
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
    ("n_ctx", Ignored),
    ("reorder_and_upcast_attn", Ignored),
    ("resid_pdrop", Ignored),
    ("embd_pdrop", Ignored),
    ("attn_pdrop", Ignored),
    ("summary_type", Ignored),
    ("summary_use_proj", Ignored),
    ("summary_activation", Ignored),
    ("summary_proj_to_labels", Ignored),
    ("summary_first_dropout", Ignored),
];

const GPT2: Table = &[("scale_attn_weights", Read), ("scale_attn_by_inverse_layer_idx", Read)];

const GPTJ: Table = &[
    ("rotary_dim", Read),
    ("rotary", Only(&["true"], "GPT-J is run with rotary positions")),
    ("scale_attn_weights", Ignored),
    ("scale_attn_by_inverse_layer_idx", Ignored),
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
    ("dropout", Ignored),
    ("attention_dropout", Ignored),
    ("activation_dropout", Ignored),
    ("layerdrop", Ignored),
    ("init_std", Ignored),
];

/// The fields of Llama and the families like it.
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
    ("attention_dropout", Ignored),
];

/// The fields of `rope_parameters`, which is `rope_scaling` in older files.
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
    ("finetuned", Ignored),
];

/// The kinds of layers, each of which may have rotary parameters of its own.
const LAYERS: Table =
    &[("full_attention", Inside(&[ROTARY])), ("sliding_attention", Inside(&[ROTARY]))];

const LLAMA: Table = &[
    ("attention_bias", Read),
    ("mlp_bias", Read),
    // The reference no longer slices products by it, which changed the rounding alone.
    ("pretraining_tp", Ignored),
    ("max_sequence_length", Ignored),
];

/// The field of the activation, as most of these families name it.
const SILU: Table = &[("hidden_act", Read)];

/// The field of families whose layers are of several kinds.
const LAYER_TYPES: Table = &[("layer_types", Read)];

const WINDOW: Table = &[("sliding_window", Read)];

const SMOLLM3: Table = &[
    ("attention_bias", Read),
    ("mlp_bias", Read),
    ("use_sliding_window", Read),
    ("no_rope_layers", Read),
    ("no_rope_layer_interval", Read),
    ("max_window_layers", Ignored),
    ("pretraining_tp", Ignored),
];

const PHI3: Table = &[
    ("embd_pdrop", Ignored),
    ("resid_pdrop", Ignored),
    // There is no bias, whatever this says.
    ("attention_bias", Ignored),
    ("full_attn_mod", Only(&["1"], "only attention that is alike in all layers is run")),
    ("interpolate_factor", Only(&["1"], "only positions as they are counted are run")),
    ("lm_head_bias", Only(&["false"], "only language heads without a bias are run")),
    ("mlp_bias", Only(&["false"], "only products without biases are run in this family")),
];

/// The fields of Gemma 2 and 3.
const GEMMA: Table = &[
    ("hidden_activation", Read),
    ("attention_bias", Read),
    ("query_pre_attn_scalar", Read),
    ("final_logit_softcapping", Read),
    ("use_bidirectional_attention", Read),
    // The reference reads hidden_activation instead.
    ("hidden_act", Ignored),
    ("cache_implementation", Ignored),
    ("sliding_window_size", Ignored),
];

const GEMMA2: Table = &[("attn_logit_softcapping", Read)];

const GEMMA3: Table = &[
    ("attn_logit_softcapping", Only(&[], "Gemma 3 is run without caps of scores")),
    ("sliding_window_pattern", Read),
    // Saved files have it beside layer_types.
    ("_sliding_window_pattern", Ignored),
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
    ("attention_dropout", Ignored),
    ("embedding_dropout", Ignored),
    ("mlp_dropout", Ignored),
    ("decoder_bias", Ignored),
    ("deterministic_flash_attn", Ignored),
    ("initializer_cutoff_factor", Ignored),
    ("layer_norm_eps", Ignored),
    ("position_embedding_type", Ignored),
    ("reference_compile", Ignored),
    ("repad_logits_with_grad", Ignored),
    ("sparse_prediction", Ignored),
    ("sparse_pred_ignore_index", Ignored),
    ("tie_word_embeddings", Ignored),
    ("is_causal", Ignored),
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
    ("is_decoder", Ignored),
    ("encoder_stride", Ignored),
    ("pooler_output_size", Ignored),
    ("pooler_act", Ignored),
];

/// Endings of the names of tensors that change nothing: constants that older versions stored.
const NEEDLESS_ENDS: &[&str] = &[
    "embeddings.position_ids",
    "embeddings.mask_token",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".attn.embed_positions",
    // The pooler of pretraining, which only class heads use.
    "pooler.dense.weight",
    "pooler.dense.bias",
];

/// Beginnings of the names of heads that are left unused where the architecture names no head, or another one.
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

/// Whether an unused tensor is known to change nothing.
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
        fields::Treatment,
        testing::golden,
    };
    use serde_json::{Value, json};
    use std::{collections::BTreeSet, path::Path};

    /// Fields that are read together with tensors.
    const ELSEWHERE: [&str; 1] = ["type_vocab_size"];

    /// Configs that lead a family's reader through all of its branches.
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
                Treatment::Inside(tables) => {
                    names.insert(*name);
                    names.extend(known(tables, reads));
                }
                Treatment::Read => drop(names.insert(*name)),
                _ if reads => {}
                _ => drop(names.insert(*name)),
            }
        }
        names
    }

    /// Every field that a reader asks for is in the tables of its family, and every field that they mark as read is
    /// asked for.
    #[test]
    fn field_tables_match_the_fields_that_readers_read() {
        for family in &FAMILIES {
            let tables = tables(family.model_type);
            read::take();
            for config in configs(family) {
                let path = Path::new("config.json");
                let fields = Fields::new(path, &config).expect("an object");
                // Most configs have an error, but after the fields that matter here were read.
                let _ = crate::family::read(&fields);
            }
            let asked = read::take();
            let unknown: Vec<_> = asked.difference(&known(tables, false)).copied().collect();
            assert!(unknown.is_empty(), "{}: no table has {unknown:?}", family.model_type);
            // The table of all families names fields that only some of them read.
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
    fn tensors_that_do_not_affect_results_are_recognised() {
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
