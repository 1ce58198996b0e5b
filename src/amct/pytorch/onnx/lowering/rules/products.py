"""Rules of matrix products, attention and recurrent layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amct.errors import ExportError
from amct.model.kinds import LayerKind
from amct.numerics.arq import reorder_gates
from amct.pytorch.onnx.lowering.rules.layers import transposed
from amct.pytorch.onnx.lowering.rules.shaping import expanded_to
from amct.pytorch.onnx.lowering.writer import NotLoweredError, Value, Writer, broadcast, is_static, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Number


@rule("mm", "bmm", mat2="other")
@rule("mv", vec="other")
@rule("dot", tensor="other")
@rule("matmul")
def product(to: Writer, x: Value, other: Value) -> Value:
    """A product with the broadcasting of NumPy."""
    return to.add("MatMul", x, other)


@rule("addmm")
def sum_with_product(to: Writer, x: Value, mat1: Value, mat2: Value, beta: Number = 1, alpha: Number = 1) -> Value:
    """``beta · x + alpha · mat1 @ mat2``."""
    return to.add("Gemm", mat1, mat2, x, alpha=float(alpha), beta=float(beta))


@rule("baddbmm")
def sum_with_products(to: Writer, x: Value, batch1: Value, batch2: Value, beta: Number = 1, alpha: Number = 1) -> Value:
    """``beta · x + alpha · batch1 @ batch2``; with a beta of 0, x is not read."""
    product = to.add("MatMul", batch1, batch2)
    if alpha != 1:
        product = to.mul(product, to.constant(alpha))
    if beta == 0:
        return product
    return to.binary("Add", product, x if beta == 1 else to.mul(x, to.constant(beta)))


@rule("einsum")
def einsum(to: Writer, equation: str, tensors: list[Value]) -> Value:
    """A sum of products in Einstein's notation."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotLoweredError("einsum of several types")
    return to.add("Einsum", *tensors, equation=equation.replace(" ", ""))


