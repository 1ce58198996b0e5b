"""What watches the activations of a layer during calibration, and what comes out of it.

An observer sees any number of tensors (``observe``), can be joined with another one that saw other data (``merge``),
and ends with one scale and offset (``result``). Errors speak of numbers only: the caller, who knows the layer, wraps a
``CalibrationError`` and adds its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.numerics.affine import SymmetricScale, integer_range, is_tiny, scale_and_offset


@dataclass(frozen=True, kw_only=True)
class ActivationFactors:
    """How a tensor is quantized: 0-d tensors, or one entry per channel."""

    scale: Tensor
    """float32"""
    offset: Tensor
    """int32"""
    bits: int
    clip_min: Tensor
    """The smallest value that is kept: everything below it becomes the lowest integer."""
    clip_max: Tensor
    """The largest value that is kept."""
    tiny: Tensor
    """True where the data was (as good as) zero, so that the scale is 1 by convention: worth a warning."""
    balance: Tensor | None = None
    """One factor per channel that the tensor is divided by before it is quantized; None: it is quantized as it is."""
    mean: Tensor | None = None
    """Of every channel, where that was watched."""

    @classmethod
    def from_range(
        cls, minimum: Tensor, maximum: Tensor, bits: int, *, asymmetric: bool, symmetric_scale: SymmetricScale
    ) -> ActivationFactors:
        """The factors that cover the range ``minimum``..``maximum``."""
        scale, offset = scale_and_offset(minimum, maximum, bits, asymmetric=asymmetric, symmetric_scale=symmetric_scale)
        lowest, highest = integer_range(bits)
        tiny = scale == 1  # as scale_and_offset falls back to
        if bool(tiny.any()):
            tiny = is_tiny(minimum, maximum, bits, asymmetric=asymmetric, symmetric_scale=symmetric_scale)
        return cls(
            scale=scale,
            offset=offset,
            bits=bits,
            clip_min=scale * (lowest - offset),
            clip_max=scale * (highest - offset),
            tiny=tiny,
        )


class Observer(Protocol):
    """The face of every observer."""

    @property
    def batches(self) -> int:
        """How many tensors were observed."""
        ...

    def observe(self, x: Tensor) -> None:
        """Take in one tensor; it is not kept alive and not changed."""
        ...

    def merge(self, other: Observer) -> None:
        """Take in everything that ``other``, an observer with the same settings, has seen."""
        ...

    def result(self) -> ActivationFactors:
        """Scale and offset for all data seen so far."""
        ...


class TensorObserver(Protocol):
    """The face of what watches a tensor between layers, which may turn out to need no factors."""

    @property
    def batches(self) -> int:
        """How many tensors were observed."""
        ...

    def observe(self, x: Tensor) -> None:
        """Take in one tensor; it is not kept alive and not changed."""
        ...

    def result(self) -> ActivationFactors | None:
        """Scale and offset for all data seen so far, or None: nothing to be done."""
        ...


def as_rows(x: Tensor, channel_axis: int | None) -> Tensor:
    """The values as float32 ``[channels, values per channel]``; one row when ``channel_axis`` is None.

    Raises:
        ArgumentTypeError: the tensor does not hold floating-point numbers.
        ArgumentError: it has no axis ``channel_axis``.
    """
    if not x.is_floating_point():
        raise ArgumentTypeError(f"an observer expects floating-point activations, got {x.dtype}")
    x = x.detach()
    if channel_axis is None:
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x = x.permute(0, 2, 3, 1)  # no observer minds the order inside a batch, and this spares a copy
        return x.reshape(1, -1).float()
    if not -x.ndim <= channel_axis < x.ndim:
        raise ArgumentError(f"channel_axis {channel_axis} does not exist in a tensor of shape {list(x.shape)}")
    x = x.movedim(channel_axis, 0)
    return x.reshape(x.shape[0], x.numel() // max(x.shape[0], 1)).float().contiguous()


def finite_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every row.

    Raises:
        CalibrationError: some value is NaN or infinite.
    """
    # One fused pass; NaN and infinity always show in the minimum or the maximum, which are cheaper to check.
    whole = torch.aminmax(rows) if rows.shape[0] == 1 else torch.aminmax(rows, dim=1)
    low, high = whole.min.reshape(-1), whole.max.reshape(-1)
    if low.numel() == 1:  # numbers are checked in a tenth of the time
        all_finite = math.isfinite(low.item()) and math.isfinite(high.item())
    else:
        all_finite = bool((torch.isfinite(low) & torch.isfinite(high)).all())
    if all_finite:
        return low, high
    nan = int(torch.isnan(rows).sum())
    infinite = int(torch.isinf(rows).sum())
    finite = rows[torch.isfinite(rows)]
    seen = f"minimum {finite.min():g}, maximum {finite.max():g}" if finite.numel() else "none"
    raise CalibrationError(
        f"the activation holds {nan} NaN and {infinite} infinite values among {rows.numel()} "
        f"(finite values: {seen}); look for a diverged layer or broken input data, or leave this layer in float"
    )


def check_mergeable(first: Observer, second: Observer) -> None:
    """Raise unless both observers are of one kind and set up alike.

    Raises:
        ArgumentError: naming what differs.
    """
    if type(first) is not type(second):
        raise ArgumentError(
            f"only observers of one kind can be merged, got {type(first).__name__} and {type(second).__name__}"
        )
    names = [field.name for field in fields(first) if field.init]  # type: ignore[arg-type]  # observers are dataclasses
    different = [name for name in names if getattr(first, name) != getattr(second, name)]
    if different:
        shown = ", ".join(f"{name} {getattr(first, name)} and {getattr(second, name)}" for name in different)
        raise ArgumentError(f"only observers with the same settings can be merged, got {shown}")
