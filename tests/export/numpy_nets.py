"""The operators of the small nets in plain NumPy: an executor for float graphs, and one for the Ascend dialect.

Written from the ONNX operator descriptions only; shares no code with the exporters. Works on integers too.
"""

from __future__ import annotations

import numpy as np
from onnx import helper, numpy_helper


def attributes_of(node):
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def constants_of(model):
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return values


def conv(x, w, *, strides=None, pads=None, dilations=None, group=1, **_):
    rank = w.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = pads or [0] * 2 * rank
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, spans, axis=tuple(range(2, 2 + rank)))
    windows = windows[(slice(None), slice(None), *[slice(None, None, s) for s in strides])]
    windows = windows[(..., *[slice(None, None, d) for d in dilations])]
    results = []
    for part, filters in zip(np.split(windows, group, 1), np.split(w, group, 0), strict=True):
        axes = [1, *range(2 + rank, 2 + 2 * rank)]
        results.append(np.moveaxis(np.tensordot(part, filters, (axes, [1, *range(2, 2 + rank)])), -1, 1))
    return np.concatenate(results, 1)


def conv_transpose(x, w, *, strides=None, group=1, **_):
    rank = w.ndim - 2
    strides = strides or [1] * rank
    sizes = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, w.shape[2:], strict=True)]
    results = []
    for part, filters in zip(np.split(x, group, 1), np.split(w, group, 0), strict=True):
        y = np.zeros((x.shape[0], w.shape[1], *sizes), dtype=np.result_type(x, w))
        for place in np.ndindex(*w.shape[2:]):
            where = [slice(p, p + (n - 1) * s + 1, s) for p, n, s in zip(place, x.shape[2:], strides, strict=True)]
            y[(slice(None), slice(None), *where)] += np.einsum("nc...,cd->nd...", part, filters[(..., *place)])
        results.append(y)
    return np.concatenate(results, 1)


def average_pool(x, *, kernel_shape, strides=None, pads=None, **_):
    """Padding counts as zeros (count_include_pad), which the nets here always ask for where they pad."""
    rank = len(kernel_shape)
    pads, strides = pads or [0] * 2 * rank, strides or [1] * rank
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel_shape, axis=tuple(range(2, 2 + rank)))
    windows = windows[(slice(None), slice(None), *[slice(None, None, s) for s in strides])]
    total = windows.sum(tuple(range(-rank, 0)))
    return total / np.asarray(np.prod(kernel_shape), dtype=np.result_type(x, np.float32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, w, r, b, h, c):
    hidden = r.shape[2]
    for step in x:
        gates = step @ w[0].T + h @ r[0].T + b[0, : 4 * hidden] + b[0, 4 * hidden :]
        i, o, f, g = np.split(gates, 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    return h[np.newaxis]


def gru(x, w, r, b, h):
    hidden = r.shape[2]
    wb, rb = b[0, : 3 * hidden], b[0, 3 * hidden :]
    for step in x:
        wz, wr, wh = np.split(step @ w[0].T + wb, 3, 1)
        rz, rr, rh = np.split(h @ r[0].T + rb, 3, 1)
        z, reset = sigmoid(wz + rz), sigmoid(wr + rr)
        h = (1 - z) * np.tanh(wh + reset * rh) + z * h
    return h[np.newaxis]


def pad(x, pads, value=0):
    half = len(pads) // 2
    return np.pad(x, list(zip(pads[:half], pads[half:], strict=True)), constant_values=value)


def plain(node, inputs):
    """Operators that are no layers."""
    settings = attributes_of(node)
    x = inputs[0]
    if node.op_type == "Relu":
        return np.maximum(x, np.zeros((), x.dtype))
    if node.op_type == "Add":
        return x + inputs[1]
    if node.op_type == "Mul":
        return x * inputs[1]
    if node.op_type == "GlobalAveragePool":
        return x.mean(tuple(range(2, x.ndim)), keepdims=True, dtype=x.dtype)
    if node.op_type == "Flatten":
        return x.reshape(x.shape[0], -1)
    if node.op_type == "Reshape":
        return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(inputs[1])])
    if node.op_type == "Unsqueeze":
        return np.expand_dims(x, tuple(inputs[1]))
    if node.op_type == "Squeeze":
        return np.squeeze(x, tuple(inputs[1]))
    if node.op_type == "Pad":
        return pad(x, inputs[1])
    raise NotImplementedError(node.op_type, settings)


