"""The min-max observer: the quantized range is the whole range of the observed values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import SymmetricScale, integer_range
from amct.numerics.counts.loops import range_of
from amct.numerics.observer import (
    State,
    as_rows,
    check_mergeable,
    checked_array,
    finite_range,
    flat_values,
)
from amct.numerics.qparams import Observed


class RunningRange:
    """The exact minimum and maximum of all batches, per tensor (one row) or per channel."""

    def __init__(self, channel_axis: int | None = None) -> None:
        self.channel_axis = channel_axis
        self.batches = 0
        self.count = 0
        self._minimum = torch.empty(0)
        self._maximum = torch.empty(0)
        self._known = (np.inf, -np.inf)
        """The range of some batches (per tensor only): Python's numbers are compared in a tenth of the time."""
        self._is_joined = True
        """Whether minimum and maximum include the known range."""

    @property
    def minimum(self) -> Tensor:
        """The smallest value of every channel; none before the first value."""
        self._join_known()
        return self._minimum

    @property
    def maximum(self) -> Tensor:
        """The largest value of every channel."""
        self._join_known()
        return self._maximum

    def ends(self, channel: int) -> tuple[float, float]:
        """The smallest and the largest value of a channel."""
        if self._minimum.numel() == 0:  # only known ranges, of a tensor: no tensors are needed
            return self._known[0] + 0.0, self._known[1] + 0.0
        return float(self.minimum[channel]), float(self.maximum[channel])

    @property
    def channels(self) -> int:
        """Number of channels; 0 before the first value."""
        return self.minimum.numel()

    def add(self, x: Tensor) -> Tensor:
        """Add one batch and return it as rows ``[channels, n]``; a batch that raises changes nothing.

        Raises:
            ArgumentTypeError: the batch is not floating point.
            ArgumentError: the number of channels changed.
            CalibrationError: the batch holds NaN or infinity.
        """
        if self.channel_axis is None and x.is_cpu and x.numel():
            values = flat_values(x)
            found = range_of(values)  # several times faster than torch for small tensors
            if found is not None:
                self.add_known(values.size, *found)
                return torch.from_numpy(values)[None]
        rows = as_rows(x, self.channel_axis)
        if rows.numel():
            minimum, maximum = finite_range(rows)
            self._extend(minimum.cpu(), maximum.cpu())
            self.count += rows.numel()
        self.batches += 1
        return rows

    def add_known(self, count: int, minimum: float, maximum: float) -> None:
        """Add one batch of ``count`` values whose minimum and maximum are known (per tensor only)."""
        low, high = self._known
        if minimum < low or maximum > high:
            self._known, self._is_joined = (min(low, minimum), max(high, maximum)), False
        self.count += count
        self.batches += 1

    def merge(self, other: RunningRange) -> None:
        """Add the range of ``other``."""
        if other.count:
            self._extend(other.minimum, other.maximum)
        self.count += other.count
        self.batches += other.batches

    def state(self) -> State:
        """Return the numbers of batches and values, and the range."""
        return {
            "seen": np.array([self.batches, self.count], np.int64),
            "minimum": self.minimum.numpy(),
            "maximum": self.maximum.numpy(),
        }

    def restore(self, state: State) -> None:
        """Replace everything by a state."""
        self.batches, self.count = checked_array(state, "seen", np.int64, (2,)).tolist()
        minimum = checked_array(state, "minimum", np.float32, (None,))
        maximum = checked_array(state, "maximum", np.float32, minimum.shape)
        one_row = self.channel_axis is None or self.count == 0
        if min(self.batches, self.count) < 0 or (one_row and minimum.size != min(self.count, 1)):
            raise CalibrationError(
                f"the state of an observer does not fit: {self.count} values of {self.batches} batches with "
                f"{minimum.size} ranges"
            )
        self._minimum, self._maximum = torch.from_numpy(minimum.copy()), torch.from_numpy(maximum.copy())
        self._known, self._is_joined = (np.inf, -np.inf), True

    def require_values(self) -> None:
        """Raise unless at least one value was observed.

        Raises:
            CalibrationError: no value was observed.
        """
        if self.count == 0:
            raise CalibrationError(
                f"no activation values were observed in {self.batches} batches; "
                "run the model on calibration data before computing factors"
            )

    def _join_known(self) -> None:
        if not self._is_joined:
            self._is_joined = True
            known = np.array(self._known, np.float32)
            self._extend(torch.from_numpy(known[:1]), torch.from_numpy(known[1:]))

    def _extend(self, minimum: Tensor, maximum: Tensor) -> None:
        minimum, maximum = minimum + 0.0, maximum + 0.0  # of two zeros the positive one, in whatever order they come
        if self.channels == 0:
            self._minimum, self._maximum = minimum, maximum
            return
        if minimum.numel() != self.channels:
            raise ArgumentError(
                f"the number of channels along axis {self.channel_axis} changed: {self.channels} before, "
                f"now {minimum.numel()}"
            )
        self._minimum = torch.minimum(self._minimum, minimum)
        self._maximum = torch.maximum(self._maximum, maximum)


@dataclass(kw_only=True, eq=False)
class RangeObserver(ABC):
    """Base of the observers: settings, running range, and the factors of the range that a subclass chooses."""

    bits: int = 8
    asymmetric: bool = True
    channel_axis: int | None = None
    symmetric_scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE
    _range: RunningRange = field(init=False, repr=False)

    def __post_init__(self) -> None:
        integer_range(self.bits)
        self._range = RunningRange(self.channel_axis)

    @property
    def batches(self) -> int:
        """How many tensors were observed."""
        return self._range.batches

    @property
    def count(self) -> int:
        """How many values were observed."""
        return self._range.count

    def result(self) -> Observed:
        """Return scale and offset for all data observed so far."""
        self._range.require_values()
        minimum, maximum = self.limits()
        shape = () if self.channel_axis is None else (-1,)
        return Observed.from_range(
            minimum.reshape(shape),
            maximum.reshape(shape),
            self.bits,
            asymmetric=self.asymmetric,
            symmetric_scale=self.symmetric_scale,
            axis=self.channel_axis,
        )

    @abstractmethod
    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the ends of the quantized range of every channel, ``[channels]`` each."""


class MinMaxObserver(RangeObserver):
    """Observer whose range covers all values, outliers included."""

    def begin_batch(self, number: int) -> None:
        """Tell the number of the next batch; the result does not depend on it."""

    def expect(self, values: int) -> None:
        """Tell the number of values of all processes; the result does not depend on it."""

    def observe(self, x: Tensor) -> None:
        """Add one tensor."""
        self._range.add(x)

    def merge(self, other: MinMaxObserver) -> None:
        """Add all data observed by ``other``."""
        check_mergeable(self, other)
        self._range.merge(other._range)

    def state(self) -> State:
        """Return everything observed so far."""
        return self._range.state()

    def restore(self, state: State) -> None:
        """Replace everything observed so far by a state."""
        self._range.restore(state)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the exact minimum and maximum."""
        return self._range.minimum, self._range.maximum
