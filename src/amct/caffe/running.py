"""Runs nets on user data: arrays, dicts of arrays, or tuples of arrays followed by labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.caffe.engine.net import Net
from amct.errors import ArgumentError
from amct.pipeline.batches import Batches

if TYPE_CHECKING:
    import numpy.typing as npt

    from amct.caffe.model import CaffeModel
    from amct.pipeline.batches import BatchInputs

Batch = Any
"""An array for a net with one input, a dict of arrays by input name, or a tuple of arrays in the order of the inputs;
further items of the tuple (labels) are ignored."""


def build_net(model: CaffeModel, *, keep_blobs: bool | Iterable[str] = True) -> Net:
    """Build a net that runs a model in memory.

    Raises:
        ModelError: The net cannot be built, or the weights do not fit it.
    """
    net = Net(model.net, with_gradients=False, keep_blobs=keep_blobs)
    for layer in net.layers:
        stored = model.weights.get(layer.name)
        if stored is None:
            continue
        needed = [blob.count for blob in layer.blobs]
        if needed != [tensor.numel() for tensor in stored]:
            raise layer.error(
                f"the weights have shapes {[tuple(tensor.shape) for tensor in stored]}, this net needs "
                f"{[blob.shape for blob in layer.blobs]} for inputs of shape "
                f"{[blob.shape for blob in layer.bottom_blobs]}. Do prototxt and weights belong together? Compare the "
                "input shape, and the kernels and strides of the layers before"
            )
        for blob, tensor in zip(layer.blobs, stored, strict=True):
            blob.set_tensor(tensor.view(torch.int8) if tensor.dtype is torch.uint8 else tensor)
    return net


def caffe_batches(data: object, inputs: BatchInputs | None = None) -> Batches:
    """Convert data to batches of a net; a single array or dict is one batch.

    Raises:
        ArgumentTypeError: It cannot be iterated.
    """
    return Batches(
        data,
        inputs or (lambda batch: batch),
        single=(np.ndarray, torch.Tensor, Mapping),
        expected="an array or an iterable of batches",
    )


def sample_count(batch: Batch) -> int:
    """The number of samples in one batch."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    shape = np.shape(batch) if batch is not None else ()
    return shape[0] if shape else 1


def run_net(net: Net, batch: Batch) -> dict[str, npt.NDArray[np.float32]]:
    """Run a net on one batch and return its outputs by name.

    Raises:
        ArgumentError: the batch does not have the net's inputs.
    """
    feed(net, batch)
    net.forward()
    graph = net.graph
    return {graph.blob_names[index]: _copy_of(graph.blobs[index].tensor) for index in graph.outputs}


def feed(net: Net, batch: Batch) -> None:
    """Copy a batch into the inputs of a net, replacing the previous batch.

    Raises:
        ArgumentError: the batch does not have the net's inputs.
    """
    names = [net.graph.blob_names[index] for index in net.graph.inputs]
    for name, value in _by_name(names, batch).items():
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        blob = net.blob(name)
        try:
            blob.set_shape(np.shape(array))
            blob.data[...] = array
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"a batch must hold arrays of numbers, got {type(value).__name__}: {error}") from error


def input_blobs(model: CaffeModel) -> list[str]:
    """The names of a net's inputs, in order."""
    return [name for layer in model.layers if layer.type == "Input" for name in layer.top]


def inputs_by_name(names: list[str], batch: Batch) -> dict[str, npt.NDArray[Any]]:
    """A batch as arrays by input name.

    Raises:
        ArgumentError: the batch does not have these inputs.
    """
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value, np.float32)
        for name, value in _by_name(names, batch).items()
    }


def _by_name(names: list[str], batch: Batch) -> Mapping[str, Any]:
    given: Mapping[str, Any] | None
    if isinstance(batch, Mapping):
        given = batch
    elif isinstance(batch, (tuple, list)) and len(batch) >= len(names) > 0 and hasattr(batch[0], "shape"):
        given = dict(zip(names, batch, strict=False))
    else:
        given = {names[0]: batch} if len(names) == 1 else None
    if given is None or set(given) != set(names):
        got = sorted(given) if given is not None else "one array"
        raise ArgumentError(f"a batch must be a dict with the arrays of the net's inputs {names}, got {got}")
    return given


def _copy_of(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.array(tensor.detach().cpu().numpy(), np.float32, order="C")
