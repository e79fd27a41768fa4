#!/usr/bin/env python3
"""Reference outputs made by `transformers`, for the conformance tests.

    scripts/golden.py [NAME...]            small checkpoints, or all -> testdata/golden/<name>/
    scripts/golden.py minilm MODEL OUT     embeddings of fixed sentences by sentence-transformers

Needs torch and transformers; the second form also sentence-transformers. The results are
committed: run this only to add a case, and note what changed.

Each checkpoint has every parameter random (biases and norms too: their usual zeros and ones hide
mistakes) and shapes that divide by nothing convenient. `expected.safetensors` holds for each
length n: `ids.n` (i32 [n]), `hidden.n` (f32 [n, hidden], after the last norm) and `logits.n`
(f32 [n, vocabulary] of a language head, [labels] of a class head). The reference runs in float64
on the weights as stored.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

LENGTHS = [1, 2, 7, 64, 129]
FIRST_ID = {"roberta": 3, "mpnet": 3, "opt": 3}
VOCABULARY = 97
# An argmax that hangs on rounding would make decoding tests flaky.
LEAST_GAP = 1e-2
ROOT = Path(__file__).resolve().parent.parent / "testdata" / "golden"

BERT = dict(
    vocab_size=VOCABULARY, hidden_size=42, num_hidden_layers=3, num_attention_heads=6,
    intermediate_size=50, max_position_embeddings=160, hidden_act="gelu", num_labels=3,
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
        dict(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, head_dim=10, intermediate_size=58,
             max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
             eos_token_id=None,
             rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0,
                                  low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=64)),
        torch.float32, None,
    ),
    "llama-tied-bf16": (
        "LlamaForCausalLM",
        dict(vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=1, intermediate_size=54, max_position_embeddings=256,
             tie_word_embeddings=True, attention_bias=True, mlp_bias=True, bos_token_id=None,
             eos_token_id=None,
             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
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
        dict(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, intermediate_size=58, max_position_embeddings=256,
             tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        torch.bfloat16, None,
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        dict(vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=3, head_dim=14, intermediate_size=58,
             max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
             eos_token_id=None,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        torch.float32, None,
    ),
    "mistral": (
        "MistralForCausalLM",
        dict(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=3, intermediate_size=58, max_position_embeddings=512,
             sliding_window=200, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        torch.bfloat16, None,
    ),
    "vit": (
        "ViTForImageClassification",
        dict(image_size=[36, 48], patch_size=12, num_channels=3, hidden_size=42,
             num_hidden_layers=3, num_attention_heads=6, intermediate_size=50, num_labels=3),
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


def reference(path: Path, architecture: str, seed: int) -> dict[str, torch.Tensor]:
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    model.eval()
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

    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    model.eval()
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
        case names if set(names) <= set(CASES):
            for seed, name in enumerate(CASES, start=1):
                if not names or name in names:
                    checkpoint(name, seed)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
