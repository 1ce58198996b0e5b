"""The front door of the model on a command line, and the data as the model takes it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct.cli.batches import DataBatches, is_plain, named_batches, stored_batches, with_fixed_size
from amct.cli.model_layers import ONNX_ENDING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
        names: Of the inputs, whose arrays the data has; empty for one input of numbers, which takes all kinds of data.
        converts: Makes what the model takes of an array.
        fixed_size: The batch size of an ONNX model that takes no other.
        shapes: Of the inputs of a Caffe model, as the prototxt declares them.
    """

    quantize: Callable[..., QuantizedModel]
    quantize_to: Callable[..., QuantizedModel]
    diagnose: Callable[..., Diagnosis]
    data: DataOptions
    names: tuple[str, ...]
    converts: Callable[[Any], Any]
    fixed_size: int | None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """The samples of a batch."""
        return self.data.batch_size

    def batches(self) -> DataBatches:
        """All the data in batches as the model takes them, which are read when they are asked for.

        Raises:
            AmctError: The data cannot be read, or does not fit the model.
        """
        read = partial(named_batches, self.names) if self.names else stored_batches
        return DataBatches.converted(read(self.data, self.fixed_size), self.converted)

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
        import amct.caffe
        from amct.caffe.prototxt import input_shapes

        shapes = input_shapes(model)
        names = tuple(shapes) if len(shapes) > 1 else ()
        fitted = data if names else data.fitting(next(iter(shapes.values()), ()), "bgr")
        return _opened(amct.caffe, (model, weights), names, fitted, shapes=shapes)
    if model.endswith(ONNX_ENDING):
        import amct.onnx_model
        from amct.export.onnx.messages import fixed_batch_size
        from amct.onnx_model.reading import input_shape, read_model

        proto = read_model(model).model
        names = () if is_plain(proto) else tuple(value.name for value in proto.graph.input)
        size = fixed_batch_size(proto)
        data = with_fixed_size(data, size)
        fitted = data if names else data.fitting(input_shape(proto, proto.graph.input[0].name) or ())
        return _opened(amct.onnx_model, (model,), names, fitted, fixed_size=size)
    import torch

    import amct.pytorch
    from amct.cli.model_layers import load_reference

    own = {} if part is None else {"part": part}
    network = load_reference(model)
    names = forward_inputs(network)
    fitted = data if names else data.fitting(None)
    return _opened(amct.pytorch, (network,), names, fitted, torch.from_numpy, options=own)


def forward_inputs(model: Any) -> tuple[str, ...]:  # noqa: ANN401  a torch module
    """The arguments that a forward needs, if they are several."""
    found = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    return tuple(found) if len(found) > 1 else ()


def _opened(  # noqa: PLR0913  the last ones are those of one kind of model each
    door: Any,  # noqa: ANN401  a module
    model: tuple[Any, ...],
    names: tuple[str, ...],
    data: DataOptions,
    converts: Callable[[Any], Any] = lambda array: array,
    *,
    fixed_size: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    options: Mapping[str, str] = MappingProxyType({}),
) -> FrontDoor:
    return FrontDoor(
        quantize=partial(door.quantize, *model, **options),
        quantize_to=partial(door.quantize_to, *model, **options),
        diagnose=partial(door.diagnose, *model),
        data=data,
        names=names,
        converts=converts,
        fixed_size=fixed_size,
        shapes=shapes,
    )
