"""The quantized weights of a layer, for every front door, and those that a plan of the PyTorch dialect asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amct.errors import AmctError, ArgumentTypeError, CalibrationError
from amct.numerics.affine import SMALLEST_SCALE, SymmetricScale, fine_where_empty, fit_bias
from amct.numerics.arq import arq, channels_first, from_channels_first, reorder_gates
from amct.numerics.balancing import balance_activation, balance_weight, dmq
from amct.numerics.integer import lowest_scale
from amct.numerics.qparams import LayerQParams, Observed, QParams
from amct.numerics.rounding import bias_correction, integer_weight, round_weight
from amct.numerics.settings import AdaRoundSettings, ArqSettings, WeightKind
from amct.numerics.snq import ClusteredWeight, absorb_multiplier, decode, pack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from amct.config.plan import LayerPlan
    from amct.model.kinds import LayerKind

logger = logging.getLogger(__name__)

RECORDED_BITS = (4, 6, 7, 8)
TABLE_BITS = 4
_FLOATS = (torch.float32, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class FloatWeight:
    """One float weight of a layer; a recurrent layer has several, the first of them for its input.

    Attributes:
        tensor: The weight, in the layout of ``kind``.
        kind: How it lies.
        groups: Of a convolution.
        gates: Number of gates of a recurrent layer; 0 for all others.
        torch_gates: The kind of layer when its gates are in torch's order; the record lists them in ONNX's.
        name: Its name in the layer.
        place: Its number among the layer's parameters.
        transposed: Whether the layer itself has it as ``[inputs, outputs]``.
        balance: DMQ's factors, one per input channel, by which it is multiplied before it is rounded.
    """

    tensor: Tensor
    kind: WeightKind
    groups: int = 1
    gates: int = 0
    torch_gates: LayerKind | None = None
    name: str = "weight"
    place: int = 0
    transposed: bool = False
    balance: Tensor | None = None

    def balanced(self) -> Tensor:
        """The weight with DMQ's factors multiplied in."""
        if self.balance is None:
            return self.tensor
        return balance_weight(self.tensor, self.balance.to(self.tensor.device), self.kind, self.groups)

    def rows(self) -> Tensor:
        """The weight with DMQ's factors as a matrix with one row per output channel."""
        return channels_first(self.balanced(), self.kind, self.groups)

    def balanced_input(self, x: Tensor) -> Tensor:
        """What the layer multiplies by the weight, divided by DMQ's factors."""
        if self.balance is None:
            return x
        return balance_activation(x, self.balance.to(x.device), self.kind.channel_axis)

    def restored(self, weight: Tensor) -> Tensor:
        """A weight in the layout of ``kind`` as the layer has it."""
        return weight.t().contiguous() if self.transposed else weight


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """One weight on its grid: integers, or how they follow from the float weight; the weights of a model are large.

    Attributes:
        source: The float weight.
        qparams: Its parameters: of all, of each row, or of each gate.
        cancel_errors: Whether the weight is rounded so that errors cancel.
        stored: The weight on its grid, if it does not follow from the others (learned rounding, training).
        integers: int8, in the layout of the kind; None: computed when needed.
        clusters: Of a weight with 16 values: their table and the index of each value.
    """

    source: FloatWeight
    qparams: QParams
    cancel_errors: bool = False
    stored: Tensor | None = None
    integers: Tensor | None = None
    clusters: ClusteredWeight | None = None

    @classmethod
    def clustered(cls, source: FloatWeight, clusters: ClusteredWeight) -> QuantizedWeight:
        """A weight with 16 values."""
        integers = decode(clusters.indices, clusters.table, source.kind, source.groups)
        return cls(source=source, qparams=clusters.qparams, integers=integers, clusters=clusters)

    def real(self) -> Tensor:
        """The weight on its grid with DMQ's factors multiplied in; read-only, and computed anew unless it is stored."""
        source = self.source
        if self.stored is not None:
            return self.stored
        if self.integers is None:
            cancel_errors = self.cancel_errors and not source.gates
            return round_weight(
                source.balanced(), self.qparams, source.kind, source.groups, cancel_errors=cancel_errors
            )
        rows = self._rows().float()
        rows *= self.qparams.scale.reshape(-1, 1)
        return source.restored(self._from_rows(rows))

    def unbalanced(self) -> Tensor:
        """The weight on its grid, for a model whose input is not divided by DMQ's factors."""
        balance = self.source.balance
        if balance is None:
            return self.real()
        return balance_weight(self.real(), balance.double().reciprocal(), self.source.kind, self.source.groups)

    def packed(self) -> Tensor:
        """The integers as the layer has them; of a weight with 16 values the indices, two in a byte."""
        assert self.integers is not None
        if self.clusters is None:
            return self.source.restored(self.integers)
        rows = channels_first(self.clusters.indices, self.source.kind, self.source.groups)
        return pack_nibbles(rows.contiguous())

    def with_scale(self, scale: Tensor) -> QuantizedWeight:
        """The same weight with a larger scale."""
        qparams = QParams.symmetric(scale)
        ratio = (self.qparams.scale.double() / scale.double()).reshape(-1, 1)
        if self.clusters is not None:
            table = torch.round(self.clusters.table.double() * ratio).to(torch.int8)
            return QuantizedWeight.clustered(self.source, ClusteredWeight(qparams, table, self.clusters.indices))
        coarser = torch.round(self._rows().double() * ratio).to(torch.int8)
        return replace(self, qparams=qparams, integers=self._from_rows(coarser))

    def on_grid(self, values: Tensor, scale: Tensor) -> QuantizedWeight:
        """The same weight with other values, all of them multiples of a scale, or of its table if it has one."""
        qparams = QParams.symmetric(scale, self.qparams.bits)
        if self.integers is None:
            return replace(self, qparams=qparams, stored=values.to(self.source.tensor.dtype))
        rows = channels_first(values, self.source.kind, self.source.groups)
        rows = torch.round(rows.double() / scale.double().reshape(-1, 1)).to(torch.int8)
        if self.clusters is None:
            return replace(self, qparams=qparams, integers=self._from_rows(rows)).readable()
        table = self.clusters.table.expand(len(rows), -1).contiguous()
        indices = self._from_rows(torch.searchsorted(table, rows.contiguous()).to(torch.uint8))
        return QuantizedWeight.clustered(self.source, replace(self.clusters, indices=indices))

    def times(self, multiplier: Tensor) -> QuantizedWeight:
        """Multiply each output channel: scales absorb the magnitude, integers the sign, without any rounding."""
        if self.clusters is not None:
            return QuantizedWeight.clustered(self.source, absorb_multiplier(self.clusters, multiplier)).readable()
        scale = self.qparams.scale.double() * multiplier.double().abs()
        vanished = scale < SMALLEST_SCALE
        sign = torch.where(vanished, torch.zeros_like(multiplier), torch.sign(multiplier)).to(torch.int8)
        integers = self._from_rows(self._rows() * sign.reshape(-1, 1))
        scale = torch.where(vanished, torch.ones_like(scale), scale).float()
        return replace(self, qparams=QParams.symmetric(scale), integers=integers).readable()

    def readable(self) -> QuantizedWeight:
        """The same weight with the smallest scale of the same values, which a reader of these values finds."""
        qparams = replace(self.qparams, scale=lowest_scale(self._rows(), self.qparams.scale))
        clusters = None if self.clusters is None else replace(self.clusters, qparams=qparams)
        return replace(self, qparams=qparams, clusters=clusters)

    def _rows(self) -> Tensor:
        assert self.integers is not None
        return channels_first(self.integers, self.source.kind, self.source.groups)

    def _from_rows(self, rows: Tensor) -> Tensor:
        assert self.integers is not None
        return from_channels_first(rows, self.integers.shape, self.source.kind, self.source.groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeights:
    """The quantized weights of one layer, none for average pooling.

    Attributes:
        weights: In the order of the layer's parameters.
        custom_rounding: Whether the rounding is learned (AdaRound): an exported file then stores the rounded weight,
            because the integers do not follow from float weight and scale.
        can_pack: Whether two 4-bit weights can share a byte.
    """

    weights: tuple[QuantizedWeight, ...] = ()
    custom_rounding: bool = False
    can_pack: bool = True

    @property
    def sources(self) -> tuple[FloatWeight, ...]:
        """The float weights."""
        return tuple(weight.source for weight in self.weights)

    @property
    def bits(self) -> int:
        """Bits of the integers."""
        return self.weights[0].qparams.bits if self.weights else 8

    @property
    def recorded_bits(self) -> int:
        """The bit width that the record has for the weights: the next one it knows; 4 only where two share a byte."""
        if any(weight.clusters is not None for weight in self.weights):
            return TABLE_BITS
        return next(known for known in RECORDED_BITS if known >= self.bits and (known > 4 or self.can_pack))

    @property
    def balance(self) -> Tensor | None:
        """DMQ's factors, one per input channel: the layer's input is divided by them."""
        return self.weights[0].source.balance if self.weights else None

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's input that holds the channels."""
        return self.weights[0].source.kind.channel_axis if self.weights else 1

    def qparams(self) -> LayerQParams:
        """The parameters of the weights as exporters and records have them."""
        found = []
        for weight in self.weights:
            scale, gates = weight.qparams.scale.reshape(-1).cpu(), weight.source.torch_gates
            if gates is not None and scale.numel() > 1:
                scale = reorder_gates(scale, gates.onnx_gates)
            found.append(QParams.symmetric(scale, self.recorded_bits))
        balance = None if self.balance is None else self.balance.float().cpu()
        cancels_errors = any(weight.cancel_errors for weight in self.weights) and not self.custom_rounding
        return LayerQParams(inputs={}, weights=tuple(found), balance=balance, cancels_errors=cancels_errors)

    def real(self) -> dict[str, Tensor]:
        """By name: the weight on its grid with DMQ's factors multiplied in; read-only."""
        return {weight.source.name: weight.real() for weight in self.weights}

    def unbalanced(self) -> dict[str, Tensor]:
        """By name: the weight on its grid, for a model whose input is not divided by DMQ's factors."""
        return {weight.source.name: weight.unbalanced() for weight in self.weights}

    def balanced_input(self, x: Tensor) -> Tensor:
        """The layer's input as its quantizer gets it."""
        return self.weights[0].source.balanced_input(x) if self.weights else x

    def rows(self) -> list[Tensor]:
        """The float weights as matrices with one row per output channel, for reports."""
        return [source.rows() for source in self.sources]

    def stored_bytes(self) -> tuple[float, float]:
        """The size of the float weights, and that of the integers."""
        before = sum(source.tensor.numel() * source.tensor.element_size() for source in self.sources)
        after = sum(source.tensor.numel() for source in self.sources) * self.recorded_bits / 8
        return before, after


def quantize_weights(
    plan: LayerPlan,
    sources: Sequence[FloatWeight],
    *,
    balance: Tensor | None = None,
    can_pack: bool = True,
) -> QuantizedWeights:
    """Find the scales of one layer's weights from their largest absolute values (ARQ).

    Integers are computed when somebody asks for them: the simulation, or the exporter of a file.

    Raises:
        ArgumentTypeError: The weights are neither float32 nor float16.
        CalibrationError: The weights cannot be quantized; names the layer.
    """
    settings = plan.weight or ArqSettings()
    assert isinstance(settings, (ArqSettings, AdaRoundSettings))
    cancel_errors = plan.weight_rounding == "error_cancelling"
    found = []
    for number, source in enumerate(sources):
        given = source if number else replace(source, balance=balance)
        check_weight(plan.name, given)
        try:
            qparams = arq(
                given.balanced(),
                kind=given.kind,
                bits=settings.num_bits,
                channel_wise=settings.channel_wise,
                groups=given.gates or given.groups,
                symmetric_scale=SymmetricScale(plan.weight_scale),
            )
        except AmctError as error:
            raise layer_error(plan.name, error) from error
        found.append(QuantizedWeight(source=given, qparams=qparams, cancel_errors=cancel_errors))
    return QuantizedWeights(weights=tuple(found), can_pack=can_pack)


def layer_balance(plan: LayerPlan, source: FloatWeight, maximum: Tensor) -> Tensor:
    """DMQ's factors of one layer, from the largest activation of each of its input channels.

    Raises:
        CalibrationError: They cannot be computed; names the layer.
    """
    try:
        return dmq(maximum, source.tensor.cpu(), source.kind, source.groups, plan.migration_strength or 0.0)
    except AmctError as error:
        raise layer_error(plan.name, error) from error


def check_weight(layer: str, source: FloatWeight) -> None:
    """Check that a weight can be quantized at all.

    Raises:
        ArgumentTypeError: It is neither float32 nor float16.
        CalibrationError: It holds NaN or infinity.
    """
    weight = source.tensor
    if weight.dtype not in _FLOATS:
        parts, converted = "compute with its real and imaginary part", "convert the model with model.float()"
        raise ArgumentTypeError(
            f'layer "{layer}": only weights of float32 and float16 can be quantized, got '
            f"{str(weight.dtype).removeprefix('torch.')}; {parts if weight.is_complex() else converted}"
        )
    if weight.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise CalibrationError(
            f'layer "{layer}": {bad} of {weight.numel()} values of {source.name} are NaN or infinite; '
            "repair the model, or leave this layer in float"
        )


def mean_loss(qparams: LayerQParams, weights: QuantizedWeights) -> Tensor | None:
    """What each output of a convolution or linear layer loses on average because its weight is rounded.

    None where its bias is not to be corrected, or the mean of its input is unknown.
    """
    if not qparams.corrects_bias or qparams.mean is None or not weights.weights:
        return None
    weight = weights.weights[0]
    source, integers, scale = weight.source, weight.integers, weight.qparams.scale
    exact = source.balanced()
    if source.kind is WeightKind.CONV_TRANSPOSE or qparams.mean.numel() != exact.shape[1] * source.groups:
        return None
    if weight.stored is not None:
        integers, scale = weight.stored, torch.ones(1)
    elif integers is None:
        cancels, scale = qparams.cancels_errors, qparams.weight.scale
        integers = integer_weight(exact, qparams.weight, source.kind, source.groups, cancel_errors=cancels)
    return bias_correction(exact, integers, scale.to(exact.device), qparams.mean, source.groups)


def corrected_bias(qparams: LayerQParams, weights: QuantizedWeights, bias: Tensor) -> Tensor:
    """The bias that belongs to the rounded weight: that of every file and simulation.

    Where the plan asks for it and the mean of the layer's input is known, it makes up for the mean error of rounding.
    """
    loss = qparams.lost if qparams.lost is not None else mean_loss(qparams, weights)
    return bias if loss is None else (bias.detach().double() + loss).float()


def suited_to_bias(layer: str, qparams: LayerQParams, weights: QuantizedWeights, bias: Tensor) -> LayerQParams:
    """The parameters of a layer with weight scales that suit its bias, in steps of the scales of weight and input.

    Two kinds of channels that hardly depend on the layer's input, as batch norms with a scale of zero make them, need
    other scales. Where all weights are zero, or round to it, any scale is right for them, and the steps of the 1 that
    they get are far too large for a bias. Where they are so small that the bias has no place in int32, the scale is
    raised just enough: rounding K weights of a channel to it changes the output by at most K · 127 / 2^32 of the bias.

    Raises:
        CalibrationError: The bias is not finite, or no scale is large enough; names the layer.
    """
    scales = qparams.weight.scale
    if scales.numel() not in (1, bias.numel()):
        return qparams
    bias = bias.detach().float().cpu()
    data = qparams.input.scale.cpu()
    try:
        fit = fit_bias(bias, _fine_where_zero(scales, weights, bias, data), data)
    except AmctError as error:
        raise layer_error(layer, error) from error
    if fit.raised:
        logger.info(
            'layer "%s": the bias does not fit int32, so the weight scale of %d channel(s) is raised',
            layer,
            len(fit.raised),
        )
    first, *others = qparams.weights
    return replace(qparams, weights=(replace(first, scale=fit.scale_weight.float()), *others))


def _fine_where_zero(scales: Tensor, weights: QuantizedWeights, bias: Tensor, data: Tensor) -> Tensor:
    """The scales, with those of channels without any weight chosen for their bias."""
    if not bool((scales == 1).any()):  # the scale of weights that are as good as zero
        return scales
    rounds_to_zero = weights.rows()[0].detach().cpu().flatten(1).abs().amax(1) < 0.5
    empty = rounds_to_zero & (scales == 1)
    return fine_where_empty(scales, empty, bias, data)


def with_bits(inputs: Mapping[int, QParams], plan: LayerPlan | None) -> dict[int, QParams]:
    """The parameters of inputs with the settings of a plan.

    The range that these settings have found if the calibration was asked for them; with other bits the same range in
    finer or coarser steps.
    """
    found = dict(inputs)
    for number, settings in enumerate(plan.activations if plan is not None else ()):
        before = inputs.get(number)
        if isinstance(before, Observed):
            other = next((qparams for known, qparams in before.others if known == settings), None)
            if other is not None:
                found[number] = before = replace(before, scale=other.scale, offset=other.offset)
        if before is None or before.bits == settings.num_bits:
            continue
        steps = 2.0 ** (settings.num_bits - before.bits)
        low = -(2 ** (settings.num_bits - 1))
        offset = torch.round(low - before.clip_min / before.scale * steps).to(torch.int32)
        offset = torch.where(before.offset == 0, torch.zeros_like(offset), offset)
        found[number] = replace(before, scale=before.scale / steps, offset=offset, bits=settings.num_bits)
    return found


def layer_error(layer: str, error: AmctError) -> CalibrationError:
    """An error of the maths with the name of the layer in front."""
    return CalibrationError(f'layer "{layer}": {error}')
