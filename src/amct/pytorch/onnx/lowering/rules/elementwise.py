"""Rules of operations that compute each position by itself: arithmetic, functions, activations, comparisons."""

from __future__ import annotations

import math

import torch

from amct.pytorch.onnx.lowering.writer import NotLoweredError, Number, Value, Writer, rule

Operand = Value | Number | torch.SymInt
"""A tensor, a number of the program, or a size."""

_ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
_COMPARISONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_LOGICAL = {"and": "And", "or": "Or", "xor": "Xor"}
_FLOAT_FUNCTIONS = {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin",
    "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh",
    "atanh": "Atanh", "erf": "Erf", "reciprocal": "Reciprocal", "sigmoid": "Sigmoid", "tanh": "Tanh",
}  # fmt: skip


def as_value(to: Writer, operand: Operand, dtype: torch.dtype) -> Value:
    """An operand as a tensor of a type; a number or a size becomes one without axes."""
    if isinstance(operand, Value):
        return to.cast(operand, dtype)
    if isinstance(operand, torch.SymInt):
        return to.cast(to.squeeze(to.sizes.tensor(operand), [0]), dtype)
    return to.constant(operand, dtype)


def common_type(*operands: Operand) -> torch.dtype:
    """The type to which torch promotes operands."""
    found = _stand_in(operands[0])
    dtype = torch.result_type(found, found)
    for operand in operands[1:]:
        other = _stand_in(operand)
        dtype = torch.result_type(found, other)
        wide = isinstance(found, torch.Tensor) and found.ndim
        wider = isinstance(other, torch.Tensor) and other.ndim
        found = torch.empty([1] if wide or wider else [], dtype=dtype, device="meta")
    return dtype


def _stand_in(operand: Operand) -> torch.Tensor | Number:
    if isinstance(operand, Value):
        return torch.empty([1] if operand.rank else [], dtype=operand.dtype, device="meta")
    return 1 if isinstance(operand, torch.SymInt) else operand


def promoted(to: Writer, *operands: Operand) -> list[Value]:
    """The operands as tensors of their common type."""
    dtype = common_type(*operands)
    return [as_value(to, operand, dtype) for operand in operands]


# -- arithmetic --------------------------------------------------------------------------------------------------------


@rule("pow", exponent="other")
@rule("add", "sub", "mul", "maximum", "minimum")
def arithmetic(to: Writer, x: Operand, other: Operand, alpha: Number = 1, operator: str = "") -> Value:
    """One operator; ``alpha`` multiplies the second operand."""
    one, two = promoted(to, x, other)
    if alpha != 1:
        two = to.mul(two, to.constant(alpha, two.dtype))
    if one.dtype is torch.bool:
        if operator not in ("mul", "add"):
            raise NotLoweredError(f"{operator} of truth values")
        return to.cast(to.binary("And" if operator == "mul" else "Or", one, two), to.dtype)
    return to.cast(to.binary(_ARITHMETIC[operator], one, two), to.dtype)


@rule("rsub")
def reversed_difference(to: Writer, x: Operand, other: Operand, alpha: Number = 1) -> Value:
    """``other - alpha · x``."""
    return arithmetic(to, other, x, alpha, operator="sub")


@rule("square")
def square(to: Writer, x: Value) -> Value:
    """``x · x``."""
    return to.mul(x, x)


@rule("div", "divide", "true_divide")
def division(to: Writer, x: Operand, other: Operand, rounding_mode: str | None = None) -> Value:
    """Division, also rounded down or towards zero."""
    if rounding_mode is None:
        return to.binary("Div", as_value(to, x, to.dtype), as_value(to, other, to.dtype))
    one, two = promoted(to, x, other)
    if rounding_mode == "floor":
        return to.cast(_floor_division(to, one, two), to.dtype)
    quotient = to.binary("Div", one, two)
    return to.cast(_truncated(to, quotient) if one.dtype.is_floating_point else quotient, to.dtype)


@rule("floor_divide")
def floor_division(to: Writer, x: Operand, other: Operand) -> Value:
    """Division rounded down."""
    return to.cast(_floor_division(to, *promoted(to, x, other)), to.dtype)


