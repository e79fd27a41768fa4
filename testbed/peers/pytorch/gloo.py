#!/usr/bin/env python3
"""One device of a text encoder or decoder under PyTorch, alone or with others over Gloo: what our runs
stand beside.

    gloo.py MODEL WAY RANK DEVICES TOKENS HOST PORT

MODEL is a directory of BERT, DistilBERT, GPT-2 or OPT, as `transformers` writes it, WAY is

- single: the whole model on one device,
- megatron: each device has a part of the heads and of the inner columns of every layer, whole numbers of
  both that are as equal as can be, and adds its partial results to all others' twice in a layer (Shoeybi et
  al., Megatron-LM); tables, norms and biases behind a sum are on all devices,
- sequence: each device has all weights and a part of the rows, and gathers keys and values once in a layer.

The first device (RANK 0) takes connections at HOST and says `at PORT`; PORT is what it is told there, and 0
for itself. Once all have their weights it says `ready` and how it keeps them, and then answers every line of
token ids with the time from the line to the mean of the last hidden states, and that mean, as JSON. It ends
with its input, and the others with it. All is f32, on one thread.

This is PyTorch as the models' own implementations compute, without what these do besides: query, key and
value are one product, nothing is copied that need not be, memory of results is used again. Weights are packed
by oneDNN for texts of TOKENS, as `torch.compile` with freezing does, where that is faster here: on AMD's
processors it is, on Intel's often not. There is one copy of them either way.
"""

import ctypes
import datetime
import gc
import json
import os
import sys
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors import safe_open  # noqa: E402

# Nobody gives up on a device that waits for its turn: whoever started them ends them.
FOREVER = datetime.timedelta(days=7)
# mallopt's numbers for what is given back to the system, and for what is a mapping of its own.
TRIM, MAPPING, NEVER = -1, -3, 2**31 - 1


def shares(whole, parts):
    """Where each of so many parts begins and ends, as equal as whole numbers can be."""
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + whole // parts + (part < whole % parts))
    return list(zip(ends, ends[1:]))


class Weights:
    """The tensors of a directory, read by the slice."""

    def __init__(self, directory):
        self.files = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = safe_open(str(path), framework="pt")
            self.files.update((name, file) for name in file.keys())

    def __call__(self, name, rows=slice(None), columns=None):
        part = self.files[name].get_slice(name)
        found = part[rows] if columns is None else part[rows, columns]
        # A copy of its own: aligned, f32, and the file's pages are given back.
        return torch.empty(found.shape).copy_(found)


