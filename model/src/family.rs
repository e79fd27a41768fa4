//! Families: for each, how fields of its config become a [`ModelSpec`], and how its tensors are
//! called.
//!
//! A family is a table. `{}` in a name stands for the layer. Names lie below one of the family's
//! prefixes (the one below which the embedding table is found), except those that begin with `/`.

use crate::{
    config::{Fields, short},
    error::ModelError,
    matrix::Storage,
    spec::*,
};
use std::f64::consts::TAU;

const MAX_WIDTH: u32 = 1 << 20;
const MAX_INNER: u32 = 1 << 22;
const MAX_LAYERS: u32 = 4096;
const MAX_HEADS: u32 = 1 << 16;
const MAX_VOCABULARY: u32 = 1 << 24;
const MAX_POSITIONS: u32 = 1 << 24;
const MAX_LABELS: u32 = 1 << 16;

/// What an architecture puts on the layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Top {
    Hidden,
    Classes,
    Language,
}

/// One family.
pub(crate) struct Family {
    /// `model_type` in its configs.
    pub(crate) model_type: &'static str,
    architectures: &'static [(&'static str, Top)],
    read: fn(&Fields<'_>, Top) -> Result<ModelSpec, ModelError>,
    /// Tried in order.
    pub(crate) prefixes: &'static [&'static str],
    /// Of the layers' products; heads are always `nn.Linear`.
    pub(crate) storage: Storage,
    /// Whether query, key and value are thirds of one tensor.
    pub(crate) fused: bool,
    pub(crate) names: Names,
}

/// Names of tensors without `.weight` and `.bias`; empty where a family has none.
pub(crate) struct Names {
    pub(crate) word: &'static str,
    pub(crate) position: &'static str,
    pub(crate) token_type: &'static str,
    pub(crate) embedding_norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    pub(crate) attention_output: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) class_dense: &'static str,
    pub(crate) class_output: &'static str,
    pub(crate) language_head: &'static str,
}

static FAMILIES: [Family; 4] = [
    Family {
        model_type: "bert",
        architectures: &[
            ("BertModel", Top::Hidden),
            ("BertForSequenceClassification", Top::Classes),
            ("BertForMaskedLM", Top::Hidden),
        ],
        read: bert,
        prefixes: &["", "bert."],
        storage: Storage::OutputRows,
        fused: false,
        names: Names {
            word: "embeddings.word_embeddings",
            position: "embeddings.position_embeddings",
            token_type: "embeddings.token_type_embeddings",
            embedding_norm: "embeddings.LayerNorm",
            query: "encoder.layer.{}.attention.self.query",
            key: "encoder.layer.{}.attention.self.key",
            value: "encoder.layer.{}.attention.self.value",
            attention_output: "encoder.layer.{}.attention.output.dense",
            attention_norm: "encoder.layer.{}.attention.output.LayerNorm",
            gate: "",
            up: "encoder.layer.{}.intermediate.dense",
            down: "encoder.layer.{}.output.dense",
            mlp_norm: "encoder.layer.{}.output.LayerNorm",
            final_norm: "",
            class_dense: "pooler.dense",
            class_output: "/classifier",
            language_head: "",
        },
    },
    Family {
        model_type: "distilbert",
        architectures: &[
            ("DistilBertModel", Top::Hidden),
            ("DistilBertForSequenceClassification", Top::Classes),
            ("DistilBertForMaskedLM", Top::Hidden),
        ],
        read: distilbert,
        prefixes: &["", "distilbert."],
        storage: Storage::OutputRows,
        fused: false,
        names: Names {
            word: "embeddings.word_embeddings",
            position: "embeddings.position_embeddings",
            token_type: "",
            embedding_norm: "embeddings.LayerNorm",
            query: "transformer.layer.{}.attention.q_lin",
            key: "transformer.layer.{}.attention.k_lin",
            value: "transformer.layer.{}.attention.v_lin",
            attention_output: "transformer.layer.{}.attention.out_lin",
            attention_norm: "transformer.layer.{}.sa_layer_norm",
            gate: "",
            up: "transformer.layer.{}.ffn.lin1",
            down: "transformer.layer.{}.ffn.lin2",
            mlp_norm: "transformer.layer.{}.output_layer_norm",
            final_norm: "",
            class_dense: "/pre_classifier",
            class_output: "/classifier",
            language_head: "",
        },
    },
    Family {
        model_type: "gpt2",
        architectures: &[
            ("GPT2Model", Top::Hidden),
            ("GPT2LMHeadModel", Top::Language),
            ("GPT2ForSequenceClassification", Top::Classes),
        ],
        read: gpt2,
        prefixes: &["", "transformer."],
        storage: Storage::InputRows,
        fused: true,
        names: Names {
            word: "wte",
            position: "wpe",
            token_type: "",
            embedding_norm: "",
            query: "h.{}.attn.c_attn",
            key: "h.{}.attn.c_attn",
            value: "h.{}.attn.c_attn",
            attention_output: "h.{}.attn.c_proj",
            attention_norm: "h.{}.ln_1",
            gate: "",
            up: "h.{}.mlp.c_fc",
            down: "h.{}.mlp.c_proj",
            mlp_norm: "h.{}.ln_2",
            final_norm: "ln_f",
            class_dense: "",
            class_output: "/score",
            language_head: "/lm_head",
        },
    },
    Family {
        model_type: "llama",
        architectures: &[
            ("LlamaModel", Top::Hidden),
            ("LlamaForCausalLM", Top::Language),
            ("LlamaForSequenceClassification", Top::Classes),
        ],
        read: llama,
        prefixes: &["", "model."],
        storage: Storage::OutputRows,
        fused: false,
        names: Names {
            word: "embed_tokens",
            position: "",
            token_type: "",
            embedding_norm: "",
            query: "layers.{}.self_attn.q_proj",
            key: "layers.{}.self_attn.k_proj",
            value: "layers.{}.self_attn.v_proj",
            attention_output: "layers.{}.self_attn.o_proj",
            attention_norm: "layers.{}.input_layernorm",
            gate: "layers.{}.mlp.gate_proj",
            up: "layers.{}.mlp.up_proj",
            down: "layers.{}.mlp.down_proj",
            mlp_norm: "layers.{}.post_attention_layernorm",
            final_norm: "norm",
            class_dense: "",
            class_output: "/score",
            language_head: "/lm_head",
        },
    },
];

