#!/usr/bin/env python3
"""Reference outputs made by `transformers`, for the conformance tests.

    scripts/golden.py [NAME...]            small checkpoints, or all -> testdata/golden/<name>/
    scripts/golden.py generate [NAME...]   only what decoders generate, by the weights as they are
    scripts/golden.py minilm MODEL OUT     embeddings of fixed sentences by sentence-transformers

Needs torch and transformers; the last form also sentence-transformers. The results are
committed: run this only to add a case, and note what changed.

Each checkpoint has every parameter random (biases and norms too: their usual zeros and ones hide
mistakes) and shapes that divide by nothing convenient. `expected.safetensors` holds for each
length n: `ids.n` (i32 [n]), `hidden.n` (f32 [n, hidden], after the last norm) and `logits.n`
(f32 [n, vocabulary] of a language head, [labels] of a class head). The reference runs in float64
on the weights as stored.

`generated.json` holds for some prompts the ids that `generate` gives without sampling; of gpt2,
`processed.json` also what settings of sampling make of the next token's logits. Both from the same
float64 reference, whose logits `generate` rounds to float32 before it looks at them.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

LENGTHS = [1, 2, 7, 64, 129]
FIRST_ID = {"modernbert": 3, "modernbert-biases": 3, "roberta": 3, "mpnet": 3, "opt": 3, "opt-post": 3}
VOCABULARY = 97
# An argmax that hangs on rounding would make decoding tests flaky.
LEAST_GAP = 1e-2
PROMPTS = [1, 7, 26]
NEW_IDS = 64
# Between the best and the second best logit of a step, relative to the step's largest: ten times
# what law 1 allows, so that no near tie decides which id comes next.
LEAST_RELATIVE_GAP = 1e-3
# A small random model soon says one word for ever, and a cache of equal rows hides mistakes: this
# many ids of the second half must differ.
LEAST_DISTINCT = 4
# Whose next token's logits are processed as for sampling, after a prompt of how many ids.
PROCESSED = "gpt2"
PROCESSED_PROMPT = 12
# In the order in which `generate` applies them.
PROCESSORS = {
    "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
}
TOGETHER = dict(repetition_penalty=1.3, temperature=0.7, top_k=5, top_p=0.8, min_p=0.1)
# Of so few ids top_p leaves nothing for min_p to do; of more it does.
WIDER = dict(repetition_penalty=1.3, temperature=1.2, top_k=30, top_p=0.9, min_p=0.1)
SETTINGS = [{key: value} for key, value in TOGETHER.items()] + [TOGETHER, WIDER]
ROOT = Path(__file__).resolve().parent.parent / "testdata" / "golden"

BERT = dict(
    vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=3, num_attention_heads=6,
    intermediate_size=50, max_position_embeddings=160, hidden_act="gelu", num_labels=3,
)


def decoder(hidden, layers, heads, kv_heads, inner, rows, tied, rope, **more) -> dict:
    """The config of a decoder with rotary positions, whose texts no token begins or ends."""
    return dict(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
        max_position_embeddings=rows, tie_word_embeddings=tied, rope_parameters=rope,
        bos_token_id=None, eos_token_id=None, **more,
    )


# name -> (architecture, config, storage, largest shard)
CASES = {
    "bert": ("BertForSequenceClassification", BERT, torch.float32, None),
    "bert-f16": ("BertForSequenceClassification", BERT, torch.float16, None),
    "distilbert": (
        "DistilBertForSequenceClassification",
        dict(vocab_size=VOCABULARY, dim=40, n_layers=3, n_heads=5, hidden_dim=54,
             max_position_embeddings=140, num_labels=4),
        torch.float32, None,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(vocab_size=VOCABULARY, n_embd=40, n_layer=3, n_head=5, n_inner=54, n_positions=160,
             bos_token_id=None, eos_token_id=None),
        torch.float32, None,
    ),
    "gpt2-classes": (
        "GPT2ForSequenceClassification",
        dict(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=140, num_labels=2,
             bos_token_id=None, eos_token_id=None, pad_token_id=None),
        torch.float32, None,
    ),
    "llama": (
        "LlamaForCausalLM",
        decoder(hidden=48, layers=3, heads=6, kv_heads=2, inner=58, rows=512,
                tied=False, head_dim=10,
                rope=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                          high_freq_factor=4.0, original_max_position_embeddings=64)),
        torch.float32, None,
    ),
    "llama-tied-bf16": (
        "LlamaForCausalLM",
        decoder(hidden=40, layers=3, heads=4, kv_heads=1, inner=54, rows=256,
                tied=True, attention_bias=True, mlp_bias=True,
                rope=dict(rope_type="default", rope_theta=500.0)),
        torch.bfloat16, "60KB",
    ),
    "roberta": (
        "RobertaForSequenceClassification",
        dict(vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=3, num_attention_heads=6,
             intermediate_size=50, max_position_embeddings=150, type_vocab_size=1, num_labels=3,
             layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0, eos_token_id=2),
        torch.float32, None,
    ),
    "mpnet": (
        "MPNetForSequenceClassification",
        dict(vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=3, num_attention_heads=6,
             intermediate_size=50, max_position_embeddings=150, num_labels=3,
             layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0, eos_token_id=2),
        torch.float32, None,
    ),
    "opt": (
        "OPTForCausalLM",
        dict(vocab_size=VOCABULARY, hidden_size=40, word_embed_proj_dim=40, num_hidden_layers=3,
             num_attention_heads=5, ffn_dim=54, max_position_embeddings=160, pad_token_id=1,
             bos_token_id=None, eos_token_id=None),
        torch.float16, None,
    ),
    "gptj": (
        "GPTJForCausalLM",
        dict(vocab_size=VOCABULARY, n_embd=40, n_layer=3, n_head=4, n_inner=54, n_positions=160,
             rotary_dim=6, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None),
        torch.float32, None,
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        decoder(hidden=48, layers=3, heads=6, kv_heads=2, inner=58, rows=256,
                tied=True, rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.bfloat16, None,
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        decoder(hidden=40, layers=3, heads=6, kv_heads=3, inner=58, rows=256,
                tied=False, head_dim=14,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    "mistral": (
        "MistralForCausalLM",
        decoder(hidden=48, layers=3, heads=6, kv_heads=3, inner=58, rows=512,
                tied=False, sliding_window=200,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.bfloat16, None,
    ),
    "vit": (
        "ViTForImageClassification",
        dict(image_size=[36, 48], patch_size=12, num_channels=3, hidden_size=42,
             num_hidden_layers=3, num_attention_heads=6, intermediate_size=50, num_labels=3),
        torch.float32, None,
    ),
    # Scores by the number of the layer, and another activation.
    "gpt2-scales": (
        "GPT2LMHeadModel",
        dict(vocab_size=VOCABULARY, n_embd=24, n_layer=3, n_head=3, n_inner=34, n_positions=140,
             scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True,
             activation_function="quick_gelu", bos_token_id=None, eos_token_id=None),
        torch.float32, None,
    ),
    # Cosines and sines that are multiplied.
    "llama-yarn": (
        "LlamaForCausalLM",
        decoder(hidden=24, layers=3, heads=3, kv_heads=1, inner=34, rows=256,
                tied=True, rope=dict(rope_type="yarn", rope_theta=500.0, factor=4.0,
                          original_max_position_embeddings=64)),
        torch.float32, None,
    ),
    # Other frequencies for texts of more than 64 rows.
    "mistral-longrope": (
        "MistralForCausalLM",
        decoder(hidden=24, layers=2, heads=3, kv_heads=3, inner=34, rows=256,
                tied=True, sliding_window=None,
                rope=dict(rope_type="longrope", rope_theta=10000.0, factor=4.0,
                          original_max_position_embeddings=64, short_factor=[1.0, 1.1, 1.3, 2.0],
                          long_factor=[1.5, 2.0, 4.0, 8.0])),
        torch.float32, None,
    ),
    # A decoder with norms after its blocks.
    "opt-post": (
        "OPTForSequenceClassification",
        dict(vocab_size=VOCABULARY, hidden_size=24, word_embed_proj_dim=24, num_hidden_layers=2,
             num_attention_heads=3, ffn_dim=34, max_position_embeddings=160, pad_token_id=1,
             do_layer_norm_before=False, num_labels=3, bos_token_id=None, eos_token_id=None),
        torch.float32, None,
    ),
    # All layers have a window.
    "mistral-window": (
        "MistralForCausalLM",
        decoder(hidden=24, layers=3, heads=3, kv_heads=1, inner=34, rows=256,
                tied=True, sliding_window=17,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    # Some have, and rows see later ones, too.
    "qwen2-window": (
        "Qwen2ForCausalLM",
        decoder(hidden=24, layers=3, heads=3, kv_heads=1, inner=34, rows=256,
                tied=True, is_causal=False, use_sliding_window=True, sliding_window=11,
                max_window_layers=1, rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        decoder(hidden=40, layers=5, heads=5, kv_heads=1, inner=54, rows=256, tied=True,
                no_rope_layer_interval=2, pad_token_id=None,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    "phi3": (
        "Phi3ForCausalLM",
        decoder(hidden=48, layers=3, heads=6, kv_heads=2, inner=58, rows=256, tied=False,
                original_max_position_embeddings=64, sliding_window=40, pad_token_id=None,
                rope=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                          short_factor=[1.0, 1.1, 1.3], long_factor=[1.5, 2.0, 4.0])),
        torch.bfloat16, None,
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        decoder(hidden=40, layers=3, heads=4, kv_heads=2, inner=58, rows=256, tied=True,
                head_dim=14, query_pre_attn_scalar=21, sliding_window=23, pad_token_id=None,
                attn_logit_softcapping=4.0, final_logit_softcapping=12.0,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        decoder(hidden=40, layers=4, heads=4, kv_heads=1, inner=58, rows=256, tied=True,
                head_dim=14, query_pre_attn_scalar=21, sliding_window=23, pad_token_id=None,
                sliding_window_pattern=3,
                rope=dict(full_attention=dict(rope_type="linear", factor=2.0, rope_theta=5000.0),
                          sliding_attention=dict(rope_type="default", rope_theta=300.0))),
        torch.float32, None,
    ),
    # EmbeddingGemma: rows see later ones.
    "gemma3-both-ways": (
        "Gemma3TextForSequenceClassification",
        decoder(hidden=24, layers=3, heads=3, kv_heads=1, inner=34, rows=256, tied=True,
                head_dim=8, query_pre_attn_scalar=8, sliding_window=30, pad_token_id=None,
                sliding_window_pattern=2, use_bidirectional_attention=True, num_labels=2,
                rope=dict(full_attention=dict(rope_type="default", rope_theta=5000.0),
                          sliding_attention=dict(rope_type="default", rope_theta=300.0))),
        torch.float32, None,
    ),
    "modernbert": (
        "ModernBertForSequenceClassification",
        dict(vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=4, num_attention_heads=3,
             intermediate_size=50, max_position_embeddings=160, num_labels=3, local_attention=20,
             pad_token_id=0, bos_token_id=None, eos_token_id=None, cls_token_id=1, sep_token_id=2),
        torch.float32, None,
    ),
    # With all biases, and other layers.
    "modernbert-biases": (
        "ModernBertForSequenceClassification",
        dict(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=3, num_attention_heads=3,
             intermediate_size=34, max_position_embeddings=160, num_labels=2, local_attention=12,
             global_attn_every_n_layers=2, attention_bias=True, mlp_bias=True, norm_bias=True,
             classifier_bias=True,
             pad_token_id=0, bos_token_id=None, eos_token_id=None, cls_token_id=1, sep_token_id=2),
        torch.float32, None,
    ),
    # A decoder whose rows see later ones.
    "qwen2-both-ways": (
        "Qwen2ForCausalLM",
        decoder(hidden=24, layers=2, heads=3, kv_heads=1, inner=34, rows=256,
                tied=True, is_causal=False,
                rope=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
}

SENTENCES = [
    "A transformer runs on all the devices in the room.",
    "The quick brown fox jumps over the lazy dog.",
    "Hello",
    "Ten thousand small boats crossed the harbour before dawn, and nobody counted them.",
    "Wie spät ist es in São Paulo?",
    "3.14159 is not 22/7, but it is close enough for most carpenters!",
    "naïve café déjà-vu — 東京 🙂",
    "Edge devices rarely agree: one is fast and small, one slow and large, and the link between "
    "them is worse than either would like. " * 4,
]


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1.0 if norm else noise)


def load(path: Path, architecture: str) -> torch.nn.Module:
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def reference(path: Path, architecture: str, seed: int) -> dict[str, torch.Tensor]:
    model = load(path, architecture)
    language = model.get_output_embeddings() is not None
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for length in LENGTHS:
        for _ in range(100):
            # Ids of padding are none that a text has.
            ids = torch.randint(FIRST_ID.get(path.name, 0), VOCABULARY, (1, length),
                                generator=generator)
            with torch.no_grad():
                hidden = model.base_model(ids).last_hidden_state[0]
                logits = model(ids).logits[0]
            top = torch.topk(logits[-1] if language else logits, 2).values
            if top[0] - top[1] > LEAST_GAP:
                break
        else:
            raise SystemExit(f"{path.name}: no ids of length {length} with a clear answer")
        out[f"ids.{length}"] = ids[0].to(torch.int32)
        out[f"hidden.{length}"] = hidden.to(torch.float32).contiguous()
        out[f"logits.{length}"] = logits.to(torch.float32).contiguous()
    return out


def images(path: Path, architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """The same from an image file, `image.png`: `pixels` (f32 [3, height, width]), `hidden.n` and
    `logits.n` for its n rows."""
    from PIL import Image
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    model = load(path, architecture)
    height, width = model.config.image_size
    generator = torch.Generator().manual_seed(seed)
    # Smooth and rough parts, larger than the model reads in one direction and smaller in the other.
    # Wide: of tall images Pillow 13 resizes the columns first, and rounds otherwise than it used to.
    size = (height - 5, 2 * width - 19)
    noise = torch.randint(0, 256, (*size, 3), generator=generator).to(torch.float64)
    ramp = torch.linspace(0, 255, size[1])[None, :, None].expand(*size, 3)
    pixels = torch.where(torch.arange(size[0])[:, None, None] < size[0] // 2, ramp, noise)
    image = Image.fromarray(pixels.to(torch.uint8).numpy())
    image.save(path / "image.png")
    processor = ViTImageProcessorPil(size={"height": height, "width": width})
    processor.save_pretrained(path)
    values = processor(images=Image.open(path / "image.png"), return_tensors="np").pixel_values
    values = torch.from_numpy(values)
    with torch.no_grad():
        hidden = model.base_model(values.to(torch.float64)).last_hidden_state[0]
        logits = model(values.to(torch.float64)).logits[0]
    rows = hidden.shape[0]
    out = {"pixels": values[0].contiguous()}
    out[f"hidden.{rows}"] = hidden.to(torch.float32).contiguous()
    out[f"logits.{rows}"] = logits.to(torch.float32).contiguous()
    return out


def digits(values: torch.Tensor) -> list[float]:
    """Nine significant digits, which say a float32 exactly."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def steps(model: torch.nn.Module, ids: torch.Tensor, count: int, **settings):
    """What `generate` returns of `count` tokens after `ids`, with the logits of each step."""
    # Nothing is padding, and nothing ends a text early.
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), use_cache=True, max_new_tokens=count,
        output_logits=True, output_scores=True, return_dict_in_generate=True, **settings,
    )


