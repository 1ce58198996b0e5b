"""The front door of the model on a command line that reads all its data into memory, and the data as it wants it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from amct.cli.model_layers import ONNX_ENDING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from amct.cli.batches import DataBatches
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
        names: Of the inputs, whose arrays the data has; empty for one input of numbers, which takes all kinds of data.
        converts: Makes what the model takes of an array.
        batch_size: The samples of a batch.
    """

    quantize: Callable[..., QuantizedModel]
    quantize_to: Callable[..., QuantizedModel]
    diagnose: Callable[..., Diagnosis]
    data: DataOptions
    names: tuple[str, ...]
    converts: Callable[[Any], Any]
    batch_size: int

    def converted(self, batch: Any) -> Any:  # noqa: ANN401  an array, or several by name
        """A batch as the model takes it."""
        if isinstance(batch, dict):
            return {name: self.converts(array) for name, array in batch.items()}
        return self.converts(batch)


def front_door(model: str, weights: Path | None, data: DataOptions, *, part: str | None = None) -> FrontDoor:
    """The front door of a model.

    Args:
        model: As on the command line.
        weights: The caffemodel.
        data: The data.
        part: The part of a PyTorch model.

    Raises:
        AmctError: The model cannot be read.
    """
    if weights is not None:
        from amct.caffe import door
        from amct.caffe.prototxt import input_shapes

        shapes = input_shapes(model)
        names = tuple(shapes) if len(shapes) > 1 else ()
        fitted = data if names else data.fitting(next(iter(shapes.values()), ()), "bgr")
        return _opened(door, (model, weights), names, fitted, data.batch_size)
    if model.endswith(ONNX_ENDING):
        from amct.cli.batches import is_plain
        from amct.export.onnx.messages import fixed_batch_size
        from amct.onnx_model import door as onnx_door
        from amct.onnx_model.reading import input_shape, read_model

        proto = read_model(model).model
        names = () if is_plain(proto) else tuple(value.name for value in proto.graph.input)
        fitted = data if names else data.fitting(input_shape(proto, proto.graph.input[0].name) or ())
        size = fixed_batch_size(proto) or data.batch_size
        return _opened(onnx_door, (model,), names, fitted, size)
    import torch

    from amct.cli.model_layers import load_reference
    from amct.pytorch import door as torch_door

    own = {} if part is None else {"part": part}
    network = load_reference(model)
    names = forward_inputs(network)
    fitted = data if names else data.fitting(None)
    return _opened(torch_door, (network,), names, fitted, data.batch_size, torch.from_numpy, **own)


def torch_data(model: Any, data: DataOptions) -> DataBatches:  # noqa: ANN401  a torch module
    """The batches for a torch model, with one input or several."""
    import torch

    from amct.cli.batches import DataBatches, named_batches

    names = forward_inputs(model)
    if names:
        return named_batches(names, data).converted_by(torch.from_numpy)
    return DataBatches.converted(data.fitting(None).stored(), torch.from_numpy)


def forward_inputs(model: Any) -> tuple[str, ...]:  # noqa: ANN401  a torch module
    """The arguments that a forward needs, if they are several."""
    found = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    return tuple(found) if len(found) > 1 else ()


def _opened(
    door: Any,  # noqa: ANN401  a module
    model: tuple[Any, ...],
    names: tuple[str, ...],
    data: DataOptions,
    batch_size: int,
    converts: Callable[[Any], Any] = lambda array: array,
    **part: str,
) -> FrontDoor:
    return FrontDoor(
        quantize=partial(door.quantize, *model, **part),
        quantize_to=partial(door.quantize_to, *model, **part),
        diagnose=partial(door.diagnose, *model),
        data=data,
        names=names,
        converts=converts,
        batch_size=batch_size,
    )
