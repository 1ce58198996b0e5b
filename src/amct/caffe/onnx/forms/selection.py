"""BatchReindex, Filter, Parameter and DummyData."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layers.combine import BatchReindex, Filter
from amct.caffe.engine.layers.input import DummyData, Parameter
from amct.caffe.onnx.forms.place import BOOL, INT64
from amct.caffe.onnx.forms.registry import onnx_form

if TYPE_CHECKING:
    from amct.caffe.onnx.forms.place import Place


@onnx_form(BatchReindex)
def batch_reindex(place: Place[BatchReindex]) -> None:
    """Gather of samples."""
    place.top("Gather", place.bottom, place.step("index", "Cast", place.bottoms[1], to=INT64), axis=0)


@onnx_form(Filter)
def filter_samples(place: Place[Filter]) -> None:
    """Compress by the last bottom."""
    selector = place.reshaped(place.bottoms[-1], (None,), "selector")
    kept = place.step("kept", "Cast", selector, to=BOOL)
    for index, bottom in enumerate(place.bottoms[:-1]):
        place.top("Compress", bottom, kept, index=index, axis=0)


@onnx_form(Parameter)
def parameter(place: Place[Parameter]) -> None:
    """A constant."""
    place.alias(place.parameter(0, "value"))


@onnx_form(DummyData)
def dummy_data(place: Place[DummyData]) -> None:
    """A constant; random data is an error."""
    for index, (blob, filler) in enumerate(zip(place.layer.top_blobs, place.layer.fillers, strict=True)):
        if filler.type != "constant":
            raise place.error(
                f"its data is random ({filler.type}), which an ONNX file cannot express; make it an Input"
            )
        place.alias(place.value(f"value{index}", blob.tensor.detach().numpy()), index)