/// The family of a config, and the spec that it describes.
pub(crate) fn read(config: &Fields<'_>) -> Result<(&'static Family, ModelSpec), ModelError> {
    let architecture = match config.get(&["architectures"]) {
        None => None,
        Some((_, value)) => match value.as_array().map(|list| list.first().map(|v| v.as_str())) {
            Some(None) => None,
            Some(Some(Some(name))) => Some(name),
            _ => {
                let problem = format!("is {}: a list of names is wanted", short(value));
                return Err(config.wrong("architectures", problem));
            }
        },
    };
    let by_architecture = |f: &&Family| f.architectures.iter().any(|a| Some(a.0) == architecture);
    let family = match (config.text(&["model_type"])?, architecture) {
        (Some(model_type), _) => {
            FAMILIES.iter().find(|f| f.model_type == model_type).ok_or_else(|| {
                let known: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
                config.unknown("model_type", model_type, known.join(", "))
            })?
        }
        (None, Some(name)) => FAMILIES.iter().find(by_architecture).ok_or_else(|| {
            let known = FAMILIES.iter().flat_map(|f| f.architectures).map(|a| a.0);
            config.unknown("architecture", name, known.collect::<Vec<_>>().join(", "))
        })?,
        (None, None) => return Err(config.wrong("model_type", "is missing")),
    };
    let top = match architecture {
        None => Top::Hidden,
        Some(name) => {
            let known = || family.architectures.iter().map(|a| a.0).collect::<Vec<_>>().join(", ");
            let found = family.architectures.iter().find(|a| a.0 == name);
            found.ok_or_else(|| config.unknown("architecture", name, known()))?.1
        }
    };
    if let Some((_, value)) = config.get(&["quantization_config"]) {
        return Err(ModelError::Unsupported {
            path: config.path.to_owned(),
            field: "quantization_config",
            value: short(value),
            remedy: "use a checkpoint in F32, F16 or BF16",
        });
    }
    Ok((family, (family.read)(config, top)?))
}

fn bert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("is_decoder", false, "BERT is run as an encoder")?;
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    if let Some(kind) = config.text(&["position_embedding_type"])?.filter(|&k| k != "absolute") {
        return Err(config.unknown("position_embedding_type", kind, "absolute"));
    }
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    Ok(ModelSpec {
        inner: config.count(&["intermediate_size"], MAX_INNER)?,
        norm_epsilon: epsilon(config, &["layer_norm_eps"], 1e-12)?,
        activation: activation(config, &["hidden_act"], Activation::Gelu)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        token_types: true,
        head: match top {
            Top::Classes => classes(config, ClassRow::First, Some(ClassActivation::Tanh), true)?,
            _ => HeadSpec::None,
        },
        ..encoder("bert", sizes)
    })
}

