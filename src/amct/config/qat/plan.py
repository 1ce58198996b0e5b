"""The plans of retraining: which layers learn to be quantized and how, which are pruned and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

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
        weight: How its weights are quantized.
        force_fp16: Whether the activation scale is rounded to float16 (``FORCE_FP16_QUANT``).
        batch_num: How many batches find the first clips where none are given.
    """

    name: str
    type: str
    enabled: bool
    activation: RetrainActivationSettings
    weight: RetrainWeightSettings
    force_fp16: bool = False
    batch_num: int = 1


@dataclass(frozen=True, kw_only=True)
class RetrainPlan:
    """How a model is quantized while it is trained.

    Attributes:
        source: The config file, or what stands for it.
        layers: Every layer the config speaks of, enabled or not, in model order.
        not_quantized: Why each other layer, and each layer switched off, stays float.
        warnings: What the user should know, each with its place in the file.
    """

    source: str
    batch_num: int = 1
    force_fp16: bool = False
    layers: tuple[RetrainLayerPlan, ...] = ()
    not_quantized: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[Problem, ...] = ()

    @property
    def enabled(self) -> tuple[RetrainLayerPlan, ...]:
        """The layers that will be quantized."""
        return tuple(layer for layer in self.layers if layer.enabled)

    def find(self, name: str) -> RetrainLayerPlan | None:
        """The plan of one layer, or None when the config does not speak of it."""
        return next((layer for layer in self.layers if layer.name == name), None)


@dataclass(frozen=True, kw_only=True)
class PruneLayerPlan:
    """How one layer is pruned; the kind of pruning is the type of its settings."""

    name: str
    type: str
    enabled: bool
    settings: PruneSettings


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """How a model is pruned.

    Attributes:
        source: The config file.
        layers: Every layer with a pruner of its own, enabled or not, in model order.
        not_pruned: Why each other layer, and each layer switched off, starts no pruning.
        warnings: What the user should know, each with its place in the file.
    """

    source: str
    layers: tuple[PruneLayerPlan, ...] = ()
    not_pruned: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[Problem, ...] = ()

    @property
    def filters(self) -> tuple[PruneLayerPlan, ...]:
        """The layers that lose output channels."""
        return tuple(
            layer for layer in self.layers if layer.enabled and isinstance(layer.settings, FilterPruneSettings)
        )

    @property
    def selective(self) -> tuple[PruneLayerPlan, ...]:
        """The layers that keep 2 of every 4 weights."""
        return tuple(
            layer for layer in self.layers if layer.enabled and isinstance(layer.settings, SelectivePruneSettings)
        )

    def find(self, name: str) -> PruneLayerPlan | None:
        """The plan of one layer, or None when it has no pruner."""
        return next((layer for layer in self.layers if layer.name == name), None)


@dataclass(frozen=True, kw_only=True)
class CompressionPlan:
    """Pruning, quantization, or both; None where the config does not ask for it."""

    source: str
    prune: PrunePlan | None = None
    quant: RetrainPlan | None = None
    warnings: tuple[Problem, ...] = ()
