"""Small ONNX graphs that the export tests share, and factors that fit them (min/max of real runs)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from amct.export.onnx.layer_lookup import LayerBinding
from amct.model.kinds import LayerKind
from amct.numerics.qparams import Observed
from amct.record import LayerRecord
from amct.record.conversion import layer_qparams

KINDS = {
    "Conv": LayerKind.CONV,
    "ConvTranspose": LayerKind.CONV_TRANSPOSE,
    "Gemm": LayerKind.LINEAR,
    "MatMul": LayerKind.LINEAR,
    "AveragePool": LayerKind.AVERAGE_POOL,
    "LSTM": LayerKind.LSTM,
    "GRU": LayerKind.GRU,
}


@dataclass
class Net:
    """A graph under construction; layers are the nodes named in ``layers``."""

    seed: int = 0
    opset: int = 17
    nodes: list = field(default_factory=list)
    initializers: list = field(default_factory=list)
    inputs: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    layers: dict = field(default_factory=dict)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)

    def input(self, name, *shape, dtype=TensorProto.FLOAT):
        self.inputs[name] = (shape, dtype)
        return name

    def weight(self, name, *shape, spread=1.0, dtype=np.float32):
        fan_in = max(1, int(np.prod(shape[1:])))
        values = self.random.standard_normal(shape) * spread / np.sqrt(fan_in)
        return self.constant(name, values.astype(dtype))

    def constant(self, name, value):
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op_type, name, *inputs, outputs=None, **attributes):
        outputs = outputs or [f"{name}_out"]
        node = helper.make_node(op_type, list(inputs), outputs, name=f"node_{name}", **attributes)
        self.nodes.append(node)
        return outputs[0]

    def layer(self, op_type, name, *inputs, outputs=None, **attributes):
        self.layers[name] = op_type
        return self.add(op_type, name, *inputs, outputs=outputs, **attributes)

    def model(self, *outputs, dtype=TensorProto.FLOAT):
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in self.inputs.items()],
            [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
            self.initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def bindings(self):
        return [
            LayerBinding(layer=name, kind=KINDS[op_type], node=f"node_{name}") for name, op_type in self.layers.items()
        ]

    def data(self, seed=1):
        random = np.random.default_rng(seed)
        return {
            name: random.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind))
            for name, (shape, kind) in self.inputs.items()
        }


def run(model, feeds, outputs=None, optimize=True):
    """Results by name, from onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    payload = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    names = outputs or [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def run_all(model, feeds):
    """Every float tensor of a model by name, computed by onnxruntime without optimization."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    known = {value.name for value in wide.graph.output}
    for value in model.graph.value_info:
        if value.name not in known:
            wide.graph.output.append(value)
    return run(wide, feeds, optimize=False) | dict(feeds)


def quantized(  # the terms are those of a record
    *, scale_d, offset_d, scale_w, act_bits=8, wts_bits=8, scale_h=None, offset_h=None, scale_r=(), balance=None
):
    """The parameters of a layer."""
    entry = LayerRecord(
        scale_d=scale_d,
        offset_d=offset_d,
        scale_w=tuple(np.asarray(scale_w, np.float64).tolist()),
        act_type=f"INT{act_bits}",
        wts_type=f"INT{wts_bits}",
        scale_h=scale_h,
        offset_h=offset_h,
        scale_r=tuple(np.asarray(scale_r, np.float64).tolist()),
        tensor_balance_factor=() if balance is None else tuple(np.asarray(balance, np.float64).tolist()),
    )
    return layer_qparams(entry)


def changed(layer, **terms):
    """The parameters of a layer with other ones for some terms."""
    known = {
        "scale_d": layer.input.step,
        "offset_d": layer.input.zero_point,
        "act_bits": layer.input.bits,
        "scale_w": layer.scale_w,
        "wts_bits": layer.weight.bits,
        "balance": layer.balance,
    }
    if layer.hidden is not None:
        hidden = {"scale_h": layer.hidden.step, "offset_h": layer.hidden.zero_point}
        known |= {**hidden, "scale_r": layer.weights[1].scale}
    return quantized(**(known | terms))


def channels(scale, zero_point, *, balance=None, mean=None):
    """The parameters of an observed layer input, with numbers by channel."""
    by_channel = {name: torch.tensor(each) for name, each in (("balance", balance), ("mean", mean)) if each is not None}
    return replace(Observed.of(scale, zero_point), **by_channel)


def tensor_factors(values, *, bits=8, symmetric=False):
    """Min/max factors: (scale, zero point) of ``bits`` signed bits that cover the values and zero."""
    levels = 2**bits - 1
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    if symmetric:
        return Observed.of(max(abs(low), abs(high)) / (2 ** (bits - 1) - 1), 0, bits)
    scale = (high - low) / levels or 1.0
    return Observed.of(scale, round(-low / scale) - 2 ** (bits - 1), bits)


def weight_scales(rows, bits=8):
    """One scale per row of a matrix, so that the largest value is the largest integer."""
    largest = np.abs(rows).max(axis=1)
    return np.where(largest > 0, largest / (2 ** (bits - 1) - 1), 1).astype(np.float32)


def rows_of(op_type, weight, groups=1, transposed=True):
    """The weight as [Cout, -1]."""
    if op_type == "ConvTranspose":
        per_group = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        return np.swapaxes(per_group, 1, 2).reshape(groups * weight.shape[1], -1)
    if op_type == "MatMul" or (op_type == "Gemm" and not transposed):
        return weight.T
    return weight.reshape(weight.shape[0], -1)


def calibrate(net, model, *, act_bits=8, wts_bits=8, symmetric=False, per_tensor=(), seed=1):
    """Factors of every layer and of every float tensor, from one batch."""
    values = run_all(model, net.data(seed))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    factors = {}
    for name, op_type in net.layers.items():
        node = nodes[f"node_{name}"]
        settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        data = tensor_factors(values[node.input[0]], bits=act_bits, symmetric=symmetric)
        extra = {}
        if op_type == "AveragePool":
            scales = np.ones(1, np.float32)
        elif op_type in ("LSTM", "GRU"):
            scales = weight_scales(arrays[node.input[1]][0], wts_bits)
            hidden = tensor_factors(values[node.output[0]], bits=act_bits)
            extra = {
                "scale_h": hidden.step,
                "offset_h": hidden.zero_point,
                "scale_r": weight_scales(arrays[node.input[2]][0], wts_bits),
            }
        else:
            rows = rows_of(op_type, arrays[node.input[1]], settings.get("group", 1), settings.get("transB", 0))
            scales = weight_scales(rows.astype(np.float32), wts_bits)
            if name in per_tensor:
                scales = scales.max(keepdims=True)
        factors[name] = quantized(
            scale_d=data.step,
            offset_d=data.zero_point,
            act_bits=act_bits,
            scale_w=scales,
            wts_bits=wts_bits,
            **extra,
        )
    tensors = {name: tensor_factors(value) for name, value in values.items() if np.asarray(value).dtype == np.float32}
    return factors, tensors


# -- the nets ---------------------------------------------------------------------------------------------------------


def residual(opset=17, seed=0):
    """conv → relu → conv, added to the input's own convolution, relu; the shape of a ResNet block."""
    net = Net(seed=seed, opset=opset)
    x = net.input("x", 2, 3, 8, 8)
    pads = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    stem = net.layer("Conv", "stem", x, net.weight("stem.w", 8, 3, 3, 3), net.weight("stem.b", 8), **pads)
    stem = net.add("Relu", "stem_relu", stem)
    inner = net.layer("Conv", "first", stem, net.weight("first.w", 8, 8, 3, 3), net.weight("first.b", 8), **pads)
    inner = net.add("Relu", "first_relu", inner)
    inner = net.layer("Conv", "second", inner, net.weight("second.w", 8, 8, 3, 3), **pads)
    total = net.add("Relu", "join_relu", net.add("Add", "join", inner, stem))
    pooled = net.add("GlobalAveragePool", "gap", total)
    flat = net.add("Flatten", "flat", pooled)
    net.layer(
        "Gemm",
        "fc",
        flat,
        net.weight("fc.w", 5, 8),
        net.weight("fc.b", 5),
        outputs=["y"],
        transB=1,
        alpha=1.0,
        beta=1.0,
    )
    return net, net.model("y")


def grouped():
    """Grouped and depthwise convolution, dilation and stride."""
    net = Net(seed=1)
    x = net.input("x", 2, 8, 9, 9)
    y = net.layer(
        "Conv", "grp", x, net.weight("grp.w", 12, 4, 3, 3), net.weight("grp.b", 12), group=2, pads=[1, 1, 1, 1]
    )
    y = net.add("Relu", "relu", y)
    y = net.layer("Conv", "dw", y, net.weight("dw.w", 12, 1, 3, 3), group=12, pads=[2, 2, 2, 2], dilations=[2, 2])
    net.layer("Conv", "pw", y, net.weight("pw.w", 6, 12, 1, 1), net.weight("pw.b", 6), strides=[2, 2], outputs=["y"])
    return net, net.model("y")


def transposed():
    """ConvTranspose, plain and grouped."""
    net = Net(seed=2)
    x = net.input("x", 2, 6, 5, 5)
    y = net.layer("ConvTranspose", "up", x, net.weight("up.w", 6, 8, 2, 2), net.weight("up.b", 8), strides=[2, 2])
    y = net.add("Relu", "relu", y)
    net.layer(
        "ConvTranspose",
        "upg",
        y,
        net.weight("upg.w", 8, 3, 3, 3),
        net.weight("upg.b", 6),
        strides=[2, 2],
        group=2,
        outputs=["y"],
    )
    return net, net.model("y")


def linear():
    """Gemm both ways round, MatMul, MatMul + Add on either side, three dimensions."""
    net = Net(seed=3)
    x = net.input("x", 4, 10)
    y = net.layer("Gemm", "fc1", x, net.weight("fc1.w", 12, 10), net.weight("fc1.b", 12), transB=1)
    y = net.add("Relu", "relu1", y)
    y = net.layer("Gemm", "fc2", y, net.weight("fc2.w", 12, 9), net.weight("fc2.b", 9))
    y = net.layer("MatMul", "bare", y, net.weight("bare.w", 9, 8))
    y = net.add("Unsqueeze", "three", y, net.constant("axes", np.array([1])))
    y = net.layer("MatMul", "biased", y, net.weight("biased.w", 8, 6))
    y = net.add("Add", "biased_add", y, net.weight("biased.b", 6))
    y = net.layer("MatMul", "swapped", y, net.weight("swapped.w", 6, 4))
    net.add("Add", "swapped_add", net.weight("swapped.b", 4), y, outputs=["y"])
    return net, net.model("y")


def pooled():
    """Average pooling with a Pad in front, and plain with padding inside."""
    net = Net(seed=4)
    x = net.input("x", 2, 4, 8, 8)
    y = net.layer("Conv", "conv", x, net.weight("conv.w", 4, 4, 3, 3), net.weight("conv.b", 4))
    y = net.add("Pad", "frame", y, net.constant("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1])))
    y = net.layer("AveragePool", "pool", y, kernel_shape=[2, 2], strides=[2, 2])
    net.layer(
        "AveragePool",
        "pool2",
        y,
        kernel_shape=[2, 2],
        strides=[1, 1],
        pads=[1, 1, 1, 1],
        count_include_pad=1,
        outputs=["y"],
    )
    return net, net.model("y")


def one_and_three_dimensions():
    """Conv1d and Conv3d."""
    net = Net(seed=5)
    a, b = net.input("a", 2, 4, 12), net.input("b", 2, 2, 4, 6, 6)
    y = net.layer("Conv", "c1", a, net.weight("c1.w", 6, 4, 3), net.weight("c1.b", 6), pads=[1, 1])
    y = net.add("Relu", "relu1", y)
    net.layer("Conv", "c1b", y, net.weight("c1b.w", 3, 6, 3), outputs=["y1"])
    z = net.layer("Conv", "c3", b, net.weight("c3.w", 4, 2, 3, 3, 3), net.weight("c3.b", 4), pads=[1] * 6)
    z = net.add("Relu", "relu3", z)
    net.layer("Conv", "c3b", z, net.weight("c3b.w", 2, 4, 1, 1, 1), outputs=["y3"])
    return net, net.model("y1", "y3")


def recurrent(kind="LSTM", state=True):
    """LSTM or GRU, with or without an initial state, and a Gemm behind it."""
    net = Net(seed=6)
    gates = {"LSTM": 4, "GRU": 3}[kind]
    x = net.input("x", 5, 2, 8)
    states = ["", net.input("h", 1, 2, 6)] if state else []
    if state and kind == "LSTM":
        states.append(net.input("c", 1, 2, 6))
    outputs = ["rnn_out", "rnn_h"] + (["rnn_c"] if kind == "LSTM" else [])
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    net.layer(
        kind,
        "rnn",
        x,
        net.weight("rnn.w", 1, gates * 6, 8, spread=3),
        net.weight("rnn.r", 1, gates * 6, 6, spread=3),
        net.weight("rnn.b", 1, 2 * gates * 6),
        *states,
        outputs=outputs,
        hidden_size=6,
        **extra,
    )
    last = net.add("Squeeze", "last", "rnn_h", net.constant("axis", np.array([0])))
    net.layer("Gemm", "fc", last, net.weight("fc.w", 4, 6), net.weight("fc.b", 4), transB=1, outputs=["y"])
    return net, net.model("y")


NETS = {
    "residual": residual,
    "grouped": grouped,
    "transposed": transposed,
    "linear": linear,
    "pooled": pooled,
    "conv1d3d": one_and_three_dimensions,
    "lstm": lambda: recurrent("LSTM"),
    "lstm_no_state": lambda: recurrent("LSTM", state=False),
    "gru": lambda: recurrent("GRU"),
    "gru_no_state": lambda: recurrent("GRU", state=False),
}