def packed(weight, rows):
    """A weight as oneDNN keeps it for so many rows; None where it does not."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def linear_packed(x, weight, bias):
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def packing_helps(rows, inputs, outputs):
    """Whether a product of these sizes is faster here with a weight that oneDNN has packed."""
    x, weight = torch.rand(rows, inputs), torch.rand(outputs, inputs)
    other = packed(weight, rows)
    if other is None:
        return False
    best = [float("inf")] * 2
    for _ in range(7):
        for side, product in enumerate((
                lambda: F.linear(x, weight), lambda: linear_packed(x, other, None))):
            # The processor's time: others read their weights at the same time.
            begun = time.thread_time_ns()
            product()
            best[side] = min(best[side], time.thread_time_ns() - begun)
    return best[1] < best[0]


class Linear:
    """`x @ weight.T + bias`, with a weight of [outputs, inputs]."""

    # For how many rows weights are packed; 0 where they are not.
    packs = 0

    def __init__(self, weight, bias):
        self.bias = bias
        self.product = F.linear
        self.weight = packed(weight, Linear.packs) if Linear.packs else None
        if self.weight is None:
            self.weight = weight
        else:
            self.product = linear_packed

    def __call__(self, x):
        return self.product(x, self.weight, self.bias)

    def partial(self, x):
        """Without the bias: that follows the sum, where inputs are spread over devices."""
        return self.product(x, self.weight, None)


def linear(weights, names, outputs=slice(None), inputs=None):
    """Products of one input, one beside the other: `outputs` of each."""
    parts = [weights(f"{name}.weight", outputs, inputs) for name in names]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Linear(weight, torch.cat([weights(f"{name}.bias", outputs) for name in names]))


def conv1d(weights, name, outputs=(slice(None),), inputs=slice(None)):
    """The same of GPT-2, which keeps its weights as [inputs, outputs] and such products in one."""
    parts = [weights(f"{name}.weight", inputs, some).t() for some in outputs]
    weight = torch.cat(parts).contiguous()
    return Linear(weight, torch.cat([weights(f"{name}.bias", some) for some in outputs]))


class Norm:
    def __init__(self, weights, name, epsilon):
        self.weight, self.bias, self.epsilon = weights(f"{name}.weight"), weights(f"{name}.bias"), epsilon

    def __call__(self, x):
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.epsilon)


class Layer:
    """`qkv`, `output`, `up`, `down`, two norms; the widths of its heads stand in the model."""


def bert(config, weights, heads, inner):
    """A layer of BERT; `heads` and `inner` are the columns of this device."""
    for i in range(config["num_hidden_layers"]):
        base, layer = f"bert.encoder.layer.{i}", Layer()
        own = f"{base}.attention.self"
        layer.qkv = linear(weights, [f"{own}.query", f"{own}.key", f"{own}.value"], heads)
        layer.output = linear(weights, [f"{base}.attention.output.dense"], inputs=heads)
        layer.up = linear(weights, [f"{base}.intermediate.dense"], inner)
        layer.down = linear(weights, [f"{base}.output.dense"], inputs=inner)
        layer.norms = [
            Norm(weights, f"{base}.{part}.LayerNorm", config["layer_norm_eps"])
            for part in ("attention.output", "output")]
        yield layer


def distilbert(config, weights, heads, inner):
    for i in range(config["n_layers"]):
        base, layer = f"distilbert.transformer.layer.{i}", Layer()
        layer.qkv = linear(weights, [f"{base}.attention.{part}_lin" for part in "qkv"], heads)
        layer.output = linear(weights, [f"{base}.attention.out_lin"], inputs=heads)
        layer.up = linear(weights, [f"{base}.ffn.lin1"], inner)
        layer.down = linear(weights, [f"{base}.ffn.lin2"], inputs=inner)
        layer.norms = [
            Norm(weights, f"{base}.{part}_layer_norm", 1e-12) for part in ("sa", "output")]
        yield layer


def gpt2(config, weights, heads, inner):
    hidden = config["n_embd"]
    for i in range(config["n_layer"]):
        base, layer = f"transformer.h.{i}", Layer()
        three = [slice(at + heads.start, at + heads.stop) for at in (0, hidden, 2 * hidden)]
        layer.qkv = conv1d(weights, f"{base}.attn.c_attn", three)
        layer.output = conv1d(weights, f"{base}.attn.c_proj", inputs=heads)
        layer.up = conv1d(weights, f"{base}.mlp.c_fc", [inner])
        layer.down = conv1d(weights, f"{base}.mlp.c_proj", inputs=inner)
        layer.norms = [
            Norm(weights, f"{base}.{part}", config["layer_norm_epsilon"]) for part in ("ln_1", "ln_2")]
        yield layer


def opt(config, weights, heads, inner):
    for i in range(config["num_hidden_layers"]):
        base, layer = f"model.decoder.layers.{i}", Layer()
        layer.qkv = linear(weights, [f"{base}.self_attn.{part}_proj" for part in "qkv"], heads)
        layer.output = linear(weights, [f"{base}.self_attn.out_proj"], inputs=heads)
        layer.up = linear(weights, [f"{base}.fc1"], inner)
        layer.down = linear(weights, [f"{base}.fc2"], inputs=inner)
        layer.norms = [
            Norm(weights, f"{base}.{part}_layer_norm", 1e-5) for part in ("self_attn", "final")]
        yield layer


class Model:
    """A model, or this device's part of it.

    Rows are those of this device: all of them, unless the way is `sequence`.
    """

    def __init__(self, directory, way, rank, devices, tokens):
        config = json.loads((directory / "config.json").read_text())
        weights = Weights(directory)
        family = config["model_type"]
        self.way, self.rank, self.devices = way, rank, devices
        self.norm_before = family in ("gpt2", "opt")
        self.last_norm, self.after_two = None, 0
        if family == "bert":
            sizes, base, read = "num_attention_heads hidden_size intermediate_size", "bert.embeddings", bert
            self.words = weights(f"{base}.word_embeddings.weight")
            # All tokens of a text are of the first type.
            self.places = weights(f"{base}.position_embeddings.weight")
            self.places += weights(f"{base}.token_type_embeddings.weight", slice(0, 1))
            self.first_norm = Norm(weights, f"{base}.LayerNorm", config["layer_norm_eps"])
            self.activation = F.gelu
        elif family == "distilbert":
            sizes, base, read = "n_heads dim hidden_dim", "distilbert.embeddings", distilbert
            self.words = weights(f"{base}.word_embeddings.weight")
            self.places = weights(f"{base}.position_embeddings.weight")
            self.first_norm = Norm(weights, f"{base}.LayerNorm", 1e-12)
            self.activation = F.gelu
        elif family == "gpt2":
            sizes, read = "n_head n_embd n_inner", gpt2
            config["n_inner"] = config.get("n_inner") or 4 * config["n_embd"]
            self.words, self.places = weights("transformer.wte.weight"), weights("transformer.wpe.weight")
            self.last_norm = Norm(weights, "transformer.ln_f", config["layer_norm_epsilon"])
            self.activation = lambda x: F.gelu(x, approximate="tanh")
        elif family == "opt":
            sizes, base, read = "num_attention_heads hidden_size ffn_dim", "model.decoder", opt
            if not config["do_layer_norm_before"] or config["word_embed_proj_dim"] != config["hidden_size"]:
                sys.exit("error: an OPT with norms behind its blocks or narrow tables is not known here")
            self.words = weights(f"{base}.embed_tokens.weight")
            self.places, self.after_two = weights(f"{base}.embed_positions.weight"), 2
            self.last_norm = Norm(weights, f"{base}.final_layer_norm", 1e-5)
            self.activation = F.relu
        else:
            sys.exit(f"error: family {family!r} is not known here: bert, distilbert, gpt2 and opt are")
        heads, self.hidden, inner = (config[size] for size in sizes.split())
        self.width = self.hidden // heads
        own, columns = (0, heads), (0, inner)
        if way == "megatron":
            own, columns = shares(heads, devices)[rank], shares(inner, devices)[rank]
        self.heads = own[1] - own[0]
        start, end = self.rows(tokens)[rank]
        # For no rows nothing is packed.
        helps = end > start and packing_helps(end - start, self.hidden, columns[1] - columns[0])
        Linear.packs = end - start if helps else 0
        parts = slice(own[0] * self.width, own[1] * self.width), slice(*columns)
        self.layers = list(read(config, weights, *parts))
        self.room = self.places.shape[0] - self.after_two
        self.mask = (0, None)

    def rows(self, count):
        """Where the rows of each device begin and end."""
        if self.way == "sequence":
            return shares(count, self.devices)
        return [(0, count)] * self.devices

    def __call__(self, ids):
        """The mean of the last hidden states: at the first device."""
        all_rows = self.rows(len(ids))
        start, end = all_rows[self.rank]
        x = F.embedding(ids[start:end], self.words)
        x += self.places[self.after_two + start:self.after_two + end]
        if not self.norm_before:
            x = self.first_norm(x)
        for layer in self.layers:
            if self.norm_before:
                x = self.attention(layer, layer.norms[0](x), x, all_rows)
                x = self.mlp(layer, layer.norms[1](x), x)
            else:
                x = layer.norms[0](self.attention(layer, x, x, all_rows))
                x = layer.norms[1](self.mlp(layer, x, x))
        if self.last_norm is not None:
            x = self.last_norm(x)
        total = x.sum(0)
        if self.way == "sequence":
            dist.reduce(total, 0)
        return total / len(ids)

    def attention(self, layer, x, residual, all_rows):
        start, end = all_rows[self.rank]
        wide = self.heads * self.width
        query, both = layer.qkv(x).split([wide, 2 * wide], 1)
        if self.way == "sequence":
            both = self.gathered(both, all_rows)
        mask, causal = None, False
        if self.norm_before and self.way == "sequence":
            # Rows behind the last of ours are seen by none of ours.
            both, mask = both[:end], self.seen(start, end)
        elif self.norm_before:
            causal = True
        query = query.unflatten(1, (self.heads, self.width)).transpose(0, 1)
        key, value = both.unflatten(1, (2, self.heads, self.width)).permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, is_causal=causal)
        context = context[0].transpose(0, 1).reshape(end - start, wide)
        return self.summed(layer.output, context, residual)

    def mlp(self, layer, x, residual):
        return self.summed(layer.down, self.activation(layer.up(x)), residual)

    def summed(self, product, x, residual):
        """A product whose inputs are spread over the devices, and what is added to it once."""
        if self.way != "megatron":
            out = product(x)
        else:
            out = product.partial(x)
            dist.all_reduce(out)
            out += product.bias
        out += residual
        return out

    def gathered(self, part, all_rows):
        """All devices' rows of this one's. Gloo gathers parts of one size."""
        most = max(end - start for start, end in all_rows)
        own = part.contiguous()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros(most - len(own), own.shape[1])])
        gathered = own.new_empty(self.devices * most, own.shape[1])
        dist.all_gather_into_tensor(gathered, own)
        if all(end - start == most for start, end in all_rows):
            return gathered
        return torch.cat([
            gathered[rank * most:rank * most + end - start]
            for rank, (start, end) in enumerate(all_rows)])

    def seen(self, start, end):
        """What rows `start..end` see of rows `0..end`."""
        if self.mask[0] != (start, end):
            unseen = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
            self.mask = (start, end), torch.zeros(end - start, end).masked_fill_(unseen, -torch.inf)
        return self.mask[1]


def answers(model, devices):
    """Rank 0: answers lines."""
    for line in sys.stdin:
        begun = time.perf_counter_ns()
        ids = torch.tensor([int(word) for word in line.split()], dtype=torch.int32)
        if not 0 < len(ids) <= model.room:
            sys.exit(f"error: {len(ids)} tokens; the model takes 1 to {model.room}")
        if devices > 1:
            told = torch.zeros(1 + model.room, dtype=torch.int32)
            told[0] = len(ids)
            told[1:1 + len(ids)] = ids
            dist.broadcast(told, 0)
        mean = model(ids)
        took = time.perf_counter_ns() - begun
        print(json.dumps({"ns": took, "mean": mean.tolist()}), flush=True)
    if devices > 1:
        dist.broadcast(torch.zeros(1 + model.room, dtype=torch.int32), 0)


def follows(model):
    """The others: do what rank 0 is asked for."""
    while True:
        told = torch.zeros(1 + model.room, dtype=torch.int32)
        dist.broadcast(told, 0)
        count = int(told[0])
        if count == 0:
            return
        model(told[1:1 + count])


def main():
    if len(sys.argv) != 8 or sys.argv[2] not in ("single", "megatron", "sequence"):
        sys.exit(__doc__)
    directory, way, host = Path(sys.argv[1]), sys.argv[2], sys.argv[6]
    rank, devices, tokens, port = (int(sys.argv[at]) for at in (3, 4, 5, 7))
    if way == "single" and devices != 1:
        sys.exit(f"error: a single device, and {devices} were said")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if devices > 1:
        store = dist.TCPStore(
            host, port, devices, is_master=rank == 0, timeout=FOREVER, wait_for_workers=False)
        if rank == 0:
            print(f"at {store.port}", flush=True)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=devices, timeout=FOREVER)
    with torch.inference_mode():
        model = Model(directory, way, rank, devices, tokens)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            # What was read is given back first; then results take pages that they had before.
            libc.malloc_trim(0)
            libc.mallopt(MAPPING, 1 << 30)
            libc.mallopt(TRIM, NEVER)
        gc.freeze()
        gc.disable()
        if devices > 1:
            dist.barrier()
        if rank == 0:
            print("ready", "packed by oneDNN" if Linear.packs else "plain", flush=True)
            answers(model, devices)
        else:
            follows(model)
        if devices > 1:
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
