"""Quantize a float ONNX model in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.onnx_model.door import OnnxDoor
from amct.onnx_model.reading import read_model
from amct.ptq import flow

if TYPE_CHECKING:
    from amct.config.ptq.quant_config import AnyConfig
    from amct.onnx_model.reading import AnyModel
    from amct.ptq.batches import BatchInputs
    from amct.ptq.quantized_model import QuantizedModel


def quantize(
    model: AnyModel, calibration_data: object, config: AnyConfig = None, *, inputs: BatchInputs | None = None
) -> QuantizedModel:
    """Quantize a float ONNX model: fold batch norms, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that can
    be quantized, all the data. A layer has the name of its node; its type in a config is that of the same layer in
    PyTorch ("Conv2d", "Linear", "AvgPool2d", "LSTM", …).

    Args:
        model: The path of a file, its bytes, or a ModelProto, which stays as it is.
        calibration_data: An array, a dict of arrays by input name, or an iterable of batches; see ``onnx_batches``.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), or a ``QuantConfig``.
        inputs: Turns a batch into the model's inputs, where its form does not tell them: ``lambda b: b["image"]``.

    Raises:
        AmctError: A subclass says what is wrong: model, config, data or files.
    """
    return flow.quantize(OnnxDoor(read_model(model)), calibration_data, config, inputs)
