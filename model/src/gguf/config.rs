//! The config of a model whose weights are in a GGUF file, as its checkpoint would have it.

use super::{Gguf, Value};
use serde_json::{Map, Value as Json, json};

/// What is read, and the family that it is.
const ARCHITECTURES: [(&str, &str, &str); 3] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];

impl Gguf {
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
        let field = |field: &str| format!("{name}.{field}");
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
        let mut config = Map::new();
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
        Ok(Json::Object(config))
    }

    /// How positions are stretched.
    fn scaling(&self, field: &impl Fn(&str) -> String) -> Result<Option<Json>, String> {
        let factor = || {
            let name = field("rope.scaling.factor");
            self.number(&name).ok_or_else(|| format!("it has no number {name}"))
        };
        match self.text(&field("rope.scaling.type")) {
            None | Some("none") => Ok(None),
            Some("linear") => Ok(Some(json!({"rope_type": "linear", "factor": factor()?}))),
            Some("yarn") => {
                let mut scaling = json!({"rope_type": "yarn", "factor": factor()?});
                let original = field("rope.scaling.original_context_length");
                if let Some(rows) = self.whole(&original) {
                    scaling["original_max_position_embeddings"] = json!(rows);
                }
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
