"""Rules of resizing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import Size, is_static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer


def _resized(to: Writer, x: Value, factors: Sequence[float | None] | None, **settings: Any) -> Value:
    """Resize to the sizes of the result; by given factors if these are not just what the sizes say."""
    rank = x.rank - 2
    given = [None] * rank if factors is None else list(factors)
    exact = all(
        factor is None or (is_static(size) and is_static(result) and size * factor == result)
        for factor, size, result in zip(given, x.shape[2:], to.shape[2:], strict=True)
    )
    if exact:
        return to.add("Resize", x, None, None, to.sizes.shape(to.shape), **settings)
    if any(factor is None for factor in given):
        raise NotLoweredError("a resizing with a factor for some axes only")
    scales = torch.tensor([1.0, 1.0, *given], dtype=torch.float32)
    return to.add("Resize", x, None, to.constant(scales), **settings)


def _factors(x: Value, scale_factors: Sequence[float] | None, single: Sequence[float | None]) -> Sequence[float] | None:
    """The factor of each axis behind the channels, given as a list or one by one; None: the sizes decide.

    Raises:
        NotLoweredError: Some axes have no factor.
    """
    factors = scale_factors or [each for each in single if each is not None]
    if factors and len(factors) != x.rank - 2:
        raise NotLoweredError("a resizing with a factor for some axes only")
    return factors or None


@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
      "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")  # fmt: skip
def nearest(
    to: Writer,
    x: Value,
    operator: str,
    output_size: Sequence[Size] | None = None,
    scale_factors: Sequence[float] | None = None,
    scales: float | None = None,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """The nearest value: rounded down from the upper left corner, or from the middle of a position."""
    del output_size
    factors = _factors(x, scale_factors, (scales, scales_d, scales_h, scales_w))
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if "exact" in operator:
        modes = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return _resized(to, x, factors, mode="nearest", **modes)


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
def interpolated(
    to: Writer,
    x: Value,
    operator: str,
    align_corners: bool,
    output_size: Sequence[Size] | None = None,
    scale_factors: Sequence[float] | None = None,
    scales: float | None = None,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """Interpolation, linear or by cubic polynomials with torch's coefficient."""
    del output_size
    factors = _factors(x, scale_factors, (scales, scales_d, scales_h, scales_w))
    mode = "align_corners" if align_corners else "half_pixel"
    if align_corners:
        factors = None  # the corners are given by the sizes
    settings: dict[str, object] = {"coordinate_transformation_mode": mode}
    if "cubic" in operator:
        return _resized(to, x, factors, mode="cubic", cubic_coeff_a=-0.75, **settings)
    return _resized(to, x, factors, mode="linear", **settings)
