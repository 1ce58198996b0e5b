"""Layers that change the shape or crop: Flatten, Reshape, Crop."""

from __future__ import annotations

from amct.caffe.engine.layers.shaping import Crop, Flatten, Reshape
from amct.caffe.onnx.forms.place import FollowsBatchError, Place, product
from amct.caffe.onnx.forms.registry import onnx_form

MATRIX = 2


@onnx_form(Flatten)
def flatten(place: Place[Flatten]) -> None:
    """Flatten if the result is a matrix, else Reshape."""
    own, wanted = place.bottom_dims[0], place.top_dims[0]
    if len(wanted) == MATRIX and wanted[1] is not None and wanted[1] == product(own[1:]):
        place.top("Flatten", place.bottom, axis=1)
    else:
        place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


@onnx_form(Reshape)
def reshape(place: Place[Reshape]) -> None:
    """Reshape to the known sizes."""
    place.top("Reshape", place.bottom, place.target(place.top_dims[0], "shape"))


@onnx_form(Crop)
def crop(place: Place[Crop]) -> None:
    """Slice; the second bottom only gives the size."""
    starts, ends, axes = [], [], []
    for axis, (own, wanted, start) in enumerate(
        zip(place.bottom_dims[0], place.top_dims[0], place.layer.starts, strict=True)
    ):
        if own is None or wanted is None:
            if start or own != wanted:
                raise FollowsBatchError(f'layer "{place.layer.name}" crops along it')
            continue
        if (start, wanted) != (0, own):
            starts.append(start)
            ends.append(start + wanted)
            axes.append(axis)
    if not axes:
        place.alias(place.bottom)
        return
    place.top(
        "Slice", place.bottom, place.value("starts", starts), place.value("ends", ends), place.value("axes", axes)
    )
