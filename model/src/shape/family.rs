//! The families of models that can be written: for each, its config and its tensors, named as
//! `transformers` does.

use super::{Fill, Shape, Tensor};
use serde_json::{Map, Value, json};

/// The extent of a tensor's dimension, in terms of a shape.
#[derive(Clone, Copy)]
enum Of {
    Hidden,
    /// The query, key and value projections in one tensor.
    Three,
    KeyValue,
    Intermediate,
    Vocabulary,
    Positions,
    /// The position table of OPT, which has two rows before the first position.
    PositionsAfterTwo,
    Just(u32),
}
use Of::*;

/// One tensor in a family's table, or two if it has a bias.
struct TensorEntry {
    name: &'static str,
    /// Either `.weight`, or nothing for a tensor that is no module's.
    suffix: &'static str,
    shape: &'static [Of],
    fill: Fill,
    /// The width of the `.bias` tensor, if there is one.
    bias: Option<Of>,
}

/// A linear layer, which `nn.Linear` stores as `[outputs, inputs]`.
const fn linear(name: &'static str, shape: &'static [Of; 2]) -> TensorEntry {
    TensorEntry { name, suffix: ".weight", shape, fill: Fill::Weight, bias: Some(shape[0]) }
}

/// A linear layer of GPT-2, which its `Conv1D` stores as `[inputs, outputs]`.
const fn conv1d(name: &'static str, shape: &'static [Of; 2]) -> TensorEntry {
    TensorEntry { name, suffix: ".weight", shape, fill: Fill::Weight, bias: Some(shape[1]) }
}

const fn norm(name: &'static str) -> TensorEntry {
    let shape = &[Hidden];
    TensorEntry { name, suffix: ".weight", shape, fill: Fill::Norm, bias: Some(Hidden) }
}

const fn weight(name: &'static str, shape: &'static [Of]) -> TensorEntry {
    TensorEntry { name, suffix: ".weight", shape, fill: Fill::Weight, bias: None }
}

const fn bare(name: &'static str, shape: &'static [Of], fill: Fill) -> TensorEntry {
    TensorEntry { name, suffix: "", shape, fill, bias: None }
}

impl TensorEntry {
    const fn unbiased(self) -> Self {
        Self { bias: None, ..self }
    }
    const fn residual(self) -> Self {
        Self { fill: Fill::Residual, ..self }
    }
}

/// A family that can be written. `{}` in a name stands for the layer.
struct Family {
    model_type: &'static str,
    config: fn(&Shape) -> Value,
    before: &'static [TensorEntry],
    layer: &'static [TensorEntry],
    after: &'static [TensorEntry],
}

