"""SNQ: weights clustered to 16 values per layer or per channel, each of them on the layer's int8 grid.

A weight becomes an index 0..15 into a table of 16 int8 values; ``scale · table[index]`` is its dequantized value. The
clustering is an iteration that begins where ``init_algo`` says.

Its values are in grid steps. The border between two integer centres is their midpoint, a multiple of one half, so the
cost depends only on the count, sum and sum of squares of the values up to each half step: a table of 513 columns,
however much data there is. The cost of any set of centres takes a few subtractions in this table. Lloyd's iteration
moves real-valued centres; on sorted points with prefix sums an iteration costs one binary search per centre. ``snap``
rounds its result to the grid and improves it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.affine import SMALLEST_SCALE, SymmetricScale
from amct.numerics.arq import WeightKind, arq, channels_first, from_channels_first
from amct.numerics.counts.compiled import compiled
from amct.numerics.qparams import QParams
from amct.numerics.settings import SnqSettings

if TYPE_CHECKING:
    from torch import Tensor

CLUSTERS = 16
_SORTED_POINTS = 2**22
"""More values than this are averaged in bins of 1/256 step before the iteration, to bound its memory."""
_BINS_PER_STEP = 256
_SEED = 0
"""Of the centres that are drawn."""


@dataclass(frozen=True)
class ClusteredWeight:
    """A weight clustered to 16 values: ``scale · table[index]``."""

    qparams: QParams
    """Of the int8 values, ``[1]`` or ``[Cout]``."""
    table: Tensor
    """int8 ``[1, 16]`` or ``[Cout, 16]``, ascending."""
    indices: Tensor
    """uint8, 0..15, in the shape of the weight."""


_DEFAULT = SnqSettings()


def snq(
    weight: Tensor,
    *,
    kind: WeightKind,
    groups: int = 1,
    settings: SnqSettings = _DEFAULT,
) -> ClusteredWeight:
    """Cluster a weight to 16 values on its int8 grid. Float64 weights are clustered as float32.

    Args:
        weight: floating point, in the layout of ``kind``.
        kind: layout of the weight.
        groups: groups of a transposed convolution.
        settings: how it is clustered, and whether each output channel has a scale and a table of its own.

    Raises:
        CalibrationError: the weight holds NaN or infinity, or its scale would be too large.
        ArgumentError: shape or groups cannot be used.
    """
    if kind is WeightKind.RNN:
        raise ArgumentError("a recurrent layer's weights cannot be clustered; quantize them with arq")
    full = SymmetricScale.FULL_RANGE
    qparams = arq(weight, kind=kind, channel_wise=settings.channel_wise, groups=groups, symmetric_scale=full)
    rows = channels_first(weight.detach(), kind, groups).float()
    values = rows.reshape(qparams.scale.numel(), -1).contiguous().cpu().numpy()
    table = np.empty((len(values), CLUSTERS), np.int8)
    indices = np.empty(values.shape, np.uint8)
    for row, scale in enumerate(qparams.scale.tolist()):
        centres = _centres(values[row], scale, settings, row)
        nearest(values[row], scale, centres, indices[row])
        table[row] = centres
    by_channel = torch.from_numpy(indices).to(weight.device).reshape(rows.shape)
    return ClusteredWeight(
        qparams,
        torch.from_numpy(table).to(weight.device),
        from_channels_first(by_channel, weight.shape, kind, groups),
    )


def _centres(values: NDArray[np.float32], scale: float, settings: SnqSettings, row: int) -> NDArray[np.int64]:
    moments = half_step_moments(values, scale)
    points, weights = _points(values, scale)
    counts, sums = (np.concatenate(([0.0], np.cumsum(part))) for part in (weights, weights * points))
    if settings.init_algo == "uniform":
        start = np.linspace(points[0], points[-1], CLUSTERS)
    elif settings.init_algo == "gaussian":
        start = _normal_quantiles(moments, points)
    else:
        generator = np.random.Generator(np.random.PCG64([_SEED, row]))
        start = d2_sampling(points, counts, generator.random(CLUSTERS))
    found = lloyd(points, counts, sums, start, settings.max_iteration, settings.min_distance)
    return snap(moments, found, CLUSTERS)


def _points(values: NDArray[np.float32], scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sorted values in grid steps and the count of each; more than 2^22 values are averaged in narrow bins."""
    if values.size <= _SORTED_POINTS:
        return np.sort(values / np.float64(scale)), np.ones(values.size)
    zero = 128 * _BINS_PER_STEP
    counts, sums = np.zeros(2 * zero + 1), np.zeros(2 * zero + 1)
    for start in range(0, values.size, _SORTED_POINTS):
        steps = values[start : start + _SORTED_POINTS] / np.float64(scale)
        bins = np.rint(steps * _BINS_PER_STEP).astype(np.int64) + zero
        counts += np.bincount(bins, minlength=counts.size)
        sums += np.bincount(bins, weights=steps, minlength=sums.size)
    filled = counts > 0
    return sums[filled] / counts[filled], counts[filled]


