"""Measures for scripts/compare-quantised: a prompt of 128 tokens and 48 tokens behind it, here and there in turns.

Ours stands behind the prompt when it makes tokens, llama.cpp behind nothing.
"""

import json
import statistics
import subprocess
import sys

# Token ids: the models have no tokenizer.
PROMPT = [5 + at * 7919 % 32000 for at in range(128)]
TOKENS = 48


def ours(galaxy, model, threads):
    command = [galaxy, "generate", "--model", model, "--threads", threads, "--max-tokens", str(TOKENS),
               "--temperature", "0", "--json", "--ids", ",".join(map(str, PROMPT))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return len(PROMPT) / found["first_token_ms"] * 1e3, found["tokens_per_second"]


def theirs(bench, model, threads):
    command = [bench, "-m", model, "-t", threads, "-p", str(len(PROMPT)), "-n", str(TOKENS), "-r", "1", "-o", "json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    by = {bool(run["n_gen"]): run["avg_ts"] for run in found}
    return by[False], by[True]


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main():
    galaxy, bench, models, rounds, threads, formats = sys.argv[1:]
    for name in formats.split(","):
        for count in threads.split(","):
            model = f"{models}/llama-1b-{name}.gguf"
            pairs = []
            for number in range(int(rounds)):
                pair = ours(galaxy, model, count), theirs(bench, model, count)
                pairs.append(pair)
                (read, made), (other_read, other_made) = pair
                print(f"{name}, {count} threads, round {number + 1}: prompt {read:.1f} and {other_read:.1f}, "
                      f"tokens {made:.1f} and {other_made:.1f} a second", file=sys.stderr, flush=True)
            for at, what in enumerate(["prompt", "tokens"]):
                own, other = ([side[at] for side in sides] for sides in zip(*pairs))
                ratios = [a / b for a, b in zip(own, other)]
                print(f"{name}, {count} threads, {what}/s: {spread(own)}, llama.cpp {spread(other)}; "
                      f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
