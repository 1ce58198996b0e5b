"""The plans of retraining: how each layer is quantized while it is trained, and how it is pruned."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.config.plan import LayerPlan, LayerPlans, Plan
from amct.config.qat.settings import FilterPruneSettings, SelectivePruneSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.config.qat.settings import PruneSettings, RetrainActivationSettings, RetrainWeightSettings
    from amct.errors import Problem


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
