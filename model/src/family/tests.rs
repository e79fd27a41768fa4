#![allow(clippy::unwrap_used)]

use super::{limits::MAX_WIDTH, read as read_family};
use crate::{config::Fields, error::ModelError, spec::*};
use galaxy_common::Wanted;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{f64::consts::TAU, path::Path};

fn read_spec(config: &Value) -> Result<ModelSpec, ModelError> {
    read_family(&Fields::new(Path::new("config.json"), config)?).map(|described| described.spec)
}

/// The config `base`, with the fields of `changes` replaced or added.
fn over(base: Value, changes: Value) -> Value {
    let (Value::Object(mut base), Value::Object(changes)) = (base, changes) else {
        panic!("two objects")
    };
    base.extend(changes);
    Value::Object(base)
}
fn small_bert(changes: Value) -> Value {
    let base = json!({
        "model_type": "bert", "hidden_size": 12, "num_attention_heads": 3,
        "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 30
    });
    over(base, changes)
}
fn small_gpt2(changes: Value) -> Value {
    let base = json!({
        "model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 30
    });
    over(base, changes)
}
fn small_llama(changes: Value) -> Value {
    let base = json!({
        "model_type": "llama", "hidden_size": 24, "num_attention_heads": 6,
        "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 30
    });
    over(base, changes)
}
fn small_qwen2(changes: Value) -> Value {
    over(small_llama(json!({ "model_type": "qwen2", "num_key_value_heads": 2 })), changes)
}
fn frequencies(config: &Value) -> Vec<f32> {
    match read_spec(config).expect("a spec").positions {
        Positions::Rotary { inverse_frequencies, .. } => inverse_frequencies,
        Positions::Learned { .. } => panic!("no rotation"),
    }
}

#[test]
fn defaults_match_transformers() {
    let bert = read_spec(&small_bert(json!({}))).expect("a spec");
    assert_eq!((bert.head_width, bert.norm_epsilon), (4, 1e-12));
    assert_eq!((bert.position_limit(), bert.activation), (512, Activation::Gelu));
    assert_eq!(bert.head, HeadSpec::None);
    assert!(bert.token_types == 2 && bert.embedding_norm && !bert.causal);

    let coarse = read_spec(&small_bert(json!({ "layer_norm_eps": 1.0 }))).expect("a spec");
    assert_eq!(coarse.norm_epsilon, 1.0);

    let gpt2 = read_spec(&small_gpt2(json!({ "n_inner": null }))).expect("a spec");
    assert_eq!((gpt2.intermediate, gpt2.norm_epsilon, gpt2.position_limit()), (48, 1e-5, 1024));
    assert!(gpt2.causal && !gpt2.embedding_norm && gpt2.norm_place == NormPlace::Pre);
    let config = small_gpt2(json!({ "architectures": ["GPT2LMHeadModel"] }));
    let head = read_spec(&config).expect("a spec").head;
    assert_eq!(head, HeadSpec::Language { tied: true, bias: false });

    let config = small_llama(json!({ "architectures": ["LlamaForCausalLM"] }));
    let llama = read_spec(&config).expect("a spec");
    assert_eq!((llama.kv_heads, llama.head_width, llama.norm_epsilon), (6, 4, 1e-6));
    assert_eq!(llama.head, HeadSpec::Language { tied: false, bias: false });
    assert!(!llama.qkv_bias && !llama.mlp_bias && llama.gated);
    assert_eq!(frequencies(&config), [1.0, 0.01]);

    let distilbert = read_spec(&json!({
        "architectures": ["DistilBertForSequenceClassification"], "activation": "relu",
        "dim": 12, "n_heads": 3, "n_layers": 1, "hidden_dim": 7, "vocab_size": 30
    }))
    .expect("the architecture tells the family");
    assert_eq!((distilbert.family.as_str(), distilbert.intermediate), ("distilbert", 7));
    let HeadSpec::Classes(head) = distilbert.head else { panic!("classes") };
    assert_eq!((head.labels, head.dense), (2, Some(ClassActivation::Relu)));
    assert_eq!(head.names, ["LABEL_0", "LABEL_1"]);
}

