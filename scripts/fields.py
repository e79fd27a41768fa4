#!/usr/bin/env python3
"""What one changed field of `config.json` does to what `transformers` computes, for the tests.

    scripts/fields.py            draws the changes -> testdata/golden/fields.json
    scripts/fields.py audit      names the fields of the config classes that no table of ours has

Needs torch and transformers. Over each golden checkpoint, fields of its config class are changed one at
a time, by a seed: flags are flipped, numbers scaled, names swapped, fields left out. A change counts as
one that moves the output where hidden states or logits of fixed ids differ by more than 1e-3 of their
largest; then they are kept, for some rows. A change that moves nothing (less than 1e-6) is kept without
values. What `transformers` refuses to load, or fills with random weights, is no change. The reference
runs in float64 on the weights as stored, as in `scripts/golden.py`, whose result changes with the config
alone.
"""

import dataclasses
import json
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers.activations import ACT2FN

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "testdata" / "golden"
TABLES = ROOT / "model" / "src" / "family" / "fields.rs"
SEED = 40
# Changes of each family that move the output, and that do not.
MOVING, STILL = 18, 8
# Of their largest.
LEAST_MOVE, MOST_STILL = 1e-3, 1e-6
FIRST_TRIES = 8
# Of one field of a family at most, so that no field stands for all.
MOST_OF_A_FIELD = 5
MOST_DRAWS = 1500
IDS = 11
ROWS = [0, 5, 10]
VOCABULARY = 97
ABSENT = object()

# family -> checkpoints with what is laid over their config first
BASES = {
    "bert": [("bert", {})],
    "roberta": [("roberta", {})],
    "xlm-roberta": [("roberta", {"model_type": "xlm-roberta",
                                 "architectures": ["XLMRobertaForSequenceClassification"]})],
    "mpnet": [("mpnet", {})],
    "distilbert": [("distilbert", {})],
    "gpt2": [("gpt2", {}), ("gpt2-classes", {"pad_token_id": 96})],
    "gptj": [("gptj", {})],
    "opt": [("opt", {})],
    "llama": [("llama", {}), ("llama-tied-bf16", {})],
    # The second as files of transformers 4 have it.
    "mistral": [("mistral", {}), ("mistral", {"rope_parameters": None, "rope_theta": 10000.0})],
    "qwen2": [("qwen2", {}), ("qwen2", {"sliding_window": 6, "max_window_layers": 1,
                                        "layer_types": None})],
    "qwen3": [("qwen3", {}), ("qwen3", {"sliding_window": 6, "max_window_layers": 1,
                                        "layer_types": None})],
    "vit": [("vit", {})],
}
# What models or older files have besides the fields of the class.
BESIDES = ["is_causal", "num_labels", "output_attentions", "attn_implementation", "torch_dtype",
           "position_embedding_type", "gradient_checkpointing", "temperature", "max_length",
           "per_layer_config", "classifier_dropout"]
ROTARY = ["rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim",
          "original_max_position_embeddings", "layer_types", "sliding_window"]
NUMBERS = {"rope_theta": [100.0, 5000.0, 500000.0], "partial_rotary_factor": [0.5, 1.0],
           "original_max_position_embeddings": [8, 64, 128]}
# Not fields of a model: what makes another model of it.
LEFT_OUT = {"architectures", "transformers_version"}


