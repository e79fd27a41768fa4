//! What GGUF files of encoders say besides: the `config.json` of BERT and ModernBERT, and how rows become a vector.

use super::{Gguf, MetadataValue, config::layer_types, dense};
use crate::files::SENTENCE_CONFIG;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// The architectures in which rows see the rows behind them, too.
const BOTH_WAYS: [&str; 3] = ["bert", "gemma-embedding", "modern-bert"];

/// How rows become a vector, by the numbers of `pooling_type`: the name in the configs of sentence-transformers.
const POOLING: [(u64, &str); 3] =
    [(1, "pooling_mode_mean_tokens"), (2, "pooling_mode_cls_token"), (3, "pooling_mode_lasttoken")];

/// The field that says how long texts may be, where the model was trained for shorter ones than it has positions. It is
/// Galaxy's own: others leave it out.
pub(super) const MAX_TOKENS: &str = "sentence_transformers.max_seq_length";

/// The field with the prompts that are put before texts, as `config_sentence_transformers.json` has them. It is
/// Galaxy's own, too.
pub(super) const PROMPTS: &str = "sentence_transformers.prompts";

impl Gguf {
    /// Whether rows of this file's architecture see the rows behind them, too.
    pub(super) fn sees_both_ways(&self) -> bool {
        self.architecture().is_some_and(|name| BOTH_WAYS.contains(&name))
    }

    /// The fields of a config that BERT and ModernBERT share.
    fn encoder(&self, class: &str, family: &str) -> Result<BTreeMap<String, Json>, String> {
        if self.rows("cls.weight").or(self.rows("cls.output.weight")).is_some() {
            return Err("its class head is not read from GGUF files".to_owned());
        }
        let vocabulary = self.rows("token_embd.weight").ok_or("it has no token_embd.weight")?;
        Ok(BTreeMap::from(
            [
                ("architectures", json!([class])),
                ("model_type", json!(family)),
                ("hidden_size", json!(self.count("embedding_length")?)),
                ("intermediate_size", json!(self.count("feed_forward_length")?)),
                ("num_hidden_layers", json!(self.count("block_count")?)),
                ("num_attention_heads", json!(self.count("attention.head_count")?)),
                ("max_position_embeddings", json!(self.count("context_length")?)),
                ("vocab_size", json!(vocabulary)),
                ("pad_token_id", json!(self.whole("tokenizer.ggml.padding_token_id").unwrap_or(0))),
            ]
            .map(|(key, value)| (key.to_owned(), value)),
        ))
    }

    /// The `config.json` of BERT.
    pub(super) fn bert(&self) -> Result<Json, String> {
        let mut config = self.encoder("BertModel", "bert")?;
        if self.text("tokenizer.ggml.model").is_some_and(|kind| !["bert", "none"].contains(&kind)) {
            return Err("it is of RoBERTa's kind by its tokenizer, which is not read from GGUF files: bert is".into());
        }
        let types = self.rows("token_types.weight").ok_or("it has no token_types.weight")?;
        config.insert("hidden_act".to_owned(), json!("gelu"));
        config
            .insert("layer_norm_eps".to_owned(), json!(self.real("attention.layer_norm_epsilon")?));
        config.insert("type_vocab_size".to_owned(), json!(types));
        Ok(Json::Object(Map::from_iter(config)))
    }

    /// The `config.json` of ModernBERT.
    pub(super) fn modern_bert(&self) -> Result<Json, String> {
        let mut config = self.encoder("ModernBertModel", "modernbert")?;
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        let activation = self.text("modern-bert.hidden_activation").unwrap_or("gelu");
        put("hidden_activation", json!(activation));
        put("norm_eps", json!(self.real("attention.layer_norm_epsilon")?));
        put("norm_bias", json!(self.rows("output_norm.bias").is_some()));
        put("attention_bias", json!(self.rows("blk.0.attn_qkv.bias").is_some()));
        put("mlp_bias", json!(self.rows("blk.0.ffn_up.bias").is_some()));
        let theta = |field: &str, usual: f64| self.number(field).unwrap_or(usual);
        put("global_rope_theta", json!(theta("modern-bert.rope.freq_base", 160_000.0)));
        put("local_rope_theta", json!(theta("modern-bert.rope.freq_base_swa", 10_000.0)));
        match self.whole("modern-bert.attention.sliding_window").filter(|window| *window > 0) {
            Some(window) => put("local_attention", json!(window)),
            // Without a window, all layers are whole.
            None => put("global_attn_every_n_layers", json!(1)),
        }
        match self.fields.get("modern-bert.attention.sliding_window_pattern") {
            Some(MetadataValue::Whole(every)) if *every > 0 => {
                put("global_attn_every_n_layers", json!(u64::try_from(*every).unwrap_or(0)));
            }
            Some(pattern) => {
                let types = layer_types(pattern, self.count("block_count")?);
                let types = types.ok_or_else(|| {
                    format!("modern-bert.attention.sliding_window_pattern is {pattern:?}")
                })?;
                put("layer_types", json!(types));
            }
            None => {}
        }
        Ok(Json::Object(Map::from_iter(config)))
    }

    /// The files of sentence-transformers that say how rows become a vector, by their paths, where the file says it.
    /// Vectors have length one, as llama.cpp gives them.
    ///
    /// # Errors
    /// A sentence about what it asks for that is not done.
    pub(super) fn sentence(&self) -> Result<Vec<(&'static str, Json)>, String> {
        let field = self.own("pooling_type");
        let longest = self.whole(MAX_TOKENS).map(|rows| json!({ "max_seq_length": rows }));
        let longest = longest.map(|json| ("sentence_bert_config.json", json));
        let number = self.whole(&field).unwrap_or(0);
        if number == 0 {
            return Ok(longest.into_iter().collect());
        }
        let found = POOLING.iter().find(|(known, _)| *known == number);
        let Some((_, mode)) = found else {
            return Err(format!(
                "it has {field} = {number}, which is not done from GGUF files: the mean (1), the first (2) and the last \
                 row (3) are"
            ));
        };
        // Elsewhere they stand before the pooling.
        if !self.dense.is_empty() && self.architecture() != Some(dense::ARCHITECTURE) {
            return Err("its dense layers are not done from GGUF files of its architecture".into());
        }
        let module = |at: u32, path: &str, kind: &str| {
            json!({
                "idx": at, "name": at.to_string(), "path": path,
                "type": format!("sentence_transformers.models.{kind}"),
            })
        };
        let pooling =
            json!({"word_embedding_dimension": self.count("embedding_length")?, *mode: true});
        let behind = 2 + self.dense.len() as u32;
        let mut modules = vec![module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")];
        modules
            .extend((2..).zip(&self.dense).map(|(at, layer)| module(at, layer.module(), "Dense")));
        modules.push(module(behind, &format!("{behind}_Normalize"), "Normalize"));
        let mut files = vec![("modules.json", json!(modules)), ("1_Pooling/config.json", pooling)];
        files.extend(longest);
        if let Some(text) = self.text(PROMPTS) {
            let prompts = serde_json::from_str(text).map_err(|e| format!("its {PROMPTS}: {e}"))?;
            files.push((SENTENCE_CONFIG, prompts));
        }
        Ok(files)
    }
}