#[test]
fn class_labels_are_ordered_by_number_and_bad_ones_rejected() {
    let labels: serde_json::Map<_, _> =
        (0..12).map(|i| (i.to_string(), json!(format!("n{i}")))).collect();
    let config = small_bert(json!({
        "architectures": ["BertForSequenceClassification"], "id2label": labels
    }));
    let HeadSpec::Classes(head) = read_spec(&config).expect("a spec").head else {
        panic!("classes")
    };
    assert_eq!((head.labels, head.names[2].as_str(), head.names[10].as_str()), (12, "n2", "n10"));
    for labels in [json!({}), json!({ "1": "a" }), json!({ "x": "a" }), json!([])] {
        let config = small_bert(json!({
            "architectures": ["BertForSequenceClassification"], "id2label": labels
        }));
        assert!(matches!(read_spec(&config), Err(ModelError::Field { .. })));
    }
}

#[test]
fn rope_scaling_is_applied_to_the_frequencies() {
    let theta = json!({ "rope_theta": 400.0 });
    assert_eq!(frequencies(&small_llama(theta.clone())), [1.0, 0.05]);
    let new = json!({ "rope_theta": 9.0, "rope_parameters": over(theta, json!({ "rope_type": "default" })) });
    assert_eq!(frequencies(&small_llama(new)), [1.0, 0.05]);
    let linear = json!({ "rope_scaling": { "type": "linear", "factor": 4.0 } });
    assert_eq!(frequencies(&small_llama(linear)), [0.25, 0.0025]);

    // Llama 3.1's own numbers: the first frequency stays, the last is divided, and one in
    // between (by transformers' formula) is neither.
    let config = json!({
        "head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": { "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 }
    });
    let have = frequencies(&small_llama(config));
    let plain = |i: i32| 500_000f64.powf(f64::from(-2 * i) / 128.0);
    assert_eq!(have.len(), 64);
    assert_eq!(have[0], 1.0);
    assert_eq!(have[28], plain(28) as f32);
    assert_eq!(have[63], (plain(63) / 8.0) as f32);
    let smooth = (8192.0 * plain(32) / TAU - 1.0) / 3.0;
    assert!((0.0..1.0).contains(&smooth));
    let middle = (1.0 - smooth) * plain(32) / 8.0 + smooth * plain(32);
    assert!((f64::from(have[32]) / middle - 1.0).abs() < 1e-6);
}

/// Numbers of `transformers` 5.24, which `scripts/golden.py` holds the whole models against.
#[test]
fn every_rope_scaling_rule_matches_transformers() {
    let rotary = |changes: Value| {
        let base = json!({ "head_dim": 8, "max_position_embeddings": 256 });
        match read_spec(&small_llama(over(base, changes))).expect("a spec").positions {
            Positions::Rotary { inverse_frequencies, long, scale, .. } => {
                (inverse_frequencies, long, scale)
            }
            Positions::Learned { .. } => panic!("no rotation"),
        }
    };
    let plain = [1.0, 0.1, 0.01, 0.001];
    let (dynamic, _, scale) = rotary(json!({ "rope_scaling": { "type": "dynamic", "factor": 2 } }));
    close(&dynamic, &plain);
    assert_eq!(scale, 1.0);

    let yarn = json!({ "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64
    } });
    let (frequencies, _, scale) = rotary(yarn.clone());
    close(&frequencies, &[1.0, 0.0625, 0.0025, 0.00025]);
    close(&[scale], &[1.138_629_4]);
    let yarn = |changes: Value| json!({ "rope_parameters": over(yarn["rope_parameters"].clone(), changes) });
    let exact = rotary(yarn(json!({ "truncate": false })));
    close(&exact.0, &[1.0, 0.025_595_25, 0.0025, 0.00025]);
    close(
        &rotary(yarn(json!({ "beta_fast": 8, "beta_slow": 2, "truncate": false }))).0,
        &[1.0, 0.025, 0.0025, 0.00025],
    );
    let both = rotary(yarn(json!({ "mscale": 0.7, "mscale_all_dim": 0.3 }))).2;
    close(&[both], &[1.053_237_7]);
    close(&[rotary(yarn(json!({ "mscale": 0.7 }))).2], &[scale]);
    close(&[rotary(yarn(json!({ "factor": null }))).2], &[scale]);
    assert_eq!(rotary(yarn(json!({ "attention_factor": 1.25 }))).2, 1.25);

    let longrope = |changes: Value| {
        json!({ "rope_scaling": over(json!({
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 2.0, 4.0, 5.0], "long_factor": [2.0, 4.0, 10.0, 20.0]
    }), changes) })
    };
    let (short, long, scale) = rotary(longrope(json!({})));
    close(&short, &[1.0, 0.05, 0.0025, 0.0002]);
    let long = long.expect("another rule for long texts");
    assert_eq!(long.above, 64);
    close(&long.inverse_frequencies, &[0.5, 0.025, 0.001, 0.00005]);
    close(&[scale], &[(1.0 + 4f64.ln() / 64f64.ln()).sqrt() as f32]);
    assert_eq!(rotary(longrope(json!({ "attention_factor": 1.5 }))).2, 1.5);

    let proportional = json!({ "rope_parameters": {
        "rope_type": "proportional", "factor": 2, "partial_rotary_factor": 0.5
    } });
    assert_eq!(rotary(proportional).0, [0.5, 0.05, 0.0, 0.0]);
    let same = json!({ "rope_type": "linear", "factor": 4.0 });
    let nested =
        json!({ "rope_parameters": { "full_attention": same, "sliding_attention": same } });
    close(&rotary(nested).0, &plain.map(|f| f / 4.0));
    // The older name counts where both are there.
    let both = json!({ "rope_scaling": same, "rope_parameters": { "rope_type": "default" } });
    close(&rotary(both).0, &plain.map(|f| f / 4.0));
}

