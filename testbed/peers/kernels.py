#!/usr/bin/env python3
"""Layers and products of PyTorch and of ours, in turn, on one thread of one core.

    kernels.py SERVER OUTPUT [--rounds N] [--smoke]

SERVER is the program that measures ours when it is asked (`galaxy-testbed kernels-serve`); OUTPUT
is a JSON file with every sample. `scripts/compare-kernels` runs it with a PyTorch of its own.

The layers are written in plain PyTorch as the models' own implementations compute them, without
what those do besides (masks that hide nothing, dropout, hooks): PyTorch at its best, not a library
on top of it. Nothing is compiled. "mkl" and "onednn" are the same with weights that the one or the
other library packs once, for the number of rows that follow, as `torch.compile` with freezing does:
MKL is the faster on Intel's processors, oneDNN on AMD's.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

# A turn measures so long at least, in milliseconds, and no more than so many runs.
TURN, MOST_RUNS = 20.0, 200
# A turn in which we had less of the core is tried again, so often; the last one counts anyway.
UNDISTURBED, TRIES = 0.97, 6
# The sides of PyTorch.
HOW = ["eager", "mkl", "onednn"]


class Linear:
    """`x @ weight.T + bias`, as PyTorch does it or with a weight that a library has packed."""

    def __init__(self, inputs, outputs, bias, dtype):
        self.weight = torch.empty(outputs, inputs, dtype=dtype).uniform_(-0.0346, 0.0346)
        self.bias = torch.empty(outputs, dtype=dtype).uniform_(-0.01, 0.01) if bias else None
        self.packed = None
        self.rows = 0

    def pack(self, how, rows):
        """Packs for so many rows; whether that can be done."""
        self.rows = rows
        try:
            if how == "mkl":
                self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, rows)
            elif how == "onednn":
                self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)
            self(torch.zeros(rows, self.weight.shape[1], dtype=self.weight.dtype), how)
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
        return True

    def __call__(self, x, how):
        if how == "mkl":
            return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, self.rows)
        if how == "onednn":
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class BertLayer:
    """A layer of BERT-Large: post-norm, GELU by the error function, biases everywhere."""

    hidden, heads, inner, bias = 1024, 16, 4096, True

    def __init__(self, dtype):
        h, i = self.hidden, self.inner
        self.query, self.key, self.value = (Linear(h, h, True, dtype) for _ in range(3))
        self.output, self.up, self.down = (
            Linear(h, h, True, dtype), Linear(h, i, True, dtype), Linear(i, h, True, dtype))
        self.norms = [(torch.ones(h, dtype=dtype), torch.zeros(h, dtype=dtype)) for _ in range(2)]

    def linears(self):
        return [self.query, self.key, self.value, self.output, self.up, self.down]

    def __call__(self, x, how):
        rows = x.shape[0]

        def heads(linear):
            return linear(x, how).view(1, rows, self.heads, -1).transpose(1, 2)

        context = F.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value))
        context = context.transpose(1, 2).reshape(rows, self.hidden)
        x = F.layer_norm(
            x + self.output(context, how), (self.hidden,), *self.norms[0], 1e-12)
        inner = F.gelu(self.up(x, how))
        return F.layer_norm(
            x + self.down(inner, how), (self.hidden,), *self.norms[1], 1e-12)


class LlamaLayer:
    """A layer of Llama 3.2 1B: pre-norm, rotary positions, grouped heads, a gated MLP."""

    hidden, heads, kv_heads, inner = 2048, 32, 8, 8192
    width = 64

    def __init__(self, dtype):
        h, i, kv = self.hidden, self.inner, self.kv_heads * self.width
        self.query, self.key, self.value, self.output = (
            Linear(h, h, False, dtype), Linear(h, kv, False, dtype), Linear(h, kv, False, dtype),
            Linear(h, h, False, dtype))
        self.gate, self.up, self.down = (
            Linear(h, i, False, dtype), Linear(h, i, False, dtype), Linear(i, h, False, dtype))
        self.norms = [torch.ones(h, dtype=dtype) for _ in range(2)]
        frequencies = 500000.0 ** (-torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(512).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def linears(self):
        return [self.query, self.key, self.value, self.output, self.gate, self.up, self.down]

    def rotate(self, x, rows):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[:rows] + torch.cat((-b, a), dim=-1) * self.sin[:rows]

    def __call__(self, x, how):
        rows = x.shape[0]

        def heads(linear, normed, count):
            return linear(normed, how).view(1, rows, count, self.width).transpose(1, 2)

        normed = F.rms_norm(x, (self.hidden,), self.norms[0], 1e-5)
        query = self.rotate(heads(self.query, normed, self.heads), rows)
        key = self.rotate(heads(self.key, normed, self.kv_heads), rows)
        value = heads(self.value, normed, self.kv_heads)
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, enable_gqa=True)
        x = x + self.output(context.transpose(1, 2).reshape(rows, self.hidden), how)
        normed = F.rms_norm(x, (self.hidden,), self.norms[1], 1e-5)
        inner = F.silu(self.gate(normed, how)) * self.up(normed, how)
        return x + self.down(inner, how)


class Product:
    """A product alone, as large as the server's of the same name."""

    SHAPES = {"output": (1024, 1024, False), "up": (1024, 4096, True), "down": (4096, 1024, False)}

    def __init__(self, name, dtype):
        self.hidden, outputs, bias = self.SHAPES[name]
        self.linear = Linear(self.hidden, outputs, bias, dtype)

    def linears(self):
        return [self.linear]

    def __call__(self, x, how):
        return self.linear(x, how)


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Server:
    """Ours."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command.split() if isinstance(command, str) else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error:"):
            sys.exit(f"error: the server answers {request!r} with {answer or 'nothing'}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Theirs:
    """Layers or products of PyTorch that take turns."""

    def __init__(self, make, copies, rows, dtype, how):
        self.modules = [make() for _ in range(copies)]
        self.x = torch.randn(rows, self.modules[0].hidden).to(dtype)
        self.how, self.next = how, 0
        self.packs = all(
            linear.pack(how, rows) for module in self.modules for linear in module.linears())

    def once(self):
        module = self.modules[self.next % len(self.modules)]
        self.next += 1
        begin = time.perf_counter()
        module(self.x, self.how)
        return (time.perf_counter() - begin) * 1e3

    def turn(self, runs):
        """The median of so many runs, and whether nothing disturbed them."""
        for _ in range(TRIES):
            begin, before = time.perf_counter(), time.process_time()
            self.once()
            middle = statistics.median(self.once() for _ in range(runs))
            share = (time.process_time() - before) / (time.perf_counter() - begin)
            if share >= UNDISTURBED:
                return middle, True
        return middle, False


def deviation():
    """How far packed weights are from plain ones: a comparison of wrong results is none."""
    worst = 0.0
    for make in (BertLayer, LlamaLayer):
        module = make(torch.float32)
        x = torch.randn(9, module.hidden)
        plain = module(x, "eager")
        for how in HOW[1:]:
            if all(linear.pack(how, 9) for linear in module.linears()):
                off = (module(x, how) - plain).abs().max() / plain.abs().max()
                worst = max(worst, off.item())
    return worst


def cases(smoke):
    """(what, model of the server, its part, rows, format)"""
    rows = [1, 71] if smoke else [1, 16, 71, 284, 384]
    for count in rows:
        yield "bert layer", "bert", "layer", count, "f32"
    for count in rows:
        yield "llama layer", "llama", "layer", count, "f32"
    yield "llama layer", "llama", "layer", 1, "bf16"
    yield "bert layer", "bert", "layer", 1, "bf16"
    for count in [71] if smoke else [1, 71, 284]:
        for part, (inputs, outputs, _) in Product.SHAPES.items():
            yield f"product {inputs}x{outputs}", "relu", part, count, "f32"


def run_case(server, model, part, rows, form, rounds):
    dtype = DTYPES[form]
    copies = int(server.ask(f"{model} {form} layers"))
    if part == "layer":
        make = {"bert": BertLayer, "llama": LlamaLayer}[model]
        theirs = lambda: make(dtype)
    else:
        # As many bytes of products must take turns as of layers.
        inputs, outputs, _ = Product.SHAPES[part]
        copies = math.ceil(copies * 12 * 1024 * 1024 / (inputs * outputs))
        theirs = lambda: Product(part, dtype)
    sides = {how: Theirs(theirs, copies, rows, dtype, how) for how in HOW}
    sides = {how: side for how, side in sides.items() if side.packs}
    warm, _ = sides["eager"].turn(1)
    runs = max(1, min(MOST_RUNS, round(TURN / max(warm, 1e-3))))

    def ours():
        share, *times = map(float, server.ask(f"{model} {form} {part} {rows} {runs}").split())
        return statistics.median(times), share >= UNDISTURBED

    turns = {name: (lambda side=side: side.turn(runs)) for name, side in sides.items()}
    turns["ours"] = ours
    names, found = list(turns), {name: [] for name in turns}
    disturbed = 0
    for at in range(rounds + 1):
        # Whoever is first has another neighbour next time.
        for name in names[at % len(names):] + names[: at % len(names)]:
            ms, quiet = turns[name]()
            if at > 0:
                found[name].append(ms)
                disturbed += not quiet
    return found, disturbed


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("server", help="the command that measures ours")
    arguments.add_argument("output", help="where the samples go")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--smoke", action="store_true")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    rounds = 2 if arguments.smoke else arguments.rounds
    with torch.inference_mode():
        off = deviation()
        if off > 1e-4:
            sys.exit(f"error: packed weights give other results, off by {off}")
        server = Server(arguments.server)
        results, disturbed, todo = [], 0, list(cases(arguments.smoke))
        for at, (what, model, part, rows, form) in enumerate(todo, 1):
            begin = time.monotonic()
            sides, some = run_case(server, model, part, rows, form, rounds)
            disturbed += some
            results.append(dict(what=what, rows=rows, format=form, sides=sides))
            middle = {name: statistics.median(times) for name, times in sides.items()}
            line = "  ".join(f"{name} {ms:.3f}" for name, ms in middle.items())
            ratio = middle["ours"] / middle["eager"]
            print(f"[{at}/{len(todo)}] {what}, {form}, {rows} rows: {line} ms, ours / eager "
                  f"{ratio:.3f}, in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        server.close()
    settings = dict(
        rounds=rounds, smoke=arguments.smoke, threads=1,
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        instructions=os.environ.get("GALAXY_INSTRUCTIONS"),
        torch_instructions=torch.backends.cpu.get_cpu_capability())
    with open(arguments.output, "w") as out:
        versions = {"torch": torch.__version__}
        json.dump(
            dict(versions=versions, settings=settings, disturbed=disturbed, cases=results), out)


if __name__ == "__main__":
    main()
