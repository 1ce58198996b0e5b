"""GroupNorm and LayerNormalization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layers.group_normalization import GroupNorm, LayerNormalization
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place


def _normalized(place: Place[GroupNorm] | Place[LayerNormalization], tensor: str, axes: list[int], eps: float) -> str:
    """(x - mean) / sqrt(variance + eps) over the axes."""
    centred = place.step("centred", "Sub", tensor, place.reduced("mean", "ReduceMean", tensor, axes))
    squares = place.step("squares", "Mul", centred, centred)
    variance = place.reduced("variance", "ReduceMean", squares, axes)
    shifted = place.step("shifted", "Add", variance, place.value("eps", eps))
    return place.step("normalized", "Div", centred, place.step("deviation", "Sqrt", shifted))


@onnx_form(GroupNorm)
def group_norm(place: Place[GroupNorm]) -> None:
    """Normalize each group as a row."""
    options = place.layer.parameter.group_norm_param
    shape = place.value("groups", [0, int(options.group_num), -1])  # 0 keeps the batch size
    rows = place.step("rows", "Reshape", place.bottom, shape)
    place.top_reshaped(_normalized(place, rows, [2], float(options.eps)))


@onnx_form(LayerNormalization)
def layer_normalization(place: Place[LayerNormalization]) -> None:
    """Normalize the last axes, multiply by the scale, add the bias."""
    layer = place.layer
    axes = list(range(layer.axis, len(place.bottom_dims[0])))
    factors = place.bottoms[1:] or [place.parameter(index, f"factor{index}") for index in range(len(layer.blobs))]
    normalized = _normalized(place, place.bottom, axes, float(layer.options.epsilon))
    if len(factors) == 1:
        place.top("Mul", normalized, factors[0])
    else:
        place.top("Add", place.step("scaled", "Mul", normalized, factors[0]), factors[1])