static FAMILIES: [Family; 7] = [
    Family {
        model_type: "bert",
        config: bert,
        before: &[
            weight("bert.embeddings.word_embeddings", &[Vocabulary, Hidden]),
            weight("bert.embeddings.position_embeddings", &[Positions, Hidden]),
            weight("bert.embeddings.token_type_embeddings", &[Just(2), Hidden]),
            norm("bert.embeddings.LayerNorm"),
        ],
        layer: &[
            linear("bert.encoder.layer.{}.attention.self.query", &[Hidden, Hidden]),
            linear("bert.encoder.layer.{}.attention.self.key", &[Hidden, Hidden]),
            linear("bert.encoder.layer.{}.attention.self.value", &[Hidden, Hidden]),
            linear("bert.encoder.layer.{}.attention.output.dense", &[Hidden, Hidden]).residual(),
            norm("bert.encoder.layer.{}.attention.output.LayerNorm"),
            linear("bert.encoder.layer.{}.intermediate.dense", &[Intermediate, Hidden]),
            linear("bert.encoder.layer.{}.output.dense", &[Hidden, Intermediate]).residual(),
            norm("bert.encoder.layer.{}.output.LayerNorm"),
        ],
        after: &[
            bare("cls.predictions.bias", &[Vocabulary], Fill::Bias),
            linear("cls.predictions.transform.dense", &[Hidden, Hidden]),
            norm("cls.predictions.transform.LayerNorm"),
        ],
    },
    Family {
        model_type: "distilbert",
        config: distilbert,
        before: &[
            weight("distilbert.embeddings.word_embeddings", &[Vocabulary, Hidden]),
            weight("distilbert.embeddings.position_embeddings", &[Positions, Hidden]),
            norm("distilbert.embeddings.LayerNorm"),
        ],
        layer: &[
            linear("distilbert.transformer.layer.{}.attention.q_lin", &[Hidden, Hidden]),
            linear("distilbert.transformer.layer.{}.attention.k_lin", &[Hidden, Hidden]),
            linear("distilbert.transformer.layer.{}.attention.v_lin", &[Hidden, Hidden]),
            linear("distilbert.transformer.layer.{}.attention.out_lin", &[Hidden, Hidden])
                .residual(),
            norm("distilbert.transformer.layer.{}.sa_layer_norm"),
            linear("distilbert.transformer.layer.{}.ffn.lin1", &[Intermediate, Hidden]),
            linear("distilbert.transformer.layer.{}.ffn.lin2", &[Hidden, Intermediate]).residual(),
            norm("distilbert.transformer.layer.{}.output_layer_norm"),
        ],
        after: &[
            linear("vocab_transform", &[Hidden, Hidden]),
            norm("vocab_layer_norm"),
            bare("vocab_projector.bias", &[Vocabulary], Fill::Bias),
        ],
    },
    Family {
        model_type: "gpt2",
        config: gpt2,
        before: &[
            weight("transformer.wte", &[Vocabulary, Hidden]),
            weight("transformer.wpe", &[Positions, Hidden]),
        ],
        layer: &[
            norm("transformer.h.{}.ln_1"),
            conv1d("transformer.h.{}.attn.c_attn", &[Hidden, Three]),
            conv1d("transformer.h.{}.attn.c_proj", &[Hidden, Hidden]).residual(),
            norm("transformer.h.{}.ln_2"),
            conv1d("transformer.h.{}.mlp.c_fc", &[Hidden, Intermediate]),
            conv1d("transformer.h.{}.mlp.c_proj", &[Intermediate, Hidden]).residual(),
        ],
        after: &[norm("transformer.ln_f")],
    },
    Family {
        model_type: "gptj",
        config: gptj,
        before: &[weight("transformer.wte", &[Vocabulary, Hidden])],
        layer: &[
            norm("transformer.h.{}.ln_1"),
            weight("transformer.h.{}.attn.k_proj", &[Hidden, Hidden]),
            weight("transformer.h.{}.attn.v_proj", &[Hidden, Hidden]),
            weight("transformer.h.{}.attn.q_proj", &[Hidden, Hidden]),
            weight("transformer.h.{}.attn.out_proj", &[Hidden, Hidden]).residual(),
            linear("transformer.h.{}.mlp.fc_in", &[Intermediate, Hidden]),
            linear("transformer.h.{}.mlp.fc_out", &[Hidden, Intermediate]).residual(),
        ],
        after: &[norm("transformer.ln_f"), linear("lm_head", &[Vocabulary, Hidden])],
    },
    Family {
        model_type: "llama",
        config: llama,
        before: &[weight("model.embed_tokens", &[Vocabulary, Hidden])],
        layer: &[
            weight("model.layers.{}.self_attn.q_proj", &[Hidden, Hidden]),
            weight("model.layers.{}.self_attn.k_proj", &[KeyValue, Hidden]),
            weight("model.layers.{}.self_attn.v_proj", &[KeyValue, Hidden]),
            weight("model.layers.{}.self_attn.o_proj", &[Hidden, Hidden]).residual(),
            weight("model.layers.{}.mlp.gate_proj", &[Intermediate, Hidden]),
            weight("model.layers.{}.mlp.up_proj", &[Intermediate, Hidden]),
            weight("model.layers.{}.mlp.down_proj", &[Hidden, Intermediate]).residual(),
            norm("model.layers.{}.input_layernorm").unbiased(),
            norm("model.layers.{}.post_attention_layernorm").unbiased(),
        ],
        after: &[norm("model.norm").unbiased()],
    },
    Family {
        model_type: "opt",
        config: opt,
        before: &[
            weight("model.decoder.embed_tokens", &[Vocabulary, Hidden]),
            weight("model.decoder.embed_positions", &[PositionsAfterTwo, Hidden]),
        ],
        layer: &[
            linear("model.decoder.layers.{}.self_attn.k_proj", &[Hidden, Hidden]),
            linear("model.decoder.layers.{}.self_attn.v_proj", &[Hidden, Hidden]),
            linear("model.decoder.layers.{}.self_attn.q_proj", &[Hidden, Hidden]),
            linear("model.decoder.layers.{}.self_attn.out_proj", &[Hidden, Hidden]).residual(),
            norm("model.decoder.layers.{}.self_attn_layer_norm"),
            linear("model.decoder.layers.{}.fc1", &[Intermediate, Hidden]),
            linear("model.decoder.layers.{}.fc2", &[Hidden, Intermediate]).residual(),
            norm("model.decoder.layers.{}.final_layer_norm"),
        ],
        after: &[norm("model.decoder.final_layer_norm")],
    },
    Family {
        model_type: "vit",
        config: vit,
        before: &[
            bare("vit.embeddings.cls_token", &[Just(1), Just(1), Hidden], Fill::Weight),
            bare("vit.embeddings.position_embeddings", &[Just(1), Positions, Hidden], Fill::Weight),
            TensorEntry {
                name: "vit.embeddings.patch_embeddings.projection",
                suffix: ".weight",
                shape: &[Hidden, Just(3), Just(16), Just(16)],
                fill: Fill::Weight,
                bias: Some(Hidden),
            },
        ],
        layer: &[
            linear("vit.encoder.layer.{}.attention.attention.query", &[Hidden, Hidden]),
            linear("vit.encoder.layer.{}.attention.attention.key", &[Hidden, Hidden]),
            linear("vit.encoder.layer.{}.attention.attention.value", &[Hidden, Hidden]),
            linear("vit.encoder.layer.{}.attention.output.dense", &[Hidden, Hidden]).residual(),
            linear("vit.encoder.layer.{}.intermediate.dense", &[Intermediate, Hidden]),
            linear("vit.encoder.layer.{}.output.dense", &[Hidden, Intermediate]).residual(),
            norm("vit.encoder.layer.{}.layernorm_before"),
            norm("vit.encoder.layer.{}.layernorm_after"),
        ],
        after: &[norm("vit.layernorm"), linear("classifier", &[Vocabulary, Hidden])],
    },
];