def rope(rng: random.Random, head_width: int) -> dict:
    """A dictionary of rotary positions, in the old form or the new one."""
    kind = rng.choice(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
    out = {rng.choice(["rope_type", "type"]): kind}
    if rng.random() < 0.7:
        out["rope_theta"] = rng.choice([100.0, 5000.0, 10000.0, 500000.0])
    if kind != "default":
        out["factor"] = rng.choice([1.5, 2.0, 8.0])
    if kind in ("llama3", "yarn", "longrope") and rng.random() < 0.8:
        out["original_max_position_embeddings"] = rng.choice([8, 64, 128])
    if kind == "llama3":
        out |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        optional = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2,
                    "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5}
        out |= {k: v for k, v in optional.items() if rng.random() < 0.3}
    if kind == "longrope":
        pairs = head_width // 2
        out["short_factor"] = [round(1 + 0.1 * i, 2) for i in range(pairs)]
        out["long_factor"] = [round(2 + 0.5 * i, 2) for i in range(pairs)]
    if rng.random() < 0.15:
        out["partial_rotary_factor"] = 0.5
    return out


def plausible(name: str, now, annotation: str, rng: random.Random, config: dict):
    """A value that a field may have in a file."""
    if name in config and rng.random() < 0.1:
        return ABSENT
    layers = config.get("num_hidden_layers") or config.get("n_layers") or config.get("n_layer")
    if name in ("rope_parameters", "rope_scaling"):
        heads = config["num_attention_heads"]
        return rope(rng, config.get("head_dim") or config["hidden_size"] // heads)
    if name.endswith(("_act", "activation", "activation_function")):
        return rng.choice(sorted(ACT2FN))
    if name in ("is_causal", "tie_word_embeddings"):
        return rng.choice([True, False])
    if name in NUMBERS:
        return rng.choice(NUMBERS[name])
    if name == "position_embedding_type":
        return rng.choice(["absolute", "relative_key", "relative_key_query"])
    if name == "problem_type":
        return rng.choice(["regression", "single_label_classification",
                           "multi_label_classification"])
    if name in ("dtype", "torch_dtype"):
        return rng.choice(["float32", "float16", "bfloat16"])
    if name == "attn_implementation":
        return rng.choice(["eager", "sdpa"])
    if name == "per_layer_config":
        return {"1": {rng.choice([k for k in config if k.endswith(("eps", "epsilon"))]
                                 or ["hidden_size"]): 0.5}}
    if name == "layer_types":
        kinds = ["full_attention", "sliding_attention"]
        return [rng.choice(kinds) for _ in range(layers)]
    if name == "summary_type":
        return rng.choice(["last", "first", "mean"])
    if name == "id2label":
        return {str(i): f"name {i}" for i in range(len(config.get(name) or {}) or 2)}
    if name == "label2id":
        return {f"name {i}": i for i in range(3)}
    if name in ("num_labels", "_num_labels"):
        return rng.choice([1, 2, 3, 4])
    if name.endswith("token_id"):
        return rng.choice([None, rng.randrange(VOCABULARY), rng.choice(ids_of(config))])
    if name in ("sliding_window", "max_window_layers"):
        return rng.choice([None, 1, 2, 3, 6, 8, 12, 4096])
    if name in ("image_size", "patch_size") and isinstance(now, list):
        return rng.choice([now[::-1], now[0], [2 * n for n in now]])
    if isinstance(now, bool) or "bool" in annotation or name.startswith(("is_", "output_", "gradient")):
        return not now
    if isinstance(now, float) or "float" in annotation:
        return rng.choice([0.0, 0.001, 0.1, 0.5, 1.0] + [now * k for k in (0.01, 0.1, 0.5, 2, 10)]
                          if now else [0.001, 0.1, 0.5, 1.0, 2.0])
    if isinstance(now, int) or "int" in annotation:
        now = now or 0
        return rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, now + 1, now - 1, 2 * now, now // 2, 0])
    if isinstance(now, dict):
        return {}
    return rng.choice(["first", "none", ""])


def ids_of(config: dict) -> list[int]:
    """The fixed ids; of what a padding row takes the first, none."""
    rng = random.Random(f"{SEED} ids")
    return [rng.randrange(3, VOCABULARY - 1) for _ in range(IDS)]


def fields_of(family: str, config: dict) -> dict:
    """The fields that may be changed, with what is there now and the annotation."""
    known = transformers.CONFIG_MAPPING[family]
    made = known(**{k: v for k, v in config.items() if k != "model_type"})
    out = {f.name: (getattr(made, f.name, None), str(f.type)) for f in dataclasses.fields(known)}
    out |= {other: (getattr(made, own, None), "") for other, own in known.attribute_map.items()}
    besides = BESIDES + (ROTARY if "rope_parameters" in out else ["rope_theta", "sliding_window"])
    out |= {name: (getattr(made, name, None), "") for name in besides if name not in out}
    for name in config:
        out.setdefault(name, (config[name], ""))
    return {k: v for k, v in out.items() if k not in LEFT_OUT | {"model_type"}}


def outputs(checkpoint: str, config: dict, folder: Path) -> dict[str, torch.Tensor] | None:
    """Hidden states and logits by a config, or nothing where it does not load."""
    (folder / "config.json").write_text(json.dumps(config))
    model_class = getattr(transformers, config["architectures"][0])
    try:
        model, how = model_class.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
        if how["missing_keys"] or how["mismatched_keys"] or how["error_msgs"]:
            return None
        model.eval()
        if hasattr(model.config, "image_size"):
            given = load_file(GOLDEN / checkpoint / "expected.safetensors")["pixels"][None]
            given = given.to(torch.float64)
        else:
            given = torch.tensor([ids_of(config)])
        with torch.no_grad():
            hidden = model.base_model(given, return_dict=True).last_hidden_state[0]
            logits = model(given, return_dict=True).logits[0]
        logits = logits if logits.ndim == 1 else logits[-1]
    except Exception:
        return None
    if not (hidden.isfinite().all() and logits.isfinite().all()):
        return None
    return {"hidden": hidden[ROWS].flatten(), "logits": logits}


def apart(a: dict, b: dict) -> float:
    if any(a[k].shape != b[k].shape for k in a):
        return 1.0
    return max(((a[k] - b[k]).abs().max() / b[k].abs().max()).item() for k in a)


def digits(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def draw(family: str, bases: list, changes: list) -> None:
    rng = random.Random(f"{SEED} {family}")
    here = []
    for checkpoint, over in BASES[family]:
        folder = Path(tempfile.mkdtemp())
        for file in (GOLDEN / checkpoint).glob("model*"):
            (folder / file.name).symlink_to(file)
        config = json.loads((GOLDEN / checkpoint / "config.json").read_text()) | over
        config = {k: v for k, v in config.items() if k not in over or v is not None}
        plain = outputs(checkpoint, config, folder)
        assert plain is not None, (checkpoint, over)
        here.append((len(bases), checkpoint, config, folder, plain, fields_of(family, config)))
        bases.append({"family": family, "checkpoint": checkpoint, "over": over}
                     | {k: digits(v) for k, v in plain.items()})
    found = {True: [], False: []}
    seen, counts = set(), Counter()

    def tried(at: int, field: str) -> bool:
        """Whether a value of the field, drawn now, moves the output."""
        base, checkpoint, config, folder, plain, fields = here[at]
        value = plausible(field, *fields[field], rng, config)
        key = (at, field, repr(value) if value is not ABSENT else "absent")
        if key in seen or (value is not ABSENT and field in config and config[field] == value):
            return False
        seen.add(key)
        changed = {k: v for k, v in config.items() if k != field}
        if value is not ABSENT:
            changed[field] = value
        result = outputs(checkpoint, changed, folder)
        if result is None:
            return False
        moved = apart(result, plain)
        moves, most = moved > LEAST_MOVE, MOST_OF_A_FIELD if moved > LEAST_MOVE else 1
        if MOST_STILL < moved <= LEAST_MOVE or counts[at, field, moves] >= most:
            return False
        if len(found[moves]) >= (MOVING if moves else STILL):
            return False
        counts[at, field, moves] += 1
        line = {"base": base, "field": field} | ({} if value is ABSENT else {"value": value})
        found[moves].append(line | ({k: digits(v) for k, v in result.items()} if moves else {}))
        return moves

    # Each field that can move the output is there, if there is room, before any is there again.
    every = [(at, field) for at, base in enumerate(here) for field in sorted(base[-1])]
    for at, field in rng.sample(every, len(every)):
        any(tried(at, field) for _ in range(FIRST_TRIES))
    draws = 0
    while len(found[True]) < MOVING and draws < MOST_DRAWS:
        draws += 1
        tried(*rng.choice(every))
    changes += found[True] + found[False]
    for *_, folder, _, _ in here:
        shutil.rmtree(folder)
    print(f"{family}: {len(found[True])} changes move the output, {len(found[False])} do not", flush=True)


def write(bases: list, changes: list) -> None:
    """JSON with a line for each base and each change."""
    def lines(of: list) -> str:
        return "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in of) + "\n]"

    head = {"seed": SEED, "ids": ids_of({}), "rows": ROWS, "torch": torch.__version__,
            "transformers": transformers.__version__}
    text = json.dumps(head)[:-1] + f', "bases": {lines(bases)}, "changes": {lines(changes)}}}\n'
    json.loads(text)
    (GOLDEN / "fields.json").write_text(text)
    print(f"{len(changes)} changes, {len(text) / 1000:.0f} kB")


def audit() -> bool:
    """Fields of each config class, and of what all have, that no table names."""
    from transformers.generation import GenerationConfig

    text = TABLES.read_text()
    tables = dict(re.findall(r"const (\w+): Table =\s+&\[(.*?)\];\n", text, re.S))
    names = {name: set(re.findall(r'\(\s*"([^"]+)",', body)) for name, body in tables.items()}
    rows = re.findall(r'((?:"[\w-]+"(?: \| )?)+) => &\[([^\]]*)\]', text)
    whole = {}
    for families, of in rows:
        known = set().union(*(names[t] for t in re.findall(r"\w+", of)))
        whole |= {family: known for family in re.findall(r'"([\w-]+)"', families)}
    good = True
    for family in BASES:
        known = transformers.CONFIG_MAPPING[family]
        want = {f.name for f in dataclasses.fields(known)} | set(known.attribute_map)
        want |= set(GenerationConfig._get_default_generation_params())
        want |= {"is_causal", "num_labels", "torch_dtype", "output_attentions", "per_layer_config",
                 "attn_implementation", "experts_implementation", "name_or_path", "model_type",
                 "_commit_hash", "auto_map", "quantization_config"}
        if "rope_parameters" in want:
            want |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
        lacking = sorted(want - whole.get(family, set()))
        good &= not lacking
        print(f"{family}: " + (f"lacks {', '.join(lacking)}" if lacking else "all are known"))
    return good


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    match sys.argv[1:]:
        case ["audit"]:
            sys.exit(0 if audit() else 1)
        case names if set(names) <= set(BASES):
            bases, changes = [], []
            for family in names or BASES:
                draw(family, bases, changes)
            write(bases, changes)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
