#!/usr/bin/env python3
"""GGUF files that `galaxy quantise` writes, read by llama.cpp: the same tokens of texts, the same continuations, the same
vectors.

    python3 -m venv /tmp/written
    /tmp/written/bin/pip install numpy==2.4.6 gguf==0.19.0 tokenizers==0.23.3 xllamacpp==2026.10.11549
    /tmp/written/bin/python testbed/peers/written.py target/release/galaxy [MODEL...]

xllamacpp is a build of llama.cpp from PyPI. For each family a small checkpoint of random weights is made, quantised, and run
here and there: continuations without sampling, with the log-probabilities of likely tokens, or vectors. Here it is with
activations in f32, there once as llama.cpp does it, which rounds them to 8 bits, and once with the same values in a file of
f32. MODEL is the name of one of these, or the directory of another checkpoint, as models/all-MiniLM-L6-v2. Tokens of texts
by llama.cpp are compared with those of the checkpoint's own tokenizer, by the tokenizers library. The reader of PyPI gguf
says of each file whether its fields are of the types that converters write, and its tensors those of the architecture.
"""

import json
import math
import struct
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import xllamacpp

STEPS = 24
# By LongRoPE, llama.cpp takes a text for long where its context is, and we where the text is.
CONTEXT = 256
FORMATS = ["q8", "q4"]
HIDDEN, HEADS, KV, WIDTH, INNER, LAYERS = 256, 4, 2, 64, 384, 8
# Beyond the windows of the models here, which have 16 rows.
TEXT = "the cat sat on the mat, and then it sat on\tthe  table.\n\nWhy is 1234 not a cat?"
TEXTS = [TEXT, "a", "A  b", "cats' 12345\n\n\nand caT's <turn>  on", "\u00e4\u00f6\u00fc \U0001f600 x"]
SPACE = "\u2581"
WORDS = ["th", "the", "at", "cat", "an", "and", "on", "it", "sat", "mat"]


def added(ident, text, special=True, **more):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": ident, "content": text, **flags, "special": special, **more}


def around(first, ids):
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {first: {"id": first, "ids": [ids], "tokens": [first]}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}


def sentence_piece(names, strip):
    """A tokenizer as Gemma has it; with `strip`, one as Phi-3 has it."""
    texts = list(names) + ["<turn>", "\n", "\n\n"] + [f"<0x{byte:02X}>" for byte in range(256)]
    texts += [SPACE] + sorted(set("".join(WORDS)) | set("s,.12345?"))
    merges = [["\n", "\n"], [SPACE, SPACE]]
    texts += [SPACE * 2]
    for word in ["th", "at", "an", "on", "it"]:
        merges.append([word[0], word[1]])
        texts.append(word)
    for left, right in [("th", "e"), ("c", "at"), ("s", "at"), ("m", "at"), ("an", "d"), (SPACE, "the"), (SPACE, "on")]:
        merges.append([left, right])
        texts.append(left + right)
    vocabulary = {text: ident for ident, text in enumerate(texts)}
    special = [added(ident, text, rstrip=strip and text not in ("<unk>", "<s>", "<|endoftext|>"))
               for ident, text in enumerate(names)]
    special.append(added(len(names), "<turn>", rstrip=strip))
    if not strip:
        special += [added(vocabulary[text], text, special=False) for text in ("\n", "\n\n")]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": ([{"type": "Prepend", "prepend": SPACE}] if strip else []) + [
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]},
        "pre_tokenizer": None if strip else {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": around(names[2], 2),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocabulary, "merges": merges},
    }


