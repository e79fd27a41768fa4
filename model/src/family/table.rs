//! The table of families. A family that resembles another lists only the differences.

use super::{Family, Names, Top, config};
use crate::matrix::Storage;

const NONE: Names = Names {
    word: "",
    patch: "",
    class_row: "",
    position: "",
    token_type: "",
    relative_bias: "",
    embedding_norm: "",
    query: "",
    key: "",
    value: "",
    query_norm: "",
    key_norm: "",
    attention_output: "",
    attention_norm: "",
    gate: "",
    up: "",
    down: "",
    mlp_norm: "",
    attention_sum_norm: "",
    mlp_sum_norm: "",
    final_norm: "",
    class_dense: "",
    class_norm: "",
    class_output: "",
    language_head: "",
};

const BERT: Family = Family {
    model_type: "bert",
    architectures: &[
        ("BertModel", Top::Hidden),
        ("BertForSequenceClassification", Top::Classes),
        ("BertForMaskedLM", Top::Hidden),
        ("BertForPreTraining", Top::Hidden),
        ("BertForNextSentencePrediction", Top::Hidden),
        ("BertForMultipleChoice", Top::Hidden),
        ("BertForQuestionAnswering", Top::Hidden),
        ("BertForTokenClassification", Top::Hidden),
        ("BertLMHeadModel", Top::Hidden),
    ],
    read: config::bert,
    prefixes: &["", "bert."],
    storage: Storage::OutputRows,
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
        up: "encoder.layer.{}.intermediate.dense",
        down: "encoder.layer.{}.output.dense",
        mlp_norm: "encoder.layer.{}.output.LayerNorm",
        class_dense: "pooler.dense",
        class_output: "/classifier",
        ..NONE
    },
};

const ROBERTA: Family = Family {
    model_type: "roberta",
    architectures: &[
        ("RobertaModel", Top::Hidden),
        ("RobertaForSequenceClassification", Top::Classes),
        ("RobertaForMaskedLM", Top::Hidden),
        ("RobertaForCausalLM", Top::Hidden),
        ("RobertaForMultipleChoice", Top::Hidden),
        ("RobertaForQuestionAnswering", Top::Hidden),
        ("RobertaForTokenClassification", Top::Hidden),
    ],
    read: config::roberta,
    prefixes: &["", "roberta."],
    names: Names {
        class_dense: "/classifier.dense",
        class_output: "/classifier.out_proj",
        ..BERT.names
    },
    ..BERT
};

const GPT2: Family = Family {
    model_type: "gpt2",
    architectures: &[
        ("GPT2Model", Top::Hidden),
        ("GPT2LMHeadModel", Top::Language),
        ("GPT2ForSequenceClassification", Top::Classes),
        ("GPT2DoubleHeadsModel", Top::Language),
        ("GPT2ForQuestionAnswering", Top::Hidden),
        ("GPT2ForTokenClassification", Top::Hidden),
    ],
    read: config::gpt2,
    prefixes: &["", "transformer."],
    storage: Storage::InputRows,
    names: Names {
        word: "wte",
        position: "wpe",
        query: "h.{}.attn.c_attn",
        key: "h.{}.attn.c_attn",
        value: "h.{}.attn.c_attn",
        attention_output: "h.{}.attn.c_proj",
        attention_norm: "h.{}.ln_1",
        up: "h.{}.mlp.c_fc",
        down: "h.{}.mlp.c_proj",
        mlp_norm: "h.{}.ln_2",
        final_norm: "ln_f",
        class_output: "/score",
        language_head: "/lm_head",
        ..NONE
    },
};

const LLAMA: Family = Family {
    model_type: "llama",
    architectures: &[
        ("LlamaModel", Top::Hidden),
        ("LlamaForCausalLM", Top::Language),
        ("LlamaForSequenceClassification", Top::Classes),
        ("LlamaForQuestionAnswering", Top::Hidden),
        ("LlamaForTokenClassification", Top::Hidden),
    ],
    read: config::llama,
    prefixes: &["", "model."],
    storage: Storage::OutputRows,
    names: Names {
        word: "embed_tokens",
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
        class_output: "/score",
        language_head: "/lm_head",
        ..NONE
    },
};

const GEMMA2_NAMES: Names = Names {
    attention_sum_norm: "layers.{}.post_attention_layernorm",
    mlp_norm: "layers.{}.pre_feedforward_layernorm",
    mlp_sum_norm: "layers.{}.post_feedforward_layernorm",
    ..LLAMA.names
};

