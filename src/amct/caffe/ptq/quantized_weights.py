"""The weights of one layer as integers: uniform (ARQ, or factors given by the user) or clustered to 16 values (SNQ)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amct.caffe.model import RECURRENT_TYPES
from amct.caffe.ptq.folding import FusionReport, float_weight, fuse_after, naming
from amct.errors import AmctError, CalibrationError
from amct.numerics.affine import SymmetricScale, fit_bias, quantize_bias
from amct.numerics.arq import WeightKind, arq, quantize_weight
from amct.numerics.integer import bias_integers, dequantized_bias, sum_scale, worst_case_accumulator
from amct.numerics.qparams import QParams, float32_tensor
from amct.numerics.rounding import quantize_weight_cancelling_errors
from amct.numerics.settings import ArqSettings, SnqSettings
from amct.numerics.snq import snq
from amct.pipeline.weights import FloatWeight, QuantizedWeight, QuantizedWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.numerics.settings import WeightRounding, WeightScale, WeightSettings

logger = logging.getLogger(__name__)

UNIFORM_BITS = 8
_REFUSED = "its weights cannot be quantized"


def real_blobs(weights: QuantizedWeights, blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The blobs of a layer with the weights quantized and dequantized."""
    result = list(blobs)
    for weight in weights.weights:
        result[weight.source.place] = weight.real()
    return result


def quantize_weights(
    layer: ProtoMessage,
    blobs: Sequence[torch.Tensor],
    settings: WeightSettings | None,
    *,
    rounding: WeightRounding = "error_cancelling",
    scale: WeightScale = "full_range",
) -> QuantizedWeights:
    """Quantize the weights of a layer according to its settings; by default uniformly per channel.

    Args:
        layer: The layer.
        blobs: Its blobs.
        settings: The weight settings.
        rounding: The rounding of uniform weights; recurrent layers always round to nearest.
        scale: The divisor of the largest absolute weight.

    Raises:
        CalibrationError: a weight is NaN, infinite or too large; the message names the layer.
    """
    chosen = settings or ArqSettings()
    with naming(layer, CalibrationError, _REFUSED):
        if layer.type in RECURRENT_TYPES:
            return QuantizedWeights(weights=tuple(weight.readable() for weight in _recurrent(blobs, scale)))
        source = float_weight(layer, blobs[0])
        channel_wise = chosen.channel_wise and source.kind is not WeightKind.LINEAR
        if layer.type != "InnerProduct" and layer.convolution_param.axis != 1:
            channel_wise = False  # DeQuant scales along axis 1 only
        if isinstance(chosen, SnqSettings):
            given = replace(chosen, channel_wise=channel_wise)
            clusters = snq(source.tensor, kind=source.kind, groups=source.groups, settings=given)
            weight = QuantizedWeight.clustered(source, clusters)
        else:
            weight = _rounded(source, _uniform(source, channel_wise, scale), rounding)
        return QuantizedWeights(weights=(weight.readable(),))


def fold_quantized(
    model: CaffeModel, weights: dict[str, QuantizedWeights], *, skip: Collection[str] = ()
) -> FusionReport:
    """Fold BatchNorm, Scale and Bias behind layers whose weights are quantized already: the integers stay.

    The scale of each output takes the factor; a layer with one scale for all outputs cannot take one for each.

    Args:
        model: The model; it is changed.
        weights: The quantized weights by layer; changed where something is folded.
        skip: Layers that are not folded.
    """

    def refuse_head(layer: ProtoMessage) -> str | None:
        if layer.type == "InnerProduct" and layer.name in weights:
            return f'the weights of "{layer.name}" have one scale for all outputs, which cannot take a factor for each'
        return None

    report = FusionReport()
    for head, affine in fuse_after(model, report, skip=skip, refuse_head=refuse_head).items():
        if head in weights:
            weight = weights[head].weights[0].times(affine.multiplier)
            weights[head] = replace(weights[head], weights=(weight,))
    return report


def _uniform(source: FloatWeight, channel_wise: bool, scale: WeightScale) -> QParams:
    return arq(
        source.tensor,
        kind=source.kind,
        channel_wise=channel_wise,
        groups=source.groups,
        symmetric_scale=SymmetricScale(scale),
    )


