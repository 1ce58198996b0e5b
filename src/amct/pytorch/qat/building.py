"""Builds the trainable model: a copy of the user's model whose layers have trained quantizers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct.config.qat.settings import UlqRetrainSettings
from amct.errors import ModelError
from amct.ptq.preparation import enabled_layers
from amct.pytorch.folding import fuse
from amct.pytorch.layer_weights import weight_parts
from amct.pytorch.model_copy import copy_model
from amct.pytorch.qat.layers import as_quantized
from amct.pytorch.qat.model import QatState, as_qat_model
from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.config.qat.plan import RetrainLayerPlan, RetrainPlan
    from amct.model import Graph, Node
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.qat.model import QatModel

logger = logging.getLogger(__name__)

_RECTIFIERS = frozenset({"relu", "relu6"})
_KEEP_SIGN = frozenset(
    {
        "AvgPool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "alpha_dropout", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat",
        "channel_shuffle", "chunk", "clone", "constant_pad_nd", "contiguous", "dropout", "expand", "feature_dropout",
        "flatten", "identity", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "pad", "permute", "pixel_shuffle",
        "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "transpose", "unflatten",
        "unsqueeze", "upsample_nearest2d", "view",
    }
)  # fmt: skip
"""Operations whose results are not negative where their inputs are not."""


def build(traced: Traced, plan: RetrainPlan, *, weight_bits: Mapping[int, int] | None = None) -> QatModel:
    """Copy the model and give the layers of the plan trained quantizers; the user's model is not changed.

    Every module of the copy is in the mode (train or eval) of its original. Batch norms stay modules of their own and
    are trained unfolded. A weight quantizer knows the batch norm that will be folded into its layer.

    Args:
        traced: The model.
        plan: How its layers are quantized.
        weight_bits: By number of bits in the plan: another number to train weights with.

    Raises:
        CalibrationError: No layer is to be quantized.
        ModelError: The model cannot be copied, or a weight is not float32 or not finite.
    """
    chosen = enabled_layers(plan, traced.layers, switch="retrain_enable")
    norms = fuse(traced)
    for skip in norms.skips:
        logger.info("not folded: %s", skip)
    model = copy_model(traced.model)
    for original, duplicate in zip(traced.model.modules(), model.modules(), strict=True):
        duplicate.training = original.training
    leaders: dict[object, ActivationQuantizer] = {}
    for layer in chosen:
        module = model.get_submodule(layer.name)
        _check(layer.name, module)
        norm = norms.fusions.get(layer.name)
        own = _weight_quantizers(layer, module, None if norm is None else model.get_submodule(norm), weight_bits or {})
        source = _source(traced, layer)
        leader = leaders.get(source) if source is not None else None
        if leader is None:
            quantizer = activation_quantizer(layer, fixed_min=is_fixed_min(layer, traced.graph))
            own["input_quantizer"] = quantizer.to(_device(module))
            leaders[source if source is not None else layer.name] = quantizer
        as_quantized(module, own, leader)
    kept = replace(plan, not_quantized=dict(plan.not_quantized))  # a dict can be pickled
    return as_qat_model(model, QatState(plan=kept, not_folded=norms.skips))


def activation_quantizer(plan: RetrainLayerPlan, *, fixed_min: bool, trained: bool = True) -> ActivationQuantizer:
    """The quantizer of a layer's input as its plan says."""
    settings = plan.activation
    clips = None
    if settings.clip_min is not None and settings.clip_max is not None:
        clips = settings.clip_min, settings.clip_max
    return ActivationQuantizer(
        plan.name,
        settings.num_bits,
        clips=clips,
        fixed_min=fixed_min,
        batch_num=plan.batch_num,
        fp16_scale=plan.force_fp16,
        trained=trained,
    )


def _weight_quantizers(
    plan: RetrainLayerPlan, module: nn.Module, norm: nn.Module | None, bits: Mapping[int, int]
) -> dict[str, nn.Module]:
    settings = plan.weight
    made: dict[str, nn.Module] = {}
    for name, part in zip(("weight_quantizer", "state_weight_quantizer"), weight_parts(module), strict=False):
        quantizer = WeightQuantizer(
            part,
            bits.get(settings.num_bits, settings.num_bits),
            channel_wise=settings.channel_wise,
            learned=isinstance(settings, UlqRetrainSettings),
            norm=norm,
        )
        made[name] = quantizer
    if isinstance(module, nn.RNNBase):
        state = activation_quantizer(plan, fixed_min=False, trained=False)
        made["state_quantizer"] = state.to(_device(module))
    return made


def _check(name: str, module: nn.Module) -> None:
    for part in weight_parts(module):
        if part.tensor.dtype is not torch.float32:
            raise ModelError(
                f'layer "{name}": weights are trained in float32, got {str(part.tensor.dtype).removeprefix("torch.")}; '
                "convert the model with model.float() and train with torch.autocast instead"
            )
        if not bool(torch.isfinite(part.tensor).all()):
            bad = int((~torch.isfinite(part.tensor)).sum())
            raise ModelError(f'layer "{name}": {bad} of {part.tensor.numel()} weights are NaN or infinite')


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


# -- facts of the graph ------------------------------------------------------------------------------------------------


def _source(traced: Traced, layer: RetrainLayerPlan) -> object:
    """What layers have in common that share one input quantizer: the tensor they read, and how it is quantized."""
    if traced.graph is None or layer.name not in traced.graph:
        return None
    tensor = traced.graph[layer.name].inputs[0]
    return tensor, layer.activation, layer.force_fp16, layer.batch_num


def is_fixed_min(layer: RetrainLayerPlan, graph: Graph | None) -> bool:
    """Whether the lower clip of a layer's input stays 0: as its plan says, by default after a ReLU.

    Pooling, reshaping and the like in between do not matter.
    """
    if layer.activation.fixed_min is not None:
        return layer.activation.fixed_min
    if graph is None or layer.name not in graph:
        return False
    known: dict[str, bool] = {}
    return _not_negative(graph, graph[layer.name].inputs[0], known)


def _not_negative(graph: Graph, tensor: str, known: dict[str, bool]) -> bool:
    """Whether a tensor is made by a ReLU, through operations that keep the sign."""
    pending = [tensor]
    while pending:
        current = pending.pop()
        if current in known:
            continue
        node = graph.producer(current)
        known[current] = node is not None and (_rectifies(node) or node.op in _KEEP_SIGN)
        if not known[current]:
            return False
        if node is not None and not _rectifies(node):
            pending.extend(node.inputs)
    return True


def _rectifies(node: Node) -> bool:
    settings: Any = node.attributes.get("settings", ())
    return node.op in _RECTIFIERS or (node.op == "hardtanh" and bool(settings) and settings[0] == 0)