def greedy(model: torch.nn.Module, name: str, length: int) -> dict:
    """The first prompt, by seeds in order, that no near tie decides and that keeps moving."""
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(FIRST_ID.get(name, 0), VOCABULARY, (1, length), generator=generator)
        out = steps(model, prompt, NEW_IDS, do_sample=False)
        generated = out.sequences[0, length:].tolist()
        assert len(generated) == NEW_IDS
        logits = torch.cat(out.logits)
        best = torch.topk(logits, 2).values
        gaps = best[:, 0] - best[:, 1]
        relative = gaps / logits.abs().amax(dim=1)
        distinct = len(set(generated[NEW_IDS // 2:]))
        if relative.min() > LEAST_RELATIVE_GAP and distinct >= LEAST_DISTINCT:
            return {
                "seed": seed,
                "prompt": prompt[0].tolist(),
                "generated": generated,
                "least_gap": digits(gaps.min()[None])[0],
                "least_relative_gap": digits(relative.min()[None])[0],
            }
    raise SystemExit(f"{name}: no prompt of length {length} with clear and varied answers")


def process(ids: torch.Tensor, logits: torch.Tensor, settings: dict) -> torch.Tensor:
    for key, value in settings.items():
        logits = PROCESSORS[key](value)(ids, logits)
    return logits


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits[0]).nonzero()[:, 0].tolist()


def telling(ids: torch.Tensor, logits: torch.Tensor, generator: torch.Generator) -> bool:
    """Whether a mistake in any processor would show, and rounding in none."""
    repeated, counts = ids[0].unique(return_counts=True)
    repeated = logits[0, repeated[counts > 1]]
    # A penalty divides what is above zero, multiplies what is below, and does so once.
    if not (repeated.max() > 0 > repeated.min()):
        return False
    both = [(kept(process(ids, logits, full)), full) for full in (TOGETHER, WIDER)]
    if min(len(right) for right, _ in both) < 2:
        return False
    for key in PROCESSORS:
        # With one of the two, other ids would be kept without it, and if it came last.
        less = [{k: v for k, v in full.items() if k != key} for _, full in both]
        late = [{**rest, key: full[key]} for rest, (_, full) in zip(less, both)]
        for changed in [less] if key == "min_p" else [less, late]:
            if all(kept(process(ids, logits, c)) == right for c, (right, _) in zip(changed, both)):
                return False
    for _ in range(20):
        noise = torch.rand(logits.shape, generator=generator) * 2 - 1
        near = logits + noise * LEAST_RELATIVE_GAP * logits.abs().max()
        for settings in SETTINGS:
            if kept(process(ids, near, settings)) != kept(process(ids, logits, settings)):
                return False
    return True


def processed(model: torch.nn.Module) -> dict:
    """The next token's logits after a prompt, and what settings of sampling make of them."""
    for seed in range(10_000):
        generator = torch.Generator().manual_seed(seed)
        # Fewer ids than places: some repeat.
        few = torch.randint(0, VOCABULARY, (8,), generator=generator)
        ids = few[torch.randint(0, len(few), (1, PROCESSED_PROMPT), generator=generator)]
        with torch.no_grad():
            logits = model(ids).logits[:, -1].to(torch.float32)
        if telling(ids, logits, generator):
            break
    else:
        raise SystemExit("no prompt shows what every processor does")
    results = []
    for settings in SETTINGS:
        scores = process(ids, logits, settings)
        # Unless told, `generate` keeps the fifty best.
        out = steps(model, ids, 1, do_sample=True, **{"top_k": 0, **settings})
        assert torch.equal(out.logits[0], logits) and torch.equal(out.scores[0], scores)
        left = kept(scores)
        probabilities = torch.softmax(scores[0], dim=-1)[left]
        results.append({"settings": settings, "kept": left, "probabilities": digits(probabilities)})
    prompt = ids[0].tolist()
    return {"seed": seed, "prompt": prompt, "logits": digits(logits[0]), "results": results}


def write_lines(path: Path, fields: dict) -> None:
    """JSON with a line for each field and, in lists of objects, for each field of these."""

    def text(value, indent: str) -> str:
        inner = indent + "  "
        if isinstance(value, dict):
            lines = [f"{json.dumps(key)}: {text(v, inner)}" for key, v in value.items()]
            return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = [inner + text(v, inner) for v in value]
            return "[\n" + ",\n".join(lines) + f"\n{indent}]"
        return json.dumps(value)

    path.write_text(text(fields, "") + "\n")


def generate(name: str) -> None:
    """`generated.json` and `processed.json`, where the checkpoint is of a decoder with a head."""
    path = ROOT / name
    architecture, fields, *_ = CASES[name]
    decoder = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if not decoder or not fields.get("is_causal", True):
        return
    model = load(path, architecture)
    # As many ids as asked for, whatever one of them means.
    model.generation_config.eos_token_id = None
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    prompts = [greedy(model, name, length) for length in PROMPTS]
    write_lines(path / "generated.json", {"new_ids": NEW_IDS, "prompts": prompts, **versions})
    if name == PROCESSED:
        write_lines(path / "processed.json", {**processed(model), **versions})
    print(f"{name}: {[prompt['seed'] for prompt in prompts]}")


def checkpoint(name: str, seed: int) -> None:
    architecture, fields, dtype, shard = CASES[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**fields)
    path = ROOT / name
    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(seed)
    model = model_class(config)
    randomise(model, seed)
    model = model.to(dtype)
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    (path / "generation_config.json").unlink(missing_ok=True)
    of_images = hasattr(config, "image_size")
    expected = (images if of_images else reference)(path, architecture, seed)
    save_file(expected, path / "expected.safetensors")
    cases = {
        "name": name,
        "architecture": architecture,
        "lengths": [] if of_images else LENGTHS,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (path / "cases.json").write_text(json.dumps(cases, indent=2) + "\n")
    generate(name)
    size = sum(f.stat().st_size for f in path.iterdir())
    print(f"{name}: {size / 1000:.0f} kB")


def minilm(model: str, out: str) -> None:
    import sentence_transformers

    encoder = sentence_transformers.SentenceTransformer(model, device="cpu")
    vectors = [encoder.encode([s])[0].tolist() for s in SENTENCES]
    ids = [encoder.preprocess([s])["input_ids"][0].tolist() for s in SENTENCES]
    result = {
        "sentence_transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "sentences": SENTENCES,
        "ids": ids,
        "vectors": [[round(x, 7) for x in v] for v in vectors],
    }
    Path(out).write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["minilm", model, out]:
            minilm(model, out)
        case ["generate", *names] if set(names) <= set(CASES):
            for name in names or CASES:
                generate(name)
        case names if set(names) <= set(CASES):
            for seed, name in enumerate(CASES, start=1):
                if not names or name in names:
                    checkpoint(name, seed)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
