"""The plan of a retrained model in the form of post-training quantization, which exports and reports read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct.config.plan import LayerPlan, Plan

if TYPE_CHECKING:
    from amct.config.qat.plan import RetrainLayerPlan, RetrainPlan


def deployment_plan(plan: RetrainPlan) -> Plan:
    """The plan of what is deployed: the same layers, switched on or off, with the same settings."""
    layers = (_deployed(layer) for layer in plan.layers)
    return Plan(
        source=plan.source,
        layers=tuple(layers),
        warnings=plan.warnings,
        batch_num=plan.batch_num,
        force_fp16=plan.force_fp16,
        not_quantized=plan.not_quantized,
    )


def _deployed(layer: RetrainLayerPlan) -> LayerPlan:
    # Nothing is calibrated or quantized anew: of these settings only the bits are read, and their text is shown.
    activation: Any = layer.activation
    weight: Any = layer.weight if layer.quantizes_weights else None
    return LayerPlan(
        name=layer.name,
        type=layer.type,
        enabled=layer.enabled,
        activations=(activation,),
        weight=weight,
        force_fp16=layer.force_fp16,
        batch_num=layer.batch_num,
    )
