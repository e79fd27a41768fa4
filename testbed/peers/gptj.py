#!/usr/bin/env python3
"""Whether a text is the likeliest that a GPT-J makes, by NumPy alone: a second opinion on a model that is
too large for other references on this machine.

    gptj.py MODEL PROMPT TEXT

MODEL is the directory, PROMPT and TEXT are ids with spaces between them. Layer after layer is read and
computed with in f32, all positions at once, so that it takes one layer's memory. Says for each id of the
text whether it has the largest logit, and by how much it leads; ends with 1 if one has not. Needs numpy.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

TYPES = {"F16": np.float16, "F32": np.float32}


class Tensors:
    """The tensors of a directory, by name."""

    def __init__(self, directory):
        self.places = {}
        for path in sorted(directory.glob("*.safetensors")):
            with open(path, "rb") as file:
                size = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    self.places[name] = (path, 8 + size, entry)

    def __call__(self, name):
        path, base, entry = self.places[name]
        start, end = entry["data_offsets"]
        kind = np.dtype(TYPES[entry["dtype"]])
        values = np.fromfile(path, kind, (end - start) // kind.itemsize, offset=base + start)
        return values.reshape(entry["shape"]).astype(np.float32)


def norm(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + bias


def turned(x, angles):
    """The first columns of each head, in neighbouring pairs, turned by their position."""
    width = 2 * angles.shape[-1]
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    out = x.copy()
    out[..., 0:width:2] = even * cosine - odd * sine
    out[..., 1:width:2] = odd * cosine + even * sine
    return out


def logits(directory, ids):
    config = json.loads((directory / "config.json").read_text())
    tensors = Tensors(directory)
    heads, hidden = config["n_head"], config["n_embd"]
    width, count, rotary = hidden // heads, len(ids), config["rotary_dim"]
    inverse = 1.0 / 10000.0 ** (np.arange(0, rotary, 2, dtype=np.float32) / rotary)
    angles = np.arange(count, dtype=np.float32)[:, None] * inverse
    seen = np.tril(np.ones((count, count), bool))
    x = tensors("transformer.wte.weight")[ids]
    for layer in range(config["n_layer"]):
        def part(name):
            return tensors(f"transformer.h.{layer}.{name}")

        def linear(x, name):
            return x @ part(f"{name}.weight").T + part(f"{name}.bias")

        h = norm(x, part("ln_1.weight"), part("ln_1.bias"), config["layer_norm_epsilon"])
        q, k, v = ((h @ part(f"attn.{n}_proj.weight").T).reshape(count, heads, width) for n in "qkv")
        scores = np.einsum("ihd,jhd->hij", turned(q, angles), turned(k, angles)) / np.sqrt(width)
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
        attended = context.reshape(count, hidden) @ part("attn.out_proj.weight").T
        inner = linear(h, "mlp.fc_in")
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + attended + linear(inner, "mlp.fc_out")
        print(f"layer {layer + 1} of {config['n_layer']}", file=sys.stderr)
    x = norm(
        x, tensors("transformer.ln_f.weight"), tensors("transformer.ln_f.bias"), config["layer_norm_epsilon"]
    )
    return x @ tensors("lm_head.weight").T + tensors("lm_head.bias")


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    prompt, text = ([int(id) for id in words.split()] for words in sys.argv[2:])
    found = logits(Path(sys.argv[1]), prompt + text[:-1])
    wrong = 0
    for at, id in enumerate(text):
        row = found[len(prompt) - 1 + at]
        best, second = np.sort(row)[-1], np.sort(row)[-2]
        wrong += row.argmax() != id
        say = "is" if row.argmax() == id else f"is not {row.argmax()},"
        print(f"{id} {say} the likeliest; the best leads by {best - second:.4f}")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
