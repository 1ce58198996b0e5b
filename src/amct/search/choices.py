"""What a layer may become, and the plan of a model whose layers are chosen one by one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.errors import ArgumentError, did_you_mean
from amct.numerics.settings import AdaRoundSettings, ArqSettings, SnqSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amct.config.plan import LayerPlan, Plan
    from amct.pipeline.door import LayerFreedom

FLOAT, INT8, INT16, INT4, ADAROUND4 = "float", "int8", "int16", "int4", "adaround4"
MEANINGS = {
    FLOAT: "the layer is not quantized",
    INT8: "8-bit weights and activations",
    INT16: "8-bit weights, 16-bit activations",
    INT4: "4-bit weights whose rounding errors cancel (Caffe: SNQ), 8-bit activations",
    ADAROUND4: "4-bit weights whose rounding is learned (PyTorch), 8-bit activations",
}
DEFAULT = (FLOAT, INT8, INT4)
WEIGHT_BITS = {FLOAT: 32, INT8: 8, INT16: 8, INT4: 4, ADAROUND4: 4}
DATA_BITS = {FLOAT: 32, INT8: 8, INT16: 16, INT4: 8, ADAROUND4: 8}
NOT_CHOSEN = "left float by the search"


def checked(choices: Iterable[str] | None, known: Iterable[str] = MEANINGS) -> tuple[str, ...]:
    """The choices of a search, checked; None: the default.

    Raises:
        ArgumentError: One is unknown, or there is nothing to choose.
    """
    known = tuple(known)
    if choices is None:
        return DEFAULT
    found = tuple(dict.fromkeys([choices] if isinstance(choices, str) else choices))
    for name in found:
        if name not in known:
            raise ArgumentError(f'choices: "{name}" is unknown.{did_you_mean(str(name), known)} Choose from {known}')
    if not set(found) - {FLOAT}:
        raise ArgumentError(f'choices: expected something besides "{FLOAT}", such as {DEFAULT}, got {found}')
    return found


def planned(layer: LayerPlan, choice: str, kind: LayerFreedom) -> LayerPlan | None:
    """The plan of a layer that becomes ``choice``; None if it cannot."""
    if choice == FLOAT:
        return replace(layer, enabled=False)
    if choice == INT8:
        return layer
    if choice == INT16:
        wide: tuple[Any, ...] = tuple(replace(each, num_bits=16) for each in layer.activations)  # type: ignore[type-var]
        return replace(layer, activations=wide) if kind.wide else None
    if not kind.can_pack or layer.weight is None or layer.migration_strength is not None:
        return None
    channel_wise = layer.weight.channel_wise
    if kind.clustered:
        return replace(layer, weight=SnqSettings(channel_wise=channel_wise)) if choice == INT4 else None
    if choice == ADAROUND4:
        return replace(layer, weight=AdaRoundSettings(num_bits=4, channel_wise=channel_wise))
    return replace(layer, weight=ArqSettings(num_bits=4, channel_wise=channel_wise))


def plan_with(plan: Plan, choices: Mapping[str, str], kinds: Mapping[str, LayerFreedom]) -> Plan:
    """The plan of a model with a choice for each layer; one that a layer cannot take leaves it as it is."""
    layers, left = [], dict(plan.not_quantized)
    for layer in plan.layers:
        choice = choices.get(layer.name)
        made = layer if choice is None else planned(layer, choice, kinds[layer.name]) or layer
        if layer.enabled and not made.enabled:
            left[layer.name] = NOT_CHOSEN
        layers.append(made)
    return replace(plan, source="the search", layers=tuple(layers), not_quantized=MappingProxyType(left), warnings=())