/// Asserts that frequencies are equal but for rounding.
fn close(have: &[f32], want: &[f32]) {
    assert_eq!(have.len(), want.len());
    for (have, want) in have.iter().zip(want) {
        assert!((have / want - 1.0).abs() < 1e-6, "{have} {want}");
    }
}

#[test]
fn each_layer_has_the_sliding_window_of_its_config() {
    let sees = |config: Value| -> Vec<_> {
        let spec = read_spec(&config).expect("a spec");
        assert_ne!(spec.position_limit(), 6);
        (0..spec.layers).map(|layer| spec.sees(layer)).collect()
    };
    let whole = (None, Some(0));
    let mistral = |changes: Value| {
        over(small_llama(json!({ "model_type": "mistral", "num_key_value_heads": 2 })), changes)
    };
    assert_eq!(sees(mistral(json!({}))), [(Some(4095), Some(0)); 2]);
    assert_eq!(sees(mistral(json!({ "sliding_window": null }))), [whole; 2]);
    assert_eq!(sees(mistral(json!({ "sliding_window": 6 }))), [(Some(5), Some(0)); 2]);
    // On each side, and one row more, as the reference counts.
    let both = json!({ "sliding_window": 6, "is_causal": false });
    assert_eq!(sees(mistral(both)), [(Some(6), Some(6)); 2]);

    let qwen = |changes: Value| small_qwen2(over(json!({ "sliding_window": 6 }), changes));
    assert_eq!(sees(qwen(json!({}))), [whole; 2]);
    assert_eq!(sees(qwen(json!({ "use_sliding_window": true }))), [whole; 2]);
    let some = json!({ "use_sliding_window": true, "max_window_layers": 1 });
    assert_eq!(sees(qwen(some.clone())), [whole, (Some(5), Some(0))]);
    let kinds = |kinds: [&str; 2]| over(some.clone(), json!({ "layer_types": kinds }));
    assert_eq!(sees(qwen(kinds(["full_attention"; 2]))), [whole; 2]);
    let first = kinds(["sliding_attention", "full_attention"]);
    assert_eq!(sees(qwen(first)), [(Some(5), Some(0)), whole]);
    let none = json!({ "layer_types": ["sliding_attention", "full_attention"] });
    let error = read_spec(&qwen(none)).expect_err("no window").to_string();
    assert!(error.contains("use_sliding_window gives it no window"), "{error}");
    let unknown = kinds(["chunked_attention", "full_attention"]);
    let error = read_spec(&qwen(unknown)).expect_err("unknown").to_string();
    assert!(error.contains("chunked_attention"), "{error}");
}

