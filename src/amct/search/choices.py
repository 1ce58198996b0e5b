"""What a layer may become, and the plan of a model whose layers are chosen one by one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.errors import ArgumentError, did_you_mean
from amct.numerics.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings, SnqSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from amct.config.plan import LayerPlan, Plan
    from amct.numerics.settings import ActivationSettings
    from amct.pipeline.door import LayerFreedom

FLOAT, INT8, INT16, INT4, ADAROUND4 = "float", "int8", "int16", "int4", "adaround4"
INT12, HFMG8, MINMAX8 = "int12", "hfmg8", "minmax8"
MEANINGS = {
    FLOAT: "the layer is not quantized",
    INT8: "8-bit weights and activations",
    HFMG8: "as int8, with the range of activations that HFMG finds (not in Caffe)",
    MINMAX8: "as int8, with the whole range of activations",
    INT12: "8-bit weights, 12-bit activations (Caffe)",
    INT16: "8-bit weights, 16-bit activations",
    INT4: "4-bit weights whose rounding errors cancel (Caffe: SNQ), 8-bit activations",
    ADAROUND4: "4-bit weights whose rounding is learned (PyTorch), 8-bit activations",
}
DEFAULT = (FLOAT, INT8, INT4)
WEIGHT_BITS = dict.fromkeys(MEANINGS, 8) | {FLOAT: 32, INT4: 4, ADAROUND4: 4}
DATA_BITS = dict.fromkeys(MEANINGS, 8) | {FLOAT: 32, INT12: 12, INT16: 16}
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


def other_ranges(layer: LayerPlan, choices: Iterable[str]) -> tuple[ActivationSettings, ...]:
    """The settings whose ranges a calibration must find for these choices of a layer."""
    settings = layer.activation
    if not isinstance(settings, (IfmrSettings, HfmgSettings)):
        return ()
    return tuple(_RANGES[each](settings.num_bits, settings.asymmetric) for each in choices if each in _RANGES)


def _hfmg(bits: int, asymmetric: bool) -> ActivationSettings:
    return HfmgSettings(num_bits=bits, asymmetric=asymmetric)


def _whole(bits: int, asymmetric: bool) -> ActivationSettings:
    """IFMR with one candidate: the smallest and the largest value."""
    return IfmrSettings(
        num_bits=bits,
        asymmetric=asymmetric,
        max_percentile=1.0,
        min_percentile=1.0,
        search_range=(1.0, 1.01),
        search_step=0.01,
    )


_RANGES: Mapping[str, Callable[[int, bool], ActivationSettings]] = MappingProxyType({HFMG8: _hfmg, MINMAX8: _whole})


def planned(layer: LayerPlan, choice: str, kind: LayerFreedom) -> LayerPlan | None:
    """The plan of a layer that becomes ``choice``; None if it cannot."""
    if choice == FLOAT:
        return replace(layer, enabled=False)
    if choice == INT8:
        return layer
    if choice in (INT16, INT12):
        bits = DATA_BITS[choice]
        wide: tuple[Any, ...] = tuple(replace(each, num_bits=bits) for each in layer.activations)  # type: ignore[type-var]
        return replace(layer, activations=wide) if kind.wide and (kind.clustered or choice == INT16) else None
    if choice in _RANGES:
        found = other_ranges(layer, [choice])
        has_ranges = found and found[0] in layer.other_ranges and len(set(layer.activations)) == 1
        return replace(layer, activations=found * len(layer.activations)) if has_ranges else None
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