# -- fake quantization of a float model, with a bound ----------------------------------------------------------------


class FakeQuantReference:
    """The fake-quantized float model in float64; every value with a bound on how far a float32 runtime may be off.

    * Inputs are known exactly. A quantizer of step s puts everything between x - e and x + e on the grid points between
      round((x - e)/s - d) and round((x + e)/s + d); the bound behind it is the distance to the farther of the two. It
      is 0 unless a half lies within e, and then one step (d = 2^-20 · |x/s|: float32 divides, or multiplies by 1/s).
    * A layer passes a bound on through the absolute values of its weights. Float32 sums of K products add
      (K + 8) · 2^-24 of the sum of absolute products.
    * Relu keeps a bound, averages average it, sums add. A bias behind a MatMul may be rounded to the accumulator.
    """

    def __init__(self, model, factors, layer_of):
        self.model, self.factors, self.layer_of = model, factors, layer_of
        self.constants = constants_of(model)
        self.values, self.bounds, self.steps = {}, {}, {}

    def run(self, feeds):
        self.values = {name: np.asarray(value, np.float64) for name, value in feeds.items()}
        self.bounds = {name: np.zeros(value.shape) for name, value in feeds.items()}
        for node in self.model.graph.node:
            index = 1 if node.op_type in ("LSTM", "GRU") else 0
            compute = self.layer if node.name in self.layer_of else self.other
            result, bound = compute(node)
            self.values[node.output[index]] = result
            self.bounds[node.output[index]] = bound + np.abs(result) * 2.0**-22
        return self.values, self.bounds

    def other(self, node):
        inputs = [self.constants[n] if n in self.constants else self.values[n] for n in node.input]
        errors = [np.zeros(np.shape(c)) if n in self.constants else self.bounds[n]
                  for n, c in zip(node.input, inputs, strict=True)]  # fmt: skip
        result = plain(node, inputs)
        if node.op_type in ("Unsqueeze", "Squeeze", "Pad"):
            return result, plain(node, [errors[0], *inputs[1:]])
        if node.op_type == "Add":
            rounding = sum(self.steps.get(name, 0.0) / 2 for name in node.input)
            return result, errors[0] + errors[1] + rounding
        return result, plain(node, errors)

    def layer(self, node):
        factors, settings = self.factors[self.layer_of[node.name]], attributes_of(node)
        x, e = self.quantized(node.input[0], factors.scale_d, factors.input.zero_point, factors.input.bits)
        if node.op_type == "AveragePool":
            rounding = (np.prod(settings["kernel_shape"]) + 8) * 2.0**-24
            return average_pool(x, **settings), average_pool(e + rounding * np.abs(x), **settings)
        if node.op_type in ("LSTM", "GRU"):
            return self.recurrent(node, factors, x, e)
        w, b = self.rounded_weights(node, factors, settings)
        apply = {"Conv": conv, "ConvTranspose": conv_transpose}.get(node.op_type, lambda a, c, **_: a @ c)
        shape = (1, -1, *[1] * (w.ndim - 2)) if node.op_type.startswith("Conv") else (1, -1)
        y, size = apply(x, w, **settings), apply(np.abs(x), np.abs(w), **settings)
        if b is not None:
            y, size = y + b.reshape(shape), size + np.abs(b).reshape(shape)
        if node.op_type == "MatMul":
            self.steps[node.output[0]] = factors.scale_w.astype(np.float64) * factors.scale_d
        return y, apply(e, np.abs(w), **settings) + (w[0].size + 8) * 2.0**-24 * size

    def quantized(self, name, scale, offset, bits):
        """Values on the grid, and their bound."""
        scale = float(np.float32(scale))
        x, e = self.values[name] / scale, self.bounds[name] / scale
        low, high = -(2 ** (bits - 1)) - offset, 2 ** (bits - 1) - 1 - offset
        slack = np.abs(x) * 2.0**-20
        middle, below, above = (np.clip(np.rint(v), low, high) for v in (x, x - e - slack, x + e + slack))
        return middle * scale, np.maximum(above - middle, middle - below) * scale

    def rounded_weights(self, node, factors, settings):
        """The weight on its grid (Gemm, MatMul: as ``[Cin, Cout]``) and the bias in steps of the accumulator."""
        w = self.constants[node.input[1]].astype(np.float64)
        group = settings.get("group", 1)
        if node.op_type == "Gemm" and settings.get("transB"):
            w = w.T
        if node.op_type == "Conv":
            steps = factors.scale_w.reshape(-1, *[1] * (w.ndim - 1))
        elif node.op_type == "ConvTranspose":
            steps = np.repeat(
                np.broadcast_to(factors.scale_w, group * w.shape[1]).reshape(group, -1), w.shape[0] // group, 0
            ).reshape(w.shape[0], w.shape[1], *[1] * (w.ndim - 2))
        else:
            steps = factors.scale_w.reshape(1, -1)
        steps = steps.astype(np.float64)
        low, high = -(2 ** (factors.weight.bits - 1)), 2 ** (factors.weight.bits - 1) - 1
        rounded = np.clip(np.rint(w / steps), low, high) * steps
        if len(node.input) < 3:
            return rounded, None
        step = factors.scale_w.astype(np.float64) * factors.scale_d
        return rounded, np.rint(self.constants[node.input[2]] / step) * step

    def recurrent(self, node, factors, x, e):
        w, r, b = (self.constants[node.input[i]].astype(np.float64) for i in (1, 2, 3))
        ws, rs = (s.astype(np.float64).reshape(1, -1, 1) for s in (factors.scale_w, factors.weights[1].scale.numpy()))
        w, r = np.rint(w / ws) * ws, np.rint(r / rs) * rs
        step = np.concatenate(
            [factors.scale_w * factors.scale_d, factors.weights[1].scale.numpy() * factors.hidden.step]
        )
        b = np.rint(b / step) * step
        h, state_error = np.zeros((x.shape[1], r.shape[2])), 0.0
        if len(node.input) > 5:
            h, state_error = self.quantized(
                node.input[5], factors.hidden.step, factors.hidden.zero_point, factors.input.bits
            )
            h, state_error = h[0], state_error.max()
        own = (np.abs(w).sum(2).max()) * (e.max() + np.abs(x).max() * (w.shape[2] + 8) * 2.0**-24)
        reach = lstm_reach if node.op_type == "LSTM" else gru_reach
        bound = reach(len(x), own + 2.0**-20, np.abs(r).sum(2).max(), state_error, self.values, node)
        if node.op_type == "GRU":
            return gru(x, w, r, b, h), bound
        c = self.values[node.input[6]][0] if len(node.input) > 6 else np.zeros_like(h)
        return lstm(x, w, r, b, h, c), bound


