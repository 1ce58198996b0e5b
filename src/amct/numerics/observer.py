"""The observer protocol: activation statistics gathered during calibration, and the factors computed from them.

An observer takes any number of tensors (``observe``), can be combined with an observer of other data (``merge``) and
computes scale and offset (``result``). What it has observed can be taken out as arrays (``state``) and put into another
observer of the same settings (``restore``), in another process or later. However the batches are divided among
observers, merging these gives the result of one observer that has seen all batches in their order, bit for bit. Its
errors do not name the layer: the caller wraps a ``CalibrationError`` and adds the name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError

if TYPE_CHECKING:
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
