"""A plan in a few lines for people: in reports, and in the notes beside a quantized model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct.config.plan import LayerPlan, Plan

NO_CONFIG = "create_quant_config"
"""What a plan names as its source when the user gave none."""


def config_text(plan: Plan) -> str:
    """What a plan says, short: layers with the same settings are told together."""
    lines = [
        f"source: {'defaults' if plan.source == NO_CONFIG else plan.source}",
        f"batch_num: {plan.batch_num}",
        f"activation_offset: {str(plan.activation_offset).lower()}",
        f"do_fusion: {str(plan.do_fusion).lower()}",
    ]
    if plan.skip_fusion_layers:
        lines.append(f"skip_fusion_layers: {', '.join(plan.skip_fusion_layers)}")
    if plan.force_fp16:
        lines.append("fakequant_precision_mode: FORCE_FP16_QUANT")
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in plan.enabled:
        groups.setdefault(_settings(layer), []).append(layer.name)
    for settings, names in groups.items():
        lines += ["", ", ".join(names), *(f"  {setting}" for setting in settings)]
    return "\n".join(lines)


def _settings(layer: LayerPlan) -> tuple[str, ...]:
    balance = f"dmq_balancer: migration_strength={layer.migration_strength}"
    different = dict.fromkeys(str(settings) for settings in layer.activations)
    return (
        *(f"activations: {settings}" for settings in different),
        *([f"weights: {layer.weight}"] if layer.weight is not None else []),
        *([balance] if layer.migration_strength is not None else []),
    )
