"""``caffe.coord_map``: where a value of one top of a ``NetSpec`` lies in another one, and the Crop that aligns them.

A map is ``(axis, scale, offset)``: the place ``x`` of a layer's input is at ``scale * x + offset`` of its output, along
the axes from ``axis`` on; an axis of None stands for any. Fully convolutional nets use ``crop``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from amct.caffe.pycaffe.net_spec import layers
from amct.errors import AmctError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.pycaffe.net_spec import Function, Top

    Map: TypeAlias = tuple[int | None, Any, Any]

PASS_THROUGH_LAYERS = (
    "AbsVal", "BatchNorm", "Bias", "BNLL", "Dropout", "Eltwise", "ELU", "Log", "LRN", "Exp", "MVN", "Power", "ReLU",
    "PReLU", "Scale", "Sigmoid", "Split", "TanH", "Threshold",
)  # fmt: skip
"""Layers whose output lies where their input does."""
IDENTITY: Map = (None, 1, 0)


class UndefinedMapException(AmctError, RuntimeError):  # noqa: N818  pycaffe's name
    """A layer of this type has no map between coordinates."""


class AxisMismatchException(AmctError, RuntimeError):  # noqa: N818  pycaffe's name
    """Two maps are for different axes."""


def conv_params(fn: Function) -> tuple[int, Any, Any, Any]:
    """The axis, stride, size of the kernel with its dilation, and padding of a layer with a window."""
    fields = fn.params.get("convolution_param", fn.params)
    if any(f"{name}_{side}" in fields for name in ("kernel", "stride", "pad") for side in "hw"):
        raise UndefinedMapException(f"{fn.type_name}: kernel_size, stride and pad are needed, not those of each side")
    size = np.array(fields["kernel_size"], ndmin=1)
    defaults = {"dilation": 1, "stride": 1, "pad": 0}
    dilation, stride, pad = (np.array(fields.get(name, value), ndmin=1) for name, value in defaults.items())
    return fields.get("axis", 1), stride, (size - 1) * dilation + 1, pad


def crop_params(fn: Function) -> tuple[int, Any]:
    """The axis and the offset of a Crop."""
    fields = fn.params.get("crop_param", fn.params)
    return fields.get("axis", 2), np.array(fields.get("offset", 0), ndmin=1)


def coord_map(fn: Function) -> Map:
    """The map from a layer's (first) input to its output.

    Raises:
        UndefinedMapException: Its type has none.
    """
    if fn.type_name in ("Convolution", "Pooling", "Im2col"):
        axis, stride, size, pad = conv_params(fn)
        return axis, 1 / stride, (pad - (size - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, size, pad = conv_params(fn)
        return axis, stride, (size - 1) / 2 - pad
    if fn.type_name in PASS_THROUGH_LAYERS:
        return IDENTITY
    if fn.type_name == "Crop":
        axis, offset = crop_params(fn)
        return axis - 1, 1, -offset  # the axis before the first one that has coordinates, as of a convolution
    raise UndefinedMapException(f"{fn.type_name}: no map between the coordinates of its input and its output is known")


def compose(base_map: Map, next_map: Map) -> Map:
    """The map that does ``next_map`` first.

    Raises:
        AxisMismatchException: They are for different axes.
    """
    (axis, scale, offset), (other, next_scale, next_offset) = base_map, next_map
    if None not in (axis, other) and axis != other:
        raise AxisMismatchException(f"one map is for the axes from {axis} on, the other for those from {other} on")
    return (other if axis is None else axis), scale * next_scale, scale * next_offset + offset


def inverse(map_: Map) -> Map:
    """The map back."""
    axis, scale, offset = map_
    return axis, 1 / scale, -offset / scale


def coord_map_from_to(top_from: Top, top_to: Top) -> Map:
    """The map from one top to another one, by way of a top on which both depend.

    Raises:
        RuntimeError: There is none.
    """
    sources = dict(_maps_from_sources(top_from))
    for source, to_map in _maps_from_sources(top_to):
        if source in sources:
            return compose(to_map, inverse(sources[source]))
    raise UndefinedMapException("the two tops do not depend on a common one by layers that keep coordinates")


def _maps_from_sources(top: Top) -> Iterator[tuple[Top, Map]]:
    """Every top that this one depends on, with the map from there, the nearest ones first."""
    found, waiting = {top: IDENTITY}, [top]
    while waiting:
        current = waiting.pop(0)
        yield current, found[current]
        function = current.fn
        try:
            step = coord_map(function)
        except UndefinedMapException:
            continue
        for source in function.inputs[:1] if function.type_name == "Crop" else function.inputs:
            if source not in found:
                found[source] = compose(found[current], step)
                waiting.append(source)


def crop(top_from: Top, top_to: Top) -> Any:  # noqa: ANN401  what layers.Crop returns
    """A Crop of ``top_from`` that aligns it with ``top_to``.

    Raises:
        UndefinedMapException: They differ in scale, or ``top_from`` begins inside of ``top_to``, or between its values.
    """
    axis, scale, offset = coord_map_from_to(top_from, top_to)
    scale, offset = np.atleast_1d(scale), np.atleast_1d(offset)
    if (scale != 1).any():
        raise UndefinedMapException(f"a Crop cannot change the scale, which is {scale.tolist()}")
    if (offset > 0).any():
        raise UndefinedMapException(f"a Crop cannot add an edge: the offset is {(-offset).tolist()}, below 0")
    if (np.round(offset) != offset).any():
        raise UndefinedMapException(f"the offset {(-offset).tolist()} is no whole number")
    first = 2 if axis is None else axis + 1
    return layers.Crop(top_from, top_to, crop_param={"axis": first, "offset": [int(each) for each in -offset]})
