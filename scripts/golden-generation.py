#!/usr/bin/env python3
"""What transformers generates where a request says nothing, by settings of generation_config.json.

    scripts/golden-generation.py

Writes testdata/cases/generation.json: for each checkpoint and each generation_config.json the tokens behind a
prompt. Needs torch and transformers 5.24.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent / "testdata"
CHECKPOINTS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 14]
COUNT = 16


def settings(plain: list[int]) -> list[dict]:
    """Settings of an author, some of which depend on what comes without any."""
    return [
        {},
        {"do_sample": False, "temperature": 0.3, "top_k": 5, "top_p": 0.5},
        {"do_sample": True, "temperature": 0.7, "top_k": 1},
        {"do_sample": True, "top_p": 1e-9},
        {"do_sample": True, "min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "max_new_tokens": 11},
        {"suppress_tokens": sorted(set(plain[:3])), "pad_token_id": 0},
        {"max_new_tokens": 7, "max_length": 12},
        {"max_length": 14, "num_beams": 1, "typical_p": 1.0, "length_penalty": 2.0},
        {"eos_token_id": [plain[4], plain[6]]},
        {"renormalize_logits": True, "use_cache": False, "repetition_penalty": 1.1},
        # Not carried out here: refused by name.
        {"no_repeat_ngram_size": 1},
        {"num_beams": 4},
        {"min_new_tokens": 9, "eos_token_id": plain[2]},
        {"begin_suppress_tokens": [plain[0]]},
        {"bad_words_ids": [plain[:2]]},
        {"sequence_bias": [[[plain[1]], -50.0]]},
        {"forced_eos_token_id": 5, "max_length": 14},
        {"encoder_repetition_penalty": 3.0},
        {"exponential_decay_length_penalty": [2, 50.0], "eos_token_id": 9},
    ]


def generated(name: str, config: dict) -> list[int]:
    """The tokens behind the prompt."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        shutil.copytree(ROOT / "golden" / name, path)
        # What is asked is silent, but for tests to end.
        full = {"eos_token_id": None, **config}
        (path / "generation_config.json").write_text(json.dumps(full))
        model = getattr(transformers, CHECKPOINTS[name]).from_pretrained(path, dtype=torch.float32).eval()
        said = {} if {"max_new_tokens", "max_length"} & config.keys() else {"max_new_tokens": COUNT}
        ids = torch.tensor([PROMPT])
        torch.manual_seed(0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **said)
    return out[0, len(PROMPT) :].tolist()


def main() -> None:
    cases = []
    for name in CHECKPOINTS:
        for config in settings(generated(name, {})):
            cases.append({"checkpoint": name, "config": config, "generated": generated(name, config)})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    head = json.dumps({**versions, "prompt": PROMPT, "count": COUNT})[:-1]
    out = ROOT / "cases" / "generation.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
