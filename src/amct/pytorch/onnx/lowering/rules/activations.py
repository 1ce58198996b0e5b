"""Rules of activation functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule

if TYPE_CHECKING:
    import torch

    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer

_PLAIN = {"relu": "Relu", "hardswish": "HardSwish", "softsign": "Softsign", "mish": "Mish"}
_GELU_OPSET = 20


@rule(*_PLAIN)
def plain(to: Writer, x: Value, operator: str) -> Value:
    """A function that ONNX has."""
    if operator == "relu" and not x.dtype.is_floating_point:
        return to.binary("Max", x, to.constant(0))
    return to.unary(_PLAIN[operator], x)


@rule("silu")
def silu(to: Writer, x: Value) -> Value:
    """``x · sigmoid(x)``."""
    return to.mul(x, to.unary("Sigmoid", x))


@rule("hardsigmoid")
def hardsigmoid(to: Writer, x: Value) -> Value:
    """``min(max(x / 6 + 1/2, 0), 1)``."""
    return to.unary("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@rule("gelu")
def gelu(to: Writer, x: Value, approximate: str = "none") -> Value:
    """One node from opset 20 on, several before; onnxruntime knows the exact form in this order and fuses it."""
    if to.opset >= _GELU_OPSET:
        return to.unary("Gelu", x, approximate=approximate)
    one, half = to.constant(1.0), to.constant(0.5)
    if approximate == "none":
        gate = to.unary("Erf", to.binary("Div", x, to.constant(math.sqrt(2))))
    else:
        cube = to.mul(to.constant(0.044715), to.binary("Pow", x, to.constant(3.0)))
        gate = to.unary("Tanh", to.mul(to.constant(math.sqrt(2 / math.pi)), to.binary("Add", x, cube)))
    return to.mul(to.mul(x, to.binary("Add", gate, one)), half)


@rule("leaky_relu")
def leaky_relu(to: Writer, x: Value, negative_slope: Number = 0.01) -> Value:
    """``x`` above 0, ``slope · x`` below."""
    return to.unary("LeakyRelu", x, alpha=float(negative_slope))


@rule("elu")
def elu(to: Writer, x: Value, alpha: Number = 1) -> Value:
    """``x`` above 0, ``alpha · (exp(x) - 1)`` below."""
    return to.unary("Elu", x, alpha=float(alpha))


@rule("selu")
def selu(to: Writer, x: Value) -> Value:
    """Elu with the constants of its paper."""
    return to.unary("Selu", x, alpha=1.6732632423543772848170429916717, gamma=1.0507009873554804934193349852946)


@rule("celu")
def celu(to: Writer, x: Value, alpha: Number = 1) -> Value:
    """``max(0, x) + min(0, alpha · (exp(x / alpha) - 1))``."""
    return to.unary("Celu", x, alpha=float(alpha))


@rule("prelu")
def prelu(to: Writer, x: Value, weight: Value) -> Value:
    """A slope per channel below 0."""
    if weight.rank == 1 and weight.size(0) != 1 and x.rank > 2:
        weight = to.unsqueeze(weight, list(range(1, x.rank - 1)))
    return to.add("PRelu", x, weight)


@rule("softplus")
def softplus(to: Writer, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    """``log(1 + exp(beta · x)) / beta``; above the threshold this is x up to rounding."""
    if threshold < 20:
        raise NotLoweredError(f"softplus with the threshold {threshold}")
    if beta == 1:
        return to.unary("Softplus", x)
    scale = to.constant(float(beta))
    return to.binary("Div", to.unary("Softplus", to.mul(x, scale)), scale)


@rule("log_sigmoid")
def log_sigmoid(to: Writer, x: Value) -> Value:
    """``-softplus(-x)``."""
    return to.unary("Neg", to.unary("Softplus", to.unary("Neg", x)))


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax")
def softmax(to: Writer, x: Value, dim: int, operator: str, dtype: torch.dtype | None = None) -> Value:
    """A softmax along an axis, or its logarithm."""
    x = to.cast(x, to.dtype)
    del dtype  # that of the result
    if not x.rank:
        raise NotLoweredError("softmax of a number")
    return to.unary("LogSoftmax" if "log" in operator else "Softmax", x, axis=x.axis(dim) - x.rank)


@rule("glu")
def glu(to: Writer, x: Value, dim: int = -1) -> Value:
    """One half times the sigmoid of the other."""
    axis = x.axis(dim)
    size = x.size(axis)
    if not isinstance(size, int):
        raise NotLoweredError("glu of an axis with a dynamic size")
    one, two = (to.slice(x, axis, start, start + size // 2) for start in (0, size // 2))
    return to.mul(one, to.unary("Sigmoid", two))