#[test]
fn gemma_layers_have_rope_frequencies_by_attention_kind() {
    let gemma = |changes: Value| {
        let base = json!({
            "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 4,
            "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
        });
        read_spec(&over(small_llama(base), changes))
    };
    let spec = gemma(json!({})).expect("a spec");
    assert_eq!(spec.score_scale(0), 0.25);
    assert!(spec.norms_from_one && spec.sum_norms && spec.head_norm);
    assert!((spec.embedding_scale - (spec.hidden as f32).sqrt()).abs() < 1e-6);
    let slow = |spec: &ModelSpec, layer: u32| match spec.rotary(layer) {
        Some(Positions::Rotary { inverse_frequencies, .. }) => inverse_frequencies[1],
        other => panic!("{other:?}"),
    };
    close(&[slow(&spec, 0), slow(&spec, 1)], &[0.01, 0.001]);
    let kinds: Vec<_> = (0..2).map(|layer| spec.sees(layer)).collect();
    assert_eq!(kinds, [(Some(5), Some(0)), (None, Some(0))]);
    // Files of older versions: one scaling, which is that of layers that see all.
    let old = json!({ "rope_theta": 100.0, "rope_local_base_freq": 400.0,
        "rope_scaling": { "rope_type": "linear", "factor": 8.0 } });
    let spec = gemma(old).expect("a spec");
    close(&[slow(&spec, 0), slow(&spec, 1)], &[0.05, 0.1 / 8.0]);
    let both_ways = gemma(json!({ "use_bidirectional_attention": true })).expect("a spec");
    assert_eq!(both_ways.sees(0), (Some(3), Some(3)));
    let error = gemma(json!({ "attn_logit_softcapping": 50.0 })).expect_err("a cap").to_string();
    assert!(error.contains("attn_logit_softcapping"), "{error}");
    let saved = gemma(json!({ "_sliding_window_pattern": 1 })).expect("a spec");
    assert_eq!(saved.kinds, spec.kinds, "what counts is without the line");
    let flat = json!({ "rope_parameters": { "rope_type": "linear", "factor": 2.0 } });
    let error = gemma(flat).expect_err("one for all").to_string();
    assert!(error.contains("full_attention and of sliding_attention"), "{error}");
}

#[test]
fn an_old_rope_scaling_applies_to_all_modernbert_layers() {
    let spec = |changes: Value| {
        let base = json!({
            "model_type": "modernbert", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 6, "global_rope_theta": 100.0,
            "local_rope_theta": 400.0,
        });
        read_spec(&over(base, changes)).expect("a spec")
    };
    let slow = |spec: &ModelSpec| {
        [0, 1].map(|layer| match spec.rotary(layer) {
            Some(Positions::Rotary { inverse_frequencies, .. }) => inverse_frequencies[1],
            other => panic!("{other:?}"),
        })
    };
    close(&slow(&spec(json!({}))), &[0.1, 0.05]);
    let scaled = json!({ "rope_scaling": { "rope_type": "linear", "factor": 8.0 } });
    close(&slow(&spec(scaled)), &[0.1 / 8.0, 0.05 / 8.0]);
}

