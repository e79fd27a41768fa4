#!/usr/bin/env python3
"""Writes testdata/cases/smollm2.json: what transformers generates in three chats with SmolLM2-135M-Instruct, by the
GGUF file that scripts/setup brings.

    python3 -m venv /tmp/smollm2
    /tmp/smollm2/bin/pip install numpy==2.4.6 gguf==0.19.0 torch==2.15.0 transformers==5.24.0
    /tmp/smollm2/bin/python scripts/golden-smollm2.py

The reference implementation of GGUF (PyPI gguf) makes f32 of the blocks, and transformers computes with that. For each
chat there are the tokens of the prompt, those that are chosen without sampling, and for each of these how far the
second best logit was behind (over the largest absolute logit) and which token it is: where that is less than law 1
allows, either is right.
"""

import json
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "models" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = ROOT / "testdata" / "cases" / "smollm2.json"
COUNT = 64

# Chosen before anything was computed: the template's own system prompt, another, and a chat of several turns
# with digits and letters beyond ASCII.
CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "You are the keeper of a lighthouse. Answer in two sentences."},
        {"role": "user", "content": "What do you do when there is fog at night?"},
    ],
    [
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "17 + 25 = 42."},
        {"role": "user", "content": "And how far is it from Zürich to Bern, in kilometres?"},
    ],
]

# Of a layer: its name in the file, and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def main() -> None:
    reader = gguf.GGUFReader(FILE)
    model, tokenizer = read_model(reader), read_tokenizer(reader)
    cases = [case(model, tokenizer, messages) for messages in CHATS]
    names = ["gguf", "numpy", "torch", "transformers"]
    head = json.dumps({**{name: version(name) for name in names}, "file": FILE.name, "count": COUNT})[:-1]
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
    for one in cases:
        print(f"least margin {min(one['margins']):.2e}: {tokenizer.decode(one['generated'])!r}")


def case(model, tokenizer, messages: list[dict]) -> dict:
    """What comes behind a chat, step by step."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    generated, margins, seconds = [], [], []
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0, -1]
            (best, second), (token, other) = (x.tolist() for x in logits.topk(2))
            generated.append(token)
            seconds.append(other)
            margins.append(float(f"{(best - second) / logits.abs().max().item():.3g}"))
    return {"messages": messages, "prompt": prompt, "generated": generated, "seconds": seconds, "margins": margins}


def read_model(reader):
    """The model of the file's fields, with its values as f32."""
    def field(name):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight")
        if part in OTHERS:
            state[f"{OTHERS[part]}.weight"] = torch.from_numpy(values)
            continue
        _, layer, part = part.split(".")
        if part in ("attn_q", "attn_k"):
            values = in_halves(values, heads if part == "attn_q" else kv_heads)
        state[f"model.layers.{layer}.{LAYER[part]}.weight"] = torch.from_numpy(values)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as transformers has them: the file has those next to each other that turn together."""
    rows, columns = values.shape
    paired = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def read_tokenizer(reader):
    """The tokenizer of the file, which names its cuts `smollm`: digits stand alone, then the cuts of GPT-2."""
    def field(name):
        return reader.fields[f"tokenizer.{name}"].contents()

    assert field("ggml.model") == "gpt2" and field("ggml.pre") == "smollm"
    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges")]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    cuts = tokenizers.pre_tokenizers
    inner.pre_tokenizer = cuts.Sequence([cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)])
    inner.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL]
    inner.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=field("chat_template"))


if __name__ == "__main__":
    main()
