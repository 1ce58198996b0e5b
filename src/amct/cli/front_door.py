"""The front door of the model on a command line that reads all its data into memory, and the data as it wants it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from amct.cli.model_layers import ONNX_ENDING
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from amct.cli.options import DataOptions
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.search.doctor import Diagnosis


@dataclass(frozen=True, kw_only=True)
class FrontDoor:
    """The functions of a front door for one model, and data for it.

    Attributes:
        quantize: Of calibration data and a config.
        quantize_to: Of calibration data and labelled samples.
        diagnose: Of calibration data, other data and a config.
        data: With the size and the colours that the model takes.
        converted: A batch of an array.
        batch_size: The samples of a batch.
    """

    quantize: Callable[..., QuantizedModel]
    quantize_to: Callable[..., QuantizedModel]
    diagnose: Callable[..., Diagnosis]
    data: DataOptions
    converted: Callable[[Any], Any]
    batch_size: int


def front_door(model: str, weights: Path | None, data: DataOptions, *, part: str | None = None) -> FrontDoor:
    """The front door of a model.

    Args:
        model: As on the command line.
        weights: The caffemodel.
        data: The data.
        part: The part of a PyTorch model.

    Raises:
        ArgumentError: The model has several inputs.
    """
    if weights is not None:
        from amct.caffe import door
        from amct.caffe.prototxt import input_shapes

        shapes = input_shapes(model)
        fitted = data.fitting(next(iter(shapes.values()), ()), "bgr")
        return _opened(door, (model, weights), len(shapes), fitted, data.batch_size)
    if model.endswith(ONNX_ENDING):
        from amct.export.onnx.messages import fixed_batch_size
        from amct.onnx_model import door as onnx_door
        from amct.onnx_model.reading import input_shape, read_model

        proto = read_model(model).model
        fitted = data.fitting(input_shape(proto, proto.graph.input[0].name) or ())
        size = fixed_batch_size(proto) or data.batch_size
        return _opened(onnx_door, (model,), len(proto.graph.input), fitted, size)
    import torch

    from amct.cli.model_layers import load_reference
    from amct.pytorch import door as torch_door

    names = {} if part is None else {"part": part}
    network, fitted = load_reference(model), data.fitting(None)
    return _opened(torch_door, (network,), 1, fitted, data.batch_size, torch.from_numpy, **names)


def _opened(
    door: Any,  # noqa: ANN401  a module
    model: tuple[Any, ...],
    inputs: int,
    data: DataOptions,
    batch_size: int,
    converted: Callable[[Any], Any] = lambda array: array,
    **part: str,
) -> FrontDoor:
    if inputs > 1:
        raise ArgumentError(
            "with this the command line takes models with one input; use quantize_to or diagnose in Python"
        )
    return FrontDoor(
        quantize=partial(door.quantize, *model, **part),
        quantize_to=partial(door.quantize_to, *model, **part),
        diagnose=partial(door.diagnose, *model),
        data=data,
        converted=converted,
        batch_size=batch_size,
    )
