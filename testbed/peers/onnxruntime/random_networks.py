#!/usr/bin/env python3
"""Random networks with what onnxruntime makes of them, as ONNX's own conformance tests lie in directories.

    random_networks.py COUNT SEED DIRECTORY

Each network has 3 to 14 nodes of the kinds that docs/networks.md lists, of odd sizes, with values that several nodes
read, and with several results. onnxruntime runs without optimisations, so that every node is computed as it stands.
A network is drawn again where onnxruntime does not run it, where a result is not finite, and where the last bits of the
inputs decide over the results: what follows from rounding alone says nothing about either side.
"""

import collections
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

# Versions of the operators: each changed what a node is written like.
OPSETS = [9, 10, 11, 13, 17, 18, 21, 22]
LEAST_NODES, MOST_NODES = 3, 14
# The most values that a tensor may have.
MAX_VALUES = 60_000
# How much inputs are changed, and how much results may then change, of the largest value.
CHANGE, CHANGED = 1e-6, 2e-5
MAX_RESULT = 1e5

SIMPLE = ["Abs", "Elu", "Erf", "HardSigmoid", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Softplus", "Tanh"]
SINCE = {"HardSwish": 14, "Mish": 18, "Erf": 9}


class Unfit(Exception):
    """What was drawn cannot be, and something else is."""


class Drawn:
    """A network while it is drawn."""

    def __init__(self, rng):
        self.rng = rng
        self.opset = int(rng.choice(OPSETS))
        self.nodes, self.stored, self.inputs = [], [], []
        self.shapes = {}
        self.read = collections.Counter()

    def one(self, choices):
        if not choices:
            raise Unfit
        return choices[int(self.rng.integers(len(choices)))]

    def number(self, least, most):
        if most < least:
            raise Unfit
        return int(self.rng.integers(least, most + 1))

    def chance(self, share):
        return self.rng.random() < share

    def name(self, kind="v"):
        return f"{kind}{len(self.nodes)}_{len(self.stored)}_{len(self.shapes)}"

    def floats(self, shape, scale=1.0, around=0.0):
        values = (around + scale * self.rng.standard_normal(shape)).astype(np.float32)
        return self.store(values)

    def wholes(self, values):
        return self.store(np.array(values, dtype=np.int64))

    def store(self, array):
        name = self.name("w")
        self.stored.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def input(self, shape):
        name = f"x{len(self.inputs)}"
        self.inputs.append((name, shape))
        self.shapes[name] = list(shape)

    def model(self, results):
        """The network with these results; shapes of results are left open."""
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in self.inputs]
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        graph = helper.make_graph(self.nodes, "random", values, made, self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def node(self, operator, reads, makes=1, **attributes):
        """A node behind the others, whose results get their shapes by inference. Gives their names."""
        names = [self.name(f"v{at}_") for at in range(makes)]
        self.nodes.append(helper.make_node(operator, reads, names, name=f"{operator}_{len(self.nodes)}", **attributes))
        try:
            found = onnx.shape_inference.infer_shapes(self.model(names), strict_mode=True, data_prop=True)
            shapes = {value.name: value.type.tensor_type for value in found.graph.output}
            for name in names:
                if shapes[name].elem_type != TensorProto.FLOAT or not shapes[name].HasField("shape"):
                    raise Unfit
                sides = [side.dim_value for side in shapes[name].shape.dim]
                if min(sides, default=1) < 1 or np.prod(sides) > MAX_VALUES:
                    raise Unfit
                self.shapes[name] = sides
        except (Unfit, onnx.shape_inference.InferenceError) as error:
            self.nodes.pop()
            for name in names:
                self.shapes.pop(name, None)
            raise Unfit from error
        for name in reads:
            self.read[name] += 1
        return names

    def value(self, fits=lambda shape: True):
        """A value whose shape fits: mostly one of the latest."""
        fitting = [name for name, shape in self.shapes.items() if fits(shape)]
        if not fitting:
            raise Unfit
        return fitting[-1] if self.chance(0.5) else self.one(fitting)

    def image(self):
        """A value with channels and one to three axes behind them."""
        return self.value(lambda shape: 3 <= len(shape) <= 5)

    def axis(self, shape):
        """An axis, counted from the end now and then."""
        axis = self.number(0, len(shape) - 1)
        return axis - len(shape) if self.chance(0.3) else axis


def windows(drawn, sides, dilated=True):
    """The attributes of windows over sides."""
    kernel = [drawn.number(1, min(5, side + 1)) for side in sides]
    of = dict(kernel_shape=kernel, strides=[drawn.number(1, 3) for _ in sides])
    if dilated and drawn.chance(0.4):
        of["dilations"] = [drawn.number(1, 3) for _ in sides]
    way = drawn.number(0, 4)
    if way == 0:
        of["auto_pad"] = drawn.one(["SAME_UPPER", "SAME_LOWER", "VALID"])
        # Dilations and a padding to the same size are not defined together in all versions.
        of.pop("dilations", None)
    elif way <= 3:
        of["pads"] = [drawn.number(0, side - 1) for side in kernel] + [drawn.number(0, side - 1) for side in kernel]
    if not of.get("auto_pad", "").startswith("SAME"):
        # onnxruntime reads beyond the end of an axis that a window does not fit into.
        pads, dilations = of.get("pads", [0] * 2 * len(sides)), of.get("dilations", [1] * len(sides))
        for at, side in enumerate(sides):
            if (kernel[at] - 1) * dilations[at] >= side + pads[at] + pads[at + len(sides)]:
                raise Unfit
    return of


def convolution(drawn):
    name = drawn.image()
    _, channels, *sides = drawn.shapes[name]
    groups = drawn.one([of for of in range(1, channels + 1) if channels % of == 0])
    groups = groups if drawn.chance(0.4) else 1
    made = groups * drawn.number(1, 17 if groups == 1 else 3)
    of = windows(drawn, sides)
    fan = channels // groups * int(np.prod(of["kernel_shape"]))
    reads = [name, drawn.floats([made, channels // groups, *of["kernel_shape"]], fan**-0.5)]
    if drawn.chance(0.6):
        reads.append(drawn.floats([made]))
    (result,) = drawn.node("Conv", reads, group=groups, **of)
    if drawn.chance(0.3):
        result = normalised(drawn, result)
    if drawn.chance(0.4):
        drawn.node(drawn.one(["Relu", "Sigmoid", "LeakyRelu", "Tanh"]), [result])


def normalised(drawn, name):
    channels = drawn.shapes[name][1]
    parts = [drawn.floats([channels], 0.3, 1.0), drawn.floats([channels]), drawn.floats([channels])]
    variance = drawn.store((0.5 + drawn.rng.random(channels)).astype(np.float32))
    return drawn.node("BatchNormalization", [name, *parts, variance], epsilon=drawn.one([1e-5, 1e-3]))[0]


def batch_norm(drawn):
    normalised(drawn, drawn.value(lambda shape: len(shape) >= 2))


def silu(drawn):
    name = drawn.value()
    function = drawn.one(["Sigmoid", "HardSigmoid"])
    attributes = dict(alpha=1 / 6, beta=0.5) if function == "HardSigmoid" else {}
    (gate,) = drawn.node(function, [name], **attributes)
    drawn.node("Mul", [name, gate] if drawn.chance(0.5) else [gate, name])


def transposed_convolution(drawn):
    name = drawn.image()
    _, channels, *sides = drawn.shapes[name]
    groups = drawn.one([of for of in range(1, channels + 1) if channels % of == 0])
    groups = groups if drawn.chance(0.3) else 1
    made = drawn.number(1, 7)
    kernel = [drawn.number(1, 4) for _ in sides]
    strides = [drawn.number(1, 3) for _ in sides]
    of = dict(kernel_shape=kernel, strides=strides, group=groups)
    if drawn.chance(0.3):
        of["dilations"] = [drawn.number(1, 2) for _ in sides]
    if drawn.chance(0.5):
        of["pads"] = [drawn.number(0, (side - 1) // 2) for side in kernel] * 2
    if drawn.chance(0.3):
        of["output_padding"] = [drawn.number(0, stride - 1) for stride in strides]
    reads = [name, drawn.floats([channels, made, *kernel], (channels * int(np.prod(kernel))) ** -0.5)]
    if drawn.chance(0.5):
        reads.append(drawn.floats([made * groups]))
    drawn.node("ConvTranspose", reads, **of)


def pool(drawn):
    name = drawn.image()
    sides = drawn.shapes[name][2:]
    operator = drawn.one(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"])
    if operator.startswith("Global"):
        drawn.node(operator, [name])
        return
    of = windows(drawn, sides, dilated=operator == "MaxPool" and drawn.opset >= 10)
    if operator == "AveragePool" and drawn.chance(0.5):
        of["count_include_pad"] = 1
    if drawn.opset >= 10 and drawn.chance(0.3) and "auto_pad" not in of:
        of["ceil_mode"] = 1
    drawn.node(operator, [name], **of)


def product(drawn):
    if drawn.chance(0.5):
        name = drawn.value(lambda shape: len(shape) >= 2)
        inner = drawn.shapes[name][-1]
        others = drawn.shapes[name][:-2] if drawn.chance(0.3) else []
        drawn.node("MatMul", [name, drawn.floats([*others, inner, drawn.number(1, 19)], inner**-0.5)])
        return
    name = drawn.value(lambda shape: len(shape) == 2)
    of = dict(transA=drawn.number(0, 1), transB=drawn.number(0, 1))
    rows, inner = drawn.shapes[name][:: -1 if of["transA"] else 1]
    columns = drawn.number(1, 19)
    weights = drawn.floats([columns, inner] if of["transB"] else [inner, columns], inner**-0.5)
    reads = [name, weights]
    if drawn.opset < 11 or drawn.chance(0.6):
        reads.append(drawn.floats(drawn.one([[columns], [rows, columns], [1, columns], [rows, 1]])))
    if drawn.chance(0.4):
        of.update(alpha=0.5, beta=1.5)
    drawn.node("Gemm", reads, **of)


def two_values(drawn):
    """The product of two values that are both computed: of each with its own transpose."""
    name = drawn.value(lambda shape: len(shape) >= 2 and shape[-2] <= 64)
    order = list(range(len(drawn.shapes[name])))
    order[-2:] = order[-1], order[-2]
    (turned,) = drawn.node("Transpose", [name], perm=order)
    drawn.node("MatMul", [name, turned] if drawn.chance(0.5) else [turned, name])


def local_response(drawn):
    name = drawn.value(lambda shape: len(shape) == 4)
    drawn.node("LRN", [name], size=drawn.one([1, 3, 5]), alpha=0.1, beta=0.75, bias=1.0)


def softmax(drawn):
    name = drawn.value()
    drawn.node(drawn.one(["Softmax", "LogSoftmax"]), [name], axis=drawn.axis(drawn.shapes[name]))


def function(drawn):
    name = drawn.value()
    operator = drawn.one(SIMPLE + list(SINCE) + ["Clip", "Floor", "Ceil", "Exp", "Log", "Sqrt", "Reciprocal"])
    if SINCE.get(operator, 0) > drawn.opset:
        raise Unfit
    if operator == "Clip":
        if drawn.opset < 11:
            drawn.node("Clip", [name], min=-0.5, max=0.75)
        else:
            least, most = (drawn.store(np.float32(bound)) for bound in (-0.5, 0.75))
            drawn.node("Clip", drawn.one([[name, least, most], [name, least], [name, "", most]]))
        return
    if operator in ("Log", "Sqrt", "Reciprocal"):
        # Of numbers above a half.
        (name,) = drawn.node("Abs", [name])
        (name,) = drawn.node("Add", [name, drawn.store(np.float32(0.5))])
    attributes = dict(alpha=0.3) if operator in ("Elu", "LeakyRelu") and drawn.chance(0.5) else {}
    drawn.node(operator, [name], **attributes)


def repeated(drawn, shape):
    """A shape that is repeated along axes to `shape`."""
    sides = [1 if drawn.chance(0.4) else side for side in shape]
    return sides[drawn.number(0, len(sides)) if drawn.chance(0.4) else 0 :]


def arithmetic(drawn):
    name = drawn.value()
    operator = drawn.one(["Add", "Sub", "Mul", "Div", "Pow", "PRelu"])
    shape = drawn.shapes[name]
    if operator == "Pow":
        (name,) = drawn.node("Abs", [name])
        drawn.node("Pow", [name, drawn.store(np.float32(drawn.one([2.0, 0.5, 3.0, 1.5])))])
    elif operator == "PRelu":
        slopes = [shape[1], *[1] * (len(shape) - 2)] if len(shape) >= 2 else shape
        drawn.node("PRelu", [name, drawn.floats(slopes, 0.3)])
    elif operator == "Div" or drawn.chance(0.5):
        other = drawn.floats(repeated(drawn, shape), 0.1, 1.0)
        drawn.node(operator, [name, other] if operator == "Div" or drawn.chance(0.7) else [other, name])
    else:
        # Another value whose axes fit: its own, of length 1, or fewer.
        def fits(other):
            return all(a == b or 1 in (a, b) for a, b in zip(reversed(shape), reversed(other)))

        drawn.node(operator, [name, drawn.value(fits)])


def several(drawn):
    name = drawn.value()
    shape = drawn.shapes[name]
    others = [other for other, of in drawn.shapes.items() if of == shape and other != name]
    reads = [name, *others[-2:]] + ([drawn.floats(repeated(drawn, shape))] if drawn.chance(0.6) else [])
    drawn.node(drawn.one(["Sum", "Max", "Min"]), reads)


def reduction(drawn):
    name = drawn.value()
    shape = drawn.shapes[name]
    operator = drawn.one(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"])
    axes = sorted({drawn.number(0, len(shape) - 1) for _ in range(drawn.number(1, 2))})
    reads, attributes = [name], dict(keepdims=drawn.number(0, 1))
    if drawn.opset >= (13 if operator == "ReduceSum" else 18):
        reads.append(drawn.wholes(axes))
    else:
        attributes["axes"] = axes
    drawn.node(operator, reads, **attributes)


def concatenation(drawn):
    name = drawn.value()
    shape = drawn.shapes[name]
    axis = drawn.number(0, len(shape) - 1)

    def fits(other):
        return len(other) == len(shape) and all(
            a == b for at, (a, b) in enumerate(zip(shape, other)) if at != axis
        )

    names = [drawn.value(fits) for _ in range(drawn.number(1, 2))] + [name]
    if drawn.chance(0.3):
        names.append(drawn.floats([3 if at == axis else side for at, side in enumerate(shape)]))
    drawn.node("Concat", names, axis=axis - len(shape) if drawn.opset >= 11 and drawn.chance(0.3) else axis)


def split(drawn):
    name = drawn.value(lambda shape: max(shape, default=0) >= 2)
    shape = drawn.shapes[name]
    axis = drawn.one([at for at, side in enumerate(shape) if side >= 2])
    first = drawn.number(1, shape[axis] - 1)
    parts = [first, shape[axis] - first]
    if parts[1] >= 2 and drawn.chance(0.4):
        parts[1:] = [1, parts[1] - 1]
    if drawn.opset >= 13:
        drawn.node("Split", [name, drawn.wholes(parts)], len(parts), axis=axis)
    else:
        drawn.node("Split", [name], len(parts), axis=axis, split=parts)


def part(drawn):
    name = drawn.value()
    shape = drawn.shapes[name]
    axes = sorted({drawn.number(0, len(shape) - 1) for _ in range(drawn.number(1, 2))})
    starts, ends, steps = [], [], []
    for axis in axes:
        side = shape[axis]
        start = drawn.number(0, side - 1)
        back = drawn.opset >= 10 and drawn.chance(0.3)
        starts.append(start - side if drawn.chance(0.3) else start)
        ends.append(-side - 1 if back else drawn.one([start + 1, side, 2**31 - 1]))
        steps.append(-drawn.number(1, 2) if back else drawn.number(1, 2))
    if drawn.opset < 10:
        drawn.node("Slice", [name], starts=starts, ends=ends, axes=axes)
    else:
        drawn.node("Slice", [name, *(drawn.wholes(of) for of in (starts, ends, axes, steps))])


def gather(drawn):
    name = drawn.value()
    axis = drawn.axis(drawn.shapes[name])
    side = drawn.shapes[name][axis]
    least = -side if drawn.opset >= 11 else 0
    shape = drawn.one([[], [1], [3], [2, 2]])
    indices = drawn.store(drawn.rng.integers(least, side, shape).astype(np.int64))
    drawn.node("Gather", [name, indices], axis=axis)


def transpose(drawn):
    name = drawn.value()
    drawn.node("Transpose", [name], perm=[int(axis) for axis in drawn.rng.permutation(len(drawn.shapes[name]))])


def pad(drawn):
    name = drawn.value(lambda shape: len(shape) >= 2)
    shape = drawn.shapes[name]
    mode = drawn.one(["constant", "edge", "reflect"])
    most = [min(2, side - 1) if mode == "reflect" else 2 for side in shape]
    # A batch stays as it is.
    pads = [0 if at == 0 else drawn.number(0, of) for _ in range(2) for at, of in enumerate(most)]
    if drawn.opset < 11:
        drawn.node("Pad", [name], mode=mode, pads=pads, **(dict(value=0.5) if mode == "constant" else {}))
    else:
        value = [drawn.store(np.float32(0.5))] if mode == "constant" and drawn.chance(0.5) else []
        drawn.node("Pad", [name, drawn.wholes(pads), *value], mode=mode)


def expand(drawn):
    name = drawn.value(lambda shape: 1 in shape)
    shape = [drawn.number(1, 4) if side == 1 else side for side in drawn.shapes[name]]
    drawn.node("Expand", [name, drawn.wholes([2, *shape] if drawn.chance(0.2) else shape)])


def resize(drawn):
    name = drawn.value(lambda shape: len(shape) == 4)
    shape = drawn.shapes[name]
    scales = np.array([1, 1, drawn.one([0.5, 1.5, 2, 3]), drawn.one([0.6, 1, 2, 2.5])], dtype=np.float32)
    mode = drawn.one(["nearest", "linear"])
    if drawn.opset <= 10:
        scales = np.array([1, 1, drawn.number(1, 3), drawn.number(1, 3)], dtype=np.float32)
        drawn.node("Upsample" if drawn.opset == 9 else "Resize", [name, drawn.store(scales)], mode=mode)
        return
    mode = drawn.one(["nearest", "linear", "cubic"])
    how = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    of = dict(mode=mode, coordinate_transformation_mode=drawn.one(how))
    if mode == "nearest":
        of["nearest_mode"] = drawn.one(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
    if mode == "cubic":
        of["cubic_coeff_a"] = drawn.one([-0.75, -0.5])
    nothing = "" if drawn.opset >= 13 else drawn.store(np.zeros(0, np.float32))
    if drawn.chance(0.5):
        sizes = [*shape[:2], drawn.number(1, 2 * shape[2]), drawn.number(1, 2 * shape[3])]
        none = "" if drawn.opset >= 13 else drawn.store(np.zeros(0, np.float32))
        drawn.node("Resize", [name, nothing, none, drawn.wholes(sizes)], **of)
    else:
        if "align_corners" in of.values() and any(side * scale % 1 for side, scale in zip(shape, scales)):
            # Whether the last entry is that of the whole length, as onnxruntime has it, or of what was asked for, as ONNX's
            # own tests do.
            raise Unfit
        drawn.node("Resize", [name, nothing, drawn.store(scales)], **of)


def view(drawn):
    name = drawn.value()
    shape = drawn.shapes[name]
    way = drawn.one(["Reshape", "Computed", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Cast"])
    axes = {"Squeeze": [at for at, side in enumerate(shape) if side == 1][:2], "Unsqueeze": [drawn.number(0, len(shape))]}
    if way == "Reshape":
        cut = drawn.number(0, len(shape))
        sizes = drawn.one([[int(np.prod(shape[:cut])), -1], [-1], [0, -1], [0, 1, -1] if len(shape) > 1 else [1, -1]])
        drawn.node("Reshape", [name, drawn.wholes(sizes)])
    elif way == "Computed":
        computed_shape(drawn, name)
    elif way == "Flatten":
        drawn.node("Flatten", [name], axis=drawn.number(0, len(shape)))
    elif way in axes:
        if not axes[way] or len(shape) > 5:
            raise Unfit
        if drawn.opset >= 13:
            drawn.node(way, [name, drawn.wholes(axes[way])])
        else:
            drawn.node(way, [name], axes=axes[way])
    elif way == "Cast":
        drawn.node("Cast", [name], to=TensorProto.FLOAT)
    else:
        drawn.node(way, [name])


def computed_shape(drawn, name):
    """A reshape by what other nodes work out, as PyTorch exports it."""
    before = list(drawn.nodes)
    (shape, entry, parts, whole) = (drawn.name(f"s{at}_") for at in range(4))
    index, rest = drawn.store(np.array(0, dtype=np.int64)), drawn.wholes([-1])
    drawn.nodes.append(helper.make_node("Shape", [name], [shape]))
    drawn.nodes.append(helper.make_node("Gather", [shape, index], [entry], axis=0))
    if drawn.opset >= 13:
        drawn.nodes.append(helper.make_node("Unsqueeze", [entry, drawn.wholes([0])], [parts]))
    else:
        drawn.nodes.append(helper.make_node("Unsqueeze", [entry], [parts], axes=[0]))
    drawn.nodes.append(helper.make_node("Concat", [parts, rest], [whole], axis=0))
    try:
        drawn.node("Reshape", [name, whole])
    except Unfit:
        drawn.nodes = before
        raise


# How often each kind is drawn.
KINDS = {
    convolution: 6, transposed_convolution: 1, pool: 2, batch_norm: 1, silu: 1, product: 2, two_values: 1,
    local_response: 1, softmax: 1, function: 4, arithmetic: 4, several: 1, reduction: 2, concatenation: 2, split: 2,
    part: 2, gather: 1, transpose: 2, pad: 1, expand: 1, resize: 2, view: 3,
}  # fmt: skip


def draw(rng):
    """A network, the names of its results, and inputs."""
    drawn = Drawn(rng)
    kinds = [kind for kind, often in KINDS.items() for _ in range(often)]
    for _ in range(drawn.number(1, 2)):
        axes = drawn.one([2, 2, 2, 2, 1, 3])
        most = {1: 41, 2: 19, 3: 7}[axes]
        drawn.input([drawn.one([1, 1, 1, 2]), drawn.number(1, 17), *(drawn.number(1, most) for _ in range(axes))])
    if drawn.chance(0.3):
        drawn.input([drawn.number(1, 5), drawn.number(1, 33)])
    wanted, tries = drawn.number(LEAST_NODES, MOST_NODES), 0
    while len(drawn.nodes) < wanted:
        tries += 1
        if tries > 200:
            raise Unfit
        try:
            drawn.one(kinds)(drawn)
        except Unfit:
            continue
    # Some kinds are of several nodes.
    if len(drawn.nodes) > MOST_NODES:
        raise Unfit
    computed = [name for name in drawn.shapes if name not in dict(drawn.inputs)]
    results = [name for name in computed if not drawn.read[name]]
    others = [name for name in computed if drawn.read[name]]
    if others and drawn.chance(0.3):
        results.append(drawn.one(others))
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in drawn.inputs}
    return drawn, results, inputs


def session(model):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def computed(model, results, inputs, rng):
    """What onnxruntime computes, or why the network is drawn again."""
    try:
        running = session(model)
        found = running.run(results, inputs)
        changed = {
            name: (value * (1 + CHANGE * rng.standard_normal(value.shape))).astype(np.float32)
            for name, value in inputs.items()
        }
        others = running.run(results, changed)
    except Exception:  # onnxruntime has errors of many types, which all say that it does not run this.
        return None, "onnxruntime does not run it"
    for one, other in zip(found, others):
        if one.dtype != np.float32 or not np.isfinite(one).all() or np.abs(one).max(initial=0) > MAX_RESULT:
            return None, "a result is not finite, or too large"
        if np.abs(one - other).max(initial=0) > CHANGED * np.abs(one).max(initial=0):
            return None, "the last bits of the inputs decide"
    return found, None


def write(model, inputs, found, directory):
    data = directory / "test_data_set_0"
    data.mkdir(parents=True)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    for kind, arrays in (("input", inputs), ("output", found)):
        for at, array in enumerate(arrays):
            (data / f"{kind}_{at}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())


def main():
    count, seed, directory = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    again, kinds, nodes = collections.Counter(), collections.Counter(), 0
    for number in range(count):
        # Each network by a seed of its own, so that one can be drawn alone.
        rng = np.random.default_rng([seed, number])
        while True:
            try:
                drawn, results, inputs = draw(rng)
            except Unfit:
                again["nothing fitted"] += 1
                continue
            model = drawn.model(results)
            found, why = computed(model, results, inputs, rng)
            if found is not None:
                break
            again[why] += 1
        kinds.update({node.op_type for node in model.graph.node})
        nodes += len(model.graph.node)
        write(model, list(inputs.values()), found, directory / f"{number:04}")
    print(f"{count} networks of {nodes} nodes by seed {seed}; drawn again: {dict(again)}", file=sys.stderr)
    print("kinds: " + ", ".join(f"{kind} {often}" for kind, often in sorted(kinds.items())), file=sys.stderr)


if __name__ == "__main__":
    main()