#[test]
fn layers_configured_without_rope_have_no_rotary_positions() {
    let spec = |changes: Value| {
        let base = json!({ "model_type": "smollm3", "num_key_value_heads": 2 });
        read_spec(&over(small_llama(base), changes))
    };
    let turned = |changes: Value| {
        let spec = spec(changes).expect("a spec");
        [0, 1].map(|layer| spec.rotary(layer).is_some())
    };
    assert_eq!(turned(json!({})), [true, true]);
    assert_eq!(turned(json!({ "no_rope_layer_interval": 2 })), [true, false]);
    assert_eq!(turned(json!({ "no_rope_layers": [0, 1] })), [false, true]);
    let error = spec(json!({ "no_rope_layers": [2, 1] })).expect_err("no flag").to_string();
    assert!(error.contains("no_rope_layers"), "{error}");
}

#[test]
fn is_causal_decides_whether_attention_sees_both_ways() {
    for config in [small_gpt2(json!({})), small_llama(json!({})), small_qwen2(json!({}))] {
        let spec = |changes: Value| read_spec(&over(config.clone(), changes)).expect("a spec");
        assert!(spec(json!({})).causal && spec(json!({ "is_causal": true })).causal);
        assert!(!spec(json!({ "is_causal": false })).causal);
        assert!(!spec(json!({ "is_causal": null })).causal);
    }
    let bert = |changes: Value| read_spec(&small_bert(changes)).expect("a spec");
    assert!(bert(json!({ "is_decoder": true })).causal);
    assert!(!bert(json!({ "is_decoder": true, "is_causal": false })).causal);
}

#[test]
fn attention_scores_are_scaled_by_head_width_and_layer() {
    let spec = |changes: Value| read_spec(&small_gpt2(changes)).expect("a spec");
    assert_eq!(spec(json!({})).score_scale(1), 0.5);
    assert_eq!(spec(json!({ "scale_attn_weights": false })).score_scale(1), 1.0);
    let by_layer = json!({ "scale_attn_by_inverse_layer_idx": true });
    assert_eq!(spec(by_layer).score_scale(1), 0.25);
}

#[test]
fn last_row_heads_ignore_padding_at_the_end() {
    let head = |config: Value| match read_spec(&config).expect("a spec").head {
        HeadSpec::Classes(head) => head,
        _ => panic!("classes"),
    };
    let gpt2 = |changes: Value| {
        let base = json!({ "architectures": ["GPT2ForSequenceClassification"] });
        head(small_gpt2(over(base, changes)))
    };
    let padded = gpt2(json!({ "pad_token_id": 9, "problem_type": "regression" }));
    assert_eq!((padded.padding, padded.problem), (Some(9), Some(Problem::Regression)));
    let rows = [(&[1, 2, 3][..], 3), (&[1, 9, 3, 9, 9], 3), (&[9, 9], 1), (&[5, 9, 3], 3)];
    for (tokens, want) in rows {
        assert_eq!(padded.unpadded(tokens), want, "{tokens:?}");
    }
    let none = gpt2(json!({ "pad_token_id": null }));
    assert_eq!((none.padding, none.unpadded(&[1, 9, 9])), (None, 3));
    assert_eq!(gpt2(json!({ "pad_token_id": -1 })).padding, None);
    let bert = json!({ "architectures": ["BertForSequenceClassification"], "pad_token_id": 0 });
    assert_eq!(head(small_bert(bert)).unpadded(&[1, 0, 0]), 3);
}

