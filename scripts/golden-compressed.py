#!/usr/bin/env python3
"""Writes testdata/compressed: a Llama that compressed-tensors has packed in three ways, the values that its matrices
stand for, and the logits of a text.

    python3 -m venv /tmp/compressed
    /tmp/compressed/bin/pip install torch==2.15.0 transformers==5.24.0 compressed-tensors==0.20.1 safetensors==0.8.0
    /tmp/compressed/bin/python scripts/golden-compressed.py

The reference runs in float64 on codes times scales; the library itself would round each product to the type of the
scales. `values.f32` has the matrices of the first layer, in the order of their names, row by row.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

ROWS = 19
GROUPS = {
    # Groups of the default kind: a scale for 32 inputs.
    "group_0": dict(targets=["re:.*(q|k|v)_proj"], bits=4, symmetric=True, strategy="group", group_size=32),
    # A scale for each output.
    "group_1": dict(targets=["re:.*o_proj"], bits=8, symmetric=True, strategy="channel", group_size=None),
    # With zero points.
    "group_2": dict(targets=["re:.*(gate|up|down)_proj"], bits=4, symmetric=False, strategy="group", group_size=64),
}


def scheme(targets, bits, symmetric, strategy, group_size):
    weights = dict(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
    return dict(targets=targets, weights=weights)


def parameters(module):
    """Sets the scales and zero points by the smallest and largest values of each group."""
    args = module.quantization_scheme.weights
    rows, columns = module.weight.shape
    parts = module.weight.reshape(rows, -1, args.group_size or columns)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)


def dequantised(tensors, name, bits):
    """The values of a matrix in float64: codes minus zero points, times scales."""
    shape = tensors[f"{name}.weight_shape"].tolist()
    scale = tensors[f"{name}.weight_scale"].double()
    codes = unpack_from_int32(tensors[f"{name}.weight_packed"], bits, torch.Size(shape)).double()
    codes = codes.reshape(shape[0], scale.shape[1], -1)
    if f"{name}.weight_zero_point" in tensors:
        zero = tensors[f"{name}.weight_zero_point"]
        zero = unpack_from_int32(zero, bits, torch.Size([shape[0], scale.shape[1]]), packed_dim=0)
        codes = codes - zero.double()[..., None]
    return (codes * scale[..., None]).reshape(shape)


def main():
    out = Path(__file__).resolve().parent.parent / "testdata" / "compressed"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.manual_seed(20261129)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=64, tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.12)
    groups = {name: scheme(**group) for name, group in GROUPS.items()}
    wanted = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, wanted)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                parameters(module)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors")
    config.architectures, config.torch_dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(out)
    compressor.update_config(out)

    tensors = load_file(out / "model.safetensors")
    bits = lambda name: 8 if name.endswith("o_proj") else 4
    names = sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed"))
    values = {f"{name}.weight": dequantised(tensors, name, bits(name)) for name in names}
    first = [value.numpy().ravel() for name, value in values.items() if ".layers.0." in name]
    np.concatenate(first).astype("<f4").tofile(out / "values.f32")
    rest = {name: value.double() for name, value in tensors.items() if ".weight_" not in name}
    exact = transformers.LlamaForCausalLM(config).double()
    exact.load_state_dict(values | rest)
    ids = torch.tensor([[(3 + at * 7) % 90 for at in range(ROWS)]])
    with torch.no_grad():
        logits = exact.eval()(ids).logits[0]
    logits.numpy().astype("<f4").tofile(out / "logits.f32")


if __name__ == "__main__":
    main()
