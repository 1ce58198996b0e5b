"""Shape checks shared by many layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

IMAGE_BLOB_AXES = 4
"""Images, channels, rows, columns."""


def canonical_axis(axis: int, axes: int, layer: str) -> int:
    """Convert an axis that may count from the end to one that counts from the start.

    Raises:
        ModelError: There is no such axis.
    """
    if not -axes <= axis < axes:
        raise ModelError(f'layer "{layer}": axis {axis} is out of range for a blob of {axes} axes')
    return axis % axes if axes else 0


def count(shape: Sequence[int], start: int = 0, end: int | None = None) -> int:
    """The number of values in the axes from ``start`` up to (not including) ``end``."""
    return math.prod(shape[start:end])


def require_image(shape: Shape, layer: str) -> None:
    """Require the four axes of images.

    Raises:
        ModelError: The number of axes is different.
    """
    if len(shape) != IMAGE_BLOB_AXES:
        raise ModelError(f'layer "{layer}": expected a blob of {IMAGE_BLOB_AXES} axes, got shape {shape}')


def require_same_shape(first: Shape, other: Shape, layer: str, index: int) -> None:
    """Require equal shapes.

    Raises:
        ModelError: ``other`` (bottom ``index``) differs from bottom 0.
    """
    if first != other:
        raise ModelError(f'layer "{layer}": bottom {index} has shape {other}, bottom 0 has {first}: they must be equal')