#[test]
fn readable_tokens_depend_on_the_wanted_output_and_padding() {
    let spec = |changes: Value| {
        let base = json!({
            "architectures": ["GPT2ForSequenceClassification"], "pad_token_id": 9
        });
        read_spec(&small_gpt2(over(base, changes))).expect("a spec")
    };
    let causal = spec(json!({}));
    assert_eq!(causal.readable(&[1, 2, 9, 9], Wanted::Classes), Ok(2));
    assert_eq!(causal.readable(&[1, 2, 9, 9], Wanted::Hidden), Ok(4));
    let both_ways = spec(json!({ "is_causal": false }));
    assert_eq!(both_ways.readable(&[1, 9, 2], Wanted::Classes), Ok(3));
    let why = both_ways.readable(&[1, 2, 9], Wanted::Classes).expect_err("it is seen");
    assert!(why.contains("token 9"), "{why}");

    let roberta = read_spec(&small_bert(json!({ "model_type": "roberta" }))).expect("a spec");
    assert_eq!(roberta.readable(&[0, 5, 2], Wanted::Hidden), Ok(3));
    let why = roberta.readable(&[0, 1, 2], Wanted::Hidden).expect_err("it has no position");
    assert!(why.contains("token 1"), "{why}");
}

#[test]
fn a_model_with_an_unsupported_head_loads_without_head() {
    for name in ["BertForPreTraining", "BertForMaskedLM", "BertForTokenClassification"] {
        let spec = read_spec(&small_bert(json!({ "architectures": [name] }))).expect("a spec");
        assert_eq!(spec.head, HeadSpec::None);
        assert!(spec.headless.is_some_and(|why| why.contains(name)));
    }
    let spec = read_spec(&small_bert(json!({ "architectures": ["BertModel"] }))).expect("a spec");
    assert_eq!(spec.headless, None);
    let double = json!({ "architectures": ["GPT2DoubleHeadsModel"] });
    let spec = read_spec(&small_gpt2(double)).expect("a spec");
    assert_eq!(spec.head, HeadSpec::Language { tied: true, bias: false });
}

