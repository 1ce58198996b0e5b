"""Pooling and SPP with Caffe's windows, expressed by explicit ONNX paddings.

ONNX's ``ceil_mode`` is not used, because runtimes disagree about its last window. The part of a window beyond the
padded image ("overhang") is written as padding at the end:

* MAX ignores padding;
* AVE divides by the area of a window inside the *padded* image, so padding counts and overhang does not. Without
  padding that is ``count_include_pad=0``, without overhang ``count_include_pad=1``, with both a Pad before the former.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.layers.pooling import AVE, LOWEST, MAX, SPP, Pooling, PoolWindow
from amct.caffe.onnx.forms.place import FLOAT, Place, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.writer import Attribute


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """How far windows extend beyond the image, as (height, width)."""

    begin: tuple[int, int]
    end: tuple[int, int]
    """Padding and overhang of the last window."""

    @property
    def pads(self) -> list[int]:
        """The ``pads`` attribute of ONNX's poolings."""
        return [*self.begin, *self.end]

    def fit(self, window: PoolWindow) -> bool:
        """Whether runtimes accept the paddings: each smaller than the kernel."""
        both = (*zip(self.begin, window.kernel, strict=True), *zip(self.end, window.kernel, strict=True))
        return all(pad < kernel for pad, kernel in both)

    def overhang(self, window: PoolWindow) -> tuple[int, int]:
        """How far the last window extends beyond the padded image."""
        return max(0, self.end[0] - window.pad[0]), max(0, self.end[1] - window.pad[1])


def _margins(window: PoolWindow, sizes: tuple[int, ...]) -> _Margins:
    output = window.output(sizes)
    left, right, top, bottom = window.overhang(sizes, output)
    return _Margins(begin=(top, left), end=(bottom, right))


def _image_pads(begin: tuple[int, int], end: tuple[int, int]) -> list[int]:
    return [0, 0, *begin, 0, 0, *end]


def _padded(place: Place[Pooling] | Place[SPP], tensor: str, part: str, pads: list[int], value: float) -> str:
    inputs = [tensor, place.value(f"{part}_amounts", pads)]
    if value:
        inputs.append(place.value(f"{part}_value", value))
    return place.step(part, "Pad", *inputs)


def _pool(
    place: Place[Pooling] | Place[SPP], window: PoolWindow, method: int, prefix: str
) -> tuple[str, str, dict[str, Attribute]]:
    """Write the nodes before the pooling; returns its input, operator and attributes."""
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    attributes: dict[str, Attribute] = {"kernel_shape": list(window.kernel), "strides": list(window.stride)}
    if method == MAX:
        if margins.fit(window):
            return place.bottom, "MaxPool", {**attributes, "pads": margins.pads}
        pads = _image_pads(margins.begin, margins.end)
        return _padded(place, place.bottom, f"{prefix}pad", pads, LOWEST), "MaxPool", attributes
    overhang = margins.overhang(window)
    if not any(overhang) and margins.fit(window):
        return place.bottom, "AveragePool", {**attributes, "pads": margins.pads, "count_include_pad": 1}
    tensor = place.bottom
    if any(window.pad):
        end = min(margins.end[0], window.pad[0]), min(margins.end[1], window.pad[1])
        tensor = _padded(place, tensor, f"{prefix}pad", _image_pads(window.pad, end), 0.0)
    return tensor, "AveragePool", {**attributes, "pads": [0, 0, *overhang], "count_include_pad": 0}


def _has_empty_window(place: Place[Pooling] | Place[SPP], window: PoolWindow) -> bool:
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    return any(over >= kernel for over, kernel in zip(margins.overhang(window), window.kernel, strict=True))


@onnx_form(Pooling)
def pooling(place: Place[Pooling]) -> None:
    """MaxPool or AveragePool, or the global ones with ``global_pooling``."""
    layer, method = place.layer, place.layer.options.pool
    if layer.options.global_pooling and len(place.tops) == 1 and method in (MAX, AVE):
        place.top("GlobalAveragePool" if method == AVE else "GlobalMaxPool", place.bottom)
    elif method == MAX and len(place.tops) > 1:
        _max_with_indices(place)
    elif method == MAX or (method == AVE and not _has_empty_window(place, layer.window)):
        tensor, operator, attributes = _pool(place, layer.window, method, "")
        place.top(operator, tensor, **attributes)
    elif method == AVE:
        _average_with_empty_windows(place)
    else:
        _stochastic(place)


