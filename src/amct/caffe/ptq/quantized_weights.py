"""The weights of one layer as integers: uniform (ARQ, or factors given by the user) or clustered to 16 values (SNQ)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from amct.caffe.model import RECURRENT_TYPES
from amct.caffe.ptq.folding import FusionReport, WeightLayout, fuse_after, layout_of
from amct.errors import AmctError, CalibrationError
from amct.numerics.affine import SMALLEST_SCALE, SymmetricScale, fit_bias, quantize_bias
from amct.numerics.arq import WeightKind, arq, channels_first, from_channels_first, quantize_weight
from amct.numerics.integer import worst_case_accumulator
from amct.numerics.qparams import QParams
from amct.numerics.rounding import quantize_weight_cancelling_errors
from amct.numerics.settings import ArqSettings, SnqSettings
from amct.numerics.snq import ClusteredWeight, absorb_multiplier, decode, pack_nibbles, snq
from amct.numerics.weight_grid import bias_integers, dequantized_bias, lowest_scale
from amct.numerics.weight_grid import sum_scale as step_of_sums
from amct.record import CaffeLayerRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import CaffeModel
    from amct.numerics.settings import WeightRounding, WeightScale, WeightSettings

logger = logging.getLogger(__name__)

UNIFORM_BITS, TABLE_BITS = 8, 4
Found = TypeVar("Found")


def known(found: Found | None) -> Found:
    """Return a part of a validated record, which is never None."""
    assert found is not None, "the record was checked"
    return found


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """One weight blob as integers.

    Attributes:
        blob: Its index among the layer's blobs.
        layout: How its values are arranged.
        factors: Scale and offset, one or one per output channel.
        integers: int8, in the layout of its kind.
        clustered: Indices and table of a clustered weight; its factors and values are those above.
    """

    blob: int
    layout: WeightLayout
    factors: QParams
    integers: torch.Tensor
    clustered: ClusteredWeight | None = None

    def real(self) -> torch.Tensor:
        """The dequantized float32 weight, in the layout of the file."""
        rows = channels_first(self.integers, self.layout.kind, self.layout.groups).float()
        rows *= self.factors.scale.reshape(-1, 1)
        return self.layout.restored(
            from_channels_first(rows, self.integers.shape, self.layout.kind, self.layout.groups)
        )

    def stored(self) -> torch.Tensor:
        """The blob of a deploy model: int8 weights in the layer's own layout, or packed indices."""
        if self.clustered is None:
            return self.layout.restored(self.integers)
        rows = channels_first(self.clustered.indices, self.layout.kind, self.layout.groups)
        return pack_nibbles(rows.contiguous())

    def with_scale(self, scale: torch.Tensor) -> QuantizedMatrix:
        """The same weight with a larger scale."""
        factors = QParams.symmetric(scale)
        ratio = (self.factors.scale.double() / scale.double()).reshape(-1, 1)
        if self.clustered is not None:
            table = torch.round(self.clustered.table.double() * ratio).to(torch.int8)
            return self._with_clusters(ClusteredWeight(factors, table, self.clustered.indices))
        rows = channels_first(self.integers, self.layout.kind, self.layout.groups)
        coarser = torch.round(rows.double() * ratio).to(torch.int8)
        integers = from_channels_first(coarser, self.integers.shape, self.layout.kind, self.layout.groups)
        return replace(self, factors=factors, integers=integers)

    def times(self, multiplier: torch.Tensor) -> QuantizedMatrix:
        """Multiply each output channel: scales absorb the magnitude, integers the sign, without any rounding."""
        if self.clustered is not None:
            return self._with_clusters(absorb_multiplier(self.clustered, multiplier)).with_readable_scale()
        scale = self.factors.scale.double() * multiplier.double().abs()
        vanished = scale < SMALLEST_SCALE
        sign = torch.where(vanished, torch.zeros_like(multiplier), torch.sign(multiplier)).to(torch.int8)
        rows = channels_first(self.integers, self.layout.kind, self.layout.groups) * sign.reshape(-1, 1)
        scale = torch.where(vanished, torch.ones_like(scale), scale).float()
        made = replace(
            self,
            factors=QParams.symmetric(scale),
            integers=from_channels_first(rows, self.integers.shape, self.layout.kind, self.layout.groups),
        )
        return made.with_readable_scale()

    def with_readable_scale(self) -> QuantizedMatrix:
        """The same weight with the smallest scale of the same dequantized values, which a reader of them finds."""
        rows = channels_first(self.integers, self.layout.kind, self.layout.groups)
        factors = replace(self.factors, scale=lowest_scale(rows, self.factors.scale))
        clustered = None if self.clustered is None else replace(self.clustered, qparams=factors)
        return replace(self, factors=factors, clustered=clustered)

    def _with_clusters(self, clustered: ClusteredWeight) -> QuantizedMatrix:
        integers = decode(clustered.indices, clustered.table, self.layout.kind, self.layout.groups)
        return replace(self, factors=clustered.qparams, integers=integers, clustered=clustered)


