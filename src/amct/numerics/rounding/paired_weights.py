"""Weights for kernels that add two products of uint8 and int8 in 16 bits: 8-bit integers whose pairs cannot saturate.

Without VNNI, x86 multiplies by ``vpmaddubsw``, which adds the products of two neighbours along the reduction in 16 bits
signed. ``255 · (|a| + |b|)`` fits up to ``|a| + |b| = 128``; neighbours of different sign never saturate. So pairs are
bounded by ``|a + b| <= 128``, and a weight needs 7 bits only where two of its largest values are neighbours.

The reduction runs over the positions of the kernel, and at each position over the inputs of the group. That is the
order of onnxruntime's kernels, for convolutions and matrix products alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.numerics.affine import SymmetricScale
from amct.numerics.arq import WeightKind, arq, row_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PAIR_LIMIT = 128
"""The largest sum of magnitudes whose products with 255 fit 16 bits signed."""
LARGEST = 127
"""The largest magnitude. -128 is left out: kernels for ARM add two products of int8, which overflow with -128 twice."""
SCALES = 8
"""Scales that are tried between the finest one and the finest that bounds no pair."""
COHERENT = 4
"""How often the error of a bounded pair counts: it shrinks large weights, and does not cancel as rounding does."""


def adds_pairs(shape: Sequence[int], groups: int) -> bool:
    """Whether kernels add pairs for a weight ``[Cout, Cin/groups, ...]``: those of depthwise convolutions do not."""
    return not (shape[1] == 1 and shape[0] == groups)


def paired(weight: Tensor) -> Tensor:
    """The values of each output ``[Cout, pairs, 2]`` that a kernel adds in 16 bits; an odd one has a zero beside it.

    Args:
        weight: ``[Cout, Cin/groups, ...]``.
    """
    rows = weight.reshape(*weight.shape[:2], -1).transpose(1, 2).flatten(1)
    if rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return rows.reshape(rows.shape[0], -1, 2)


def unpaired(pairs: Tensor, shape: torch.Size) -> Tensor:
    """The weight of a shape from its pairs: the inverse of ``paired``."""
    rows = pairs.flatten(1)[:, : shape[1:].numel()]
    return rows.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(shape)


def pairs_fit(integers: Tensor) -> bool:
    """Whether no pair of an int8 weight ``[Cout, Cin/groups, ...]`` can saturate."""
    chunks = row_chunks(integers.shape[0], integers.numel())
    return all(bool((_sums(integers[part].short()).abs() <= PAIR_LIMIT).all()) for part in chunks)


def paired_scale(weight: Tensor) -> Tensor:
    """The scale of each output ``[Cout]`` with the least expected error of weights whose pairs are bounded.

    A finer scale has smaller rounding errors, but more pairs that must be made smaller. The expected error of a scale s
    is s²/12 for each weight, and ``COHERENT`` times half of the squared excess for each pair (both move by half of it).
    At the coarse end no pair is too large: at worst two of the largest weights are neighbours, and the scale is that of
    7 bits.

    Raises:
        CalibrationError: the weight holds NaN or infinity.
        ArgumentError: it is empty.
    """
    finest = arq(weight, kind=WeightKind.CONV, bits=8, symmetric_scale=SymmetricScale.FULL_RANGE).scale

    chunks = row_chunks(weight.shape[0], weight.numel())
    return torch.cat([_least_error(weight[part].detach(), finest[part]) for part in chunks])


def within_limit(exact: Tensor) -> Tensor:
    """The nearest values, in steps of the scale, whose pairs are bounded: each of too large a pair gives up half."""
    pairs = paired(exact)
    sums = pairs.sum(-1, keepdim=True)
    return unpaired(pairs - (sums - sums.clamp(-PAIR_LIMIT, PAIR_LIMIT)) / 2, exact.shape)


def rounded_within_limit(exact: Tensor) -> Tensor:
    """The nearest integers whose pairs are bounded, of values whose pairs are; only a tie can be rounded too far."""
    rounded = paired(exact.round())
    too_large = rounded.sum(-1).abs() > PAIR_LIMIT
    if bool(too_large.any()):
        found = rounded[too_large]
        errors = found.abs() - paired(exact)[too_large].abs()
        rounded[too_large] = found - found.sign() * torch.nn.functional.one_hot(errors.argmax(-1), 2)
    return unpaired(rounded, exact.shape)


def near_limit(integers: Tensor) -> Tensor:
    """Which integers may not grow: if both of any other pair do so by one, the pair is still bounded."""
    fixed = (_sums(integers).abs() >= PAIR_LIMIT - 1).unsqueeze(-1)
    return unpaired(fixed.expand(-1, -1, 2), integers.shape)


def _sums(weight: Tensor) -> Tensor:
    """The sum of each pair ``[Cout, pairs]``."""
    first, second = paired(weight).unbind(-1)
    return first + second


def _least_error(rows: Tensor, finest: Tensor) -> Tensor:
    joint = _sums(rows.float()).abs_()
    coarsest = torch.maximum(finest, joint.amax(1) / PAIR_LIMIT)
    steps = torch.linspace(0, 1, SCALES, device=rows.device).reshape(-1, 1)
    scales = finest * (coarsest / finest) ** steps
    rounding = scales.square() / 12 * rows[0].numel()
    excess = [(joint - PAIR_LIMIT * scale.reshape(-1, 1)).clamp_(min=0) for scale in scales]
    errors = rounding + torch.stack([each.square().sum(1) for each in excess]) * (COHERENT / 2)
    # Of equal errors the coarse scale: its integers are the smaller ones.
    chosen = SCALES - 1 - errors.flip(0).argmin(0)
    return scales.gather(0, chosen.reshape(1, -1)).reshape(-1)
