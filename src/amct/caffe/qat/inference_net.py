"""The form of a trained model that is deployed: Input layers instead of data layers, no losses, no accuracies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.layer import find_layer_class
from amct.caffe.engine.layers.losses import LossLayer
from amct.caffe.engine.messages import new_message
from amct.caffe.model import CaffeModel, blob_shapes

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

_MEASURES = ("Accuracy", "Silence", "HDF5Output")


def inference_model(model: CaffeModel) -> CaffeModel:
    """A copy of a model without losses, accuracies and what only they read, with Input layers of one sample.

    Raises:
        AmctError: The shapes of the data are unknown: its source cannot be read.
    """
    result = model.copy()
    shapes = blob_shapes(model.net) if any(_is_source(layer) for layer in model.layers) else {}
    kept = [layer for layer in model.layers if not _is_measure(layer)]
    read = {blob for layer in kept for blob in layer.bottom}
    layers: list[ProtoMessage] = []
    for layer in kept:
        if _is_source(layer):
            layers += [_input(blob, shapes[blob]) for blob in layer.top if blob in read]
        else:
            layers.append(layer)
    result.set_layers(layers)
    return result


def _is_source(layer: ProtoMessage) -> bool:
    """Whether a layer makes data from nowhere."""
    return not layer.bottom and bool(layer.top) and layer.type not in ("Input", "Parameter")


def _is_measure(layer: ProtoMessage) -> bool:
    """Whether a layer computes a loss or an accuracy."""
    found = find_layer_class(layer.type)
    is_loss = found is not None and issubclass(found, LossLayer)
    return is_loss or layer.type in _MEASURES or any(layer.loss_weight)


def _input(blob: str, shape: tuple[int, ...]) -> ProtoMessage:
    made = new_message("LayerParameter", name=blob, type="Input", top=[blob])
    made.input_param.shape.add().dim.extend([1, *shape[1:]])
    return made
