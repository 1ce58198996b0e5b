"""The observer protocol: activation statistics gathered during calibration, and the factors computed from them.

An observer takes any number of tensors (``observe``), can be combined with an observer of other data (``merge``) and
computes scale and offset (``result``). What it has observed can be taken out as arrays (``state``) and put into another
observer of the same settings (``restore``), in another process or later. However the batches are divided among
observers, merging these gives the result of one observer that has seen all batches in their order, bit for bit. Its
errors do not name the layer: the caller wraps a ``CalibrationError`` and adds the name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.numerics.affine import LARGEST_SCALE, SymmetricScale, integer_range
from amct.numerics.counts.loops import range_of
from amct.numerics.qparams import Observed

State = Mapping[str, NDArray[Any]]
"""What an observer has observed: arrays of numbers, which files hold without pickle."""


class TensorObserver(Protocol):
    """The interface of an observer of a tensor between layers, which may need no factors."""

    @property
    def batches(self) -> int:
        """How many tensors were observed."""
        ...

    def observe(self, x: Tensor) -> None:
        """Add one tensor; no reference to it is kept, and it is not changed."""
        ...

    def result(self) -> Observed | None:
        """Return scale and offset for all data observed so far, or None if the tensor needs none."""
        ...


class Observer(TensorObserver, Protocol):
    """The interface of an observer of a layer's input, which always gives factors."""

    def result(self) -> Observed:
        """Return scale and offset for all data observed so far."""
        ...


@runtime_checkable
class MergeableObserver(Protocol):
    """The interface of an observer whose data can be shared out among processes or kept in a file."""

    def begin_batch(self, number: int) -> None:
        """Tell the number, among all batches of all processes, of the batch that is observed next."""
        ...

    def state(self) -> State:
        """Return everything observed so far."""
        ...

    def restore(self, state: State) -> None:
        """Replace everything observed so far by a state of an observer with the same settings.

        Raises:
            CalibrationError: The state is damaged or does not belong to such an observer.
        """
        ...

    def expect(self, values: int) -> None:
        """Tell the number of values of all processes: whether they are stored or counted depends on it."""
        ...

    @property
    def count(self) -> int:
        """The number of values observed."""
        ...

    def merge(self, other: Any) -> None:  # noqa: ANN401  an observer of the same class
        """Add all data observed by ``other``, an observer with the same settings, which is not changed."""
        ...