GEMMA = sentence_piece(["<pad>", "<eos>", "<bos>", "<unk>"], False)
PHI3 = sentence_piece(["<unk>", "</s>", "<s>", "<|endoftext|>"], True)
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(pattern=None, normalizer=None, names=("<s>", "<e>", "<turn>"), ignore_merges=False, first=None):
    """A tokenizer over bytes that cuts texts by a pattern, or as GPT-2 does."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed} | {byte: chr(256 + at) for at, byte in enumerate(other)}
    texts = [letters[byte] for byte in range(256)]
    merges = [["t", "h"], ["th", "e"], ["a", "t"], ["c", "at"], ["\u0120", "the"], ["\u0120", "on"], ["1", "2"]]
    merges.insert(0, ["o", "n"])
    texts += ["".join(merge) for merge in merges]
    special = [added(len(texts) + at, name) for at, name in enumerate(names)]
    steps = [] if pattern is None else [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None})
    end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ids = {one["content"]: one["id"] for one in special}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": end if first is None else around(first, ids[first]), "decoder": end,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": ignore_merges, "vocab": {text: at for at, text in enumerate(texts)}, "merges": merges},
    }


def longrope(part):
    pairs = int(WIDTH * part) // 2
    return {"type": "longrope", "short_factor": [1 + at / 64 for at in range(pairs)],
            "long_factor": [1 + at / 8 for at in range(pairs)]}


NFC = {"type": "NFC"}
SCALED = {"query_pre_attn_scalar": WIDTH, "sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh"}
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
# Each with its family, class, tokenizer and what its config has besides.
MODELS = {
    "llama": ("llama", "LlamaForCausalLM", byte_level(LLAMA3, ignore_merges=True, first="<s>"), {"rope_theta": 5000.0}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", byte_level(), {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", byte_level(), {}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", GEMMA, SCALED | {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma2-every-4th": ("gemma2", "Gemma2ForCausalLM", GEMMA, SCALED | {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4)}),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", GEMMA, SCALED | {
        "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-listed": ("gemma3_text", "Gemma3ForCausalLM", GEMMA, SCALED | {"layer_types": [
        "sliding_attention" if at in (0, 1, 3, 4, 5) else "full_attention" for at in range(LAYERS)]}),
    "gemma3-capped": ("gemma3_text", "Gemma3ForCausalLM", GEMMA, SCALED | KINDS | {"final_logit_softcapping": 2.0}),
    "gemma-embedding": ("gemma3_text", "Gemma3TextModel", GEMMA, SCALED | {"use_bidirectional_attention": True}),
    "phi3": ("phi3", "Phi3ForCausalLM", PHI3, {"tie_word_embeddings": False}),
    "phi3-long": ("phi3", "Phi3ForCausalLM", byte_level(GPT4O), {
        "rope_scaling": longrope(0.75), "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32}),
    "phi3-short": ("phi3", "Phi3ForCausalLM", byte_level(GPT4O), {
        "rope_scaling": longrope(1.0), "original_max_position_embeddings": CONTEXT}),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", byte_level(LLAMA3, ignore_merges=True), {}),
    "modern-bert": ("modernbert", "ModernBertModel", byte_level(
        normalizer=NFC, names=("[CLS]", "[SEP]", "[MASK]"), first="[CLS]"), {"local_attention": 16}),
}
# The types of fields as converters write them, behind the architecture's name; others are u32.
TYPES = {
    "attention.layer_norm_rms_epsilon": "FLOAT32", "attention.layer_norm_epsilon": "FLOAT32",
    "attention.causal": "BOOL", "rope.freq_base": "FLOAT32", "rope.freq_base_swa": "FLOAT32",
    "rope.scaling.type": "STRING", "rope.scaling.factor": "FLOAT32", "rope.scaling.attn_factor": "FLOAT32",
    "attn_logit_softcapping": "FLOAT32", "final_logit_softcapping": "FLOAT32", "hidden_activation": "STRING",
    "tokenizer.ggml.model": "STRING", "tokenizer.ggml.pre": "STRING", "tokenizer.ggml.tokens": "STRING",
    "tokenizer.ggml.merges": "STRING", "tokenizer.ggml.scores": "FLOAT32", "tokenizer.ggml.token_type": "INT32",
    "tokenizer.ggml.add_bos_token": "BOOL", "tokenizer.ggml.add_eos_token": "BOOL",
    "tokenizer.ggml.add_sep_token": "BOOL", "tokenizer.ggml.add_space_prefix": "BOOL",
    "tokenizer.chat_template": "STRING", "general.architecture": "STRING", "general.type": "STRING",
    "general.name": "STRING", "tokenizer.huggingface.rstrip": "INT32", "tokenizer.huggingface.lstrip": "INT32",
    "tokenizer.ggml.normalizer.lowercase": "BOOL", "tokenizer.ggml.normalizer.strip_accents": "BOOL",
    "sentence_transformers.prompts": "STRING",
}
NORMS = {"gemma2": 4, "gemma3_text": 4}


def tensors(family, rows, tied):
    """The names and shapes of a checkpoint's tensors."""
    bert = family == "modernbert"
    kv, heads = (HEADS if bert else KV) * WIDTH, HEADS * WIDTH
    prefix = "" if bert else "model."
    yield prefix + ("embeddings.tok_embeddings.weight" if bert else "embed_tokens.weight"), (rows, HIDDEN)
    yield prefix + ("final_norm.weight" if bert else "norm.weight"), (HIDDEN,)
    if bert:
        yield "embeddings.norm.weight", (HIDDEN,)
    if not tied:
        yield "lm_head.weight", (rows, HIDDEN)
    for layer in range(LAYERS):
        at = f"{prefix}layers.{layer}."
        if bert:
            yield from ((f"{at}{name}.weight", shape) for name, shape in [
                ("attn.Wqkv", (3 * heads, HIDDEN)), ("attn.Wo", (HIDDEN, heads)), ("mlp_norm", (HIDDEN,)),
                ("mlp.Wi", (2 * INNER, HIDDEN)), ("mlp.Wo", (HIDDEN, INNER))])
            if layer > 0:
                yield f"{at}attn_norm.weight", (HIDDEN,)
            continue
        names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
        yield from ((f"{at}{name}.weight", (HIDDEN,)) for name in names[:NORMS.get(family, 2)])
        if family in ("qwen3", "gemma3_text"):
            yield from ((f"{at}self_attn.{name}_norm.weight", (WIDTH,)) for name in "qk")
        if family == "phi3":
            yield f"{at}self_attn.qkv_proj.weight", (heads + 2 * kv, HIDDEN)
            yield f"{at}mlp.gate_up_proj.weight", (2 * INNER, HIDDEN)
        else:
            for name, outputs in (("q", heads), ("k", kv), ("v", kv)):
                yield f"{at}self_attn.{name}_proj.weight", (outputs, HIDDEN)
                if family == "qwen2":
                    yield f"{at}self_attn.{name}_proj.bias", (outputs,)
            yield f"{at}mlp.gate_proj.weight", (INNER, HIDDEN)
            yield f"{at}mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{at}self_attn.o_proj.weight", (HIDDEN, heads)
        yield f"{at}mlp.down_proj.weight", (HIDDEN, INNER)