def _rounded(source: FloatWeight, qparams: QParams, rounding: WeightRounding = "error_cancelling") -> QuantizedWeight:
    round_weight = quantize_weight if rounding == "nearest" else quantize_weight_cancelling_errors
    integers = round_weight(source.tensor, qparams, source.kind, groups=source.groups)
    cancels_errors = rounding == "error_cancelling"
    return QuantizedWeight(source=source, qparams=qparams, cancel_errors=cancels_errors, integers=integers)


def _recurrent(blobs: Sequence[torch.Tensor], scale: WeightScale) -> list[QuantizedWeight]:
    """Round each matrix to nearest: hidden states have both signs, so weight errors already cancel."""
    matrices = [
        FloatWeight(tensor=blob, kind=WeightKind.LINEAR, place=index)
        for index, blob in enumerate(blobs)
        if blob.ndim == 2  # the others are biases
    ]
    return [_rounded(source, _uniform(source, False, scale), "nearest") for source in matrices]


def given_weights(layer: ProtoMessage, blobs: Sequence[torch.Tensor], scales: Sequence[float]) -> QuantizedWeights:
    """Quantize weights with user-supplied scales.

    Raises:
        CalibrationError: a weight is NaN; the message names the layer.
    """
    with naming(layer, CalibrationError, _REFUSED):
        return QuantizedWeights(weights=(_rounded(float_weight(layer, blobs[0]), QParams.of(scales)),))


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """The sums of one input with one weight: a layer has one for each bottom, a recurrent layer one for each matrix.

    Attributes:
        weight: The weight, with a larger scale where the bias needs one.
        data: The parameters of the input.
        bias: int32; every input has its own step, so the same bias has different integers for each.
    """

    weight: QuantizedWeight
    data: QParams
    bias: torch.Tensor | None = None

    @property
    def step(self) -> torch.Tensor:
        """The step of the sums, one or one per output channel."""
        return sum_scale(self.weight.qparams.scale, float32_tensor(self.data.step))

    def real_blobs(self) -> dict[int, torch.Tensor]:
        """The dequantized weight, and the bias behind it, by their place among the blobs of the layer."""
        place = self.weight.source.place
        bias = {} if self.bias is None else {place + 1: dequantized_bias(self.bias, self.step)}
        return {place: self.weight.real(), **bias}

    def may_overflow(self) -> bool:
        """Whether the largest possible sums exceed int32."""
        source, integers = self.weight.source, self.weight.integers
        assert integers is not None
        data = {"bits": self.data.bits, "offset": self.data.zero_point}
        worst = worst_case_accumulator(integers, self.bias, kind=source.kind, groups=source.groups, **data)
        return bool(worst.overflowing)


def layer_products(
    layer: str, weight: QuantizedWeight, bias: torch.Tensor | None, inputs: Sequence[QParams], *, may_raise_scale: bool
) -> list[Product]:
    """The products of inputs with a weight; where the bias exceeds int32, the scale of that channel is increased.

    Raises:
        CalibrationError: the bias exceeds int32 and the scale is user-supplied; the message names the layer.
    """
    if bias is None:
        return [Product(weight=weight, data=data) for data in inputs]
    scales = [float32_tensor(data.step) for data in inputs]
    try:
        if may_raise_scale:
            fit = fit_bias(bias, weight.qparams.scale, min(scales))  # the smallest scale gives the largest integers
            if fit.raised:
                channels = ", ".join(map(str, fit.raised[:5])) + (" ..." if len(fit.raised) > 5 else "")
                logger.warning(
                    'layer "%s": the bias does not fit int32; the weight scale of %d channel(s) is raised: %s',
                    layer,
                    len(fit.raised),
                    channels,
                )
                weight = weight.with_scale(fit.scale_weight)
        biases = [quantize_bias(bias, weight.qparams.scale, scale) for scale in scales]
    except AmctError as error:
        raise CalibrationError(f'layer "{layer}": {error}') from error
    step = sum_scale(weight.qparams.scale, scales[0])
    biases[0] = bias_integers(dequantized_bias(biases[0], step), step)  # as a reader finds it in its dequantized values
    return [Product(weight=weight, data=data, bias=each) for data, each in zip(inputs, biases, strict=True)]
