"""The weights of one layer quantized as its plan says, and their entry in a record of the PyTorch dialect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amct.errors import AmctError, ArgumentTypeError, CalibrationError
from amct.numerics.affine import SymmetricScale, fine_where_empty, fit_bias
from amct.numerics.arq import WeightKind, arq, channels_first, reorder_gates
from amct.numerics.dmq import balance_activation, balance_weight, dmq
from amct.numerics.rounding import round_weight
from amct.numerics.settings import AdaRoundSettings, ArqSettings
from amct.record import LayerRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from amct.config.plan import LayerPlan
    from amct.model.kinds import LayerKind
    from amct.numerics.qparams import QParams

logger = logging.getLogger(__name__)

RECORDED_BITS = (4, 6, 7, 8)
_FLOATS = (torch.float32, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPart:
    """One float weight of a layer; a recurrent layer has two, for the input and for the hidden state.

    Attributes:
        name: Its name in the layer.
        tensor: The weight, in the layout of ``kind``.
        kind: How it lies.
        groups: Of a convolution.
        gates: Number of gates of a recurrent layer; 0 for all others.
        torch_gates: The kind of layer when its gates are in torch's order; the record lists them in ONNX's.
        balanced: Whether DMQ multiplies its factors in; the weight of a hidden state stays as it is.
    """

    name: str
    tensor: Tensor
    kind: WeightKind
    groups: int = 1
    gates: int = 0
    torch_gates: LayerKind | None = None
    balanced: bool = True

    def with_balance(self, balance: Tensor | None) -> Tensor:
        """The weight with DMQ's factors multiplied in."""
        if balance is None or not self.balanced:
            return self.tensor
        return balance_weight(self.tensor, balance.to(self.tensor.device), self.kind, self.groups)

    def without_balance(self, weight: Tensor, balance: Tensor | None) -> Tensor:
        """A weight in which DMQ's factors are multiplied in, divided by them again."""
        if balance is None or not self.balanced:
            return weight
        return balance_weight(weight, balance.double().reciprocal(), self.kind, self.groups)

    def recorded_scales(self, factors: QParams) -> tuple[float, ...]:
        """The scales in the order of the record."""
        scale = factors.scale.reshape(-1)
        if self.torch_gates is not None and scale.numel() > 1:
            scale = reorder_gates(scale, self.torch_gates.onnx_gates)
        return tuple(float(value) for value in scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundedWeights(Mapping[str, "Tensor"]):
    """By name of the part: the weight on its grid, computed anew at every access; the weights of a model are large.

    Attributes:
        parts: The float weights by name.
        factors: Their scales.
        bits: Bits of the integers.
        balance: DMQ's factors.
        cancel_errors: Whether the weights are rounded so that their errors cancel.
    """

    parts: Mapping[str, WeightPart]
    factors: Mapping[str, QParams]
    bits: int
    balance: Tensor | None
    cancel_errors: bool

    def __getitem__(self, name: str) -> Tensor:
        part = self.parts[name]
        return round_weight(
            part.with_balance(self.balance),
            self.factors[name],
            part.kind,
            part.groups,
            cancel_errors=self.cancel_errors and not part.gates,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """The quantized weights of one layer.

    Attributes:
        parts: The float weights; empty for a layer without weights.
        rounded: By name of the part: the weight on its grid, with DMQ's factors multiplied in; read-only.
        factors: By name of the part: its scales.
        bits: Bits of the integers.
        balance: DMQ's factors, one per input channel: the layer's input is divided by them.
        custom_rounding: Whether the rounding is learned (AdaRound) or error-cancelling, not to the nearest: an exported
            file then stores the rounded weight, because the integers do not follow from float weight and scale.
        can_pack: Whether two 4-bit weights can share a byte.
    """

    parts: tuple[WeightPart, ...]
    rounded: Mapping[str, Tensor]
    factors: Mapping[str, QParams]
    bits: int = 8
    balance: Tensor | None = None
    custom_rounding: bool = False
    can_pack: bool = True

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's input that holds the channels."""
        return self.parts[0].kind.channel_axis if self.parts else 1

    @property
    def recorded_bits(self) -> int:
        """The bit width that the record has for the weights: the next one it knows; 4 only where two share a byte."""
        return next(known for known in RECORDED_BITS if known >= self.bits and (known > 4 or self.can_pack))

    def record(self) -> LayerRecord:
        """The layer's entry in the record, without its activations."""
        if not self.parts:
            return LayerRecord(scale_w=(1.0,), offset_w=(0,))
        scales = [part.recorded_scales(self.factors[part.name]) for part in self.parts]
        state = scales[1] if len(scales) > 1 else ()
        return LayerRecord(
            scale_w=scales[0],
            offset_w=(0,) * len(scales[0]),
            scale_r=state,
            offset_r=(0,) * len(state),
            wts_type=f"INT{self.recorded_bits}",
            tensor_balance_factor=() if self.balance is None else tuple(float(value) for value in self.balance),
        )

    def balanced_input(self, x: Tensor) -> Tensor:
        """The layer's input as its quantizer gets it: divided by DMQ's factors, if it has any."""
        if self.balance is None:
            return x
        return balance_activation(x, self.balance.to(x.device), self.channel_axis)

    def unbalanced(self) -> dict[str, Tensor]:
        """By name of the part: the weight on its grid, for a model whose input is not divided by DMQ's factors."""
        return {part.name: part.without_balance(self.rounded[part.name], self.balance) for part in self.parts}

    def rows(self) -> list[Tensor]:
        """The float weights as matrices with one row per output channel, for reports."""
        return [channels_first(part.with_balance(self.balance), part.kind, part.groups) for part in self.parts]

    def stored_bytes(self) -> tuple[float, float]:
        """The size of the float weights, and that of the integers."""
        before = sum(part.tensor.numel() * part.tensor.element_size() for part in self.parts)
        after = sum(part.tensor.numel() for part in self.parts) * self.recorded_bits / 8
        return before, after


def quantize_weights(
    plan: LayerPlan,
    parts: Sequence[WeightPart],
    *,
    balance: Tensor | None = None,
    can_pack: bool = True,
) -> LayerWeights:
    """Quantize the weights of one layer with scales from their largest absolute values (ARQ).

    Raises:
        ArgumentTypeError: The weights are neither float32 nor float16.
        CalibrationError: The weights cannot be quantized; names the layer.
    """
    settings = plan.weight or ArqSettings()
    assert isinstance(settings, (ArqSettings, AdaRoundSettings))
    factors: dict[str, QParams] = {}
    cancel_errors = plan.weight_rounding == "error_cancelling"
    for part in parts:
        check_weight(plan.name, part)
        weight = part.with_balance(balance)
        groups = part.gates or part.groups
        try:
            factors[part.name] = arq(
                weight,
                kind=part.kind,
                bits=settings.num_bits,
                channel_wise=settings.channel_wise,
                groups=groups,
                symmetric_scale=SymmetricScale(plan.weight_scale),
            )
        except AmctError as error:
            raise layer_error(plan.name, error) from error
    return LayerWeights(
        parts=tuple(parts),
        rounded=RoundedWeights(
            parts={part.name: part for part in parts},
            factors=factors,
            bits=settings.num_bits,
            balance=balance,
            cancel_errors=cancel_errors,
        ),
        factors=factors,
        bits=settings.num_bits,
        balance=balance,
        custom_rounding=cancel_errors,
        can_pack=can_pack,
    )


def balance_factors(plan: LayerPlan, part: WeightPart, maximum: Tensor) -> Tensor:
    """DMQ's factors of one layer, from the largest activation of each of its input channels.

    Raises:
        CalibrationError: They cannot be computed; names the layer.
    """
    try:
        return dmq(maximum, part.tensor.cpu(), part.kind, part.groups, plan.migration_strength or 0.0)
    except AmctError as error:
        raise layer_error(plan.name, error) from error


def check_weight(layer: str, part: WeightPart) -> None:
    """Check that a weight can be quantized at all.

    Raises:
        ArgumentTypeError: It is neither float32 nor float16.
        CalibrationError: It holds NaN or infinity.
    """
    weight = part.tensor
    if weight.dtype not in _FLOATS:
        raise ArgumentTypeError(
            f'layer "{layer}": only weights of float32 and float16 can be quantized, got '
            f"{str(weight.dtype).removeprefix('torch.')}; convert the model with model.float()"
        )
    if weight.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise CalibrationError(
            f'layer "{layer}": {bad} of {weight.numel()} values of {part.name} are NaN or infinite; '
            "repair the model, or leave this layer in float"
        )


def suited_to_bias(layer: str, entry: LayerRecord, weights: LayerWeights, bias: Tensor) -> LayerRecord:
    """The entry of a layer in the record with weight scales that suit its bias, in steps of scale_w · scale_d.

    Two kinds of channels that hardly depend on the layer's input, as batch norms with a scale of zero make them, need
    other scales. Where all weights are zero, or round to it, any scale is right for them, and the steps of the 1 that
    they get are far too large for a bias. Where they are so small that the bias has no place in int32, the scale is
    raised just enough: rounding K weights of a channel to it changes the output by at most K · 127 / 2^32 of the bias.

    Raises:
        CalibrationError: The bias is not finite, or no scale is large enough; names the layer.
    """
    scales = torch.tensor(entry.scale_w, dtype=torch.float32)
    if scales.numel() not in (1, bias.numel()) or entry.scale_d is None:
        return entry
    bias = bias.detach().float().cpu()
    data = torch.tensor(entry.scale_d, dtype=torch.float32)
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
    return replace(entry, scale_w=tuple(float(value) for value in fit.scale_weight))


def _fine_where_zero(scales: Tensor, weights: LayerWeights, bias: Tensor, data: Tensor) -> Tensor:
    """The scales, with those of channels without any weight chosen for their bias."""
    if not bool((scales == 1).any()):  # the scale of weights that are as good as zero
        return scales
    rounds_to_zero = weights.rows()[0].detach().cpu().flatten(1).abs().amax(1) < 0.5
    empty = rounds_to_zero & (scales == 1)
    return fine_where_empty(scales, empty, bias, data)


def layer_error(layer: str, error: AmctError) -> CalibrationError:
    """An error of the maths with the name of the layer in front."""
    return CalibrationError(f'layer "{layer}": {error}')