def _floor_division(to: Writer, one: Value, two: Value) -> Value:
    if one.dtype.is_floating_point:
        return to.unary("Floor", to.binary("Div", one, two))
    # ONNX's Mod has the sign of the divisor; without it the division is exact, so that Div's rounding does not matter.
    return to.binary("Div", to.binary("Sub", one, to.binary("Mod", one, two)), two)


def _truncated(to: Writer, x: Value) -> Value:
    return to.mul(to.unary("Sign", x), to.unary("Floor", to.unary("Abs", x)))


@rule("remainder")
def remainder(to: Writer, x: Operand, other: Operand) -> Value:
    """The remainder with the sign of the divisor."""
    one, two = promoted(to, x, other)
    if not one.dtype.is_floating_point:
        return to.cast(to.binary("Mod", one, two), to.dtype)
    quotient = to.unary("Floor", to.binary("Div", one, two))
    return to.cast(to.binary("Sub", one, to.mul(quotient, two)), to.dtype)


@rule("addcmul", "addcdiv")
def scaled_sum(to: Writer, x: Value, tensor1: Value, tensor2: Value, value: Number = 1, operator: str = "") -> Value:
    """``x + value · tensor1 · tensor2``, or with a quotient."""
    base, one, two = (to.cast(each, to.dtype) for each in (x, tensor1, tensor2))
    part = to.binary("Mul" if operator == "addcmul" else "Div", one, two)
    if value != 1:
        part = to.mul(part, to.constant(value))
    return to.binary("Add", base, part)


@rule("lerp")
def interpolation(to: Writer, x: Value, end: Value, weight: Operand) -> Value:
    """``x + weight · (end - x)``."""
    difference = to.binary("Sub", end, x)
    return to.binary("Add", x, to.mul(difference, as_value(to, weight, to.dtype)))


# -- functions ---------------------------------------------------------------------------------------------------------


@rule(*_FLOAT_FUNCTIONS)
def function(to: Writer, x: Value, operator: str) -> Value:
    """A function that ONNX has, in floating point."""
    return to.unary(_FLOAT_FUNCTIONS[operator], to.cast(x, to.dtype))


@rule("abs", "neg", "sign", "sgn")
def sign_function(to: Writer, x: Value, operator: str) -> Value:
    """A function that also integers have."""
    if x.dtype is torch.bool:
        raise NotLoweredError(f"{operator} of truth values")
    return to.unary({"abs": "Abs", "neg": "Neg", "sign": "Sign", "sgn": "Sign"}[operator], x)


@rule("floor", "ceil", "round", "trunc")
def rounding(to: Writer, x: Value, operator: str) -> Value:
    """A function that rounds; half to even, as torch and ONNX do."""
    if not x.dtype.is_floating_point:
        return x
    return _truncated(to, x) if operator == "trunc" else to.unary(operator.capitalize(), x)


@rule("rsqrt")
def reciprocal_root(to: Writer, x: Value) -> Value:
    """``1 / sqrt(x)``."""
    return to.unary("Reciprocal", to.unary("Sqrt", to.cast(x, to.dtype)))


@rule("log2", "log10", "log1p", "exp2", "expm1")
def scaled_logarithm(to: Writer, x: Value, operator: str) -> Value:
    """Logarithms and exponentials that ONNX lacks."""
    x = to.cast(x, to.dtype)
    if operator == "exp2":
        return to.binary("Pow", to.constant(2.0), x)
    if operator == "expm1":
        return to.binary("Sub", to.unary("Exp", x), to.constant(1.0))
    if operator == "log1p":
        return to.unary("Log", to.binary("Add", x, to.constant(1.0)))
    base = torch.log(torch.tensor(2.0 if operator == "log2" else 10.0, dtype=torch.float64))
    return to.mul(to.unary("Log", x), to.constant(float(1 / base)))


@rule("isnan", "isinf")
def special_values(to: Writer, x: Value, operator: str) -> Value:
    """Whether values are not numbers, or infinite."""
    if not x.dtype.is_floating_point:
        raise NotLoweredError(f"{operator} of {x.dtype}")
    return to.add("IsNaN" if operator == "isnan" else "IsInf", x, dtype=torch.bool, shape=x.shape)


# -- limits ------------------------------------------------------------------------------------------------------------


