"""Layers that resize an image: Upsample, Unpooling, Interp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from amct.caffe.engine.layer import Layer, Place, ProtoMessage, Shape, Tensors, register
from amct.caffe.engine.onnx_place import INT64, fixed
from amct.caffe.engine.windows import size_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


MASK = 1
DEFAULT_STRIDE = 2
AVERAGE = 1


class _MaskedUnpooling(Layer):
    """Writes values to the indices of a mask: the second top of MAX Pooling, row * width + column within each plane."""

    bottom_count = (1, 2)
    allows_in_place = False
    size: tuple[int, int]
    no_gradient = (MASK,)

    def check_mask(self, bottoms: list[Shape]) -> None:
        """The mask must have the shape of the first bottom."""
        self.require_image(bottoms[0])
        if len(bottoms) > MASK and bottoms[MASK] != bottoms[0]:
            raise self.error(f"the mask must have the shape of the first bottom, got {bottoms[MASK]} and {bottoms[0]}")

    def scatter(self, bottom: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A plane of zeros with the values at their indices."""
        lead, (height, width) = bottom.shape[:2], self.size
        places = mask.detach().reshape(*lead, -1).to(torch.int64)
        if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < height * width):
            raise self.error(f"the mask holds an index outside the {height} x {width} image")
        plane = bottom.new_zeros(*lead, height * width)
        return plane.scatter(2, places, bottom.reshape(*lead, -1)).reshape(*lead, height, width)

    def write_scatter(self, place: Place, places: str) -> str:
        """``scatter`` in ONNX."""
        batch, channels, *_ = fixed(place.bottom_dims[0])
        plane = place.value("plane", np.zeros((batch, channels, self.size[0] * self.size[1]), np.float32))
        shape = place.value("flat_shape", [batch, channels, -1])
        index = place.step("flat_index", "Reshape", places, shape)
        values = place.step("flat", "Reshape", place.bottom, shape)
        filled = place.main("ScatterElements", plane, index, values, axis=2)
        return place.reshaped(filled, place.top_dims[0], "picture")


def _given(options: ProtoMessage, name: str) -> float | None:
    """The value of an option if it is set; the message of a custom.proto may lack the field."""
    if name not in options.DESCRIPTOR.fields_by_name or not options.HasField(name):
        return None
    value: float = getattr(options, name)
    return value


@register("Upsample")
class Upsample(_MaskedUnpooling):
    """Repeats each value ``stride`` times (YOLO v3), or with two bottoms writes it to the index in the mask (SegNet).

    ``scale`` alone, or ``scale_h`` and ``scale_w``, are factors of size (YOLO's Caffe, SegNet); together with
    ``stride`` ``scale`` multiplies the values (ATC). ``pad_out_h`` and ``pad_out_w`` leave out the last row and column,
    where the image before the pooling had an odd size.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the factor of size and the factor of the values."""
        options = self.parameter.upsample_param
        scale, stride = _given(options, "scale"), _given(options, "stride")
        down, across = _given(options, "stride_h"), _given(options, "stride_w")
        self.times = 1.0
        high, wide = _given(options, "scale_h"), _given(options, "scale_w")
        if (high is None) != (wide is None):
            raise self.error("scale_h and scale_w must be given together")
        if high is not None and wide is not None:
            self.factor = (high, wide)
        elif scale is not None and stride is down is across is None:
            self.factor = (scale, scale)
        else:
            single = DEFAULT_STRIDE if stride is None else stride
            self.factor = (single if down is None else down, single if across is None else across)
            self.times = 1.0 if scale is None else scale
        self.wanted = (_given(options, "upsample_h"), _given(options, "upsample_w"))
        if any(factor < 1 or factor != int(factor) for factor in self.factor):
            raise self.error(f"the factor of size must be a whole number of at least 1, got {self.factor}")
        self.missing = (int(_given(options, "pad_out_h") or 0), int(_given(options, "pad_out_w") or 0))
        if any(cut and factor != DEFAULT_STRIDE for cut, factor in zip(self.missing, self.factor, strict=True)):
            raise self.error(f"pad_out_h and pad_out_w need a factor of size of 2, got {self.factor}")
        if any(self.missing) and len(bottoms) == MASK:
            raise self.error("pad_out_h and pad_out_w need a mask (second bottom)")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The size times the factor; with a mask upsample_h and upsample_w override it."""
        self.check_mask(bottoms)
        height, width = (int(size * factor) for size, factor in zip(bottoms[0][2:], self.factor, strict=True))
        if len(bottoms) > MASK:
            height, width = (
                int(wanted or size - cut)
                for wanted, size, cut in zip(self.wanted, (height, width), self.missing, strict=True)
            )
        self.size = (height, width)
        return [(*bottoms[0][:2], height, width)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Repeat, or scatter by the mask; then multiply by ``scale``."""
        if len(bottoms) > MASK:
            result = self.scatter(*bottoms)
        else:
            vertical, horizontal = map(int, self.factor)
            result = bottoms[0].repeat_interleave(vertical, 2).repeat_interleave(horizontal, 3)
        return [result if self.times == 1 else result * self.times]

    def to_onnx(self, place: Place) -> None:
        """Resize (nearest), or ScatterElements with a mask."""
        if len(place.bottoms) > 1:
            places = place.step("index", "Cast", place.bottoms[1], to=INT64)
            result = self.write_scatter(place, places)
        else:
            scales = place.value("scales", np.array([1, 1, *self.factor], np.float32))
            rule: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            if self.times == 1:
                place.top("Resize", place.bottom, "", scales, mode="nearest", **rule)
                return
            result = place.main("Resize", place.bottom, "", scales, mode="nearest", **rule)
        if self.times == 1:
            place.alias(result)
        else:
            place.node("Mul", "times", [result, place.value("factor", float(self.times))], place.tops)