def _normal_quantiles(moments: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    count, total, squares = moments[:, -1]
    mean = total / count
    deviation = np.sqrt(max(squares / count - mean * mean, 0.0))
    quantiles = [NormalDist().inv_cdf((index + 0.5) / CLUSTERS) for index in range(CLUSTERS)]
    start: NDArray[np.float64] = np.clip(mean + deviation * np.array(quantiles), points[0], points[-1])
    return start


def decode(indices: Tensor, table: Tensor, kind: WeightKind, groups: int = 1) -> Tensor:
    """Look the indices up in the table: the int8 weight, in the shape of the indices.

    Raises:
        ArgumentError: the table is neither ``[1, 16]`` nor ``[Cout, 16]``.
    """
    rows = channels_first(indices, kind, groups)
    if table.ndim != 2 or table.shape[0] not in (1, rows.shape[0]) or table.shape[1] != CLUSTERS:
        raise ArgumentError(
            f"table: expected [1, {CLUSTERS}] or [{rows.shape[0]}, {CLUSTERS}], got {list(table.shape)}"
        )
    values = table.expand(rows.shape[0], CLUSTERS).gather(1, rows.to(torch.int64))
    return from_channels_first(values, indices.shape, kind, groups)


def absorb_multiplier(clustered: ClusteredWeight, multiplier: Tensor) -> ClusteredWeight:
    """Multiply each output channel, e.g. to fold a batch norm: scale and table change, the indices stay.

    The scale is multiplied by the magnitude and the table by the sign, so one table for all channels becomes one per
    channel if a multiplier is negative. A channel whose scale would be below float epsilon becomes zero with scale 1.

    Args:
        clustered: the weight.
        multiplier: ``[Cout]``.
    """
    multiplier = multiplier.detach().to(clustered.qparams.scale.device, torch.float64)
    scale = clustered.qparams.scale.double() * multiplier.abs()
    vanished = scale < SMALLEST_SCALE
    table = clustered.table
    if bool(vanished.any() | (multiplier < 0).any()):
        table = (table * torch.sign(multiplier).to(torch.int8).reshape(-1, 1)).masked_fill(vanished.reshape(-1, 1), 0)
    scale = torch.where(vanished, torch.ones_like(scale), scale).float()
    return ClusteredWeight(QParams.symmetric(scale), table, clustered.indices)


def pack_nibbles(indices: Tensor) -> Tensor:
    """Pack indices 0..15, two per byte, low nibble first; each row (all but the first axis) is padded to a byte.

    Args:
        indices: uint8 ``[R, ...]``.

    Returns:
        uint8 ``[R, ceil(n / 2)]`` for rows of n indices.

    Raises:
        ArgumentTypeError: not uint8.
        ArgumentError: an index above 15.
    """
    if indices.dtype is not torch.uint8:
        raise ArgumentTypeError(f"indices: expected torch.uint8, got {indices.dtype}")
    if indices.numel() and int(indices.max()) >= CLUSTERS:
        raise ArgumentError(f"indices: expected 0..{CLUSTERS - 1}, got {int(indices.max())}")
    rows = indices.reshape(indices.shape[0], -1)
    if rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return rows[:, 0::2] | (rows[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, length: int) -> Tensor:
    """Unpack the result of ``pack_nibbles`` to uint8 ``[R, length]``.

    Raises:
        ArgumentTypeError: not uint8.
        ArgumentError: the bytes do not hold rows of this length.
    """
    if packed.dtype is not torch.uint8:
        raise ArgumentTypeError(f"packed: expected torch.uint8, got {packed.dtype}")
    if packed.ndim != 2 or packed.shape[1] != (length + 1) // 2:
        raise ArgumentError(
            f"packed: expected [R, {(length + 1) // 2}] for rows of {length} indices, got {list(packed.shape)}"
        )
    return torch.stack([packed & 15, packed >> 4], dim=2).reshape(packed.shape[0], -1)[:, :length]


# -- clusters on an integer grid ---------------------------------------------------------------------------------------

LIMIT = 127
"""Centres lie in -127..127, which is symmetric so that they can be negated."""
_ZERO = 256
"""Column of the border at 0; the border at n/2 is column _ZERO + n."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@compiled
def half_step_moments(values: NDArray[np.float32], scale: float) -> Floats:
    """Return count, sum and sum of squares of all ``values / scale`` up to each half step, ``[3, 513]``."""
    moments = np.zeros((3, 2 * _ZERO + 1))
    for index in range(values.size):
        value = np.float64(values[index]) / scale
        column = min(max(int(np.ceil(2.0 * value)) + _ZERO, 0), 2 * _ZERO)
        moments[0, column] += 1.0
        moments[1, column] += value
        moments[2, column] += value * value
    for column in range(1, 2 * _ZERO + 1):
        for order in range(3):
            moments[order, column] += moments[order, column - 1]
    return moments


@compiled
def _cost(moments: Floats, after: int, upto: int, centre: int) -> float:
    """Return the squared distance to ``centre`` of the values between two columns (``after`` -1: from the first)."""
    count, total, squares = moments[0, upto], moments[1, upto], moments[2, upto]
    if after >= 0:
        count -= moments[0, after]
        total -= moments[1, after]
        squares -= moments[2, after]
    return squares - 2.0 * centre * total + float(centre) * centre * count  # type: ignore[no-any-return]


@compiled
def _left_cost(moments: Floats, centre: int) -> float:
    """Return the cost of all values below the first centre."""
    return _cost(moments, -1, 2 * centre + _ZERO, centre)


@compiled
def _right_cost(moments: Floats, centre: int) -> float:
    """Return the cost of all values above the last centre."""
    return _cost(moments, 2 * centre + _ZERO, 2 * _ZERO, centre)


@compiled
def _pair_cost(moments: Floats, low: int, high: int) -> float:
    """Return the cost of all values between two neighbouring centres, each assigned to the nearer one."""
    middle = low + high + _ZERO
    return _cost(moments, 2 * low + _ZERO, middle, low) + _cost(moments, middle, 2 * high + _ZERO, high)


@compiled
def total_cost(moments: Floats, centres: Integers) -> float:
    """Return the sum of squared distances of all values to the nearest of the ascending ``centres``."""
    cost = _left_cost(moments, centres[0]) + _right_cost(moments, centres[-1])
    for index in range(centres.size - 1):
        cost += _pair_cost(moments, centres[index], centres[index + 1])
    return cost


@compiled
def lloyd(
    points: Floats, counts: Floats, sums: Floats, centres: Floats, max_iteration: int, min_distance: float
) -> Floats:
    """Move each centre to the mean of the points nearest to it, until none moves by more than ``min_distance``.

    Args:
        points: ascending, ``[n]``, in grid steps.
        counts: prefix sums of the points' weights, starting with 0, ``[n + 1]``.
        sums: prefix sums of weight times point, starting with 0, ``[n + 1]``.
        centres: initial centres, ascending.
        max_iteration: maximum number of iterations.
        min_distance: in grid steps.
    """
    centres = centres.copy()
    for _ in range(max_iteration):
        farthest = 0.0
        first = 0
        moved = centres.copy()
        for index in range(centres.size):
            last = points.size
            if index + 1 < centres.size:
                last = np.searchsorted(points, 0.5 * (centres[index] + centres[index + 1]), side="right")
            weight = counts[last] - counts[first]
            if weight > 0:
                moved[index] = (sums[last] - sums[first]) / weight
                farthest = max(farthest, abs(moved[index] - centres[index]))
            first = last
        centres = np.sort(moved)  # a centre without points does not move, so another one may pass it
        if farthest <= min_distance:
            break
    return centres


@compiled
def d2_sampling(points: Floats, counts: Floats, draws: Floats) -> Floats:
    """k-means++: draw each centre with a probability proportional to the squared distance to the centres so far."""
    chosen = np.empty(draws.size)
    distance = np.full(points.size, np.inf)
    for index in range(draws.size):
        total = 0.0
        for point in range(points.size):
            if index > 0:
                gap = points[point] - chosen[index - 1]
                distance[point] = min(distance[point], gap * gap)
            total += (counts[point + 1] - counts[point]) * (1.0 if index == 0 else distance[point])
        left = draws[index] * total
        pick = points.size - 1
        for point in range(points.size):
            left -= (counts[point + 1] - counts[point]) * (1.0 if index == 0 else distance[point])
            if left < 0:
                pick = point
                break
        chosen[index] = points[pick]
    return np.sort(chosen)


@compiled
def _fill(moments: Floats, used: NDArray[np.bool_], clusters: int) -> Integers:
    """Add candidates to the marked ones until there are ``clusters``, each time the one with the largest gain."""
    count = used.size
    for _ in range(clusters - int(used.sum())):
        best_gain, best = -np.inf, -1
        low = -1
        while low < count:
            high = low + 1
            while high < count and not used[high]:
                high += 1
            for candidate in range(low + 1, high):
                gain = _gap_cost(moments, low, high, count)
                gain -= _gap_cost(moments, low, candidate, count) + _gap_cost(moments, candidate, high, count)
                if gain > best_gain:
                    best_gain, best = gain, candidate
            low = high
        used[best] = True
    return np.nonzero(used)[0] - LIMIT


@compiled
def _gap_cost(moments: Floats, low: int, high: int, count: int) -> float:
    """Return the cost between two candidates; low = -1: no centre below, high = ``count``: no centre above."""
    if low < 0:
        return _left_cost(moments, high - LIMIT)
    if high >= count:
        return _right_cost(moments, low - LIMIT)
    return _pair_cost(moments, low - LIMIT, high - LIMIT)


@compiled
def snap(moments: Floats, centres: Floats, clusters: int) -> Integers:
    """Round real centres to different integers, fill them up to ``clusters``, then move them while the cost falls."""
    used = np.zeros(2 * LIMIT + 1, np.bool_)
    for centre in centres:
        used[min(max(int(np.rint(centre)), -LIMIT), LIMIT) + LIMIT] = True
    best = _fill(moments, used, clusters)
    cost = total_cost(moments, best)
    while True:
        used[:] = False
        after = -1
        for index in range(clusters):
            upto = best[index] + best[index + 1] + _ZERO if index + 1 < clusters else 2 * _ZERO
            weight = moments[0, upto] - (moments[0, after] if after >= 0 else 0.0)
            if weight > 0:
                mean = (moments[1, upto] - (moments[1, after] if after >= 0 else 0.0)) / weight
                used[min(max(int(np.rint(mean)), -LIMIT), LIMIT) + LIMIT] = True
            after = upto
        moved = _fill(moments, used, clusters)
        moved_cost = total_cost(moments, moved)
        if not moved_cost < cost:
            return best
        best, cost = moved, moved_cost


@compiled
def nearest(values: NDArray[np.float32], scale: float, centres: Integers, found: NDArray[np.uint8]) -> None:
    """Write the index of the centre nearest to each ``values / scale`` to ``found``; ties go to the lower centre."""
    table = np.zeros(2 * _ZERO + 1, np.uint8)
    for index in range(centres.size - 1):
        table[centres[index] + centres[index + 1] + _ZERO + 1 :] += np.uint8(1)
    for index in range(values.size):
        column = int(np.ceil(2.0 * (np.float64(values[index]) / scale))) + _ZERO
        found[index] = table[min(max(column, 0), 2 * _ZERO)]
