#!/usr/bin/env python3
"""A Llama directory of Hugging Face as a GGUF file, tensors as they are or in f16.

    convert.py MODEL OUTPUT.gguf [--type bf16|f16]

Only what llama.cpp computes with, without a tokenizer: texts are given as ids. Its own converter
does the same for whole models, and needs PyTorch and a tokenizer.
"""

import argparse
import json
import math
import os
import struct

import gguf
import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def named(name):
    """Its name in GGUF."""
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def tensors(path):
    """Names and values in 16 bit, as uint16, of a safetensors file in bf16."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", 8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, and bf16 is read here"
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def widened(bf16):
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def interleaved(weight, heads):
    """Rows of queries or keys as llama.cpp rotates them: the halves of a head alternate."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def stretched(config, dim):
    """Divisors of the frequencies of positions as Llama 3 scales them; none without scaling."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return None
    assert scaling["rope_type"] == "llama3", scaling
    old = scaling["original_max_position_embeddings"]
    low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    divisors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wave < old / high:
            divisors.append(1.0)
        elif wave > old / low:
            divisors.append(factor)
        else:
            smooth = (old / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--type", choices=["bf16", "f16"], default="bf16")
    options = parser.parse_args()
    with open(os.path.join(options.model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    part = options.output + ".part"
    out = gguf.GGUFWriter(part, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(groups)
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_dimension_count(dim)
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    divisors = stretched(config, dim)
    if divisors is not None:
        out.add_tensor("rope_freqs.weight", divisors)
    for name, value in tensors(os.path.join(options.model, "model.safetensors")):
        if value.ndim == 1:
            out.add_tensor(named(name), widened(value))
            continue
        for projection, count in (("q_proj", heads), ("k_proj", groups)):
            if projection in name:
                value = interleaved(value, count)
        if options.type == "f16":
            out.add_tensor(named(name), widened(value).astype(np.float16))
        else:
            raw = np.ascontiguousarray(value).view(np.uint8)
            out.add_tensor(named(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file(progress=True)
    out.close()
    os.replace(part, options.output)


if __name__ == "__main__":
    main()
