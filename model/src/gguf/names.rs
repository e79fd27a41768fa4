//! What tensors of GGUF files are called in the checkpoints that they were made of.

/// Of every architecture that is read: they are named like Llama's.
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

/// The name of a tensor there; its own where it has none.
pub(crate) fn renamed(name: &str) -> String {
    if let Some((_, there)) = WHOLE.iter().find(|(here, _)| *here == name) {
        return (*there).to_owned();
    }
    let in_layer = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, ending) = rest.rsplit_once('.')?;
        let (_, there) = IN_LAYER.iter().find(|(here, _)| *here == part)?;
        Some(format!("model.layers.{layer}.{there}.{ending}"))
    };
    in_layer().unwrap_or_else(|| name.to_owned())
}
