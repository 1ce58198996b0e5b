"""The weights of an ONNX model's layers, quantized as the plan says, and their entries in the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.calibration.layer_records import recorded_bits, weight_record
from amct.config.settings import ArqSettings
from amct.errors import AmctError, CalibrationError
from amct.export.onnx.weights import replace_weight
from amct.numerics.arq import WeightFactors, WeightKind, arq, channels_first, fake_quantize_weight
from amct.numerics.dmq import balance_weight

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from amct.config.plan import LayerPlan
    from amct.export.onnx.graph import OnnxGraph
    from amct.export.onnx.layer import Layer
    from amct.onnx_model.layers import FoundLayer
    from amct.record import LayerRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """The quantized weights of one layer.

    Attributes:
        layer: The float layer.
        floats: Its weight, and of a recurrent layer the second matrix; balanced where DMQ balances the layer.
        rounded: The same on their grids.
        factors: Their scales.
        bits: How many bits the integers have.
        balance: DMQ's factors, one per input channel; the layer's input is divided by them.
        can_pack: Whether two 4-bit weights can share a byte.
    """

    layer: Layer
    floats: tuple[Tensor, ...]
    rounded: tuple[Tensor, ...]
    factors: tuple[WeightFactors, ...]
    bits: int = 8
    balance: Tensor | None = None
    can_pack: bool = True

    @property
    def kind(self) -> WeightKind:
        """How the weight lies."""
        return self.layer.kind.weight_kind

    @property
    def channel_axis(self) -> int:
        """Where the input of the layer has its channels."""
        return self.layer.kind.channel_axis

    @property
    def recorded_bits(self) -> int:
        """The bit width that the record has for them: the next that it knows."""
        return recorded_bits(self.bits, can_pack=self.can_pack)

    def record(self) -> LayerRecord:
        """The layer's entry in the record, still without its activations. ONNX's order of gates is the record's."""
        scales = [tuple(float(value) for value in factors.scale.reshape(-1)) for factors in self.factors]
        return weight_record(
            scales[0] if scales else (),
            state=scales[1] if len(scales) > 1 else (),
            bits=self.recorded_bits,
            balance=() if self.balance is None else tuple(float(value) for value in self.balance),
        )

    def put_into(self, graph: OnnxGraph, layer: Layer) -> None:
        """Let the layer's node in a graph compute with these weights; its input is not balanced there."""
        for index, weight in enumerate(self.rounded, start=1):
            if index == 1 and self.balance is not None:
                weight = balance_weight(weight, self.balance.double().reciprocal(), self.kind, self.layer.groups)
            array: NDArray[np.floating] = weight.numpy()
            replace_weight(graph, layer, array[np.newaxis] if layer.kind.is_recurrent else array, index)

    def rows(self) -> list[Tensor]:
        """The float weights by output channel, for reports."""
        return [channels_first(weight, self.kind, self.layer.groups) for weight in self.floats]


def float_weights(layer: Layer, balance: Tensor | None = None) -> tuple[Tensor, ...]:
    """The weights of a layer as tensors, the first one multiplied by DMQ's factors."""
    arrays = [array for array in (layer.weight, layer.recurrent_weight) if array is not None]
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    if balance is not None:
        tensors[0] = balance_weight(tensors[0], balance, layer.kind.weight_kind, layer.groups)
    return tuple(tensors)


def quantize_weights(plan: LayerPlan, found: FoundLayer, balance: Tensor | None = None) -> LayerWeights:
    """Quantize the weights of one layer by their largest values.

    Raises:
        CalibrationError: the weights cannot be quantized (NaN, infinity); names the layer.
    """
    settings = plan.weight or ArqSettings()
    assert isinstance(settings, ArqSettings)  # others were refused before
    layer = found.layer
    floats = float_weights(layer, balance)
    factors, rounded = [], []
    for weight in floats:
        kind, bits = layer.kind.weight_kind, settings.num_bits
        groups = layer.kind.gates or layer.groups
        try:
            scales = arq(weight, kind=kind, bits=bits, channel_wise=settings.channel_wise, groups=groups)
        except AmctError as error:
            raise CalibrationError(f'layer "{plan.name}": {error}') from error
        factors.append(scales)
        rounded.append(fake_quantize_weight(weight, scales, kind, bits, layer.groups))
    return LayerWeights(
        layer=layer,
        floats=floats,
        rounded=tuple(rounded),
        factors=tuple(factors),
        bits=settings.num_bits,
        balance=balance,
        can_pack=found.can_pack,
    )