def largest_state(values, node, index):
    return max(1.0, np.abs(values[node.input[index]]).max()) if len(node.input) > index else 1.0


def lstm_reach(steps, own, feedback, h, values, node):
    """How far the last h may be off, when W · x is off by ``own`` and R sums to ``feedback``.

    Sums of gates move by d = own + feedback · h; sigmoid passes a quarter of that, tanh all of it. From c' = f·c + i·g,
    with 0 <= i, f <= 1 and |g| <= 1: Δc' <= Δc + |c|·d/4 + d/4 + d. From h' = o·tanh(c'): Δh' <= Δc' + d/4.
    """
    c, size = 0.0, largest_state(values, node, 6)
    for step in range(steps):
        d = own + feedback * h
        c = c + (size + step) * d / 4 + d / 4 + d  # |c| grows by at most 1 a step
        h = c + d / 4
    return h


def gru_reach(steps, own, feedback, h, values, node):
    """As ``lstm_reach``: n = tanh(Wx + r·(Rh)), h' = (1-z)·n + z·h, with |n| <= 1 and |h| <= size.

    Δr, Δz <= d/4; |Rh| <= feedback · size + 1 (biases here are below 1); Δn <= own + |Rh|·d/4 + feedback · h;
    Δh' <= (1 + size)·d/4 + Δn + Δh.
    """
    size = largest_state(values, node, 5)
    for _ in range(steps):
        d = own + feedback * h
        n = own + (feedback * size + 1) * d / 4 + feedback * h
        h = (1 + size) * d / 4 + n + h
    return h


# -- the Ascend dialect -----------------------------------------------------------------------------------------------


class Integers:
    """An integer tensor and the integer that stands for zero."""

    def __init__(self, values, offset):
        self.values, self.offset = values, offset

    @property
    def centred(self):
        return self.values.astype(np.int64) - self.offset


