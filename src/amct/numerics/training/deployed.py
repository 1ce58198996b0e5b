"""From trained weights to deployed ones: what a folded batch norm does to integers and scales.

A batch norm multiplies output channel c by m = gamma / sqrt(variance + epsilon). The integers of a trained weight stay
as they are, the scale becomes scale · |m|, and a negative m turns their sign: quantizing the unfolded weight and
folding afterwards is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amct.numerics.affine import LARGEST_SCALE, SMALLEST_SCALE, integer_range


def fold_into_integers(integers: Tensor, scale: Tensor, multiplier: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The integers and scales of a trained weight behind which channels are multiplied.

    Where the multiplier is 0 the integers become 0 and the scale stays what it was, which is legal. Where the new scale
    would be illegal it becomes the nearest legal one, and the integers are rounded again.

    Args:
        integers: ``[Cout, -1]``.
        scale: ``[1]`` or ``[Cout]``.
        multiplier: ``[Cout]``.
        bits: of the integers.

    Returns:
        The integers, and the scales ``[Cout]`` in float32.
    """
    multiplier = multiplier.double()
    before = scale.double().expand(integers.shape[0])
    wanted = before * multiplier.abs()
    after = torch.where(multiplier == 0, before, wanted.clamp(SMALLEST_SCALE, LARGEST_SCALE)).float()
    ratio = torch.where(
        after.double() == wanted.float().double(), multiplier.sign(), multiplier * before / after.double()
    )
    lowest, highest = integer_range(bits)
    return (integers * ratio[:, None]).round().clamp(lowest, highest).to(integers.dtype), after