impl Shape {
    fn recipe(&self) -> &'static Family {
        let found = FAMILIES.iter().find(|f| f.model_type == self.family);
        found.expect("shapes are made in this crate, of families in the table")
    }

    /// The content of `config.json`.
    pub fn config(&self) -> Value {
        let mut config = (self.recipe().config)(self);
        let more: Map<String, Value> =
            serde_json::from_str(self.config).expect("an object, as a test proves");
        config["model_type"] = self.family.into();
        config["torch_dtype"] = self.format.torch().into();
        for (name, value) in more {
            config[name] = value;
        }
        config
    }

    /// All tensors, in the order of the layers.
    pub fn tensors(&self) -> Vec<Tensor> {
        let recipe = self.recipe();
        let mut all = Vec::new();
        let mut add = |part: &TensorEntry, layer: u32| {
            let base = part.name.replace("{}", &layer.to_string());
            let shape = part.shape.iter().map(|&of| self.width(of)).collect();
            all.push(Tensor { name: format!("{base}{}", part.suffix), shape, fill: part.fill });
            if let Some(of) = part.bias {
                let (name, shape) = (format!("{base}.bias"), vec![self.width(of)]);
                all.push(Tensor { name, shape, fill: Fill::Bias });
            }
        };
        recipe.before.iter().for_each(|part| add(part, 0));
        for layer in 0..self.layers {
            recipe.layer.iter().for_each(|part| add(part, layer));
        }
        recipe.after.iter().for_each(|part| add(part, 0));
        all
    }

    fn width(&self, of: Of) -> u32 {
        match of {
            Hidden => self.hidden,
            Three => 3 * self.hidden,
            KeyValue => self.hidden / self.heads * self.kv_heads,
            Intermediate => self.intermediate,
            Vocabulary => self.vocabulary,
            Positions => self.positions,
            PositionsAfterTwo => self.positions + 2,
            Just(n) => n,
        }
    }
}

