"""The activation that is the only reader of a layer's output: AdaRound minimizes the error after it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, fx

    from amct.model import Node
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_WITH_SETTINGS = frozenset({"clamp", "gelu", "hardtanh", "leaky_relu", "prelu", "rrelu"})


def activation_after(layer: str, traced: Traced, fused: Fused) -> Callable[[Tensor], Tensor] | None:
    """The activation after a layer (after the batch norm folded into it); None when there is no such activation.

    Supported are ReLU, ReLU6, LeakyReLU, PReLU, RReLU, GELU, Sigmoid and Tanh.
    """
    if traced.graph is None or layer not in traced.graph:
        return None
    norm = fused.fusions.get(layer)
    if norm is not None and not traced.graph[norm].attributes["exact"]:
        return None  # the batch norm has an activation inside
    reader = traced.graph.sole_consumer(traced.graph[norm if norm is not None else layer])
    if reader is None or len(reader.inputs) != 1:
        return None
    if reader.op in _PLAIN:
        return _PLAIN[reader.op]
    return _with_settings(reader, traced, fused) if reader.op in _WITH_SETTINGS else None


def _with_settings(node: Node, traced: Traced, fused: Fused) -> Callable[[Tensor], Tensor] | None:
    settings = _settings(node, traced)
    if settings is None:
        return None
    if node.op in ("clamp", "hardtanh"):
        limits = (settings.get("min", settings.get("min_val")), settings.get("max", settings.get("max_val")))
        return functional.relu6 if limits == (0, 6) else None
    if node.op == "leaky_relu":
        return functools.partial(functional.leaky_relu, negative_slope=float(settings["negative_slope"]))
    if node.op == "rrelu":
        slope = (float(settings["lower"]) + float(settings["upper"])) / 2  # its slope in eval mode
        return functools.partial(functional.leaky_relu, negative_slope=slope)
    if node.op == "gelu":
        return functools.partial(functional.gelu, approximate=str(settings["approximate"]))
    if node.op == "prelu":
        return _prelu(node, fused)
    return None


def _prelu(node: Node, fused: Fused) -> Callable[[Tensor], Tensor] | None:
    names = node.attributes["parameters"]
    assert isinstance(names, tuple)
    if len(names) != 1:
        return None  # the slope is computed
    slope = fused.model.get_parameter(names[0]).detach()
    return functools.partial(_apply_prelu, slope)


def _apply_prelu(slope: Tensor, x: Tensor) -> Tensor:
    return functional.prelu(x, slope.to(x.dtype))


def _settings(node: Node, traced: Traced) -> dict[str, Any] | None:
    """Every argument of an operation by name, with defaults; None inside an autocast region."""
    assert traced.program is not None
    operation: fx.Node | None = next((found for found in traced.program.graph.nodes if found.name == node.name), None)
    if operation is None:
        return None
    target = operation.target
    assert isinstance(target, torch._ops.OpOverload)
    schema = target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema}
    values.update(zip((argument.name for argument in schema), operation.args, strict=False))
    return {**values, **operation.kwargs}
