"""The loop that learns roundings of weights, and what else of a part of a network moves with them.

One layer (AdaRound) or a block of several (reconstruction): the caller computes the loss of soft-rounded weights, this
loop follows its gradient. Clips of activations and biases can move too, each at a rate of its own. Here are also what a
block needs beside: its loss, quantizers with clips that move, and values that are quantized by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from amct.errors import CalibrationError
from amct.numerics.affine import fake_quantize
from amct.numerics.arq import channels_first, from_channels_first
from amct.numerics.training.quantizers import ulq, ulq_factors, valid_clips

if TYPE_CHECKING:
    from amct.numerics.adaround.rounding import Learning, SoftRounding
    from amct.numerics.qparams import QParams
    from amct.numerics.settings import WeightKind

Progress = Callable[[int, int, float], None]
"""Called with the number of finished iterations, the total number, and the loss."""

_REPORTS = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundedWeight:
    """A weight whose rounding is learned, in the layout that its layer has.

    Attributes:
        rounding: Its rows.
        shape: Of the weight.
        kind: How it lies.
        groups: Of a convolution.
    """

    rounding: SoftRounding
    shape: Sequence[int]
    kind: WeightKind
    groups: int = 1

    def restore(self, rows: Tensor) -> Tensor:
        """Rows ``[Cout, K]`` as a weight."""
        return from_channels_first(rows, self.shape, self.kind, self.groups)

    def soft(self) -> Tensor:
        """The weight as it is while it is learned."""
        return self.restore(self.rounding.soft())

    def hard(self) -> Tensor:
        """The weight on its grid."""
        return self.restore(self.rounding.hard() * self.rounding.scale)


@dataclass(frozen=True, eq=False)
class Moved:
    """Something else that is learned: a tensor that requires gradients, and how far it goes in one step."""

    tensor: Tensor
    rate: float


def follow_gradient(
    loss_of: Callable[[list[Tensor]], Tensor],
    weights: Sequence[RoundedWeight],
    settings: Learning,
    *,
    moved: Sequence[Moved] = (),
    progress: Progress | None = None,
) -> None:
    """Learn the roundings, and move the other tensors in place.

    Args:
        loss_of: The loss of the weights, with a gradient; each call may take another part of the data.
        weights: What is learned.
        settings: How.
        moved: What moves with it.
        progress: Called about a hundred times.

    Raises:
        CalibrationError: The loss is not finite.
    """
    groups: list[dict[str, Any]] = [{"params": [each.rounding.alpha for each in weights]}] if weights else []
    groups += [{"params": [each.tensor], "lr": each.rate} for each in moved]
    if not groups:
        return
    optimizer = torch.optim.Adam(groups, lr=settings.learning_rate, fused=True)
    report_every = max(1, settings.num_iteration // _REPORTS)
    for iteration in range(settings.num_iteration):
        soft = [each.soft().requires_grad_() for each in weights]
        with torch.enable_grad():
            loss = loss_of(soft)
        slopes = torch.autograd.grad(loss, [*soft, *(each.tensor for each in moved)], allow_unused=True)
        beta = settings.beta_at(iteration)
        for each, slope in zip(weights, slopes, strict=False):
            rows = channels_first(slope, each.kind, each.groups)
            each.rounding.alpha.grad = each.rounding.gradient(rows, beta, settings.reg_param)
        for other, slope in zip(moved, slopes[len(weights) :], strict=True):
            other.tensor.grad = slope
        optimizer.step()
        if (iteration + 1) % report_every == 0:
            value = finite(loss.item(), f"after {iteration + 1} iterations")
            if progress is not None:
                progress(iteration + 1, settings.num_iteration, value)


def finite(loss: float, when: str) -> float:
    """The loss, if it is a number.

    Raises:
        CalibrationError: It is not finite.
    """
    if loss - loss != 0:
        raise CalibrationError(
            f"the AdaRound loss is {loss} {when}; look for NaN, infinity or huge values in the layer's input, "
            "or use ARQ for this layer"
        )
    return loss


# -- blocks ------------------------------------------------------------------------------------------------------------


CLIP_RATE = 2e-3
"""How far a step moves a clip, in parts of its range."""


class Clips:
    """The quantizer of an activation while a block is learned.

    Args:
        start: Its parameters before.
        moves: Whether its clips are learned; a lower clip of 0 stays there.
        fp16: Whether the scale is rounded to half precision.
    """

    def __init__(self, start: QParams, *, moves: bool, fp16: bool = False) -> None:
        self._start, self._fp16 = start, fp16
        low, high = float(start.clip_min), float(start.clip_max)
        self._moves = moves and low <= 0 < high
        device = start.scale.device
        self._low, self._high = (torch.tensor(end, device=device) for end in (low, high))
        self._valid = self._low.clone(), self._high.clone()
        self.moved: list[Moved] = []
        if self._moves:
            moving = [self._high] if low == 0 else [self._high, self._low]
            self.moved = [Moved(each.requires_grad_(), CLIP_RATE * (high - low)) for each in moving]

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize."""
        if not self._moves:
            return quantized_as(x, self._start)
        with torch.no_grad():
            low, high = valid_clips(self._low, self._high, *self._valid)
            self._low.copy_(low)
            self._high.copy_(high)
        self._valid = low.detach().clone(), high.detach().clone()
        return ulq(x, self._low, self._high, self._start.bits, fp16_scale=self._fp16)

    def qparams(self) -> QParams:
        """The parameters as they are deployed."""
        if not self._moves:
            return self._start
        clips = valid_clips(self._low.detach(), self._high.detach(), *self._valid)
        scale, offset = ulq_factors(*clips, self._start.bits, fp16_scale=self._fp16)
        return replace(self._start, scale=scale, offset=offset)


def quantized_as(x: Tensor, qparams: QParams) -> Tensor:
    """Quantize and dequantize with fixed parameters; the gradient of the input is that within the range.

    Clamping passes gradients on, rounding does not: it is added as a constant.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return fake_quantize(x, qparams.scale, qparams.offset, qparams.bits)
    inside = x.clamp(float(qparams.clip_min), float(qparams.clip_max))
    with torch.no_grad():
        rounding = fake_quantize(x, qparams.scale, qparams.offset, qparams.bits) - inside
    return inside + rounding


def by_chance(quantized: Tensor, exact: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Each value quantized with this probability, else exact."""
    if not quantized.is_floating_point():
        return quantized
    chosen = torch.rand(quantized.shape, generator=generator).to(quantized.device) < share
    return torch.where(chosen, quantized, exact)


def output_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The squared error, summed over channels and averaged over all other axes; 0 of what is no floating point."""
    if not wanted.is_floating_point():
        return torch.zeros((), device=wanted.device)
    channels = wanted.shape[1 if wanted.ndim > 3 else -1] if wanted.ndim else 1
    return functional.mse_loss(found, wanted) * channels
