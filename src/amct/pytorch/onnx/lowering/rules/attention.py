"""The rule of attention."""

from __future__ import annotations

import math

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.rules.products import transposed
from amct.pytorch.onnx.lowering.rules.shaping import expanded_to
from amct.pytorch.onnx.lowering.sizes import is_static
from amct.pytorch.onnx.lowering.writer import Value, Writer, broadcast


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