@register("Unpooling")
class Unpooling(_MaskedUnpooling):
    """The inverse of Pooling, as in DeconvNet.

    MAX writes each value to the index in the mask (second bottom), or without a mask to the first pixel of its window.
    AVE divides each value evenly over its window; overlapping windows add up.
    """

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the window."""
        self.require_image(bottoms[0])
        options = self.options = self.parameter.unpooling_param
        self.kernel, self.stride, self.pad = (size_pair(options, name) for name in ("kernel", "stride", "pad"))
        if min(self.kernel) <= 0 or min(self.stride) <= 0:
            raise self.error(f"kernel and stride must be > 0, got {self.kernel} and {self.stride}")
        if any(pad >= kernel for pad, kernel in zip(self.pad, self.kernel, strict=True)):
            raise self.error(f"pad must be smaller than the kernel, got {self.pad} and {self.kernel}")
        if options.unpool == AVERAGE and len(bottoms) > MASK:
            raise self.error("only MAX unpooling takes a mask (second bottom)")

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The size given, else (size - 1) * stride + kernel - 2 * pad."""
        self.check_mask(bottoms)
        options = self.options
        given = (options.unpool_h or options.unpool_size, options.unpool_w or options.unpool_size)
        height, width = (
            wanted or (size - 1) * stride + kernel - 2 * pad
            for wanted, size, stride, kernel, pad in zip(
                given, bottoms[0][2:], self.stride, self.kernel, self.pad, strict=True
            )
        )
        self.size = (height, width)
        covered = (
            (size - 1) * stride + kernel
            for size, stride, kernel in zip(bottoms[0][2:], self.stride, self.kernel, strict=True)
        )
        self.context.check_size((*bottoms[0][:2], *covered), f'the area of all windows of layer "{self.name}"')
        self.context.check_size((bottoms[0][1], 1, *self.kernel), f'the kernel of layer "{self.name}"')
        return [(*bottoms[0][:2], height, width)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Unpool by MAX or AVE."""
        bottom = bottoms[0]
        if self.options.unpool == AVERAGE:
            return [self._spread(bottom)]
        if len(bottoms) > MASK:
            return [self.scatter(*bottoms)]
        starts = torch.from_numpy(self._starts(bottom.shape[2:]))
        return [self.scatter(bottom, starts.to(bottom.device).expand(bottom.shape))]

    def _starts(self, windows: Sequence[int]) -> NDArray[np.int64]:
        """The index of the first pixel of each window."""
        rows, columns = (
            np.clip(np.arange(count, dtype=np.int64) * stride - pad, 0, limit - 1)
            for count, stride, pad, limit in zip(windows, self.stride, self.pad, self.size, strict=True)
        )
        return rows[:, None] * self.size[1] + columns

    def _spread(self, bottom: torch.Tensor) -> torch.Tensor:
        """A transposed convolution of value / area with ones, cropped to the image."""
        channels = bottom.shape[1]
        share = self._areas(bottom.new_ones(1, 1, *self.size), bottom.shape[2:])
        kernel = bottom.new_ones(channels, 1, *self.kernel)
        spread = functional.conv_transpose2d(bottom / share, kernel, None, self.stride, 0, 0, channels)
        below, right = (pad + size for pad, size in zip(self.pad, self.size, strict=True))
        missing = (max(right - spread.shape[3], 0), max(below - spread.shape[2], 0))
        spread = functional.pad(spread, (0, missing[0], 0, missing[1]))
        return spread[:, :, self.pad[0] : below, self.pad[1] : right].contiguous()

    def _areas(self, picture: torch.Tensor, windows: Sequence[int]) -> torch.Tensor:
        """The number of pixels of the image in each window, at least 1."""
        ends = [
            (count - 1) * stride + kernel
            for count, stride, kernel in zip(windows, self.stride, self.kernel, strict=True)
        ]
        behind = [end - pad - size for end, pad, size in zip(ends, self.pad, self.size, strict=True)]
        padded = functional.pad(picture, (self.pad[1], behind[1], self.pad[0], behind[0]))
        ones = picture.new_ones(1, 1, *self.kernel)
        return functional.conv2d(padded, ones, None, self.stride).clamp(min=1)

    def to_onnx(self, place: Place) -> None:
        """ScatterElements by the mask, or at the first pixel of each window."""
        if self.options.unpool == AVERAGE:
            raise place.error("there is no ONNX form of AVE unpooling; end the file before it (outputs=[...])")
        if len(place.bottoms) > 1:
            place.alias(self.write_scatter(place, place.step("index", "Cast", place.bottoms[1], to=INT64)))
            return
        dims = fixed(place.bottom_dims[0])
        index = place.value("index", np.broadcast_to(self._starts(dims[2:]), dims).astype(np.int64))
        place.alias(self.write_scatter(place, index))


@register("Interp")
class Interp(Layer):
    """Bilinear interpolation with aligned corners, as in DeepLab v2 and PSPNet."""

    allows_in_place = False

    def setup(self, bottoms: list[Shape]) -> None:
        """Check the options."""
        self.require_image(bottoms[0])
        options = self.options = self.parameter.interp_param
        if options.pad_beg > 0 or options.pad_end > 0:
            raise self.error(
                f"only supports cropping (pad_beg, pad_end <= 0), got {options.pad_beg}, {options.pad_end}"
            )
        if options.shrink_factor < 1 or options.zoom_factor < 1:
            raise self.error(
                f"shrink_factor and zoom_factor must be positive, got {options.shrink_factor}, {options.zoom_factor}"
            )
        factors = options.HasField("shrink_factor") or options.HasField("zoom_factor")
        if not factors and not (options.height > 0 and options.width > 0):
            raise self.error("needs shrink_factor, zoom_factor, or height and width")
        self.by_factor = factors

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """Shrink by ``shrink_factor``, then zoom by ``zoom_factor``, both counted in intervals (size - 1)."""
        options = self.options
        inner = [size + options.pad_beg + options.pad_end for size in bottoms[0][2:]]
        if min(inner) <= 0:
            raise self.error(f"no pixels are left of {bottoms[0]} after cropping")
        if self.by_factor:
            shrunk = [(size - 1) // options.shrink_factor + 1 for size in inner]
            self.size = tuple(size + (size - 1) * (options.zoom_factor - 1) for size in shrunk)
        else:
            self.size = (options.height, options.width)
        return [(*bottoms[0][:2], *self.size)]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Crop, then interpolate."""
        bottom, first, last = bottoms[0], -self.options.pad_beg, self.options.pad_end
        rows, columns = (slice(first, size + last) for size in bottom.shape[2:])
        inner = bottom[:, :, rows, columns]
        if tuple(inner.shape[2:]) == self.size:
            return [inner.clone()]
        return [functional.interpolate(inner, self.size, mode="bilinear", align_corners=True)]

    def to_onnx(self, place: Place) -> None:
        """Slice (cropping), then Resize with aligned corners."""
        options, dims = self.options, place.bottom_dims[0]
        inner, sizes = place.bottom, fixed(dims[2:])
        if options.pad_beg or options.pad_end:
            start, ends = -options.pad_beg, [size + options.pad_end for size in sizes]
            sizes = tuple(end - start for end in ends)
            edges = {"starts": [start, start], "ends": ends, "axes": [2, 3]}
            inner = place.step("cropped", "Slice", inner, *(place.value(name, edge) for name, edge in edges.items()))
        wanted = fixed(place.top_dims[0][2:])
        if sizes == wanted:
            place.alias(inner)
            return
        # Factors instead of sizes leave the batch open without ``axes``, which onnxruntime's optimizer does not move.
        factors = [_factor(size, target) for size, target in zip(sizes, wanted, strict=True)]
        scales = place.value("scales", np.array([1, 1, *factors], np.float32))
        place.top("Resize", inner, "", scales, mode="linear", coordinate_transformation_mode="align_corners")


def _factor(size: int, wanted: int) -> float:
    """The smallest float32 factor with which ``floor(size * factor)`` is the wanted size."""
    factor = np.float32(wanted) / np.float32(size)
    while np.floor(np.float32(size) * factor) < wanted or int(np.floor(size * float(factor))) < wanted:
        factor = np.nextafter(factor, np.float32(np.inf))
    return float(factor)