def checked_array(state: State, name: str, dtype: type[np.generic], shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return an array of a state; None in ``shape`` stands for any length.

    Raises:
        CalibrationError: It is missing, or has another type or shape.
    """
    found = state.get(name)
    fits = found is not None and found.dtype == dtype and found.ndim == len(shape)
    if found is None or not fits or any(size not in (None, has) for size, has in zip(shape, found.shape, strict=True)):
        seen = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise CalibrationError(
            f'the state of an observer does not fit: "{name}" should be {np.dtype(dtype)} [{wanted}], got {seen}'
        )
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether the values of a tensor lie in a grid, which sparse and nested tensors do not have."""
    return tensor.layout is torch.strided and not tensor.is_nested


def as_rows(x: Tensor, channel_axis: int | None) -> Tensor:
    """Return the values as float32 ``[channels, values per channel]``; one row when ``channel_axis`` is None.

    Raises:
        ArgumentTypeError: the tensor does not hold floating-point numbers.
        ArgumentError: it has no axis ``channel_axis``.
    """
    if not x.is_floating_point():
        raise ArgumentTypeError(f"an observer expects floating-point activations, got {x.dtype}")
    x = x.detach()
    if channel_axis is None:
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x = x.permute(0, 2, 3, 1)  # avoids a copy; observers do not depend on the order within a batch
        return x.reshape(1, -1).float()
    if not -x.ndim <= channel_axis < x.ndim:
        raise ArgumentError(f"channel_axis {channel_axis} does not exist in a tensor of shape {list(x.shape)}")
    x = x.movedim(channel_axis, 0)
    return x.reshape(x.shape[0], x.numel() // max(x.shape[0], 1)).float().contiguous()


def flat_values(x: Tensor) -> NDArray[np.float32]:
    """Return the values of a tensor on the CPU, in any order and, if possible, without a copy.

    Raises:
        ArgumentTypeError: the tensor does not hold floating-point numbers.
    """
    if x.dtype == torch.float32 and x.is_cpu:  # NumPy's views take less time than torch's
        values: NDArray[np.float32] = (x.detach() if x.requires_grad else x).numpy()
        if x.is_contiguous():
            return np.reshape(values, -1)
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return np.reshape(values.transpose(0, 2, 3, 1), -1)
    copied: NDArray[np.float32] = as_rows(x, None).cpu().contiguous()[0].numpy()
    return copied


def finite_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of every row of ``rows`` ``[C, n]``, ``[C]`` each.

    Raises:
        CalibrationError: some value is NaN or infinite.
    """
    # One fused pass; NaN and infinity always propagate to the minimum or the maximum, which are cheaper to check.
    whole = torch.aminmax(rows) if rows.shape[0] == 1 else torch.aminmax(rows, dim=1)
    low, high = whole.min.reshape(-1), whole.max.reshape(-1)
    if low.numel() == 1:  # Python numbers are checked in a tenth of the time
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


def check_mergeable(first: object, second: object) -> None:
    """Raise unless both observers have the same class and settings.

    Raises:
        ArgumentError: the classes or some settings differ; the message lists both values.
    """
    if type(first) is not type(second):
        raise ArgumentError(
            f"only observers of the same class can be merged, got {type(first).__name__} and {type(second).__name__}"
        )
    own, others = _settings_of(first), _settings_of(second)
    shown = ", ".join(f"{name} {own[name]} and {others[name]}" for name in own if own[name] != others[name])
    if shown:
        raise ArgumentError(f"only observers with the same settings can be merged, got {shown}")


def _settings_of(observer: Any) -> dict[str, Any]:  # noqa: ANN401  observers are dataclasses
    """The arguments of an observer by name, those of its algorithm's settings among them."""
    values = {field.name: getattr(observer, field.name) for field in fields(observer) if field.init}
    settings = values.pop("settings", None)
    return values if settings is None else vars(settings) | values


# -- The min-max observer: the quantized range is the whole range of the observed values -------------------------------


class RunningRange:
    """The exact minimum and maximum of all batches, per tensor (one row) or per channel."""

    def __init__(self, channel_axis: int | None = None) -> None:
        self.channel_axis = channel_axis
        self.batches = 0
        self.count = 0
        self._low, self._high = np.inf, -np.inf
        """Of a whole tensor: Python's numbers are compared in a tenth of the time."""
        self._minimum = self._maximum = torch.empty(0)
        """Of channels."""

    @property
    def minimum(self) -> Tensor:
        """The smallest value of every channel; none before the first value."""
        return self._as_tensor(self._low) if self.channel_axis is None else self._minimum

    @property
    def maximum(self) -> Tensor:
        """The largest value of every channel."""
        return self._as_tensor(self._high) if self.channel_axis is None else self._maximum

    def _as_tensor(self, end: float) -> Tensor:
        return torch.tensor([end + 0.0] if self.count else [], dtype=torch.float32)  # of two zeros the positive one

    def ends(self, channel: int) -> tuple[float, float]:
        """The smallest and the largest value of a channel."""
        if self.channel_axis is None:
            return self._low + 0.0, self._high + 0.0
        return float(self._minimum[channel]), float(self._maximum[channel])

    @property
    def channels(self) -> int:
        """Number of channels; 0 before the first value."""
        return min(self.count, 1) if self.channel_axis is None else self._minimum.numel()

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
        self._low, self._high = min(self._low, minimum), max(self._high, maximum)
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
        self._low, self._high = np.inf, -np.inf
        self._minimum = self._maximum = torch.empty(0)
        if minimum.size:
            self._extend(torch.from_numpy(minimum.copy()), torch.from_numpy(maximum.copy()))

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

    def _extend(self, minimum: Tensor, maximum: Tensor) -> None:
        if self.channel_axis is None:
            self._low, self._high = min(self._low, float(minimum)), max(self._high, float(maximum))
            return
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


BEST_REACH = 3.92
"""Standard deviations at which 255 steps round and clip normally distributed values with the least error together.

The noise of clipping at t is 2 ((1 + t²) Q(t) - t φ(t)), that of rounding (2 t / 255)² / 12.
"""
_FEWEST_VALUES = 8
"""Of fewer values the range says next to nothing; it grows as for so many."""


class TensorRangeObserver(MinMaxObserver):
    """Observer of a tensor between layers: the range of all values, and more where few were seen.

    The mean of the largest of n normally distributed values is about the quantile 1 - exp(-γ) / n (Gumbel). Below
    13 000 values that is less than ``BEST_REACH``: other data would lose more by being clipped than the finer steps
    gain. So the range grows to it: by a fifth for 1000 values, by half for 130, from its middle as from zero (nobody
    knows where the middle of so few values is). An end at zero is one that an activation has made: it stays.
    """

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the ends of the range, widened."""
        factor, most = widening(self.count), torch.tensor(LARGEST_SCALE * (2 ** (self.bits - 1) - 1))
        low, high = super().limits()
        middle, half = (low + high) / 2, (high - low) / 2
        lower = torch.minimum(low * factor, middle - half * factor).where(low != 0, low)
        upper = torch.maximum(high * factor, middle + half * factor).where(high != 0, high)
        # Both ends together have no larger scale than is allowed.
        return torch.maximum(lower, torch.minimum(low, -most)), torch.minimum(upper, torch.maximum(high, most))


def widening(count: int) -> float:
    """By what the range of so many values is multiplied."""
    largest = NormalDist().inv_cdf(1 - math.exp(-np.euler_gamma) / max(count, _FEWEST_VALUES))
    return max(1.0, BEST_REACH / largest)