pub(super) static FAMILIES: [Family; 18] = [
    BERT,
    ROBERTA,
    Family {
        model_type: "xlm-roberta",
        architectures: &[
            ("XLMRobertaModel", Top::Hidden),
            ("XLMRobertaForSequenceClassification", Top::Classes),
            ("XLMRobertaForMaskedLM", Top::Hidden),
            ("XLMRobertaForCausalLM", Top::Hidden),
            ("XLMRobertaForMultipleChoice", Top::Hidden),
            ("XLMRobertaForQuestionAnswering", Top::Hidden),
            ("XLMRobertaForTokenClassification", Top::Hidden),
        ],
        ..ROBERTA
    },
    Family {
        model_type: "mpnet",
        architectures: &[
            ("MPNetModel", Top::Hidden),
            ("MPNetForSequenceClassification", Top::Classes),
            ("MPNetForMaskedLM", Top::Hidden),
            ("MPNetForMultipleChoice", Top::Hidden),
            ("MPNetForQuestionAnswering", Top::Hidden),
            ("MPNetForTokenClassification", Top::Hidden),
        ],
        read: config::mpnet,
        prefixes: &["", "mpnet."],
        names: Names {
            token_type: "",
            relative_bias: "encoder.relative_attention_bias",
            query: "encoder.layer.{}.attention.attn.q",
            key: "encoder.layer.{}.attention.attn.k",
            value: "encoder.layer.{}.attention.attn.v",
            attention_output: "encoder.layer.{}.attention.attn.o",
            attention_norm: "encoder.layer.{}.attention.LayerNorm",
            ..ROBERTA.names
        },
        ..BERT
    },
    Family {
        model_type: "distilbert",
        architectures: &[
            ("DistilBertModel", Top::Hidden),
            ("DistilBertForSequenceClassification", Top::Classes),
            ("DistilBertForMaskedLM", Top::Hidden),
            ("DistilBertForMultipleChoice", Top::Hidden),
            ("DistilBertForQuestionAnswering", Top::Hidden),
            ("DistilBertForTokenClassification", Top::Hidden),
        ],
        read: config::distilbert,
        prefixes: &["", "distilbert."],
        names: Names {
            token_type: "",
            query: "transformer.layer.{}.attention.q_lin",
            key: "transformer.layer.{}.attention.k_lin",
            value: "transformer.layer.{}.attention.v_lin",
            attention_output: "transformer.layer.{}.attention.out_lin",
            attention_norm: "transformer.layer.{}.sa_layer_norm",
            up: "transformer.layer.{}.ffn.lin1",
            down: "transformer.layer.{}.ffn.lin2",
            mlp_norm: "transformer.layer.{}.output_layer_norm",
            class_dense: "/pre_classifier",
            ..BERT.names
        },
        ..BERT
    },
    GPT2,
    Family {
        model_type: "gptj",
        architectures: &[
            ("GPTJModel", Top::Hidden),
            ("GPTJForCausalLM", Top::Language),
            ("GPTJForSequenceClassification", Top::Classes),
            ("GPTJForQuestionAnswering", Top::Hidden),
        ],
        read: config::gptj,
        storage: Storage::OutputRows,
        names: Names {
            position: "",
            query: "h.{}.attn.q_proj",
            key: "h.{}.attn.k_proj",
            value: "h.{}.attn.v_proj",
            attention_output: "h.{}.attn.out_proj",
            up: "h.{}.mlp.fc_in",
            down: "h.{}.mlp.fc_out",
            mlp_norm: "",
            ..GPT2.names
        },
        ..GPT2
    },
    Family {
        model_type: "opt",
        architectures: &[
            ("OPTModel", Top::Hidden),
            ("OPTForCausalLM", Top::Language),
            ("OPTForSequenceClassification", Top::Classes),
            ("OPTForQuestionAnswering", Top::Hidden),
        ],
        read: config::opt,
        prefixes: &["decoder.", "model.decoder."],
        storage: Storage::OutputRows,
        names: Names {
            word: "embed_tokens",
            position: "embed_positions",
            query: "layers.{}.self_attn.q_proj",
            key: "layers.{}.self_attn.k_proj",
            value: "layers.{}.self_attn.v_proj",
            attention_output: "layers.{}.self_attn.out_proj",
            attention_norm: "layers.{}.self_attn_layer_norm",
            up: "layers.{}.fc1",
            down: "layers.{}.fc2",
            mlp_norm: "layers.{}.final_layer_norm",
            final_norm: "final_layer_norm",
            class_output: "/score",
            language_head: "/lm_head",
            ..NONE
        },
    },
    LLAMA,
    Family {
        model_type: "mistral",
        architectures: &[
            ("MistralModel", Top::Hidden),
            ("MistralForCausalLM", Top::Language),
            ("MistralForSequenceClassification", Top::Classes),
            ("MistralForQuestionAnswering", Top::Hidden),
            ("MistralForTokenClassification", Top::Hidden),
        ],
        read: config::mistral,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        architectures: &[
            ("Qwen2Model", Top::Hidden),
            ("Qwen2ForCausalLM", Top::Language),
            ("Qwen2ForSequenceClassification", Top::Classes),
            ("Qwen2ForQuestionAnswering", Top::Hidden),
            ("Qwen2ForTokenClassification", Top::Hidden),
        ],
        read: config::qwen2,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        architectures: &[
            ("Qwen3Model", Top::Hidden),
            ("Qwen3ForCausalLM", Top::Language),
            ("Qwen3ForSequenceClassification", Top::Classes),
            ("Qwen3ForQuestionAnswering", Top::Hidden),
            ("Qwen3ForTokenClassification", Top::Hidden),
        ],
        read: config::qwen3,
        names: Names {
            query_norm: "layers.{}.self_attn.q_norm",
            key_norm: "layers.{}.self_attn.k_norm",
            ..LLAMA.names
        },
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        architectures: &[
            ("SmolLM3Model", Top::Hidden),
            ("SmolLM3ForCausalLM", Top::Language),
            ("SmolLM3ForSequenceClassification", Top::Classes),
            ("SmolLM3ForQuestionAnswering", Top::Hidden),
            ("SmolLM3ForTokenClassification", Top::Hidden),
        ],
        read: config::smollm3,
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        architectures: &[
            ("Phi3Model", Top::Hidden),
            ("Phi3ForCausalLM", Top::Language),
            ("Phi3ForSequenceClassification", Top::Classes),
            ("Phi3ForTokenClassification", Top::Hidden),
        ],
        read: config::phi3,
        names: Names {
            query: "layers.{}.self_attn.qkv_proj",
            key: "layers.{}.self_attn.qkv_proj",
            value: "layers.{}.self_attn.qkv_proj",
            gate: "layers.{}.mlp.gate_up_proj",
            up: "layers.{}.mlp.gate_up_proj",
            ..LLAMA.names
        },
        ..LLAMA
    },
    Family {
        model_type: "gemma2",
        architectures: &[
            ("Gemma2Model", Top::Hidden),
            ("Gemma2ForCausalLM", Top::Language),
            ("Gemma2ForSequenceClassification", Top::Classes),
            ("Gemma2ForTokenClassification", Top::Hidden),
        ],
        read: config::gemma2,
        names: GEMMA2_NAMES,
        ..LLAMA
    },
    Family {
        model_type: "gemma3_text",
        architectures: &[
            ("Gemma3TextModel", Top::Hidden),
            ("Gemma3ForCausalLM", Top::Language),
            ("Gemma3TextForSequenceClassification", Top::Classes),
        ],
        read: config::gemma3,
        names: Names {
            query_norm: "layers.{}.self_attn.q_norm",
            key_norm: "layers.{}.self_attn.k_norm",
            ..GEMMA2_NAMES
        },
        ..LLAMA
    },
    Family {
        model_type: "modernbert",
        architectures: &[
            ("ModernBertModel", Top::Hidden),
            ("ModernBertForMaskedLM", Top::Hidden),
            ("ModernBertForSequenceClassification", Top::Classes),
            ("ModernBertForTokenClassification", Top::Hidden),
            ("ModernBertForQuestionAnswering", Top::Hidden),
            ("ModernBertForMultipleChoice", Top::Hidden),
        ],
        read: config::modernbert,
        prefixes: &["", "model."],
        storage: Storage::OutputRows,
        names: Names {
            word: "embeddings.tok_embeddings",
            embedding_norm: "embeddings.norm",
            query: "layers.{}.attn.Wqkv",
            key: "layers.{}.attn.Wqkv",
            value: "layers.{}.attn.Wqkv",
            attention_output: "layers.{}.attn.Wo",
            attention_norm: "layers.{}.attn_norm",
            gate: "layers.{}.mlp.Wi",
            up: "layers.{}.mlp.Wi",
            down: "layers.{}.mlp.Wo",
            mlp_norm: "layers.{}.mlp_norm",
            final_norm: "final_norm",
            class_dense: "/head.dense",
            class_norm: "/head.norm",
            class_output: "/classifier",
            ..NONE
        },
    },
    Family {
        model_type: "vit",
        architectures: &[
            ("ViTModel", Top::Hidden),
            ("ViTForImageClassification", Top::Classes),
            ("ViTForMaskedImageModeling", Top::Hidden),
        ],
        read: config::vit,
        prefixes: &["", "vit."],
        names: Names {
            word: "",
            patch: "embeddings.patch_embeddings.projection",
            class_row: "embeddings.cls_token!",
            position: "embeddings.position_embeddings!",
            token_type: "",
            embedding_norm: "",
            query: "encoder.layer.{}.attention.attention.query",
            key: "encoder.layer.{}.attention.attention.key",
            value: "encoder.layer.{}.attention.attention.value",
            attention_norm: "encoder.layer.{}.layernorm_before",
            mlp_norm: "encoder.layer.{}.layernorm_after",
            final_norm: "layernorm",
            class_dense: "",
            ..BERT.names
        },
        ..BERT
    },
];
