#!/usr/bin/env python3
"""Writes testdata/gguf: a GGUF file with a tensor of each type that is read, of blocks with random bits, and the
values that the reference implementation gives to them; and a whole model, as small as it can be.

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


if __name__ == "__main__":
    main()
