"""Small transformers as ONNX graphs, with the normalization written in the ways of different exporters."""

from __future__ import annotations

import numpy as np
from export_nets import Net

TOKENS, WIDTH = 65, 16


def layer_norm(net, name, x):
    return net.add("LayerNormalization", name, x, net.constant(f"{name}.w", np.ones(WIDTH, np.float32)))


def layer_norm_of_arithmetic(net, name, x):
    """``(x - mean) / sqrt(mean((x - mean)²) + eps) * w + b``."""
    mean = net.add("ReduceMean", f"{name}_mean", x, axes=[-1])
    centered = net.add("Sub", f"{name}_sub", x, mean)
    square = net.add("Pow", f"{name}_pow", centered, net.constant(f"{name}.two", np.float32(2)))
    variance = net.add("ReduceMean", f"{name}_var", square, axes=[-1])
    added = net.add("Add", f"{name}_eps", variance, net.constant(f"{name}.eps", np.float32(1e-5)))
    y = net.add("Div", f"{name}_div", centered, net.add("Sqrt", f"{name}_sqrt", added))
    y = net.add("Mul", f"{name}_mul", y, net.constant(f"{name}.w", np.ones(WIDTH, np.float32)))
    return net.add("Add", name, y, net.constant(f"{name}.b", np.zeros(WIDTH, np.float32)))


def layer_norm_of_two_subtractions(net, name, x):
    """As above, with the difference written twice and multiplied by the reciprocal."""
    mean = net.add("ReduceMean", f"{name}_mean", x, axes=[-1])
    first, second = (net.add("Sub", f"{name}_sub{index}", x, mean) for index in range(2))
    variance = net.add("ReduceMean", f"{name}_var", net.add("Mul", f"{name}_square", first, first), axes=[-1])
    added = net.add("Add", f"{name}_eps", variance, net.constant(f"{name}.eps", np.float32(1e-5)))
    root = net.add("Reciprocal", f"{name}_rec", net.add("Sqrt", f"{name}_sqrt", added))
    return net.add("Mul", name, second, root)


def rms_norm(net, name, x):
    """``w * (x * (1 / sqrt(mean(x²) + eps)))``, with the casts of half-precision models."""
    wide = net.add("Cast", f"{name}_wide", x, to=1)
    square = net.add("Pow", f"{name}_pow", wide, net.constant(f"{name}.two", np.float32(2)))
    mean = net.add("ReduceMean", f"{name}_mean", square, axes=[-1])
    added = net.add("Add", f"{name}_eps", mean, net.constant(f"{name}.eps", np.float32(1e-5)))
    root = net.add(
        "Div", f"{name}_rec", net.constant(f"{name}.one", np.float32(1)), net.add("Sqrt", f"{name}_s", added)
    )
    y = net.add("Cast", f"{name}_narrow", net.add("Mul", f"{name}_mul", root, wide), to=1)
    return net.add("Mul", name, net.constant(f"{name}.w", np.ones(WIDTH, np.float32)), y)


def group_norm(net, name, x):
    """GroupNorm of torch: InstanceNormalization of the groups between two Reshapes, on channels first."""
    y = net.add("Transpose", f"{name}_first", x, perm=[0, 2, 1])
    y = net.add("Reshape", f"{name}_groups", y, net.constant(f"{name}.groups", np.array([0, 4, -1])))
    ones, zeros = net.constant(f"{name}.w", np.ones(4, np.float32)), net.constant(f"{name}.b", np.zeros(4, np.float32))
    y = net.add("InstanceNormalization", f"{name}_norm", y, ones, zeros)
    y = net.add("Reshape", f"{name}_back", y, net.constant(f"{name}.shape", np.array([0, WIDTH, -1])))
    return net.add("Transpose", name, y, perm=[0, 2, 1])


NORMALIZATIONS = {
    "LayerNormalization": layer_norm,
    "arithmetic": layer_norm_of_arithmetic,
    "two_subtractions": layer_norm_of_two_subtractions,
    "rms": rms_norm,
    "group": group_norm,
}


