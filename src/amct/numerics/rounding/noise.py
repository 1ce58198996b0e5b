"""The expected noise in a layer's outputs when its data and its weights are rounded. One model for every caller.

Rounding errors are taken as spread evenly over one step and as independent of each other: their power is step² / 12.
Dividing each input channel by a factor and multiplying its weights by it changes nothing in float, but moves noise
between data and weights: all channels of the data have one step, all weights of an output row (or all weights) another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.numerics.arq import row_chunks

if TYPE_CHECKING:
    from torch import Tensor


class RoundingNoise:
    """The noise of one layer as a function of the factors of its input channels.

    Args:
        weight: ``[groups, rows, channels of a group, taps]``.
        low: The smallest value of each input channel, at most 0; channels of all groups in turn.
        high: The largest value of each input channel, at least 0.
        power: The power of each input channel: the noise of the weights is multiplied by it.
        data_steps: Number of steps between the smallest and the largest integer of the data.
        weight_steps: The largest integer of a weight.
        one_scale: Whether all rows share one weight scale.
    """

    def __init__(
        self,
        weight: Tensor,
        low: Tensor,
        high: Tensor,
        power: Tensor,
        *,
        data_steps: int = 255,
        weight_steps: int = 127,
        one_scale: bool = False,
    ) -> None:
        detached = weight.detach()
        self._low, self._high, self._power = low.double(), high.double(), power.double()
        self._taps = weight.shape[3]
        # Of a weight without taps nothing is copied: it may be large.
        self._largest = detached.abs().amax(3) if self._taps > 1 else detached[..., 0]
        parts = row_chunks(weight.shape[2], weight.numel())
        sums = [detached[:, :, part].square().sum((1, 3), dtype=torch.float64) for part in parts]
        self._energy = torch.cat(sums, 1).reshape(-1)
        self._data_steps, self._weight_steps, self._one_scale = data_steps, weight_steps, one_scale

    def power(self, factors: Tensor) -> float:
        """The power of the noise in all outputs when the input channels are divided by ``factors``.

        Zeros are rounded without an error; they are counted as other values are.
        """
        wide = factors.double()
        step = ((self._high / wide).max() - (self._low / wide).min()) / self._data_steps
        from_data = step.square() * (wide.square() * self._energy).sum()
        grouped = factors.reshape(self._largest.shape[0], 1, -1).to(self._largest.dtype)
        parts = row_chunks(self._largest.shape[1], self._largest.numel())
        largest = [(self._largest[:, part].abs() * grouped).amax(2) for part in parts]
        scales = torch.cat(largest, 1).double() / self._weight_steps
        if self._one_scale:
            scales = scales.max().expand_as(scales)
        power = (self._power / wide.square()).reshape(grouped.shape).sum(2)
        from_weights = (scales.square() * self._taps * power).sum()
        return float(from_data + from_weights) / 12