def _max_with_indices(place: Place[Pooling]) -> None:
    """MaxPool with indices.

    Caffe's count from the start of each plane; ONNX's from the start of the (padded) tensor.
    """
    tensor, operator, attributes = _pool(place, place.layer.window, MAX, "")
    height, width = fixed(place.bottom_dims[0][2:])
    top, left = (0, 0)
    if tensor != place.bottom:
        margins = _margins(place.layer.window, (height, width))
        top, left = margins.begin
        height, width = height + top + margins.end[0], width + left + margins.end[1]
    places = place.writer.tensor(f"{place.layer.name}.places")
    place.node(operator, "", [tensor], [place.tops[0], places], **attributes)
    inside = place.step("inside", "Mod", places, place.value("area", np.int64(height * width)))
    if tensor != place.bottom:
        columns = place.value("columns", np.int64(width))
        row = place.step(
            "row", "Sub", place.step("padded_row", "Div", inside, columns), place.value("top", np.int64(top))
        )
        column = place.step("padded_column", "Mod", inside, columns)
        column = place.step("column", "Sub", column, place.value("left", np.int64(left)))
        own = place.value("own_columns", np.int64(fixed(place.bottom_dims[0][3:])[0]))
        inside = place.step("place", "Add", place.step("start", "Mul", row, own), column)
    place.writer.node("Cast", f"{place.layer.name}.mask", [inside], [place.tops[1]], to=FLOAT)


def _average_with_empty_windows(place: Place[Pooling]) -> None:
    """Windows that start beyond the image (only without padding) have a non-positive area, by which Caffe divides 0."""
    window, sizes = place.layer.window, fixed(place.bottom_dims[0][2:])
    output = window.output(sizes)
    kept, shares = [], []
    for axis in (0, 1):
        start = np.arange(output[axis]) * window.stride[axis]
        kept.append(int((start < sizes[axis]).sum()))
        shares.append(np.where(start < sizes[axis], 1, sizes[axis] - start))
    end = [max(0, (kept[axis] - 1) * window.stride[axis] + window.kernel[axis] - sizes[axis]) for axis in (0, 1)]
    attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": [0, 0, *end]}
    mean = place.step("mean", "AveragePool", place.bottom, **attributes, count_include_pad=0)
    missing = (output[0] - kept[0], output[1] - kept[1])
    full = _padded(place, mean, "empty", _image_pads((0, 0), missing), 0.0)
    divisor = (shares[0][:, None] * shares[1][None, :]).astype(np.float32)
    place.top("Div", full, place.value("areas", divisor))


def _means(place: Place[Pooling], tensor: str, part: str) -> str:
    """The mean of each whole window, with overhang as zeros."""
    window = place.layer.window
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    if not margins.fit(window):
        raise place.error("some windows lie outside the image: STOCHASTIC pooling in ONNX does not support that")
    attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": margins.pads}
    return place.step(part, "AveragePool", tensor, **attributes, count_include_pad=1)


def _stochastic(place: Place[Pooling]) -> None:
    """The expectation at inference: sum(x^2) / sum(x), 0 where the sum is not positive."""
    squares = place.step("squares", "Mul", place.bottom, place.bottom)
    total, weighted = _means(place, place.bottom, "total"), _means(place, squares, "weighted")
    zero = place.value("zero", 0.0)
    is_positive = place.step("positive", "Greater", total, zero)
    place.top("Where", is_positive, place.step("expectation", "Div", weighted, total), zero)


@onnx_form(SPP)
def spp(place: Place[SPP]) -> None:
    """A pooling per level, flattened and concatenated."""
    layer = place.layer
    method = AVE if layer.options.pool == AVE else MAX
    if layer.levels == 1:
        tensor, operator, attributes = _pool(place, layer.windows[0], method, "")
        place.top(operator, tensor, **attributes)
        return
    levels = []
    for number, window in enumerate(layer.windows):
        tensor, operator, attributes = _pool(place, window, method, f"level{number}_")
        pooled = place.step(f"level{number}", operator, tensor, **attributes)
        levels.append(place.step(f"level{number}_flat", "Flatten", pooled, axis=1))
    place.top("Concat", *levels, axis=1)