def _linear(net, name, x, inputs, outputs):
    y = net.layer("MatMul", name, x, net.weight(f"{name}.w", inputs, outputs))
    return net.add("Add", f"{name}_add", y, net.weight(f"{name}.b", outputs, spread=0.1))


def _attention(net, name, x):
    parts = {}
    shape = net.constant(f"{name}.heads", np.array([1, TOKENS, 2, WIDTH // 2]))
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        y = net.add("Reshape", f"{name}.{part}_r", _linear(net, f"{name}.{part}", x, WIDTH, WIDTH), shape)
        parts[part] = net.add("Transpose", f"{name}.{part}_t", y, perm=order)
    scores = net.add("Softmax", f"{name}.soft", net.add("MatMul", f"{name}.scores", parts["q"], parts["k"]))
    y = net.add("Transpose", f"{name}.t", net.add("MatMul", f"{name}.context", scores, parts["v"]), perm=[0, 2, 1, 3])
    y = net.add("Reshape", f"{name}.joined", y, net.constant(f"{name}.join", np.array([1, TOKENS, WIDTH])))
    return _linear(net, f"{name}.o", y, WIDTH, WIDTH)


def _blocks(net, x, norm):
    for block in ("b1", "b2"):
        x = net.add("Add", f"{block}.sum1", x, _attention(net, block, norm(net, f"{block}.norm1", x)))
        y = net.add("Relu", f"{block}.relu", _linear(net, f"{block}.up", norm(net, f"{block}.norm2", x), WIDTH, 32))
        x = net.add("Add", f"{block}.sum2", x, _linear(net, f"{block}.down", y, 32, WIDTH))
    return _linear(net, "head", norm(net, "norm", x), WIDTH, 8)


def vision_transformer(norm=layer_norm):
    """Patch convolution, class token, positions with two large channels, two blocks, head."""
    net = Net(seed=7)
    x = net.input("x", 1, 3, 16, 16)
    y = net.layer(
        "Conv", "patch", x, net.weight("patch.w", WIDTH, 3, 2, 2), net.weight("patch.b", WIDTH), strides=[2, 2]
    )
    y = net.add("Reshape", "flat", y, net.constant("flat_shape", np.array([1, WIDTH, TOKENS - 1])))
    y = net.add("Transpose", "tokens", y, perm=[0, 2, 1])
    y = net.add("Concat", "with_class", net.weight("class", 1, 1, WIDTH), y, axis=1)
    positions = net.random.standard_normal((1, TOKENS, WIDTH)).astype(np.float32)
    positions[:, :, :2] *= 30
    y = net.add("Add", "positioned", y, net.constant("positions", positions))
    y = _blocks(net, y, norm)
    net.add("Identity", "result", y, outputs=["y"])
    return net, net.model("y")


def audio_encoder():
    """Two convolutions with GELU in front of the blocks, as in Whisper."""
    net = Net(seed=8)
    y = net.input("x", 1, 4, TOKENS)
    for name, channels in (("conv1", 4), ("conv2", WIDTH)):
        y = net.layer("Conv", name, y, net.weight(f"{name}.w", WIDTH, channels, 3), pads=[1, 1])
        scaled = net.add("Div", f"{name}_div", y, net.constant(f"{name}.root", np.float32(2**0.5)))
        gate = net.add(
            "Add", f"{name}_one", net.add("Erf", f"{name}_erf", scaled), net.constant(f"{name}.1", np.float32(1))
        )
        half = net.add("Mul", f"{name}_half", gate, net.constant(f"{name}.h", np.float32(0.5)))
        y = net.add("Mul", f"{name}_gelu", y, half)
    y = net.add("Transpose", "tokens", y, perm=[0, 2, 1])
    y = net.add("Add", "positioned", y, net.weight("positions", 1, TOKENS, WIDTH))
    net.add("Identity", "result", _blocks(net, y, layer_norm), outputs=["y"])
    return net, net.model("y")
