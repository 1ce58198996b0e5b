"""SNQ: weights clustered to 16 values per layer or per channel, each of them on the layer's int8 grid.

A weight becomes an index 0..15 into a table of 16 int8 values; ``scale · table[index]`` is its dequantized value.
``grid_clusters`` has the clustering: an iteration that begins where ``init_algo`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.affine import SMALLEST_SCALE, SymmetricScale
from amct.numerics.arq import WeightFactors, WeightKind, arq, channels_first, from_channels_first
from amct.numerics.grid_clusters import d2_sampling, half_step_moments, lloyd, nearest, snap
from amct.numerics.settings import SnqSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray
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

    factors: WeightFactors
    """The int8 factors, ``[1]`` or ``[Cout]``."""
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
    symmetric_scale: SymmetricScale = SymmetricScale.FULL_RANGE,
) -> ClusteredWeight:
    """Cluster a weight to 16 values on its int8 grid. Float64 weights are clustered as float32.

    Args:
        weight: floating point, in the layout of ``kind``.
        kind: layout of the weight.
        groups: groups of a transposed convolution.
        settings: how it is clustered, and whether each output channel has a scale and a table of its own.
        symmetric_scale: divisor of the int8 scale.

    Raises:
        CalibrationError: the weight holds NaN or infinity, or its scale would be too large.
        ArgumentError: shape or groups cannot be used.
    """
    if kind is WeightKind.RNN:
        raise ArgumentError("a recurrent layer's weights cannot be clustered; quantize them with arq")
    factors = arq(weight, kind=kind, channel_wise=settings.channel_wise, groups=groups, symmetric_scale=symmetric_scale)
    rows = channels_first(weight.detach(), kind, groups).float()
    values = rows.reshape(factors.scale.numel(), -1).contiguous().cpu().numpy()
    table = np.empty((len(values), CLUSTERS), np.int8)
    indices = np.empty(values.shape, np.uint8)
    for row, scale in enumerate(factors.scale.tolist()):
        centres = _centres(values[row], scale, settings, row)
        nearest(values[row], scale, centres, indices[row])
        table[row] = centres
    by_channel = torch.from_numpy(indices).to(weight.device).reshape(rows.shape)
    return ClusteredWeight(
        factors,
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


def dequantize_clusters(clustered: ClusteredWeight, kind: WeightKind, groups: int = 1) -> Tensor:
    """Return the dequantized weight, float32, in the shape of the indices."""
    integers = decode(clustered.indices, clustered.table, kind, groups)
    rows = channels_first(integers, kind, groups).float() * clustered.factors.scale.reshape(-1, 1)
    return from_channels_first(rows, integers.shape, kind, groups)


def absorb_multiplier(clustered: ClusteredWeight, multiplier: Tensor) -> ClusteredWeight:
    """Multiply each output channel, e.g. to fold a batch norm: scale and table change, the indices stay.

    The scale is multiplied by the magnitude and the table by the sign, so one table for all channels becomes one per
    channel if a multiplier is negative. A channel whose scale would be below float epsilon becomes zero with scale 1.

    Args:
        clustered: the weight.
        multiplier: ``[Cout]``.
    """
    multiplier = multiplier.detach().to(clustered.factors.scale.device, torch.float64)
    scale = clustered.factors.scale.double() * multiplier.abs()
    vanished = scale < SMALLEST_SCALE
    table = clustered.table
    if bool(vanished.any() | (multiplier < 0).any()):
        table = (table * torch.sign(multiplier).to(torch.int8).reshape(-1, 1)).masked_fill(vanished.reshape(-1, 1), 0)
    scale = torch.where(vanished, torch.ones_like(scale), scale).float()
    return ClusteredWeight(WeightFactors(scale, torch.zeros_like(scale, dtype=torch.int32)), table, clustered.indices)


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