def weights(path, values_of):
    """Writes a safetensors file."""
    data, header, at = [], {}, 0
    for name, values in values_of.items():
        raw = values.astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def make(folder, name):
    """Writes a checkpoint of random weights."""
    family, kind, tokenizer, more = MODELS[name]
    special = [one["content"] for one in tokenizer["added_tokens"]]
    count = len(tokenizer["model"]["vocab"].keys() | set(special))
    config = {
        "model_type": family, "architectures": [kind], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "intermediate_size": INNER, "vocab_size": count, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    }
    if family != "modernbert":
        config |= {"num_key_value_heads": KV, "head_dim": WIDTH}
    config |= more
    folder.mkdir(parents=True)
    random = np.random.default_rng(len(name))
    values_of = {}
    for tensor, shape in tensors(family, count, config["tie_word_embeddings"]):
        values = random.standard_normal(shape)
        if "norm" in tensor:
            values = 0.1 * values + (0.0 if "gemma" in family else 1.0)
        elif "bias" in tensor:
            values *= 0.1
        elif "embed" in tensor or "lm_head" in tensor:
            values *= 0.15
        else:
            values *= 1.5 / math.sqrt(shape[-1])
        values_of[tensor] = values
    weights(folder / "model.safetensors", values_of)
    put = lambda file, value: (folder / file).write_text(json.dumps(value))
    put("config.json", config)
    put("tokenizer.json", tokenizer)
    begins, ends = (special[2], special[1]) if tokenizer in (GEMMA, PHI3) else (special[0], special[1])
    if family == "modernbert":
        names = {"cls_token": special[0], "sep_token": special[1], "mask_token": special[2]}
    else:
        names = {"bos_token": begins, "eos_token": ends}
    put("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    if kind.endswith("Model"):
        dense = [("2_Dense", "Dense"), ("3_Dense", "Dense")] if "gemma" in family else []
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *dense, ("9_Normalize", "Normalize")]
        put("modules.json", [{"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
                             for at, (path, kind) in enumerate(modules)])
        for (path, _), shape in zip(dense, [(2 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)]):
            (folder / path).mkdir()
            put(f"{path}/config.json", {"in_features": shape[1], "out_features": shape[0], "bias": False,
                                        "activation_function": "torch.nn.modules.linear.Identity"})
            weights(folder / path / "model.safetensors", {"linear.weight": random.standard_normal(shape) / 16})
        (folder / "1_Pooling").mkdir()
        put("1_Pooling/config.json", {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
        put("config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": None})
    return folder


def check_types(path):
    """The fields that are not of the types that converters write."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    wrong = []
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        short = name.removeprefix(architecture + ".")
        have, want = field.types[-1].name, TYPES.get(short, "UINT32")
        if short == "attention.sliding_window_pattern" and len(field.types) > 1:
            want = "BOOL"
        if have != want:
            wrong.append(f"{name} is {have}, not {want}")
    # Tensors of the file and those of the architecture.
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[kind]}
    for tensor in reader.tensors:
        parts = tensor.name.rsplit(".", 1)[0].split(".")
        pattern = "blk.{bid}." + ".".join(parts[2:]) if parts[0] == "blk" else ".".join(parts)
        if pattern not in known:
            wrong.append(f"{architecture} has no tensor {tensor.name}")
    return architecture, wrong


class Peer:
    """llama.cpp with a file."""

    def __init__(self, path, vectors):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = CONTEXT, 1, False, 0
        params.cpuparams.n_threads = 1
        params.swa_full = True
        params.embedding = vectors
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(params)

    def ask(self, path, body):
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), head)
        return json.load(urllib.request.urlopen(request))


def here(galaxy, *args):
    done = subprocess.run([galaxy, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"galaxy {' '.join(map(str, args))}\n{done.stderr}")
    return json.loads(done.stdout)


def cosine(one, other):
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def widened(path):
    """The same file with the values of its blocks in f32, so that llama.cpp does not round activations."""
    reader, out = gguf.GGUFReader(path), path.with_suffix(".f32.gguf")
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(side) for side in tensor.shape][::-1]
        writer.add_tensor(tensor.name, values.astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def continued(peer, ids, own):
    """How far a continuation is the same, and how far log-probabilities are apart until then."""
    there = peer.ask("/completion", {"prompt": ids, "n_predict": STEPS, "samplers": ["top_k"], "top_k": 1,
                                     "n_probs": 5, "ignore_eos": True, "return_tokens": True})
    same = next((at for at, (a, b) in enumerate(zip(own["tokens"], there["tokens"])) if a != b), STEPS)
    apart, places, at = 0.0, 0, 0
    # llama.cpp tells nothing of tokens that end within a character.
    for place in there["completion_probabilities"]:
        if place["id"] not in there["tokens"][at:]:
            break
        at = there["tokens"].index(place["id"], at)
        if at > same or at == STEPS:
            break
        known = dict(own["logprobs"][at]["top"])
        shared = [one for one in place["top_logprobs"] if one["id"] in known]
        apart = max([apart] + [abs(known[one["id"]] - one["logprob"]) for one in shared])
        places, at = places + 1, at + 1
    return f"{same} of {STEPS} tokens behind {len(ids)}, log-probabilities at {places} places within {apart:.4f}"


def pooled(peer, texts, own):
    """The least cosine of vectors."""
    there = [peer.ask("/v1/embeddings", {"input": ids})["data"][0]["embedding"] for ids in texts]
    return f"{len(texts)} vectors, cosine at least {min(cosine(*pair) for pair in zip(own, there)):.6f}"


def compare(galaxy, source, path, vectors):
    """What a file gives here and there, in words."""
    reference = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    reference.no_padding()
    reference.no_truncation()
    known = [reference.encode(text).ids for text in TEXTS]
    listed = [",".join(map(str, ids)) for ids in known]
    if vectors:
        runs = [here(galaxy, "run", "--model", path, "--ids", ids, "--output", "pooled", "--activations", "f32")
                for ids in listed]
        own = [run["tensors"][0]["values"] for run in runs]
    else:
        own = here(galaxy, "generate", "--model", path, "--ids", listed[0], "--json", "--logprobs", 5, "--max-tokens",
                   STEPS, "--ignore-end", "--temperature", 0, "--activations", "f32")
    said = []
    for file, what in [(path, "as it is"), (widened(path), "in f32")]:
        peer = Peer(file, vectors)
        if file == path:
            options = {"add_special": True, "parse_special": True}
            found = [peer.ask("/tokenize", {"content": text} | options)["tokens"] for text in TEXTS]
            said.append(f"tokens of {sum(a == b for a, b in zip(known, found))} of {len(TEXTS)} texts")
            said += [f"WRONG: {text!r} is {b}, not {a}" for text, a, b in zip(TEXTS, known, found) if a != b]
        result = pooled(peer, known, own) if vectors else continued(peer, known[0], own)
        said.append(f"{what} {result}")
        del peer
    return said


def main():
    galaxy, models = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        named = [(Path(model).name, None if model in MODELS else Path(model)) for model in models or MODELS]
        for name, source in named:
            source = source or make(folder / name, name)
            for form in FORMATS:
                path = folder / f"{name}-{form}.gguf"
                here(galaxy, "quantise", source, "-o", path, "--format", form, "--json")
                architecture, wrong = check_types(path)
                said = compare(galaxy, source, path, (source / "modules.json").is_file())
                said += [f"WRONG: {what}" for what in wrong]
                print(f"{name} as {architecture} in {form}: {'; '.join(said)}", flush=True)
                path.unlink()


main()