fn distilbert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let sizes = Sizes::read(
        config,
        &["dim", "hidden_size"],
        &["n_heads", "num_attention_heads"],
        &["n_layers", "num_hidden_layers"],
    )?;
    Ok(ModelSpec {
        inner: config.count(&["hidden_dim"], MAX_INNER)?,
        activation: activation(config, &["activation"], Activation::Gelu)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        head: match top {
            Top::Classes => classes(config, ClassRow::First, Some(ClassActivation::Relu), true)?,
            _ => HeadSpec::None,
        },
        ..encoder("distilbert", sizes)
    })
}

fn gpt2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("scale_attn_weights", true, "only scaled attention is run")?;
    config.must_be("scale_attn_by_inverse_layer_idx", false, "only one scale is run")?;
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    let sizes = Sizes::read(
        config,
        &["n_embd", "hidden_size"],
        &["n_head", "num_attention_heads"],
        &["n_layer", "num_hidden_layers"],
    )?;
    let inner = config.count_or_none(&["n_inner"], MAX_INNER)?.unwrap_or(4 * sizes.hidden);
    Ok(ModelSpec {
        inner,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["layer_norm_epsilon"], 1e-5)?,
        activation: activation(config, &["activation_function"], Activation::GeluTanh)?,
        causal: true,
        positions: learned(config, &["n_positions", "max_position_embeddings"], 1024)?,
        embedding_norm: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => HeadSpec::Language { tied: config.flag("tie_word_embeddings", true)? },
        },
        ..encoder("gpt2", sizes)
    })
}

fn llama(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let hidden = config.count(&["hidden_size"], MAX_WIDTH)?;
    let heads = config.count(&["num_attention_heads"], MAX_HEADS)?;
    let head_width = match config.count_or_none(&["head_dim"], MAX_WIDTH)? {
        Some(width) => width,
        None => divide(config, "hidden_size", hidden, "num_attention_heads", heads)?,
    };
    if heads.saturating_mul(head_width) > MAX_WIDTH {
        let problem = format!("makes {heads} heads wider than {MAX_WIDTH} together");
        return Err(config.wrong("head_dim", problem));
    }
    let kv_heads = config.count_or_none(&["num_key_value_heads"], MAX_HEADS)?.unwrap_or(heads);
    divide(config, "num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let sizes = Sizes {
        hidden,
        heads,
        head_width,
        layers: config.count(&["num_hidden_layers"], MAX_LAYERS)?,
        vocabulary: config.count(&["vocab_size"], MAX_VOCABULARY)?,
    };
    Ok(ModelSpec {
        kv_heads,
        inner: config.count(&["intermediate_size"], MAX_INNER)?,
        norm: NormKind::Rms,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["rms_norm_eps"], 1e-6)?,
        activation: activation(config, &["hidden_act"], Activation::Silu)?,
        gated: true,
        causal: true,
        positions: rotary(config, head_width)?,
        embedding_norm: false,
        qkv_bias: attention_bias,
        attention_output_bias: attention_bias,
        mlp_bias: config.flag("mlp_bias", false)?,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => {
                HeadSpec::Language { tied: config.flag("tie_word_embeddings", false)? }
            }
        },
        ..encoder("llama", sizes)
    })
}

struct Sizes {
    hidden: u32,
    heads: u32,
    head_width: u32,
    layers: u32,
    vocabulary: u32,
}

