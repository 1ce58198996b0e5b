"""Pooling and SPP with Caffe's windows, which ONNX's explicit paddings can express.

ONNX's ``ceil_mode`` is not used: runtimes disagree about its last window. What a window needs beyond the padded picture
("overhang") is given as padding at the end, and

* MAX never looks at padding;
* AVE divides by the part of a window inside the *padded* picture, so that padding counts and overhang does not:
  without padding that is ``count_include_pad=0``, without overhang ``count_include_pad=1``, with both a Pad in front of
  the former.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amct.caffe.engine.layers.pooling import AVE, LOWEST, MAX, SPP, Pooling, PoolWindow
from amct.caffe.onnx.forms.place import Place, fixed
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.writer import Attribute

FLOAT = 1


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """Where a window reaches over the picture, as (height, width)."""

    begin: tuple[int, int]
    end: tuple[int, int]
    """What the last window needs behind the picture, padding and overhang together."""

    @property
    def pads(self) -> list[int]:
        """As ONNX's poolings want them."""
        return [*self.begin, *self.end]

    def fit(self, window: PoolWindow) -> bool:
        """Whether runtimes accept the paddings: smaller than the kernel, no window wholly outside."""
        both = (*zip(self.begin, window.kernel, strict=True), *zip(self.end, window.kernel, strict=True))
        return all(pad < kernel for pad, kernel in both)

    def overhang(self, window: PoolWindow) -> tuple[int, int]:
        """What the last window needs behind the padded picture."""
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
    """Write all but the pooling itself; returns its input, operator and attributes."""
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
    """MaxPool or AveragePool; the global ones where the prototxt says so."""
    layer, method = place.layer, place.layer.options.pool
    if layer.options.global_pooling and len(place.tops) == 1 and method in (MAX, AVE):
        place.top("GlobalAveragePool" if method == AVE else "GlobalMaxPool", place.bottom)
    elif method == MAX and len(place.tops) > 1:
        _max_with_places(place)
    elif method == MAX or (method == AVE and not _has_empty_window(place, layer.window)):
        tensor, operator, attributes = _pool(place, layer.window, method, "")
        place.top(operator, tensor, **attributes)
    elif method == AVE:
        _average_with_empty_windows(place)
    else:
        _stochastic(place)


def _max_with_places(place: Place[Pooling]) -> None:
    """The places count from the start of each picture; ONNX counts through the whole tensor, Pad included."""
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
    """Windows that start behind the picture (only without padding) have no area: Caffe divides 0 by it."""
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
    """The mean of each whole window, whatever hangs over counted as zeros."""
    window = place.layer.window
    margins = _margins(window, fixed(place.bottom_dims[0][2:]))
    if not margins.fit(window):
        raise place.error("some of its windows lie outside the picture, which STOCHASTIC pooling in ONNX cannot have")
    attributes = {"kernel_shape": list(window.kernel), "strides": list(window.stride), "pads": margins.pads}
    return place.step(part, "AveragePool", tensor, **attributes, count_include_pad=1)


def _stochastic(place: Place[Pooling]) -> None:
    """At inference the expectation: the sum of squares over the sum, 0 where nothing is positive."""
    squares = place.step("squares", "Mul", place.bottom, place.bottom)
    total, weighted = _means(place, place.bottom, "total"), _means(place, squares, "weighted")
    zero = place.value("zero", 0.0)
    is_positive = place.step("positive", "Greater", total, zero)
    place.top("Where", is_positive, place.step("expectation", "Div", weighted, total), zero)


@onnx_form(SPP)
def spp(place: Place[SPP]) -> None:
    """A pooling for each level, flattened and joined."""
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
