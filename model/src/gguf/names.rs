//! The names that the tensors of GGUF files have in checkpoints, by architecture.

/// The tensors outside layers, the same for every architecture that is read: most are named like Llama's.
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
const OTHERWISE: [(&str, &[(&str, &str)]); 3] = [
    ("gemma2", GEMMA),
    ("gemma3", GEMMA),
    ("phi3", &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")]),
];
const GEMMA: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The name of a tensor in the checkpoint; unchanged where it is not known.
pub(crate) fn renamed(architecture: &str, name: &str) -> String {
    if let Some((_, there)) = WHOLE.iter().find(|(here, _)| *here == name) {
        return (*there).to_owned();
    }
    let own = OTHERWISE.iter().find(|(of, _)| *of == architecture).map_or(&[][..], |(_, own)| own);
    let in_layer = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, ending) = rest.rsplit_once('.')?;
        let (_, there) = own.iter().chain(&IN_LAYER).find(|(here, _)| *here == part)?;
        Some(format!("model.layers.{layer}.{there}.{ending}"))
    };
    in_layer().unwrap_or_else(|| name.to_owned())
}