impl Sizes {
    /// Heads that share the hidden width evenly.
    fn read(
        config: &Fields<'_>,
        hidden: &[&'static str],
        heads: &[&'static str],
        layers: &[&'static str],
    ) -> Result<Self, ModelError> {
        let width = config.count(hidden, MAX_WIDTH)?;
        let count = config.count(heads, MAX_HEADS)?;
        Ok(Self {
            hidden: width,
            heads: count,
            head_width: divide(config, hidden[0], width, heads[0], count)?,
            layers: config.count(layers, MAX_LAYERS)?,
            vocabulary: config.count(&["vocab_size"], MAX_VOCABULARY)?,
        })
    }
}

/// What BERT has; families say where they differ.
fn encoder(family: &str, sizes: Sizes) -> ModelSpec {
    let Sizes { hidden, heads, head_width, layers, vocabulary } = sizes;
    ModelSpec {
        family: family.to_owned(),
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_width,
        inner: hidden,
        vocabulary,
        norm: NormKind::Layer,
        norm_place: NormPlace::Post,
        norm_epsilon: 1e-12,
        activation: Activation::Gelu,
        gated: false,
        causal: false,
        positions: Positions::Learned { rows: 0, offset: 0 },
        token_types: false,
        embedding_norm: true,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head: HeadSpec::None,
    }
}

fn divide(
    config: &Fields<'_>,
    field: &str,
    whole: u32,
    by: &str,
    parts: u32,
) -> Result<u32, ModelError> {
    if whole.is_multiple_of(parts) {
        return Ok(whole / parts);
    }
    Err(config.wrong(field, format!("is {whole}, which {by} = {parts} does not divide")))
}

fn epsilon(config: &Fields<'_>, names: &[&'static str], default: f64) -> Result<f32, ModelError> {
    let value = config.positive_or_none(names)?.unwrap_or(default);
    if value >= 1.0 || value as f32 <= 0.0 {
        return Err(config.wrong(names[0], format!("is {value}: a small number is wanted")));
    }
    Ok(value as f32)
}

fn activation(
    config: &Fields<'_>,
    names: &[&'static str],
    default: Activation,
) -> Result<Activation, ModelError> {
    match config.text(names)? {
        None => Ok(default),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu") => Ok(Activation::Relu),
        Some(other) => {
            let known = "gelu, gelu_new, gelu_pytorch_tanh, silu, swish, relu";
            Err(config.unknown("activation", other, known))
        }
    }
}

fn learned(
    config: &Fields<'_>,
    names: &[&'static str],
    default: u32,
) -> Result<Positions, ModelError> {
    let rows = config.count_or_none(names, MAX_POSITIONS)?.unwrap_or(default);
    Ok(Positions::Learned { rows, offset: 0 })
}

/// Rotary frequencies, scaled as `transformers` does it.
fn rotary(config: &Fields<'_>, head_width: u32) -> Result<Positions, ModelError> {
    if head_width % 2 == 1 {
        let problem = format!("is {head_width}: rotary positions need an even width");
        return Err(config.wrong("head_dim", problem));
    }
    let limit = config.count_or_none(&["max_position_embeddings"], MAX_POSITIONS)?.unwrap_or(2048);
    // transformers 5 writes everything into rope_parameters; before, rope_theta stood beside
    // rope_scaling.
    let parameters = config.inner(&["rope_parameters"])?;
    let scaling = match parameters {
        Some(inner) => Some(inner),
        None => config.inner(&["rope_scaling"])?,
    };
    let of_parameters = match parameters {
        Some(inner) => inner.positive_or_none(&["rope_theta"])?,
        None => None,
    };
    let theta = match of_parameters {
        Some(theta) => theta,
        None => config.positive_or_none(&["rope_theta"])?.unwrap_or(10_000.0),
    };
    for fields in [Some(*config), scaling].into_iter().flatten() {
        let part = fields.positive_or_none(&["partial_rotary_factor"])?;
        if let Some(part) = part.filter(|&p| p != 1.0) {
            return Err(ModelError::Unsupported {
                path: config.path.to_owned(),
                field: "partial_rotary_factor",
                value: part.to_string(),
                remedy: "Llama rotates whole heads",
            });
        }
    }
    let pairs = head_width / 2;
    let plain = (0..pairs).map(|i| theta.powf(-f64::from(2 * i) / f64::from(head_width)));
    let kind = match scaling {
        Some(fields) => fields.text(&["rope_type", "type"])?.unwrap_or("default"),
        None => "default",
    };
    let frequencies: Vec<f64> = match (kind, scaling) {
        ("default", _) | (_, None) => plain.collect(),
        ("linear", Some(fields)) => {
            let factor = fields.positive(&["factor"])?;
            plain.map(|f| f / factor).collect()
        }
        ("llama3", Some(fields)) => {
            let factor = fields.positive(&["factor"])?;
            let low = fields.positive(&["low_freq_factor"])?;
            let high = fields.positive(&["high_freq_factor"])?;
            if low >= high {
                let problem = format!("is {low}: it must be below high_freq_factor = {high}");
                return Err(config.wrong("low_freq_factor", problem));
            }
            let original = &["original_max_position_embeddings"];
            let original = match fields.positive_or_none(original)? {
                Some(rows) => rows,
                None => config.positive_or_none(original)?.unwrap_or(f64::from(limit)),
            };
            let scale = |f: f64| {
                // Turns within the original context decide: many stay, few are slowed down.
                let turns = original * f / TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - keep) * f / factor + keep * f
            };
            plain.map(scale).collect()
        }
        (other, Some(_)) => {
            return Err(config.unknown("rope_type", other, "default, linear, llama3"));
        }
    };
    let inverse_frequencies: Vec<f32> = frequencies.into_iter().map(|f| f as f32).collect();
    if let Some(wrong) = inverse_frequencies.iter().find(|f| !f.is_finite()) {
        let problem = format!("is {theta}: with its scaling it gives the frequency {wrong}");
        return Err(config.wrong("rope_theta", problem));
    }
    Ok(Positions::Rotary { inverse_frequencies, limit })
}

fn classes(
    config: &Fields<'_>,
    row: ClassRow,
    dense: Option<ClassActivation>,
    bias: bool,
) -> Result<HeadSpec, ModelError> {
    let names = match config.inner(&["id2label"])? {
        None => {
            // transformers leaves out what it would assume: two labels.
            let labels = config.count_or_none(&["num_labels"], MAX_LABELS)?.unwrap_or(2);
            (0..labels).map(|i| format!("LABEL_{i}")).collect()
        }
        Some(labels) => {
            let mut names = std::collections::BTreeMap::new();
            for (id, name) in labels.entries() {
                let Ok(index) = id.parse::<u32>() else {
                    return Err(config.wrong("id2label", format!("has the key {id:?}")));
                };
                let name = match name.as_str() {
                    Some(text) => text.to_owned(),
                    None => short(name),
                };
                names.insert(index, name);
            }
            let last = names.last_key_value().map(|(&index, _)| u64::from(index) + 1);
            if last != Some(names.len() as u64) || names.len() > MAX_LABELS as usize {
                let problem = format!("must number its labels 0 to n-1, at most {MAX_LABELS}");
                return Err(config.wrong("id2label", problem));
            }
            names.into_values().collect::<Vec<_>>()
        }
    };
    let labels = names.len() as u32;
    Ok(HeadSpec::Classes(ClassHead { row, dense, labels, bias, names }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn read_spec(config: &Value) -> Result<ModelSpec, ModelError> {
        read(&Fields::new(Path::new("config.json"), config)?).map(|(_, spec)| spec)
    }

    /// `base` with `changes` laid over it.
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
    fn frequencies(config: &Value) -> Vec<f32> {
        match read_spec(config).expect("a spec").positions {
            Positions::Rotary { inverse_frequencies, .. } => inverse_frequencies,
            Positions::Learned { .. } => panic!("no rotation"),
        }
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let bert = read_spec(&small_bert(json!({}))).expect("a spec");
        assert_eq!((bert.head_width, bert.norm_epsilon), (4, 1e-12));
        assert_eq!((bert.position_limit(), bert.activation), (512, Activation::Gelu));
        assert_eq!(bert.head, HeadSpec::None);
        assert!(bert.token_types && bert.embedding_norm && !bert.causal);

        let gpt2 = read_spec(&small_gpt2(json!({ "n_inner": null }))).expect("a spec");
        assert_eq!((gpt2.inner, gpt2.norm_epsilon, gpt2.position_limit()), (48, 1e-5, 1024));
        assert!(gpt2.causal && !gpt2.embedding_norm && gpt2.norm_place == NormPlace::Pre);
        let config = small_gpt2(json!({ "architectures": ["GPT2LMHeadModel"] }));
        let head = read_spec(&config).expect("a spec").head;
        assert_eq!(head, HeadSpec::Language { tied: true });

        let config = small_llama(json!({ "architectures": ["LlamaForCausalLM"] }));
        let llama = read_spec(&config).expect("a spec");
        assert_eq!((llama.kv_heads, llama.head_width, llama.norm_epsilon), (6, 4, 1e-6));
        assert_eq!(llama.head, HeadSpec::Language { tied: false });
        assert!(!llama.qkv_bias && !llama.mlp_bias && llama.gated);
        assert_eq!(frequencies(&config), [1.0, 0.01]);

        let distilbert = read_spec(&json!({
            "architectures": ["DistilBertForSequenceClassification"], "activation": "relu",
            "dim": 12, "n_heads": 3, "n_layers": 1, "hidden_dim": 7, "vocab_size": 30
        }))
        .expect("the architecture tells the family");
        assert_eq!((distilbert.family.as_str(), distilbert.inner), ("distilbert", 7));
        let HeadSpec::Classes(head) = distilbert.head else { panic!("classes") };
        assert_eq!((head.labels, head.dense), (2, Some(ClassActivation::Relu)));
        assert_eq!(head.names, ["LABEL_0", "LABEL_1"]);
    }

    #[test]
    fn labels_keep_their_numbers() {
        let labels: serde_json::Map<_, _> =
            (0..12).map(|i| (i.to_string(), json!(format!("n{i}")))).collect();
        let config = small_bert(json!({
            "architectures": ["BertForSequenceClassification"], "id2label": labels
        }));
        let HeadSpec::Classes(head) = read_spec(&config).expect("a spec").head else {
            panic!("classes")
        };
        assert_eq!(
            (head.labels, head.names[2].as_str(), head.names[10].as_str()),
            (12, "n2", "n10")
        );
        for labels in [json!({}), json!({ "1": "a" }), json!({ "x": "a" }), json!([])] {
            let config = small_bert(json!({
                "architectures": ["BertForSequenceClassification"], "id2label": labels
            }));
            assert!(matches!(read_spec(&config), Err(ModelError::Field { .. })));
        }
    }

    #[test]
    fn rotary_scaling_is_in_the_frequencies() {
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

    #[test]
    fn what_is_not_carried_out_is_refused_by_name() {
        let cases = [
            (small_bert(json!({ "model_type": "roberta" })), "bert, distilbert, gpt2, llama"),
            (small_bert(json!({ "architectures": ["BertForTokenClassification"] })), "BertModel"),
            (small_bert(json!({ "architectures": ["LlamaModel"] })), "BertModel"),
            (json!({ "architectures": ["T5Model"] }), "GPT2LMHeadModel"),
            (small_bert(json!({ "architectures": 3 })), "architectures"),
            (small_bert(json!({ "hidden_act": "mish" })), "gelu_pytorch_tanh"),
            (small_bert(json!({ "is_decoder": true })), "is_decoder"),
            (small_bert(json!({ "position_embedding_type": "relative_key" })), "absolute"),
            (small_bert(json!({ "quantization_config": { "bits": 4 } })), "quantization_config"),
            (small_bert(json!({ "hidden_size": 13 })), "does not divide"),
            (small_bert(json!({ "hidden_size": 0 })), "1 to"),
            (small_bert(json!({ "hidden_size": -1 })), "1 to"),
            (small_bert(json!({ "hidden_size": 1.5 })), "1 to"),
            (small_bert(json!({ "hidden_size": (1u64 << 20) + 3 })), "1 to"),
            (small_bert(json!({ "hidden_size": null })), "missing"),
            (small_bert(json!({ "num_attention_heads": 0 })), "num_attention_heads"),
            (small_bert(json!({ "num_hidden_layers": 4097 })), "num_hidden_layers"),
            (small_bert(json!({ "vocab_size": (1u64 << 24) + 1 })), "vocab_size"),
            (small_bert(json!({ "layer_norm_eps": 0.0 })), "layer_norm_eps"),
            (small_bert(json!({ "layer_norm_eps": 1e-300 })), "layer_norm_eps"),
            (small_bert(json!({ "layer_norm_eps": "a" })), "layer_norm_eps"),
            (small_gpt2(json!({ "scale_attn_weights": false })), "scale_attn_weights"),
            (
                small_gpt2(json!({ "scale_attn_by_inverse_layer_idx": true })),
                "scale_attn_by_inverse_layer_idx",
            ),
            (small_gpt2(json!({ "add_cross_attention": true })), "add_cross_attention"),
            (small_gpt2(json!({ "add_cross_attention": 1 })), "true or false"),
            (small_llama(json!({ "num_key_value_heads": 4 })), "does not divide"),
            (small_llama(json!({ "num_key_value_heads": 7 })), "does not divide"),
            (small_llama(json!({ "head_dim": 5 })), "even"),
            (small_llama(json!({ "head_dim": 1 << 20 })), "wider"),
            (small_llama(json!({ "rope_scaling": { "type": "yarn" } })), "default, linear, llama3"),
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
        fn any_numbers_are_handled(
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
}
