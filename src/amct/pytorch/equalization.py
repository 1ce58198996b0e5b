"""Equalization across the layers of a folded torch model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from amct.errors import ExportError
from amct.export.onnx.layer_lookup import find_layers
from amct.pipeline.equalization import check_alone, equalization
from amct.pytorch.capture.functional_layers import layer_module
from amct.pytorch.capture.layer_types import float_weights, put_weights
from amct.pytorch.onnx.float_onnx import float_onnx
from amct.pytorch.user_model import copy_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.config.plan import Plan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.folding import Fused
    from amct.pytorch.layer_hooks import Arguments

logger = logging.getLogger(__name__)


def equalized(traced: Traced, fused: Fused, plan: Plan, batches: Iterable[Arguments]) -> Fused:
    """The folded model with channels of more equal size; the same model where it has no ONNX form to find them in.

    Raises:
        ConfigError: The plan balances layers too.
        CalibrationError: There is no data.
    """
    check_alone(plan)
    try:
        onnx = float_onnx(traced, fused)
    except ExportError as error:
        logger.warning("nothing is equalized: %s", error)
        return fused
    graph, layers, _ = find_layers(onnx.model, onnx.bindings)
    one_scale = [layer.name for layer in plan.layers if layer.has_one_scale]
    found = equalization(onnx.model, graph, layers, map(traced.onnx_inputs, batches), one_scale=one_scale)
    model = copy_model(fused.model, share_tensors=True)
    for name in found.layers:
        module = layer_module(model, name)
        (source,) = float_weights(module)
        changed = {source.name: found.weight(name, source.tensor, source.kind, source.groups)}
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            changed["bias"] = found.bias(name, bias.detach())
        put_weights(module, changed)
    return replace(fused, model=model) if _computes_the_same(fused, model, traced) else fused


def _computes_the_same(fused: Fused, model: torch.nn.Module, traced: Traced) -> bool:
    """Whether the outputs for the example are those of before; not where the forward itself reads a weight."""
    with torch.no_grad():
        before, after = (
            pytree.tree_leaves(each(*traced.inputs.args, **traced.inputs.kwargs)) for each in (fused.model, model)
        )
    for first, second in zip(before, after, strict=True):
        if isinstance(first, Tensor) and first.is_floating_point():
            largest = float(first.abs().max()) if first.numel() else 0.0
            if not torch.allclose(first, second, rtol=1e-4, atol=1e-4 * largest):
                logger.warning("nothing is equalized: the forward of the model reads weights that would change")
                return False
    return True
