"""What a search needs that only the PyTorch door can do: 4-bit weights whose rounding is learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.config.layers import PTQ_TYPES
from amct.pipeline.weights import quantize_weights
from amct.pytorch.adaround import learn_rounding
from amct.pytorch.preparation import TorchPreparation
from amct.search.choices import ADAROUND4, FLOAT, plan_with, planned

if TYPE_CHECKING:
    from collections.abc import Collection

    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pipeline.weights import QuantizedWeights


def learned_weights(base: QuantizedModel, choices: Collection[str]) -> dict[str, QuantizedWeights]:
    """The 4-bit weights of every layer that can have them, learned from the first calibration batches.

    Each layer learns from its own input in the float model, so its weights suit any combination of layers.
    """
    prepared = base.prepared
    if ADAROUND4 not in choices or not isinstance(prepared, TorchPreparation):
        return {}
    freedom = prepared.freedom()
    names = [
        layer.name
        for layer in prepared.layer_plans
        if PTQ_TYPES[layer.type].ada and planned(layer, ADAROUND4, freedom[layer.name]) is not None
    ]
    if not names:
        return {}
    plan = plan_with(prepared.plan, {name: ADAROUND4 if name in names else FLOAT for name in base.layers}, freedom)
    layers = [layer for layer in plan.enabled if layer.name in names]
    weights = {}
    for layer in layers:
        before = prepared.weights[layer.name]
        weights[layer.name] = quantize_weights(layer, before.sources, can_pack=before.can_pack)
    made = prepared.with_weights(plan, weights)
    return dict(learn_rounding(made, lambda: list(base.examples), fast=True))
