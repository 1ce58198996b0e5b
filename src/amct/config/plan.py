"""The plan: what will be done to each layer of a model, complete and immutable.

A config file is read once; everything after it (preparation, calibration, export, reports) works with these objects and
never looks into the file again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.config.settings import ActivationSettings, BatchNormUpdate, WeightSettings
    from amct.errors import Problem

FORCE_FP16 = "FORCE_FP16_QUANT"

OPEN_ENDED = 2**31 - 1
"""As ``batch_num``: calibration takes every batch there is and ends when it is told to."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What will be done to one layer.

    Attributes:
        name: The layer.
        type: Its type name in the framework.
        enabled: Whether it is quantized; the settings are there in both cases.
        activations: One settings object per input, in the order of the inputs.
        weight: How the weights are quantized; None for layers without weights.
        migration_strength: How much of the difficulty DMQ moves from activations to weights; None: no balancing.
        force_fp16: Whether the activation scale is rounded to float16 (``FORCE_FP16_QUANT``).
        skip_fusion: Whether a BatchNorm that follows stays where it is.
        batch_num: How many batches calibration needs.
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

    @property
    def activation(self) -> ActivationSettings:
        """The settings of the only, or first, input."""
        return self.activations[0]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done to a model.

    Attributes:
        source: The config file, or what stands for it.
        layers: Every quantizable layer of the model, enabled or not, in model order.
        not_quantized: Why each other layer, and each layer switched off, stays float.
        warnings: What the user should know, each with its place in the file.
        update_bn: How BatchNorm statistics are refreshed (Caffe); None: they are not.
    """

    source: str
    batch_num: int = 1
    activation_offset: bool = True
    do_fusion: bool = True
    skip_fusion_layers: tuple[str, ...] = ()
    force_fp16: bool = False
    layers: tuple[LayerPlan, ...] = ()
    not_quantized: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[Problem, ...] = ()
    update_bn: BatchNormUpdate | None = None

    @property
    def enabled(self) -> tuple[LayerPlan, ...]:
        """The layers that will be quantized."""
        return tuple(layer for layer in self.layers if layer.enabled)

    @property
    def balanced(self) -> tuple[LayerPlan, ...]:
        """The layers that DMQ balances before they are quantized."""
        return tuple(layer for layer in self.enabled if layer.migration_strength is not None)

    def find(self, name: str) -> LayerPlan | None:
        """The plan of one layer, or None when the layer is not quantizable."""
        return next((layer for layer in self.layers if layer.name == name), None)
