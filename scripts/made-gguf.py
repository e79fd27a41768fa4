#!/usr/bin/env python3
"""Writes a GGUF file in bf16 from a Llama checkpoint with random weights, as `galaxy-testbed` makes them: for
measuring. Its tokens are the bytes, and made-up ones behind them.

    scripts/made-gguf.py target/testbed-models/llama-1b llama-1b.gguf
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm"}


def name_of(name):
    """The name of a tensor in GGUF."""
    if name == "lm_head.weight":
        return "output.weight"
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER['.'.join(parts[2:])]}.weight"
    return OTHERS[parts[0]] + ".weight"


def in_turns(rows, heads):
    """The rows of heads with their two halves in turns, as GGUF has them of this family."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def byte_tokens():
    """A character for each byte, as byte-level BPE writes them."""
    shown = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(c) for c in shown] + [chr(256 + at) for at, _ in enumerate(hidden)]


def main():
    directory, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(directory.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = [*byte_tokens(), "Ġt"]
    tokens += [f"<made {at}>" for at in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [5] * (len(tokens) - 257))
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    file = directory / "model.safetensors"
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        raw = np.memmap(file, np.uint16, "r", 8 + length + start, ((end - start) // 2,))
        rows = raw.reshape(tensor["shape"])
        if "q_proj" in name or "k_proj" in name:
            rows = in_turns(rows, heads if "q_proj" in name else kv_heads)
        if rows.ndim == 1:
            writer.add_tensor(name_of(name), (rows.astype(np.uint32) << 16).view(np.float32))
        else:
            bits = np.ascontiguousarray(rows).view(np.uint8)
            writer.add_tensor(name_of(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


if __name__ == "__main__":
    main()