@rule("scaled_dot_product_attention")
def attention(
    to: Writer,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """``softmax(query @ keyᵀ · scale + mask) @ value``."""
    if dropout_p:
        raise NotLoweredError("attention with dropout")
    if enable_gqa:
        key, value = _for_all_heads(to, key, query), _for_all_heads(to, value, query)
    width = query.size(-1)
    if not isinstance(width, int):
        raise NotLoweredError("attention with a dynamic width")
    factor = to.constant(1 / math.sqrt(width) if scale is None else scale)
    batch = broadcast(query.shape[:-2], key.shape[:-2])
    shape = [*batch, query.size(-2), key.size(-2)]
    scores = to.add("MatMul", to.mul(query, factor), transposed(to, key), shape=shape)
    mask = _causal_mask(to, query, key) if is_causal else attn_mask
    if mask is not None and mask.dtype is torch.bool:
        none, least = to.constant(0.0), to.constant(-math.inf)
        mask = _folded_mask(to, mask) or to.add("Where", mask, none, least, shape=mask.shape)
        weights = to.unary("Softmax", to.binary("Add", scores, mask), axis=-1)
        if not is_causal:  # a row without any position is zero in torch
            empty = to.add("IsNaN", weights, dtype=torch.bool, shape=weights.shape)
            weights = to.add("Where", empty, none, weights, shape=weights.shape)
    else:
        scores = scores if mask is None else to.binary("Add", scores, to.cast(mask, to.dtype))
        weights = to.unary("Softmax", scores, axis=-1)
    return to.add("MatMul", weights, value)


def _for_all_heads(to: Writer, x: Value, query: Value) -> Value:
    """Each head as often as queries share it."""
    heads, wanted = x.size(-3), query.size(-3)
    if not is_static(heads) or not is_static(wanted):
        raise NotLoweredError("attention with a dynamic number of heads")
    times = int(wanted) // int(heads)
    if times == 1:
        return x
    axis = x.rank - 2
    wide = [*x.shape[:axis], times, *x.shape[axis:]]
    repeated = expanded_to(to, to.unsqueeze(x, [axis]), wide)
    return to.reshape(repeated, [*x.shape[: axis - 1], wanted, *x.shape[axis:]])


def _causal_mask(to: Writer, query: Value, key: Value) -> Value:
    """True where a position may see another: itself and those before."""
    sizes = [query.size(-2), key.size(-2)]
    if all(map(is_static, sizes)):
        return to.constant(torch.ones(sizes, dtype=torch.bool).tril())
    everything = expanded_to(to, to.constant(1.0), sizes)
    lower = to.add("Trilu", everything, to.constant(0, torch.int64), upper=0, shape=sizes)
    return to.cast(lower, torch.bool)


def _folded_mask(to: Writer, mask: Value) -> Value | None:
    if mask.constant is None:
        return None
    return to.constant(torch.where(mask.constant, 0.0, -math.inf).to(to.dtype))


_GATES = {"LSTM": LayerKind.LSTM.onnx_gates, "GRU": LayerKind.GRU.onnx_gates, "RNN": (0,)}


@rule("amct::lstm", "amct::gru", implied=("bias_ih", "bias_hh"))
def quantizable_layer(
    to: Writer, x: Value, h: Value | None, weight_ih: Value, weight_hh: Value, operator: str, c: Value | None = None
) -> list[Value]:
    """One node; it gets its weights in ONNX's order, and its biases, when the layers are placed."""
    output, *last = [tuple(each.shape) for each in to.result]
    steps, batch, hidden = output
    shapes = ((steps, 1, batch, hidden), *last)
    found, *states = to.add_many(
        operator.upper(),
        *(x, weight_ih, weight_hh, None, None, h, c),
        outputs=[(to.result[0].dtype, shape) for shape in shapes],
        linear_before_reset=1 if operator == "gru" else None,
    )
    return [to.squeeze(found, [1]), *states]


# -- torch's own, with any number of layers and directions -------------------------------------------------------------


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent_layers(
    to: Writer,
    x: Value,
    hx: Value | Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    operator: str,
) -> list[Value]:
    """One node per layer, with both directions."""
    if train and dropout:
        raise NotLoweredError("a recurrent layer in training mode")
    directions = 1 + bidirectional
    parts = 4 if has_biases else 2
    if len(params) == (parts + 1) * directions * num_layers:
        raise ExportError(
            "an LSTM with proj_size cannot be exported, because ONNX's LSTM has no projection; use one without "
            "proj_size and a Linear behind it"
        )
    if x.rank != 3 or len(params) != parts * directions * num_layers:
        raise NotLoweredError(f"{operator} without a batch")
    states = [hx] if isinstance(hx, Value) else list(hx)
    last: list[list[Value]] = [[] for _ in states]
    found = to.transpose(x, [1, 0, 2]) if batch_first else x
    for layer in range(num_layers):
        begin = layer * directions
        own = params[begin * parts : (begin + directions) * parts]
        start = states
        if num_layers > 1:
            start = [to.slice(state, 0, begin, begin + directions) for state in states]
        made = _layer(to, operator, found, [own[place : place + parts] for place in range(0, len(own), parts)], start)
        found = made[0]
        for place, state in enumerate(made[1:]):
            last[place].append(state)
    joined = [each[0] if len(each) == 1 else _stacked(to, each) for each in last]
    return [to.transpose(found, [1, 0, 2]) if batch_first else found, *joined]


def _layer(
    to: Writer, operator: str, x: Value, params: Sequence[Sequence[Value]], states: Sequence[Value]
) -> list[Value]:
    """One layer over a tensor [time, batch, input]; output and last states."""
    name = operator.partition("_")[0].upper()
    steps, batch, _ = x.shape
    hidden = states[0].size(-1)
    directions = len(params)
    weights = [to.constant(each) for each in _weights(params, _GATES[name])]
    settings: dict[str, object] = {"hidden_size": hidden, "direction": "bidirectional" if directions == 2 else None}
    if name == "GRU":
        settings["linear_before_reset"] = 1
    if name == "RNN":
        settings["activations"] = [operator.partition("_")[2].capitalize()] * directions
    bias = weights[2] if len(weights) == 3 else None
    output, *last = to.add_many(
        name,
        x,
        weights[0],
        weights[1],
        bias,
        None,
        *states,
        outputs=[(x.dtype, (steps, directions, batch, hidden)), *((x.dtype, state.shape) for state in states)],
        **settings,
    )
    if directions == 1:
        return [to.squeeze(output, [1]), *last]
    wide = to.transpose(output, [0, 2, 1, 3])
    return [to.reshape(wide, [steps, batch, directions * hidden]), *last]


def _weights(params: Sequence[Sequence[Value]], gates: tuple[int, ...]) -> list[torch.Tensor]:
    """W, R and, with biases, B of all directions."""
    ordered = []
    for direction in params:
        tensors = [each.parameter for each in direction]
        if any(tensor is None for tensor in tensors):
            raise NotLoweredError("a recurrent layer with computed weights")
        ordered.append([reorder_gates(tensor, gates) for tensor in tensors if tensor is not None])
    stacked = [torch.stack([each[place] for each in ordered]) for place in (0, 1)]
    if len(ordered[0]) == 2:
        return stacked
    return [*stacked, torch.stack([torch.cat(each[2:]) for each in ordered])]


def _stacked(to: Writer, states: Sequence[Value]) -> Value:
    shape = (sum(int(state.size(0)) for state in states), *states[0].shape[1:])
    return to.add("Concat", *states, axis=0, dtype=states[0].dtype, shape=shape)
