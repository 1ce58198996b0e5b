"""The weights of one layer as integers: uniform (ARQ, or factors given by the user) or clustered to 16 values (SNQ)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amct.caffe.model import RECURRENT_TYPES
from amct.caffe.ptq.folding import FusionReport, float_weight, fuse_after
from amct.errors import AmctError, CalibrationError
from amct.numerics.affine import SymmetricScale, fit_bias, quantize_bias
from amct.numerics.arq import WeightKind, arq, quantize_weight
from amct.numerics.integer import bias_integers, dequantized_bias, worst_case_accumulator
from amct.numerics.integer import sum_scale as step_of_sums
from amct.numerics.qparams import QParams
from amct.numerics.rounding import quantize_weight_cancelling_errors
from amct.numerics.settings import ArqSettings, SnqSettings
from amct.numerics.snq import snq
from amct.pipeline.weights import FloatWeight, QuantizedWeight, QuantizedWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.numerics.settings import WeightRounding, WeightScale, WeightSettings

logger = logging.getLogger(__name__)

UNIFORM_BITS = 8


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
    try:
        if layer.type in RECURRENT_TYPES:
            return QuantizedWeights(weights=tuple(weight.readable() for weight in _recurrent(blobs, scale)))
        source = float_weight(layer, blobs[0])
        channel_wise = chosen.channel_wise and source.kind is not WeightKind.LINEAR
        if layer.type != "InnerProduct" and layer.convolution_param.axis != 1:
            channel_wise = False  # DeQuant scales along axis 1 only
        if isinstance(chosen, SnqSettings):
            weight = _clustered(source, replace(chosen, channel_wise=channel_wise))
        else:
            weight = _rounded(source, _uniform(source, channel_wise, scale), rounding)
        return QuantizedWeights(weights=(weight.readable(),))
    except AmctError as error:
        raise CalibrationError(
            f'layer "{layer.name}" ({layer.type}): its weights cannot be quantized: {error}'
        ) from error


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


def _clustered(source: FloatWeight, settings: SnqSettings) -> QuantizedWeight:
    clusters = snq(source.tensor, kind=source.kind, groups=source.groups, settings=settings)
    return QuantizedWeight.clustered(source, clusters)


def matrix_places(blobs: Sequence[torch.Tensor]) -> list[int]:
    """The indices of the blobs of a recurrent layer that are matrices; the others are biases."""
    return [index for index, blob in enumerate(blobs) if blob.ndim == 2]


def _recurrent(blobs: Sequence[torch.Tensor], scale: WeightScale) -> list[QuantizedWeight]:
    """Round each matrix to nearest: hidden states have both signs, so weight errors already cancel."""
    found = []
    for index in matrix_places(blobs):
        source = FloatWeight(tensor=blobs[index], kind=WeightKind.LINEAR, place=index)
        found.append(_rounded(source, _uniform(source, False, scale), "nearest"))
    return found


def given_weights(layer: ProtoMessage, blobs: Sequence[torch.Tensor], scales: Sequence[float]) -> QuantizedWeights:
    """Quantize weights with user-supplied scales.

    Raises:
        CalibrationError: a weight is NaN; the message names the layer.
    """
    try:
        return QuantizedWeights(weights=(_rounded(float_weight(layer, blobs[0]), QParams.of(scales)),))
    except AmctError as error:
        raise CalibrationError(
            f'layer "{layer.name}" ({layer.type}): its weights cannot be quantized: {error}'
        ) from error


@dataclass(frozen=True, kw_only=True)
class IntegerLayer:
    """A quantized layer: weights, and for each bottom the int32 bias and the accumulator scale.

    Every bottom has its own scale, so the same bias has different integers for each.
    """

    weights: QuantizedWeights
    biases: tuple[torch.Tensor, ...]
    sum_scales: tuple[torch.Tensor, ...]

    @property
    def real_bias(self) -> torch.Tensor | None:
        """The dequantized bias, of the first bottom."""
        return dequantized_bias(self.biases[0], self.sum_scales[0]) if self.biases else None


def sum_scale(weight: QuantizedWeight, scale_data: float) -> torch.Tensor:
    """The accumulator scale of a weight and its data, one or one per output channel."""
    return step_of_sums(weight.qparams.scale, torch.tensor(scale_data, dtype=torch.float32))


def with_bias(
    layer: str,
    weights: QuantizedWeights,
    bias: torch.Tensor | None,
    scales_data: Sequence[float],
    *,
    may_raise_scale: bool,
) -> IntegerLayer:
    """Quantize the bias for each bottom; where it exceeds int32, increase the weight scale of that channel.

    Raises:
        CalibrationError: it does not fit and the scale is user-supplied.
    """
    weight = weights.weights[0]
    biases: tuple[torch.Tensor, ...] = ()
    if bias is not None:
        weight, biases = fitted_bias(layer, weight, bias, scales_data, may_raise_scale=may_raise_scale)
    return IntegerLayer(
        weights=replace(weights, weights=(weight,)),
        biases=biases,
        sum_scales=tuple(sum_scale(weight, scale) for scale in scales_data),
    )


def fitted_bias(
    layer: str, weight: QuantizedWeight, bias: torch.Tensor, scales_data: Sequence[float], *, may_raise_scale: bool
) -> tuple[QuantizedWeight, tuple[torch.Tensor, ...]]:
    """The integer bias for each data scale, and the weight, with a larger scale where the bias needs one.

    Raises:
        CalibrationError: the bias exceeds int32 and the scale is user-supplied; the message names the layer.
    """
    scales = [torch.tensor(scale, dtype=torch.float32) for scale in scales_data]
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
        return weight, _biases(weight, bias, scales)
    except AmctError as error:
        raise CalibrationError(f'layer "{layer}": {error}') from error


def _biases(weight: QuantizedWeight, bias: torch.Tensor, scales: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The integer bias for each data scale; the first one as a reader finds it in its dequantized values."""
    scale = weight.qparams.scale
    first, *others = (quantize_bias(bias, scale, each) for each in scales)
    step = step_of_sums(scale, scales[0])
    return bias_integers(dequantized_bias(first, step), step), *others


def may_overflow(weight: QuantizedWeight, bias: torch.Tensor | None, bits: int, offset: int) -> bool:
    """Whether the largest possible sums exceed int32."""
    assert weight.integers is not None
    worst = worst_case_accumulator(
        weight.integers, bias, kind=weight.source.kind, groups=weight.source.groups, bits=bits, offset=offset
    )
    return bool(worst.overflowing)
