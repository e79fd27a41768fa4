//! The `config.json` of a model in a GGUF file, as its checkpoint would have it.

use super::{DIVISORS, Gguf, MetadataValue};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// The architectures that are read, each with the family and the class that it has in checkpoints.
const ARCHITECTURES: [(&str, &str, &str); 10] = [
    ("bert", "bert", "BertModel"),
    ("gemma-embedding", "gemma3_text", "Gemma3TextModel"),
    ("gemma2", "gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
    ("llama", "llama", "LlamaForCausalLM"),
    ("modern-bert", "modernbert", "ModernBertModel"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
    ("phi3", "phi3", "Phi3ForCausalLM"),
    ("smollm3", "smollm3", "SmolLM3ForCausalLM"),
];

/// The Gemma architectures. From so many layers on, scores are scaled by the hidden width divided by the number of
/// heads, and not by the width of a head.
const GEMMAS: [(&str, u64); 3] = [("gemma-embedding", u64::MAX), ("gemma2", 46), ("gemma3", 62)];
/// The two tensors with divisors of rotary frequencies, for short texts and for long ones.
pub(crate) const STRETCHES: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Fields of an architecture that change what a model computes, and are not supported.
const CHANGING: [&str; 13] = [
    "attention.causal",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "embedding_scale",
    "expert_shared_count",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "use_parallel_residual",
];
/// Fields of an architecture that are read, or change nothing.
const KNOWN: [&str; 31] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attn_logit_softcapping",
    "block_count",
    "context_length",
    "dense_2_feat_in",
    "dense_2_feat_out",
    "dense_3_feat_in",
    "dense_3_feat_out",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "final_logit_softcapping",
    "hidden_activation",
    "pooling_type",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];

/// Architectures whose files store the rows of queries and keys in pairs.
const PAIRED: [&str; 2] = ["llama", "smollm3"];
/// The most layers that a pattern of windows is expanded to.
const MAX_LAYERS: u64 = 4096;

/// The fields of a config, sorted by their names.
type Config = BTreeMap<String, Json>;

impl Gguf {
    /// The architecture that the file names.
    pub(crate) fn architecture(&self) -> Option<&str> {
        self.text("general.architecture")
    }

    /// Whether a field is there and asks for something: it is neither zero nor off.
    fn asks(&self, field: &str) -> bool {
        match self.fields.get(field) {
            None | Some(MetadataValue::Whole(0)) => false,
            // What rows of this architecture see in any case asks for nothing.
            Some(MetadataValue::Flag(flag)) => {
                *flag != (field.ends_with(".causal") && !self.sees_both_ways())
            }
            // A factor of 1 changes nothing, except for attention.scale, whose neutral value is another one.
            Some(MetadataValue::Float(1.0)) => field.ends_with("attention.scale"),
            Some(MetadataValue::Float(number)) => *number != 0.0,
            Some(_) => true,
        }
    }

    /// The fields of the file's architecture that are not known here.
    pub(crate) fn unknown(&self) -> Vec<String> {
        let begins = format!("{}.", self.text("general.architecture").unwrap_or_default());
        let known = |name: &str| {
            let field = name.strip_prefix(&begins);
            field.is_none_or(|field| KNOWN.contains(&field) || CHANGING.contains(&field))
        };
        self.fields.keys().filter(|name| !known(name)).cloned().collect()
    }

    /// A whole number of the file's architecture.
    pub(super) fn count(&self, of: &str) -> Result<u64, String> {
        let field = self.own(of);
        self.whole(&field).ok_or_else(|| format!("it has no number {field}"))
    }

    /// A number of the file's architecture.
    pub(super) fn real(&self, of: &str) -> Result<f64, String> {
        let field = self.own(of);
        self.number(&field).ok_or_else(|| format!("it has no number {field}"))
    }

    /// The full name of a field of the file's architecture.
    pub(super) fn own(&self, of: &str) -> String {
        format!("{}.{of}", self.architecture().unwrap_or_default())
    }

    /// The model's `config.json`.
    ///
    /// # Errors
    /// A sentence about what the file lacks, or what it asks for that is not supported.
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
        let asked = CHANGING.iter().map(|other| self.own(other)).find(|field| self.asks(field));
        if let Some(field) = asked {
            return Err(format!("it has {field}, which is not done here"));
        }
        match name {
            "bert" => self.bert(),
            "modern-bert" => self.modern_bert(),
            _ => self.decoder(family, class),
        }
    }

    /// The `config.json` of Llama and families like it.
    fn decoder(&self, family: &str, class: &str) -> Result<Json, String> {
        if self.whole(&self.own("expert_count")).is_some_and(|experts| experts > 0) {
            return Err("models of experts are not computed here".to_owned());
        }
        // Keys are sorted: the text is a part of the fingerprint, on every device.
        let mut config = Config::new();
        self.put_sizes(&mut config)?;
        self.put_positions(family, &mut config)?;
        self.put_windows(family, &mut config)?;
        self.put_scores(&mut config)?;
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        put("architectures", json!([class]));
        put("model_type", json!(family));
        let gemma = self.gemma().is_some();
        let activation = if gemma { "hidden_activation" } else { "hidden_act" };
        put(activation, json!(if gemma { "gelu_pytorch_tanh" } else { "silu" }));
        put("tie_word_embeddings", json!(self.rows("output.weight").is_none()));
        put("rms_norm_eps", json!(self.real("attention.layer_norm_rms_epsilon")?));
        if ["llama", "smollm3"].contains(&family) {
            put("attention_bias", json!(self.rows("blk.0.attn_q.bias").is_some()));
        }
        if self.sees_both_ways() {
            put("use_bidirectional_attention", json!(true));
        }
        for (key, field) in [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")] {
            if let Some(id) = self.whole(&format!("tokenizer.ggml.{field}")) {
                put(key, json!(id));
            }
        }
        Ok(Json::Object(Map::from_iter(config)))
    }

    /// Whether the file's architecture is a Gemma, and from how many layers on it scales scores by the hidden width.
    fn gemma(&self) -> Option<u64> {
        let found = GEMMAS.iter().find(|(gemma, _)| self.architecture() == Some(gemma));
        found.map(|(_, layers)| *layers)
    }

    /// The width of a decoder's heads.
    fn head_width(&self) -> Result<u64, String> {
        let (heads, hidden) =
            (self.count("attention.head_count")?, self.count("embedding_length")?);
        let width = match self.whole(&self.own("attention.key_length")) {
            Some(width) => width,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(format!("{hidden} columns cannot be {heads} heads")),
        };
        match self.whole(&self.own("attention.value_length")).is_some_and(|values| values != width)
        {
            true => Err("values as wide as keys are computed here, and these are not".to_owned()),
            false => Ok(width),
        }
    }

    /// Puts the sizes of a decoder.
    fn put_sizes(&self, config: &mut Config) -> Result<(), String> {
        let heads = self.count("attention.head_count")?;
        let width = self.head_width()?;
        let kv_heads = match self.fields.get(&self.own("attention.head_count_kv")) {
            None => heads,
            Some(MetadataValue::Whole(count)) => u64::try_from(*count).unwrap_or(0),
            Some(_) => {
                return Err("layers with other numbers of heads are not computed here".into());
            }
        };
        let vocabulary = self.rows("token_embd.weight").ok_or("it has no token_embd.weight")?;
        let sizes = [
            ("hidden_size", self.count("embedding_length")?),
            ("intermediate_size", self.count("feed_forward_length")?),
            ("num_hidden_layers", self.count("block_count")?),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", width),
            ("max_position_embeddings", self.count("context_length")?),
            ("vocab_size", vocabulary),
        ];
        config.extend(sizes.map(|(key, size)| (key.to_owned(), json!(size))));
        Ok(())
    }

    /// Puts how a decoder rotates queries and keys.
    fn put_positions(&self, family: &str, config: &mut Config) -> Result<(), String> {
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        put("rope_theta", json!(self.number(&self.own("rope.freq_base")).unwrap_or(10_000.0)));
        let width = self.head_width()?;
        let turned = self.whole(&self.own("rope.dimension_count")).filter(|n| *n != width);
        if let Some(turned) = turned {
            put("partial_rotary_factor", json!(turned as f64 / width as f64));
        }
        if let Some(scaling) = self.scaling(&|field| self.own(field))? {
            put("rope_scaling", scaling);
        }
        if family == "gemma3_text" {
            let theta = self.number(&self.own("rope.freq_base_swa")).unwrap_or(10_000.0);
            put("rope_local_base_freq", json!(theta));
        }
        Ok(())
    }

    /// Puts the sliding window of a decoder, and which layers have it.
    fn put_windows(&self, family: &str, config: &mut Config) -> Result<(), String> {
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        match self.whole(&self.own("attention.sliding_window")).filter(|n| *n > 0) {
            Some(window) => put("sliding_window", json!(window)),
            None if family == "gemma3_text" => put("sliding_window", Json::Null),
            None => {}
        }
        let field = self.own("attention.sliding_window_pattern");
        if let Some(every) = self.fields.get(&field) {
            let types = layer_types(every, self.count("block_count")?);
            put("layer_types", json!(types.ok_or_else(|| format!("{field} is {every:?}"))?));
        }
        Ok(())
    }

    /// Puts how a decoder scales and caps attention scores and logits, where it is a Gemma.
    fn put_scores(&self, config: &mut Config) -> Result<(), String> {
        let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        let gemma = self.gemma();
        if let Some(layers) = gemma {
            let heads = self.count("attention.head_count")?;
            let wide = self.count("block_count")? >= layers && heads > 0;
            let scalar =
                if wide { self.count("embedding_length")? / heads } else { self.head_width()? };
            put("query_pre_attn_scalar", json!(scalar));
        }
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            match (self.number(&self.own(cap)).filter(|cap| *cap != 0.0), gemma) {
                (Some(most), Some(_)) => put(cap, json!(most)),
                (Some(_), None) => {
                    return Err(format!("it has {}, which is not done here", self.own(cap)));
                }
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// The scaling rule of rotary positions, as `rope_scaling` has it.
    fn scaling(&self, field: &impl Fn(&str) -> String) -> Result<Option<Json>, String> {
        let factor = || {
            let name = field("rope.scaling.factor");
            self.number(&name).ok_or_else(|| format!("it has no number {name}"))
        };
        let name = field("rope.scaling.attn_factor");
        let scale = self.number(&name);
        // Each pair of columns has its own divisor: one for short texts and one for long ones, or one for all texts.
        let divisors = |name: &str| self.divisors.get(name);
        let both = divisors(STRETCHES[0]).zip(divisors(STRETCHES[1]));
        let one = divisors(DIVISORS).map(|all| (all, all));
        if let Some((short, long)) = both.or(one) {
            if let Some(other) = self
                .text(&field("rope.scaling.type"))
                .filter(|kind| !["none", "longrope", "llama3"].contains(kind))
            {
                return Err(format!("positions are stretched twice: by {other:?} and by tensors"));
            }
            let mut scaling = json!({
                "attention_factor": scale.unwrap_or(1.0), "long_factor": long,
                "rope_type": "longrope", "short_factor": short,
            });
            let original = field("rope.scaling.original_context_length");
            let original = self.whole(&original).filter(|_| both.is_some());
            if let Some(rows) = original {
                scaling["original_max_position_embeddings"] = json!(rows);
            }
            return Ok(Some(scaling));
        }
        if scale.is_some_and(|scale| scale != 1.0 && scale != 0.0) {
            return Err(format!("it has {name}, which is not done here"));
        }
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

    /// The number of rows of a tensor, if the file has it.
    pub(crate) fn rows(&self, name: &str) -> Option<u64> {
        self.rows.get(name).copied()
    }

    /// The query heads and key-value heads of a model whose files store the rows of queries and keys in pairs; `None`
    /// for other architectures.
    pub(crate) fn paired_heads(&self) -> Option<(u64, u64)> {
        let name = self.text("general.architecture").filter(|name| PAIRED.contains(name))?;
        let heads = self.whole(&format!("{name}.attention.head_count"))?;
        Some((heads, self.whole(&format!("{name}.attention.head_count_kv")).unwrap_or(heads)))
    }
}

/// The kind of each layer. The pattern is a number, where every so many-th layer has full attention, or a list of which
/// layers have a window.
pub(super) fn layer_types(pattern: &MetadataValue, layers: u64) -> Option<Vec<&'static str>> {
    let kind = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    match pattern {
        MetadataValue::Whole(every) if *every > 0 && layers <= MAX_LAYERS => {
            Some((1..=layers).map(|layer| kind(i128::from(layer) % every != 0)).collect())
        }
        MetadataValue::List(list) if list.len() as u64 == layers => list
            .iter()
            .map(|flag| match flag {
                MetadataValue::Flag(slides) => Some(kind(*slides)),
                _ => None,
            })
            .collect(),
        _ => None,
    }
}
