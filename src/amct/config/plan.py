"""The plans: the complete, immutable settings of each layer of a model, for quantization, retraining and pruning.

A config file is read once; all later steps (preparation, calibration, export, reports) use only these objects and never
read the file again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amct.config.checks import checked_settings
from amct.config.registry import find_algorithm
from amct.config.simple_config import Level
from amct.numerics.settings import FilterPruneSettings, SelectivePruneSettings

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from amct.config.layers import LayerList
    from amct.config.registry import Algorithm
    from amct.config.simple_config import LayerBlock
    from amct.errors import Problem
    from amct.numerics.settings import (
        ActivationSettings,
        BatchNormUpdate,
        PruneSettings,
        RetrainActivationSettings,
        RetrainWeightSettings,
        WeightRounding,
        WeightScale,
        WeightSettings,
    )

FORCE_FP16 = "FORCE_FP16_QUANT"

NO_CONFIG = "create_quant_config"
"""The source of a plan without a config file."""

OPEN_ENDED = 2**31 - 1
"""Value of ``batch_num``: calibration observes every batch until the caller ends it."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The quantization settings of one layer.

    Attributes:
        name: The layer.
        type: Its type name in the framework.
        enabled: Whether it is quantized; the settings exist in both cases.
        activations: One settings object per input, in input order.
        weight: How the weights are quantized; None for layers without weights.
        migration_strength: How much quantization difficulty DMQ moves from activations to weights; None: no balancing.
        force_fp16: Whether the activation scale is rounded to float16 (``FORCE_FP16_QUANT``).
        skip_fusion: Whether a following BatchNorm is not folded.
        batch_num: The number of calibration batches.
        weight_rounding: The rounding of uniform weights; learned and clustered weights do not use it.
        weight_scale: The divisor of the largest absolute weight.
        bias_correction: Whether the bias makes up for the mean error of rounding the weights.
        other_ranges: Settings whose ranges the same calibration finds too, for a search.
    """

    name: str
    type: str
    enabled: bool
    activations: tuple[ActivationSettings, ...]
    weight: WeightSettings | None
    migration_strength: float | None = None
    force_fp16: bool = False
    skip_fusion: bool = False
    batch_num: int = 1
    weight_rounding: WeightRounding = "nearest"
    weight_scale: WeightScale = "negative_side"
    bias_correction: bool = False
    other_ranges: tuple[ActivationSettings, ...] = ()

    @property
    def activation(self) -> ActivationSettings:
        """The settings of the first (or only) input."""
        return self.activations[0]

    @property
    def has_one_scale(self) -> bool:
        """Whether all output channels of its weights get one scale."""
        return self.weight is not None and not self.weight.channel_wise


PlannedLayer = TypeVar("PlannedLayer", "LayerPlan", "RetrainLayerPlan", "PruneLayerPlan")


@dataclass(frozen=True, kw_only=True)
class LayerPlans(Generic[PlannedLayer]):
    """The plans of the layers of a model.

    Attributes:
        source: The config file, or ``create_quant_config``.
        layers: Every layer that has a plan, enabled or not, in model order.
        warnings: Warnings for the user, each with its position in the file.
    """

    source: str
    layers: tuple[PlannedLayer, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def enabled(self) -> tuple[PlannedLayer, ...]:
        """The enabled layers."""
        return tuple(layer for layer in self.layers if layer.enabled)

    def find(self, name: str) -> PlannedLayer | None:
        """The plan of one layer, or None if it has none."""
        return next((layer for layer in self.layers if layer.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Plan(LayerPlans[LayerPlan]):
    """The quantization plan of a model.

    Attributes:
        not_quantized: The reason for each layer that stays float, including disabled layers.
        update_bn: How BatchNorm statistics are updated (Caffe); None: they are not.
    """

    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    force_fp16: bool = False
    not_quantized: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    update_bn: BatchNormUpdate | None = None

    @property
    def balanced(self) -> tuple[LayerPlan, ...]:
        """The layers that DMQ balances before they are quantized."""
        return tuple(layer for layer in self.enabled if layer.migration_strength is not None)

    def without_fusion(self, names: Iterable[str]) -> Plan:
        """This plan with more layers that keep the batch norm behind them."""
        kept = dict.fromkeys((*self.skip_fusion_layers, *names))
        layers = tuple(replace(each, skip_fusion=each.skip_fusion or each.name in kept) for each in self.layers)
        return replace(self, skip_fusion_layers=tuple(kept), layers=layers)


# -- making a plan -----------------------------------------------------------------------------------------------------


def settings_of(data: Mapping[str, Any], algorithms: tuple[Algorithm, ...], name_key: str, **defaults: object) -> Any:  # noqa: ANN401  the settings class is the algorithm's
    """The settings object of a JSON block that is already checked.

    Args:
        data: The block.
        algorithms: The algorithms it may name.
        name_key: The key that names the algorithm; without it the first algorithm applies.
        defaults: Values, by settings field, for keys missing in the block.
    """
    algorithm = find_algorithm(algorithms, data[name_key]) if name_key in data else algorithms[0]
    assert algorithm is not None
    values = {algorithm.field_of(key): value for key, value in data.items() if key != name_key}
    return checked_settings(algorithm.settings, {**defaults, **values})


def reasons_not_quantized(
    model: LayerList, types: Collection[str], blocks: Mapping[str, LayerBlock], *, switch_key: str = "quant_enable"
) -> dict[str, str]:
    """The reason for each layer that stays float."""
    reasons = {}
    for layer in model:
        if layer.type not in types:
            reasons[layer.name] = f"{layer.type} cannot be quantized"
        elif layer.refusal is not None:
            reasons[layer.name] = layer.refusal
        elif layer.name not in blocks:
            reasons[layer.name] = "not in the config"
        elif not blocks[layer.name].data[switch_key]:
            origin = blocks[layer.name].origin(switch_key)
            by_type = origin.level is Level.RULE and origin.position is None
            off = f"{layer.type} is off by default: switch it on with {switch_key}"
            reasons[layer.name] = off if by_type else f"switched off: {origin}"
    return reasons


# -- showing a plan ----------------------------------------------------------------------------------------------------


def config_text(plan: Plan) -> str:
    """A plan as short text; layers with the same settings share one paragraph."""
    lines = [
        f"source: {'defaults' if plan.source == NO_CONFIG else plan.source}",
        f"batch_num: {plan.batch_num if plan.batch_num < OPEN_ENDED else 'all'}",
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


@dataclass(frozen=True, kw_only=True)
class RetrainLayerPlan:
    """How one layer is quantized while it is trained.

    Attributes:
        name: The layer.
        type: Its type name in the framework.
        enabled: Whether it is quantized; the settings are there in both cases.
        activation: How its input is quantized.
        weight: How its weights are quantized, if they are.
        quantizes_weights: Whether it has weights to quantize.
        force_fp16: Whether the activation scale is rounded to float16 (``FORCE_FP16_QUANT``).
        batch_num: How many batches determine the initial clips where none are given.
    """

    name: str
    type: str
    enabled: bool
    activation: RetrainActivationSettings
    weight: RetrainWeightSettings
    quantizes_weights: bool = True
    force_fp16: bool = False
    batch_num: int = 1

    def deployed(self) -> LayerPlan:
        """The layer as exports and reports read it, in the form of post-training quantization."""
        # Nothing is calibrated or quantized anew: of these settings only the bits are read, and their text is shown.
        activation: Any = self.activation
        weight: Any = self.weight if self.quantizes_weights else None
        return LayerPlan(
            name=self.name,
            type=self.type,
            enabled=self.enabled,
            activations=(activation,),
            weight=weight,
            force_fp16=self.force_fp16,
            batch_num=self.batch_num,
        )


@dataclass(frozen=True, kw_only=True)
class RetrainPlan(LayerPlans[RetrainLayerPlan]):
    """How a model is quantized while it is trained; ``not_quantized`` says why each other layer stays float."""

    batch_num: int = 1
    force_fp16: bool = False
    not_quantized: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def deployed(self) -> Plan:
        """The plan of what is deployed: the same layers, switched on or off, with the same settings."""
        return Plan(
            source=self.source,
            layers=tuple(layer.deployed() for layer in self.layers),
            warnings=self.warnings,
            batch_num=self.batch_num,
            force_fp16=self.force_fp16,
            not_quantized=self.not_quantized,
        )


@dataclass(frozen=True, kw_only=True)
class PruneLayerPlan:
    """How one layer is pruned; the kind of pruning is the type of its settings."""

    name: str
    type: str
    enabled: bool
    settings: PruneSettings


@dataclass(frozen=True, kw_only=True)
class PrunePlan(LayerPlans[PruneLayerPlan]):
    """How a model is pruned; ``not_pruned`` says why each layer without an enabled pruner of its own has none."""

    not_pruned: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def filters(self) -> tuple[PruneLayerPlan, ...]:
        """The layers that lose output channels."""
        return tuple(layer for layer in self.enabled if isinstance(layer.settings, FilterPruneSettings))

    @property
    def selective(self) -> tuple[PruneLayerPlan, ...]:
        """The layers that keep 2 of every 4 weights."""
        return tuple(layer for layer in self.enabled if isinstance(layer.settings, SelectivePruneSettings))


@dataclass(frozen=True, kw_only=True)
class CompressionPlan:
    """Pruning, quantization, or both; None where the config does not ask for it."""

    source: str
    prune: PrunePlan | None = None
    quant: RetrainPlan | None = None
    warnings: tuple[Problem, ...] = ()


def say_fixed_min(logger: logging.Logger, layers: Sequence[str]) -> None:
    """Log where the lower clip stays at 0 although the config does not say so."""
    if layers:
        logger.info(
            "fixed_min: the lower clip of %s stays at 0, because no input value is negative; give clips, or fixed_min: "
            "false, to train it",
            ", ".join(f'"{name}"' for name in layers),
        )