fn bert(s: &Shape) -> Value {
    json!({
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": s.hidden,
        "initializer_range": 0.02, "intermediate_size": s.intermediate, "layer_norm_eps": 1e-12,
        "max_position_embeddings": s.positions, "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers, "pad_token_id": 0, "position_embedding_type": "absolute",
        "type_vocab_size": 2, "use_cache": true, "vocab_size": s.vocabulary,
    })
}

fn distilbert(s: &Shape) -> Value {
    json!({
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1,
        "dim": s.hidden, "dropout": 0.1, "hidden_dim": s.intermediate, "initializer_range": 0.02,
        "max_position_embeddings": s.positions, "n_heads": s.heads, "n_layers": s.layers,
        "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2,
        "sinusoidal_pos_embds": false, "tie_weights_": true, "vocab_size": s.vocabulary,
    })
}

fn gpt2(s: &Shape) -> Value {
    json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256.min(s.vocabulary - 1), "embd_pdrop": 0.1,
        "eos_token_id": 50256.min(s.vocabulary - 1), "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "n_ctx": s.positions, "n_embd": s.hidden, "n_head": s.heads,
        "n_inner": (s.intermediate != 4 * s.hidden).then_some(s.intermediate), "n_layer": s.layers,
        "n_positions": s.positions, "resid_pdrop": 0.1, "summary_activation": null,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
        "summary_use_proj": true, "vocab_size": s.vocabulary,
    })
}

fn gptj(s: &Shape) -> Value {
    json!({
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256.min(s.vocabulary - 1), "embd_pdrop": 0.0,
        "eos_token_id": 50256.min(s.vocabulary - 1), "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "n_embd": s.hidden, "n_head": s.heads,
        "n_inner": (s.intermediate != 4 * s.hidden).then_some(s.intermediate), "n_layer": s.layers,
        "n_positions": s.positions, "resid_pdrop": 0.0, "rotary": true,
        "rotary_dim": s.hidden / s.heads / 4, "scale_attn_weights": true,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true, "tie_word_embeddings": false,
        "tokenizer_class": "GPT2Tokenizer", "use_cache": true, "vocab_size": s.vocabulary,
    })
}

fn llama(s: &Shape) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": s.hidden / s.heads, "hidden_act": "silu",
        "hidden_size": s.hidden, "initializer_range": 0.02, "intermediate_size": s.intermediate,
        "max_position_embeddings": s.positions, "mlp_bias": false,
        "num_attention_heads": s.heads, "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "use_cache": true, "vocab_size": s.vocabulary,
    })
}

fn opt(s: &Shape) -> Value {
    json!({
        "_remove_final_layer_norm": false, "activation_dropout": 0.0, "activation_function": "relu",
        "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
        "do_layer_norm_before": true, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": s.intermediate,
        "hidden_size": s.hidden, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": s.positions, "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers, "pad_token_id": 1, "prefix": "</s>", "use_cache": true,
        "vocab_size": s.vocabulary, "word_embed_proj_dim": s.hidden,
    })
}

fn vit(s: &Shape) -> Value {
    let label = |n: u32| format!("LABEL_{n}");
    let names: Map<_, _> = (0..s.vocabulary).map(|n| (n.to_string(), label(n).into())).collect();
    let numbers: Map<_, _> = (0..s.vocabulary).map(|n| (label(n), n.into())).collect();
    json!({
        "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": s.hidden,
        "id2label": names, "image_size": 224, "initializer_range": 0.02,
        "intermediate_size": s.intermediate, "label2id": numbers, "layer_norm_eps": 1e-12,
        "num_attention_heads": s.heads, "num_channels": 3, "num_hidden_layers": s.layers,
        "patch_size": 16, "qkv_bias": true,
    })
}

/// The content of `preprocessor_config.json`, if the family has one.
pub(super) fn preprocessor(shape: &Shape) -> Option<Value> {
    (shape.family == "vit").then(|| {
        json!({
            "do_normalize": true, "do_rescale": true, "do_resize": true,
            "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "ViTImageProcessor",
            "image_std": [0.5, 0.5, 0.5], "resample": 2, "rescale_factor": 1.0 / 255.0,
            "size": { "height": 224, "width": 224 },
        })
    })
}