class Accumulator:
    """The int32 result of a layer (in int64, proven to fit) and the axis of its channels."""

    def __init__(self, values, axis):
        assert values.dtype.kind == "f" or np.abs(values).max() < 2**31
        self.values, self.axis = values, axis

    def plus(self, bias):
        assert bias.dtype in (np.int32, np.float32)  # float32 after the Cast of a 4-bit layer
        shape = [1] * self.values.ndim
        shape[self.axis] = -1
        return Accumulator(self.values + bias.astype(np.int64).reshape(shape), self.axis)


class AscendExecutor:
    """Runs a deploy model: AscendQuant → integers → layer in int32 → AscendDequant; ``tensors`` keeps everything."""

    def __init__(self, model):
        self.model = model
        self.constants = constants_of(model)
        self.tensors = {}

    def run(self, feeds):
        self.tensors = dict(feeds)
        for node in self.model.graph.node:
            if node.op_type != "Constant":
                self.tensors[node.output[0]] = self.node(node)
        return {value.name: self.tensors[value.name] for value in self.model.graph.output}

    def node(self, node):
        inputs = [self.constants[n] if n in self.constants else self.tensors[n] for n in node.input if n]
        if node.op_type == "AscendQuant":
            return self.quantize(node, inputs[0])
        if node.op_type == "AscendDequant":
            return self.dequantize(inputs[0], inputs[1])
        if node.op_type == "Cast":
            return inputs[0].astype(helper.tensor_dtype_to_np_dtype(attributes_of(node)["to"]))
        if isinstance(inputs[0], Integers):
            return self.integer_layer(node, inputs)
        if isinstance(inputs[0], Accumulator):
            assert node.op_type == "Add"
            return inputs[0].plus(inputs[1])
        return plain(node, inputs)

    def quantize(self, node, x):
        settings = attributes_of(node)
        bits = int(settings["dst_type"][3:])
        assert x.dtype == np.float32
        grid = np.rint(x * np.float32(settings["scale"])) + np.float32(settings["offset"])
        grid = np.clip(grid, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return Integers(grid.astype(np.int16), int(settings["offset"]))

    def dequantize(self, accumulator, param):
        assert param.dtype == np.uint64
        assert not (param >> np.uint64(32)).any()
        scale = param.astype(np.uint32).view(np.float32)
        shape = [1] * accumulator.values.ndim
        shape[accumulator.axis] = -1
        return accumulator.values.astype(np.float32) * scale.reshape(shape)

    def integer_layer(self, node, inputs):
        x, settings = inputs[0], attributes_of(node)
        if node.op_type == "Pad":
            assert int(inputs[2]) == x.offset  # zero, in integers
            return Integers(pad(x.values, inputs[1], x.offset), x.offset)
        if node.op_type == "AveragePool":
            return Accumulator(average_pool(x.centred.astype(np.float32), **settings), 1)
        if node.op_type in ("Unsqueeze", "Flatten"):
            return Integers(plain(node, [x.values, *inputs[1:]]), x.offset)
        w = inputs[1]
        assert w.dtype == np.int8
        if node.op_type == "Conv":
            w = self.unpacked(w, 1, x.values.shape[1] // settings.get("group", 1))
            result = Accumulator(conv(x.centred, w.astype(np.int64), **settings), 1)
        elif node.op_type == "ConvTranspose":
            w = self.unpacked(w, 0, x.values.shape[1])
            result = Accumulator(conv_transpose(x.centred, w.astype(np.int64), **settings), 1)
        else:
            assert not settings.get("transB", 0)
            w = self.unpacked(w, 0, x.values.shape[-1])
            result = Accumulator(x.centred @ w.astype(np.int64), -1)
        return result.plus(inputs[2]) if len(inputs) > 2 else result

    @staticmethod
    def unpacked(w, axis, channels):
        """INT4: two channels in a byte, the even one in the low half."""
        if w.shape[axis] == channels:
            return w
        assert w.shape[axis] * 2 == channels
        low, high = ((w.astype(np.int16) & 15) ^ 8) - 8, w >> 4
        pairs = np.stack([low, high], axis + 1)
        return pairs.reshape([*w.shape[:axis], channels, *w.shape[axis + 1 :]])
