"""Resizes images.

Interpolation is that of OpenCV and of the scikit-image versions used with Caffe: sampled at pixel centres, without
anti-aliasing, with edge pixels replicated. Models trained with Caffe got their images that way. Linear interpolation
of 8-bit images uses OpenCV's fixed-point arithmetic, so that the result is bit-exact with Caffe's data layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amct.errors import ArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]
    Taps = list[tuple[npt.NDArray[np.intp], FloatArray]]

NEAREST, LINEAR, CUBIC = 0, 1, 3
_CUBIC_SHARPNESS = -0.5


def resize(image: npt.NDArray[Any], size: tuple[int, int], *, order: int = LINEAR) -> npt.NDArray[Any]:
    """Resize the first two axes of an array, height and width.

    Args:
        image: (height, width) or (height, width, channels), integers or floats.
        size: The new height and width.
        order: 0 nearest, 1 linear, 3 cubic (Keys, a = -0.5).

    Returns:
        A uint8 array (rounded and clipped) for a uint8 image, otherwise a float32 array.

    Raises:
        ArgumentError: A size is not positive, the image is empty, or the order is not 0, 1 or 3.
    """
    if order not in _KERNELS:
        raise ArgumentError(f"interpolation order must be 0 (nearest), 1 (linear) or 3 (cubic), got {order}")
    if image.ndim < 2 or 0 in image.shape or min(size) < 1:
        raise ArgumentError(f"cannot resize a picture of shape {image.shape} to {size[0]} x {size[1]}")
    if image.dtype == np.uint8 and order == LINEAR:
        return _linear_8_bits(image, size)
    resized = image if image.shape[0] == size[0] and order != CUBIC else _along(image, 0, size[0], order)
    resized = resized if resized.shape[1] == size[1] and order != CUBIC else _along(resized, 1, size[1], order)
    if image.dtype == np.uint8:
        rounded: npt.NDArray[np.uint8] = np.clip(np.floor(resized + 0.5), 0, 255).astype(np.uint8)
        return rounded
    return np.asarray(resized, np.float32)


def _linear_8_bits(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """OpenCV's INTER_LINEAR for uint8: fixed-point weights in units of 1/2048, rounded after each direction."""
    (left, left_share), (right, right_share) = _whole_taps(image.shape[1], size[1], clamp=True)
    (above, above_share), (below, below_share) = _whole_taps(image.shape[0], size[0], clamp=False)
    trailing = (1,) * (image.ndim - 2)
    wide = np.take(image, left, 1) * left_share.reshape(1, -1, *trailing)
    wide += np.take(image, right, 1) * right_share.reshape(1, -1, *trailing)
    wide >>= 4
    total = (wide[above] * above_share.reshape(-1, 1, *trailing)) >> 16
    total += (wide[below] * below_share.reshape(-1, 1, *trailing)) >> 16
    return ((total + 2) >> 2).astype(np.uint8)


def _whole_taps(old: int, new: int, *, clamp: bool) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]]:
    """Indices and weights (in 1/2048) of both neighbours of each new pixel; with ``clamp`` edge pixels get weight 1."""
    centres = _centres(old, new).astype(np.float32)
    first = np.floor(centres)
    share = centres - first
    if clamp:
        share[(first < 0) | (first >= old - 1)] = 0
    shares = (np.rint((1 - share) * 2048).astype(np.int32), np.rint(share * 2048).astype(np.int32))
    low = 0 if clamp else -1
    places = np.clip(first.astype(np.intp), low, old - 1)
    return [(np.clip(places + offset, 0, old - 1), weights) for offset, weights in enumerate(shares)]


def _along(image: npt.NDArray[Any], axis: int, length: int, order: int) -> FloatArray:
    total: FloatArray | None = None
    shape = [1] * image.ndim
    shape[axis] = length
    for places, weights in _KERNELS[order](image.shape[axis], length):
        part = np.take(image, places, axis).astype(np.float32) * weights.reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _centres(old: int, new: int) -> npt.NDArray[np.float64]:
    """Coordinates of the centres of the new pixels in the old image."""
    places: npt.NDArray[np.float64] = (np.arange(new, dtype=np.float64) + 0.5) * (old / new) - 0.5
    return places


def _taps(first: npt.NDArray[np.float64], weights: list[npt.NDArray[np.float64]], old: int) -> Taps:
    return [
        (np.clip(first.astype(np.intp) + offset, 0, old - 1), weight.astype(np.float32))
        for offset, weight in enumerate(weights)
    ]


def _nearest(old: int, new: int) -> Taps:
    places = np.floor(_centres(old, new) + 0.5)
    return _taps(places, [np.ones(new)], old)


def _linear(old: int, new: int) -> Taps:
    centres = _centres(old, new)
    left = np.floor(centres)
    share = centres - left
    return _taps(left, [1 - share, share], old)


def _cubic(old: int, new: int) -> Taps:
    centres = _centres(old, new)
    left = np.floor(centres)
    share = centres - left
    return _taps(left - 1, [_keys(share + 1), _keys(share), _keys(1 - share), _keys(2 - share)], old)


def _keys(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic kernel at distances 0 to 2."""
    a = _CUBIC_SHARPNESS
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, far)


_KERNELS = {NEAREST: _nearest, LINEAR: _linear, CUBIC: _cubic}
