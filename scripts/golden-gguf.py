#!/usr/bin/env python3
"""Writes testdata/gguf: a GGUF file with a tensor of each type that is read, of blocks with random bits, and the
values that the reference implementation gives to them; a whole model, as small as it can be; and one of many types
with the logits of a text.

    python3 -m venv /tmp/gguf && /tmp/gguf/bin/pip install numpy==2.4.6 gguf==0.19.0
    /tmp/gguf/bin/python scripts/golden-gguf.py
"""

from pathlib import Path

import gguf
import numpy as np

ROWS, COLUMNS = 3, 512
# Where blocks have scales in half precision.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def main():
    out = Path(__file__).resolve().parent.parent / "testdata" / "gguf"
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(20261127)
    writer = gguf.GGUFWriter(out / "types.gguf", "llama")
    writer.add_block_count(0)
    values = []
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = ROWS * COLUMNS // block
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for at in halves:
            scales = (random.standard_normal(count) * 0.02).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        if name == "MXFP4":
            # Exponents from the least to large ones.
            blocks[:, 0] = np.concatenate([[0, 1, 2], random.integers(100, 140, count - 3)])
        raw = blocks.reshape(ROWS, COLUMNS // block * size)
        values.append(gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(-1))
        writer.add_tensor(name, raw, raw_dtype=kind)
    wide = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    for name, narrow in [("F32", wide), ("F16", wide.astype(np.float16))]:
        writer.add_tensor(name, narrow)
        values.append(narrow.astype(np.float32).reshape(-1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (out / "types.f32").write_bytes(np.concatenate(values).tobytes())
    tiny(out / "tiny.gguf", random)
    mixed(out)


def tiny(path, random):
    """A Llama of one layer in Q4_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "a", "b", "ab", "\u0120"])
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    def add(name, *shape):
        values = (random.standard_normal(shape) * 0.2).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
            return
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", 5, 32)
    add("output_norm.weight", 32)
    for name, rows in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)]:
        add(f"blk.0.{name}.weight", rows, 32)
    for name in ["ffn_gate", "ffn_up", "ffn_down"]:
        add(f"blk.0.{name}.weight", 32, 32)
    for name in ["attn_norm", "ffn_norm"]:
        add(f"blk.0.{name}.weight", 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# What scales become so that values are about 0.05 large, and how much of one a minimum takes back.
LEVELS = {"Q4_K": (2e-4, 7.5), "Q5_K": (1e-4, 15.5), "Q6_K": (4e-5, 0), "IQ4_XS": (5e-5, 0), "IQ4_NL": (1e-3, 0)}
# The types of a layer: what is shared by columns, by heads and by inputs, in blocks of 32 and of 256.
TYPES = [
    {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_gate": "IQ4_XS",
     "ffn_up": "IQ4_XS", "ffn_down": "Q5_1"},
    {"attn_q": "Q8_0", "attn_k": "Q4_1", "attn_v": "Q4_1", "attn_output": "Q4_K", "ffn_gate": "Q4_0",
     "ffn_up": "Q5_0", "ffn_down": "IQ4_NL"},
]
WIDTH, HEADS, INNER, VOCABULARY, TEXT = 256, 4, 288, 96, 19


def blocks_of(random, kind, shape):
    """A matrix in blocks, and its values."""
    name = kind.name
    if name not in LEVELS:
        raw = gguf.quants.quantize((random.standard_normal(shape) * 0.05).astype(np.float32), kind)
    else:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = shape[0] * shape[1] // block
        raw = random.integers(0, 256, (count, size), dtype=np.uint8)
        scale, least = LEVELS[name]
        for number, at in enumerate(HALVES[name]):
            scales = (random.uniform(0.5, 1.5, count) * scale * (least if number else 1)).astype(np.float16)
            raw[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        raw = raw.reshape(shape[0], shape[1] // block * size)
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float64)


def mixed(out):
    """A Llama of two layers in many types, and the logits of a text in f64."""
    random = np.random.default_rng(20261128)
    writer = gguf.GGUFWriter(out / "mixed.gguf", "llama")
    writer.add_block_count(len(TYPES))
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "a", "b", "ab", "\u0120"] + [f"<{at}>" for at in range(5, VOCABULARY)])
    writer.add_token_types([3, 1, 1, 1, 1] + [5] * (VOCABULARY - 5))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    weights = {}

    def matrix(name, kind, *shape):
        kind = gguf.GGMLQuantizationType[kind]
        raw, weights[name] = blocks_of(random, kind, shape)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)

    def norm(name):
        values = (1 + random.standard_normal(WIDTH) * 0.1).astype(np.float32)
        weights[name] = values.astype(np.float64)
        writer.add_tensor(f"{name}.weight", values)

    matrix("token_embd", "Q8_0", VOCABULARY, WIDTH)
    matrix("output", "Q6_K", VOCABULARY, WIDTH)
    norm("output_norm")
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH),
              "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
              "ffn_down": (WIDTH, INNER)}
    for layer, types in enumerate(TYPES):
        for name, kind in types.items():
            matrix(f"blk.{layer}.{name}", kind, *shapes[name])
        for name in ["attn_norm", "ffn_norm"]:
            norm(f"blk.{layer}.{name}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (out / "mixed.f32").write_bytes(logits(weights).astype(np.float32).tobytes())


def logits(weights):
    """The logits behind each token of the text 3, 10, 17 .."""
    head = WIDTH // HEADS
    angles = np.outer(np.arange(TEXT), 10000.0 ** (-np.arange(0, head, 2) / head))

    def scaled(rows, name):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * weights[name]

    def turned(rows):
        even, odd = rows[..., 0::2], rows[..., 1::2]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(rows.shape)

    rows = weights["token_embd"][(3 + np.arange(TEXT) * 7) % 90]
    for layer in range(len(TYPES)):
        at = f"blk.{layer}."
        read = scaled(rows, at + "attn_norm")
        query, key, value = (
            (read @ weights[at + name].T).reshape(TEXT, -1, head) for name in ["attn_q", "attn_k", "attn_v"]
        )
        query, key = turned(query), np.repeat(turned(key), 2, 1)
        scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(head)
        scores[:, np.triu(np.ones((TEXT, TEXT), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed_values = np.einsum("hts,shd->thd", scores, np.repeat(value, 2, 1)).reshape(TEXT, -1)
        rows = rows + mixed_values @ weights[at + "attn_output"].T
        read = scaled(rows, at + "ffn_norm")
        gate = read @ weights[at + "ffn_gate"].T
        rows = rows + (gate / (1 + np.exp(-gate)) * (read @ weights[at + "ffn_up"].T)) @ weights[at + "ffn_down"].T
    return scaled(rows, "output_norm") @ weights["output"].T


if __name__ == "__main__":
    main()
