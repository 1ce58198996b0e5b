"""Builds the trainable model: a copy of the user's model whose layers have trained quantizers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct.errors import ModelError
from amct.numerics.settings import UlqRetrainSettings
from amct.pipeline.preparation import enabled_layers
from amct.pytorch.capture.program_graph import call_name
from amct.pytorch.folding import fuse
from amct.pytorch.functional.layers import child_path, take_functional_layers
from amct.pytorch.model_copy import copy_model
from amct.pytorch.qat.functional import QuantizedCall, trained_parts
from amct.pytorch.qat.layers import as_quantized, put_quantizers
from amct.pytorch.qat.model import QatState, as_qat_model
from amct.pytorch.qat.operations import add_calls, instrument
from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer
from amct.pytorch.qat.signs import not_negative

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from amct.config.plan import RetrainLayerPlan, RetrainPlan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.qat.model import QatModel

logger = logging.getLogger(__name__)


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
    calls = _functional_calls(model, {layer.name for layer in chosen})
    leaders: dict[object, ActivationQuantizer] = {}
    for layer in chosen:
        module = calls.get(layer.name) or model.get_submodule(layer.name)
        _check(layer.name, module)
        norm = norms.fusions.get(layer.name)
        own = _weight_quantizers(layer, module, None if norm is None else model.get_submodule(norm), weight_bits or {})
        source = _source(traced, layer)
        leader = leaders.get(source) if source is not None else None
        if leader is None:
            quantizer = activation_quantizer(layer, fixed_min=is_fixed_min(layer, traced))
            own["input_quantizer"] = quantizer.to(_device(module))
            leaders[source if source is not None else layer.name] = quantizer
        if isinstance(module, QuantizedCall):
            put_quantizers(module, own, leader)
        else:
            as_quantized(module, own, leader)
    kept = replace(plan, not_quantized=dict(plan.not_quantized))  # a dict can be pickled
    return as_qat_model(model, QatState(plan=kept, not_folded=norms.skips))


def _functional_calls(model: nn.Module, chosen: Collection[str]) -> dict[str, QuantizedCall]:
    """Give a copied model the modules that will quantize its functional calls; by layer."""
    layers = take_functional_layers(model)
    if layers is None:
        return {}
    made: dict[str, QuantizedCall] = {}
    known: dict[str, dict[str, tuple[Any, ...]]] = {}
    for name, source in layers.sources.items():
        path = child_path(name)
        holder, _, child = path.rpartition(".")
        owner, _, parameter = source.parameter.rpartition(".")
        known.setdefault("", {})[path] = source.parameter, source.kind
        known.setdefault(owner, {})[child] = parameter, source.kind
        if name in chosen:
            module = model.get_submodule(holder)
            made[name] = QuantizedCall(module, source).train(module.training)
            module.add_module(child, made[name])
    for owner, calls in known.items():
        add_calls(model.get_submodule(owner), calls)
        if owner:
            instrument(model.get_submodule(owner))
    return made


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
    for name, part in zip(("weight_quantizer", "state_weight_quantizer"), trained_parts(module), strict=False):
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
    for part in trained_parts(module):
        if part.tensor.dtype is not torch.float32:
            raise ModelError(
                f'layer "{name}": weights are trained in float32, got {str(part.tensor.dtype).removeprefix("torch.")}; '
                "convert the model with model.float() and train with torch.autocast instead"
            )
        if not bool(torch.isfinite(part.tensor).all()):
            bad = int((~torch.isfinite(part.tensor)).sum())
            raise ModelError(f'layer "{name}": {bad} of {part.tensor.numel()} weights are NaN or infinite')


def _device(module: nn.Module) -> torch.device:
    return trained_parts(module)[0].tensor.device


# -- facts of the graph ------------------------------------------------------------------------------------------------


def _source(traced: Traced, layer: RetrainLayerPlan) -> object:
    """What layers have in common that share one input quantizer: the tensor they read, and how it is quantized."""
    if traced.graph is None or layer.name not in traced.graph or traced.layers[layer.name].calls > 1:
        return None
    tensor = traced.graph[layer.name].inputs[0]
    return tensor, layer.activation, layer.force_fp16, layer.batch_num


def is_fixed_min(layer: RetrainLayerPlan, traced: Traced) -> bool:
    """Whether the lower clip of a layer's input stays 0: as its plan says, by default after a ReLU.

    Pooling, reshaping and the like in between do not matter. A layer that is called several times must read such a
    tensor each time.
    """
    graph = traced.graph
    if layer.activation.fixed_min is not None:
        return layer.activation.fixed_min
    calls = [call_name(layer.name, call) for call in range(traced.layers[layer.name].calls)]
    if graph is None or any(call not in graph for call in calls):
        return False
    return all(not_negative(graph, graph[call].inputs[0]) for call in calls)
