//! The names that the tensors of GGUF files have in checkpoints, by architecture.

/// The tensors outside layers, the same for every decoder that is read: most are named like Llama's.
const WHOLE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];
const IN_LAYER: [(&str, &str); 11] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The names in layers in which architectures differ from Llama's.
const OTHERWISE: [(&str, &[(&str, &str)]); 4] = [
    ("gemma-embedding", GEMMA),
    ("gemma2", GEMMA),
    ("gemma3", GEMMA),
    ("phi3", &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")]),
];
const GEMMA: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// An architecture whose tensors have other names: those outside layers, and those in layers, behind what stands before
/// the number of a layer.
type Encoder = (
    &'static [(&'static str, &'static str)],
    &'static str,
    &'static [(&'static str, &'static str)],
);

const BERT: Encoder = (
    &[
        ("token_embd", "embeddings.word_embeddings"),
        ("token_embd_norm", "embeddings.LayerNorm"),
        ("position_embd", "embeddings.position_embeddings"),
        ("token_types", "embeddings.token_type_embeddings"),
    ],
    "encoder.layer",
    &[
        ("attn_q", "attention.self.query"),
        ("attn_k", "attention.self.key"),
        ("attn_v", "attention.self.value"),
        ("attn_output", "attention.output.dense"),
        ("attn_output_norm", "attention.output.LayerNorm"),
        ("ffn_up", "intermediate.dense"),
        ("ffn_down", "output.dense"),
        ("layer_output_norm", "output.LayerNorm"),
    ],
);
const MODERN_BERT: Encoder = (
    &[
        ("token_embd", "embeddings.tok_embeddings"),
        ("token_embd_norm", "embeddings.norm"),
        ("output_norm", "final_norm"),
    ],
    "layers",
    &[
        ("attn_norm", "attn_norm"),
        ("attn_qkv", "attn.Wqkv"),
        ("attn_output", "attn.Wo"),
        ("ffn_norm", "mlp_norm"),
        ("ffn_up", "mlp.Wi"),
        ("ffn_down", "mlp.Wo"),
    ],
);

/// The name of a tensor in the checkpoint; unchanged where it is not known.
pub(crate) fn renamed(architecture: &str, name: &str) -> String {
    let found = match architecture {
        "bert" => of_encoder(&BERT, name),
        "modern-bert" => of_encoder(&MODERN_BERT, name),
        _ => of_decoder(architecture, name),
    };
    found.unwrap_or_else(|| name.to_owned())
}

fn of_encoder((whole, layers, in_layer): &Encoder, name: &str) -> Option<String> {
    let (part, ending) = name.rsplit_once('.')?;
    let there = |names: &[(&str, &'static str)], part: &str| {
        names.iter().find(|(here, _)| *here == part).map(|(_, there)| *there)
    };
    match part.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        None => Some(format!("{}.{ending}", there(whole, part)?)),
        Some((layer, part)) => {
            Some(format!("{layers}.{layer}.{}.{ending}", there(in_layer, part)?))
        }
    }
}

fn of_decoder(architecture: &str, name: &str) -> Option<String> {
    if let Some((_, there)) = WHOLE.iter().find(|(here, _)| *here == name) {
        return Some((*there).to_owned());
    }
    let own = OTHERWISE.iter().find(|(of, _)| *of == architecture).map_or(&[][..], |(_, own)| own);
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, ending) = rest.rsplit_once('.')?;
    let (_, there) = own.iter().chain(&IN_LAYER).find(|(here, _)| *here == part)?;
    Some(format!("model.layers.{layer}.{there}.{ending}"))
}