@dataclass(frozen=True, kw_only=True)
class QuantizedWeights:
    """All weights of one layer; a recurrent layer has several matrices, each with its own scale."""

    layer: str
    matrices: tuple[QuantizedMatrix, ...]

    @property
    def bits(self) -> int:
        """4 for clustered weights, else 8."""
        return TABLE_BITS if self.matrices[0].clustered is not None else UNIFORM_BITS

    @property
    def scale(self) -> torch.Tensor:
        """The scales as the record lists them."""
        return torch.cat([matrix.factors.scale.reshape(-1) for matrix in self.matrices])

    def record(self) -> CaffeLayerRecord:
        """The weights' part of the layer's entry."""
        scales = self.scale.tolist()
        return CaffeLayerRecord(
            scale_w=tuple(scales), offset_w=(0,) * len(scales), num_bits_w=self.bits, object_layer=self.layer
        )

    def real_blobs(self, blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The layer's blobs with the weights quantized and dequantized."""
        result = list(blobs)
        for matrix in self.matrices:
            result[matrix.blob] = matrix.real()
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
            matrices = tuple(matrix.with_readable_scale() for matrix in _recurrent(blobs, scale))
            return QuantizedWeights(layer=layer.name, matrices=matrices)
        layout = layout_of(layer, blobs[0])
        channel_wise = chosen.channel_wise and layout.kind is not WeightKind.LINEAR
        if layer.type != "InnerProduct" and layer.convolution_param.axis != 1:
            channel_wise = False  # DeQuant scales along axis 1 only
        if isinstance(chosen, SnqSettings):
            matrix = _clustered(layout, replace(chosen, channel_wise=channel_wise))
        else:
            matrix = _rounded(layout, _uniform_factors(layout, channel_wise, scale), rounding)
        return QuantizedWeights(layer=layer.name, matrices=(matrix.with_readable_scale(),))
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
            matrix = weights[head].matrices[0].times(affine.multiplier)
            weights[head] = replace(weights[head], matrices=(matrix,))
    return report


def _uniform_factors(layout: WeightLayout, channel_wise: bool, scale: WeightScale) -> QParams:
    return arq(
        layout.rows_first(),
        kind=layout.kind,
        channel_wise=channel_wise,
        groups=layout.groups,
        symmetric_scale=SymmetricScale(scale),
    )


def _rounded(layout: WeightLayout, factors: QParams, rounding: WeightRounding = "error_cancelling") -> QuantizedMatrix:
    round_weight = quantize_weight if rounding == "nearest" else quantize_weight_cancelling_errors
    integers = round_weight(layout.rows_first(), factors, layout.kind, groups=layout.groups)
    return QuantizedMatrix(blob=0, layout=layout, factors=factors, integers=integers)


def _clustered(layout: WeightLayout, settings: SnqSettings) -> QuantizedMatrix:
    clustered = snq(layout.rows_first(), kind=layout.kind, groups=layout.groups, settings=settings)
    integers = decode(clustered.indices, clustered.table, layout.kind, layout.groups)
    return QuantizedMatrix(blob=0, layout=layout, factors=clustered.qparams, integers=integers, clustered=clustered)


def matrix_places(blobs: Sequence[torch.Tensor]) -> list[int]:
    """The indices of the blobs of a recurrent layer that are matrices; the others are biases."""
    return [index for index, blob in enumerate(blobs) if blob.ndim == 2]


def _recurrent(blobs: Sequence[torch.Tensor], scale: WeightScale) -> list[QuantizedMatrix]:
    """Round each matrix to nearest: hidden states have both signs, so weight errors already cancel."""
    found = []
    for index in matrix_places(blobs):
        layout = WeightLayout(weight=blobs[index], kind=WeightKind.LINEAR)
        factors = _uniform_factors(layout, False, scale)
        found.append(replace(_rounded(layout, factors, "nearest"), blob=index))
    return found


def given_weights(layer: ProtoMessage, blobs: Sequence[torch.Tensor], scales: Sequence[float]) -> QuantizedWeights:
    """Quantize weights with user-supplied scales.

    Raises:
        CalibrationError: a weight is NaN; the message names the layer.
    """
    scale = torch.tensor(scales, dtype=torch.float32)
    factors = QParams.symmetric(scale)
    try:
        return QuantizedWeights(layer=layer.name, matrices=(_rounded(layout_of(layer, blobs[0]), factors),))
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


def sum_scale(matrix: QuantizedMatrix, scale_data: float) -> torch.Tensor:
    """The accumulator scale of a matrix and its data, one or one per output channel."""
    return step_of_sums(matrix.factors.scale, torch.tensor(scale_data, dtype=torch.float32))


def with_bias(
    weights: QuantizedWeights, bias: torch.Tensor | None, scales_data: Sequence[float], *, may_raise_scale: bool
) -> IntegerLayer:
    """Quantize the bias for each bottom; where it exceeds int32, increase the weight scale of that channel.

    Raises:
        CalibrationError: it does not fit and the scale is user-supplied.
    """
    matrix = weights.matrices[0]
    biases: tuple[torch.Tensor, ...] = ()
    if bias is not None:
        matrix, biases = fitted_bias(weights.layer, matrix, bias, scales_data, may_raise_scale=may_raise_scale)
    return IntegerLayer(
        weights=replace(weights, matrices=(matrix,)),
        biases=biases,
        sum_scales=tuple(sum_scale(matrix, scale) for scale in scales_data),
    )


def fitted_bias(
    layer: str, matrix: QuantizedMatrix, bias: torch.Tensor, scales_data: Sequence[float], *, may_raise_scale: bool
) -> tuple[QuantizedMatrix, tuple[torch.Tensor, ...]]:
    """The integer bias for each data scale, and the matrix, with a larger scale where the bias needs one.

    Raises:
        CalibrationError: the bias exceeds int32 and the scale is user-supplied; the message names the layer.
    """
    scales = [torch.tensor(scale, dtype=torch.float32) for scale in scales_data]
    try:
        if may_raise_scale:
            fit = fit_bias(bias, matrix.factors.scale, min(scales))  # the smallest scale gives the largest integers
            if fit.raised:
                channels = ", ".join(map(str, fit.raised[:5])) + (" ..." if len(fit.raised) > 5 else "")
                logger.warning(
                    'layer "%s": the bias does not fit int32; the weight scale of %d channel(s) is raised: %s',
                    layer,
                    len(fit.raised),
                    channels,
                )
                matrix = matrix.with_scale(fit.scale_weight)
        return matrix, _biases(matrix, bias, scales)
    except AmctError as error:
        raise CalibrationError(f'layer "{layer}": {error}') from error


def _biases(matrix: QuantizedMatrix, bias: torch.Tensor, scales: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The integer bias for each data scale; the first one as a reader finds it in its dequantized values."""
    scale = matrix.factors.scale
    first, *others = (quantize_bias(bias, scale, each) for each in scales)
    step = step_of_sums(scale, scales[0])
    return bias_integers(dequantized_bias(first, step), step), *others


def may_overflow(matrix: QuantizedMatrix, bias: torch.Tensor | None, bits: int, offset: int) -> bool:
    """Whether the largest possible sums exceed int32."""
    worst = worst_case_accumulator(
        matrix.integers, bias, kind=matrix.layout.kind, groups=matrix.layout.groups, bits=bits, offset=offset
    )
    return bool(worst.overflowing)