#[test]
fn unsupported_config_values_are_rejected_by_name() {
    let cases = [
        (small_bert(json!({ "model_type": "t5" })), "bert, roberta, xlm-roberta, mpnet"),
        (small_bert(json!({ "architectures": ["BertForEverything"] })), "BertModel"),
        (small_bert(json!({ "architectures": ["LlamaModel"] })), "BertModel"),
        (json!({ "architectures": ["T5Model"] }), "GPT2LMHeadModel"),
        (small_bert(json!({ "architectures": 3 })), "architectures"),
        (small_bert(json!({ "hidden_act": "xielu" })), "gelu_pytorch_tanh"),
        (small_bert(json!({ "model_type": "mpnet", "is_decoder": true })), "is_decoder"),
        (small_bert(json!({ "position_embedding_type": "relative_key" })), "absolute"),
        (small_bert(json!({ "quantization_config": { "bits": 4 } })), "quantization_config"),
        (small_bert(json!({ "hidden_size": 13 })), "does not divide"),
        (small_bert(json!({ "hidden_size": 0 })), "1 to"),
        (small_bert(json!({ "hidden_size": -1 })), "1 to"),
        (small_bert(json!({ "hidden_size": 1.5 })), "a whole number"),
        (small_bert(json!({ "hidden_size": 12.0 })), "a whole number"),
        (small_bert(json!({ "hidden_size": 1e300 })), "a whole number"),
        (small_bert(json!({ "add_cross_attention": 0 })), "add_cross_attention = 0"),
        (small_bert(json!({ "per_layer_config": { "1": {} } })), "per_layer_config"),
        (small_bert(json!({ "quantization": { "bits": 4 } })), "MLX"),
        (small_bert(json!({ "quantization_config": { "quant_method": "awq" } })), "\"awq\""),
        (small_llama(json!({ "rope_scaling": { "mrope_section": [1] } })), "mrope_section"),
        (small_bert(json!({ "hidden_size": (1u64 << 20) + 3 })), "1 to"),
        (small_bert(json!({ "hidden_size": null })), "missing"),
        (small_bert(json!({ "num_attention_heads": 0 })), "num_attention_heads"),
        (small_bert(json!({ "num_hidden_layers": 4097 })), "num_hidden_layers"),
        (small_bert(json!({ "vocab_size": (1u64 << 24) + 1 })), "vocab_size"),
        (small_bert(json!({ "layer_norm_eps": 0.0 })), "layer_norm_eps"),
        (small_bert(json!({ "layer_norm_eps": 1e-300 })), "layer_norm_eps"),
        (small_bert(json!({ "layer_norm_eps": "a" })), "layer_norm_eps"),
        (small_gpt2(json!({ "scale_attn_weights": 2 })), "scale_attn_weights"),
        (small_gpt2(json!({ "add_cross_attention": true })), "add_cross_attention"),
        (small_gpt2(json!({ "add_cross_attention": 1 })), "add_cross_attention = 1"),
        (small_llama(json!({ "num_key_value_heads": 4 })), "does not divide"),
        (small_llama(json!({ "num_key_value_heads": 7 })), "does not divide"),
        (small_llama(json!({ "head_dim": 5 })), "even"),
        (small_llama(json!({ "head_dim": 1 << 20 })), "wider"),
        (small_llama(json!({ "rope_scaling": { "type": "ntk" } })), "default, linear, dynamic"),
        (small_llama(json!({ "rope_scaling": { "type": "longrope" } })), "short_factor"),
        (
            small_llama(json!({ "rope_scaling": { "type": "longrope", "short_factor": [1.0] } })),
            "2 positive numbers",
        ),
        (
            small_llama(json!({ "rope_parameters": {
                "full_attention": { "rope_theta": 9.0 }, "sliding_attention": { "rope_theta": 8.0 }
            } })),
            "each kind of layer",
        ),
        (
            small_qwen2(json!({ "use_sliding_window": true, "layer_types": ["full_attention"] })),
            "list of 2 kinds",
        ),
        (
            small_qwen2(json!({ "layer_types": ["full_attention", "sliding_attention"] })),
            "no window",
        ),
        (
            small_qwen2(json!({ "layer_types": ["full_attention", "chunked_attention"] })),
            "sliding_attention",
        ),
        (
            small_gpt2(json!({
                "architectures": ["GPT2ForSequenceClassification"], "problem_type": "guess"
            })),
            "multi_label_classification",
        ),
        (small_llama(json!({ "rope_scaling": { "type": "linear" } })), "factor"),
        (small_llama(json!({ "rope_scaling": [] })), "an object"),
        (small_llama(json!({ "rope_theta": 1e-300 })), "gives the frequency inf"),
        (small_llama(json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } })), "whole"),
        (
            small_llama(json!({ "rope_scaling": { "type": "llama3", "factor": 8,
                "low_freq_factor": 4, "high_freq_factor": 4 } })),
            "below",
        ),
        (json!({}), "model_type"),
        (json!([]), "not an object"),
    ];
    for (config, want) in cases {
        let error = read_spec(&config).expect_err(&config.to_string()).to_string();
        assert!(error.contains(want), "{error}\nlacks {want:?}");
        assert!(error.contains("config.json"), "{error}");
    }
}

proptest! {
    #[test]
    fn any_config_numbers_give_a_valid_spec_or_an_error(
        numbers in proptest::collection::vec(
            prop_oneof![0u64..9, Just(u64::from(u32::MAX)), Just(1 << 20), any::<u64>()], 9),
        model_type in prop_oneof![Just("bert"), Just("distilbert"), Just("gpt2"), Just("llama")],
    ) {
        let n = |i: usize| numbers[i];
        let config = json!({
            "model_type": model_type, "hidden_size": n(0), "num_attention_heads": n(1),
            "num_hidden_layers": n(2), "intermediate_size": n(3), "vocab_size": n(4),
            "n_inner": n(3), "hidden_dim": n(3), "head_dim": n(5),
            "num_key_value_heads": n(6), "max_position_embeddings": n(7), "rope_theta": n(8),
        });
        if let Ok(spec) = read_spec(&config) {
            prop_assert!(spec.heads * spec.head_width <= MAX_WIDTH);
            prop_assert_eq!(spec.group() * spec.kv_heads, spec.heads);
        }
    }
}