@rule("hardtanh", min_val="low", max_val="high")
@rule("clamp", "clip", "clamp_min", "clamp_max", min="low", max="high")
def limited(to: Writer, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    """Values between limits; limits may be tensors."""
    x = to.cast(x, to.dtype)
    if isinstance(low, Value) or isinstance(high, Value):
        for operator, limit in (("Max", low), ("Min", high)):
            x = x if limit is None else to.binary(operator, x, as_value(to, limit, to.dtype))
        return x
    limits = [None if limit is None else as_value(to, limit, to.dtype) for limit in (low, high)]
    return to.add("Clip", x, *limits, shape=x.shape)


@rule("relu6")
def relu6(to: Writer, x: Value) -> Value:
    """Values between 0 and 6."""
    return limited(to, x, 0.0, 6.0)


# -- truth values ------------------------------------------------------------------------------------------------------


@rule("eq", "ne", "lt", "le", "gt", "ge")
def comparison(to: Writer, x: Operand, other: Operand, operator: str) -> Value:
    """A comparison."""
    one, two = promoted(to, x, other)
    if one.dtype is torch.bool and operator not in ("eq", "ne"):
        one, two = to.cast(one, torch.int32), to.cast(two, torch.int32)
    found = to.binary(_COMPARISONS["eq" if operator == "ne" else operator], one, two, torch.bool)
    return to.unary("Not", found) if operator == "ne" else found


@rule("logical_and", "logical_or", "logical_xor")
def logical(to: Writer, x: Value, other: Value, operator: str) -> Value:
    """An operator on truth values; other types are compared with zero."""
    name = _LOGICAL[operator.removeprefix("logical_")]
    return to.binary(name, to.cast(x, torch.bool), to.cast(other, torch.bool))


@rule("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
def bitwise(to: Writer, x: Operand, other: Operand, operator: str) -> Value:
    """An operator on truth values or on the bits of integers."""
    name = _LOGICAL[operator.removeprefix("bitwise_").strip("_")]
    one, two = promoted(to, x, other)
    return to.binary(name if one.dtype is torch.bool else f"Bitwise{name}", one, two)


@rule("logical_not", "bitwise_not")
def negation(to: Writer, x: Value, operator: str) -> Value:
    """The opposite of truth values, or of the bits of integers."""
    if operator == "bitwise_not" and x.dtype is not torch.bool:
        return to.unary("BitwiseNot", x)
    return to.unary("Not", to.cast(x, torch.bool))


@rule("where")
def choice(to: Writer, condition: Value, x: Operand | None = None, other: Operand | None = None) -> Value:
    """Values of one tensor where a condition holds, of another elsewhere."""
    if x is None or other is None:
        raise NotLoweredError("where with a condition only: the number of results depends on values")
    one, two = (as_value(to, each, to.dtype) for each in (x, other))
    return to.add("Where", to.cast(condition, torch.bool), one, two)


@rule("masked_fill")
def masked(to: Writer, x: Value, mask: Value, value: Operand) -> Value:
    """A value where a mask is set."""
    return to.add("Where", mask, as_value(to, value, to.dtype), to.cast(x, to.dtype))


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


_WITH_ALPHA = {"leaky_relu": "LeakyRelu", "elu": "Elu", "celu": "Celu"}


@rule(*_WITH_ALPHA, negative_slope="alpha")
def with_alpha(to: Writer, x: Value, operator: str, alpha: Number = 1) -> Value:
    """A function that ONNX has, with one setting for the values below 0."""
    return to.unary(_WITH_ALPHA[operator], x, alpha=float(alpha))


@rule("rrelu")
def rrelu(to: Writer, x: Value, lower: Number = 1 / 8, upper: Number = 1 / 3, training: bool = False) -> Value:
    """In eval mode the slope below 0 is the mean of the bounds, as torch rounds it."""
    if training:
        raise NotLoweredError("rrelu in training mode")
    return with_alpha(to, x, "leaky_relu", (lower + upper) / 2)


@rule("selu")
def selu(to: Writer, x: Value) -> Value:
    """Elu with the constants of its paper."""
    return to.unary("Selu", x, alpha=1.6732632423543772848170429916717, gamma=1.0507009873554804934193349852946)


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


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", implied=("dtype",))
def softmax(to: Writer, x: Value, dim: int, operator: str) -> Value:
    """A softmax along an axis, or its logarithm."""
    x = to.cast(x, to.dtype)
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
