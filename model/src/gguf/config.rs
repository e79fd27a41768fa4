//! The config of a model whose weights are in a GGUF file, as its checkpoint would have it.

use super::{Gguf, Value};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// What is read, and the family that it is.
const ARCHITECTURES: [(&str, &str, &str); 3] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];

/// Fields of an architecture that change what a model gives, and are not carried out.
const CHANGING: [&str; 17] = [
    "attention.causal",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_shared_count",
    "final_logit_softcapping",
    "logit_scale",
    "pooling_type",
    "residual_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "use_parallel_residual",
];
/// Those that are carried out, or change nothing.
const KNOWN: [&str; 19] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];

impl Gguf {
    /// Whether a field is there, and asks for something: neither none nor no.
    fn asks(&self, field: &str) -> bool {
        match self.fields.get(field) {
            None | Some(Value::Whole(0)) => false,
            // Causal models are read.
            Some(Value::Flag(flag)) => *flag != field.ends_with(".causal"),
            // Factors of 1 change nothing; what scores are multiplied by is another number.
            Some(Value::Float(1.0)) => field.ends_with("attention.scale"),
            Some(Value::Float(number)) => *number != 0.0,
            Some(_) => true,
        }
    }

    /// The fields of its architecture that nobody knows here.
    pub(crate) fn unknown(&self) -> Vec<String> {
        let begins = format!("{}.", self.text("general.architecture").unwrap_or_default());
        let known = |name: &str| {
            let field = name.strip_prefix(&begins);
            field.is_none_or(|field| KNOWN.contains(&field) || CHANGING.contains(&field))
        };
        self.fields.keys().filter(|name| !known(name)).cloned().collect()
    }

    /// Its `config.json`.
    ///
    /// # Errors
    /// In words: what the file lacks, or says that is not done here.
    pub(crate) fn config(&self) -> Result<Json, String> {
        let name = self.text("general.architecture").ok_or("it has no general.architecture")?;
        let known = ARCHITECTURES.iter().find(|(architecture, ..)| *architecture == name);
        let Some((_, family, class)) = known else {
            let known: Vec<_> = ARCHITECTURES.iter().map(|(name, ..)| *name).collect();
            return Err(format!(
                "architecture {name:?} is not read from GGUF files: {} are",
                known.join(", ")
            ));
        };
        if let Some(other) = self.text("general.type").filter(|kind| *kind != "model") {
            return Err(format!("it is no model by its general.type, {other:?}"));
        }
        let field = |field: &str| format!("{name}.{field}");
        let asked = CHANGING.iter().find(|other| self.asks(&field(other)));
        if let Some(other) = asked {
            return Err(format!("it has {}, which is not done here", field(other)));
        }
        let count = |of: &str| {
            self.whole(&field(of)).ok_or_else(|| format!("it has no number {}", field(of)))
        };
        if self.whole(&field("expert_count")).is_some_and(|experts| experts > 0) {
            return Err("models of experts are not computed here".to_owned());
        }
        let heads = count("attention.head_count")?;
        let hidden = count("embedding_length")?;
        let width = match self.whole(&field("attention.key_length")) {
            Some(width) => width,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(format!("{hidden} columns cannot be {heads} heads")),
        };
        if self.whole(&field("attention.value_length")).is_some_and(|values| values != width) {
            return Err("values as wide as keys are computed here, and these are not".to_owned());
        }
        let kv_heads = match self.fields.get(&field("attention.head_count_kv")) {
            None => heads,
            Some(Value::Whole(count)) => u64::try_from(*count).unwrap_or(0),
            Some(_) => {
                return Err("layers with other numbers of heads are not computed here".into());
            }
        };
        let vocabulary = self.rows("token_embd.weight").ok_or("it has no token_embd.weight")?;
        // In order: the text is a part of what tells models apart, on each device.
        let mut config = BTreeMap::new();
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        put("architectures", json!([class]));
        put("model_type", json!(family));
        put("hidden_size", json!(hidden));
        put("intermediate_size", json!(count("feed_forward_length")?));
        put("num_hidden_layers", json!(count("block_count")?));
        put("num_attention_heads", json!(heads));
        put("num_key_value_heads", json!(kv_heads));
        put("head_dim", json!(width));
        put("hidden_act", json!("silu"));
        put("max_position_embeddings", json!(count("context_length")?));
        put("vocab_size", json!(vocabulary));
        put("tie_word_embeddings", json!(self.rows("output.weight").is_none()));
        let epsilon = self.number(&field("attention.layer_norm_rms_epsilon"));
        let epsilon = epsilon
            .ok_or_else(|| format!("it has no {}", field("attention.layer_norm_rms_epsilon")))?;
        put("rms_norm_eps", json!(epsilon));
        put("rope_theta", json!(self.number(&field("rope.freq_base")).unwrap_or(10_000.0)));
        if let Some(turned) = self.whole(&field("rope.dimension_count")).filter(|n| *n != width) {
            put("partial_rotary_factor", json!(turned as f64 / width as f64));
        }
        if let Some(scaling) = self.scaling(&field)? {
            put("rope_scaling", scaling);
        }
        if let Some(window) = self.whole(&field("attention.sliding_window")).filter(|n| *n > 0) {
            put("sliding_window", json!(window));
        }
        if *family == "llama" {
            put("attention_bias", json!(self.rows("blk.0.attn_q.bias").is_some()));
        }
        for (key, field) in [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")] {
            if let Some(id) = self.whole(&format!("tokenizer.ggml.{field}")) {
                put(key, json!(id));
            }
        }
        Ok(Json::Object(Map::from_iter(config)))
    }

    /// How positions are stretched.
    fn scaling(&self, field: &impl Fn(&str) -> String) -> Result<Option<Json>, String> {
        let factor = || {
            let name = field("rope.scaling.factor");
            self.number(&name).ok_or_else(|| format!("it has no number {name}"))
        };
        match self.text(&field("rope.scaling.type")) {
            None | Some("none") => Ok(None),
            Some("linear") => Ok(Some(json!({"factor": factor()?, "rope_type": "linear"}))),
            Some("yarn") => {
                let mut scaling = json!({"factor": factor()?});
                let original = field("rope.scaling.original_context_length");
                if let Some(rows) = self.whole(&original) {
                    scaling["original_max_position_embeddings"] = json!(rows);
                }
                scaling["rope_type"] = json!("yarn");
                Ok(Some(scaling))
            }
            Some(other) => Err(format!(
                "positions that are stretched by {other:?} are not read from GGUF files"
            )),
        }
    }

    /// Rows of a tensor, if it is there.
    pub(crate) fn rows(&self, name: &str) -> Option<u64> {
        self.rows.get(name).copied()
    }

    /// Heads whose rows of queries and keys stand in pairs, as that architecture has them: of the first tensor,
    /// and of the second.
    pub(crate) fn paired_heads(&self) -> Option<(u64, u64)> {
        if self.text("general.architecture") != Some("llama") {
            return None;
        }
        let heads = self.whole("llama.attention.head_count")?;
        Some((heads, self.whole("llama.attention.head_count_kv").unwrap_or(heads)))
    }
}
