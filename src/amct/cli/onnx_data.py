"""Batches of the command line's data for an ONNX model, with its fixed batch size and an array for each input.

A model with one float input takes all data formats. A model with several inputs or with integer inputs (such as token
ids) takes an array file: an .npz with arrays named as the inputs, or a .npy for one input, without preprocessing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from amct.cli.data_options import DataBatches, full_batches
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.cli.data_options import DataOptions


def onnx_data(model: str, options: DataOptions) -> DataBatches:
    """Return the batches for a model file.

    Raises:
        AmctError: The model or the data cannot be read, or they do not fit together.
    """
    from amct.data.arrays import is_array_file
    from amct.data.samples import file_fingerprint
    from amct.onnx_model.reading import input_shape, read_model

    proto = read_model(model).model
    size = fixed_batch_size(proto)
    if size is not None:
        options = replace(options, batch_size=size)
    if is_plain(proto):
        sized = options.fitting(input_shape(proto, proto.graph.input[0].name) or ())
        stored = sized.stored()
        return DataBatches(
            lambda first, step: full_batches(stored.part(first, step), size, sized.data, first=first),
            lambda: len(stored) if size is None else stored.samples // size,
            stored.identity,
        )
    if not is_array_file(options.data):
        names = ", ".join(value.name for value in proto.graph.input)
        raise ArgumentError(f"--data: a model with the inputs {names} needs an .npz with arrays of these names")
    arrays = _arrays(proto, options)
    slices = partial(_slices, arrays, options.batch_size)
    samples = len(next(iter(arrays.values())))
    count = -(-samples // options.batch_size) if size is None else samples // size
    return DataBatches(
        lambda first, step: islice(full_batches(slices(), size, options.data), first, options.batches, step),
        lambda: count if options.batches is None else min(count, options.batches),
        lambda: f"{file_fingerprint(options.data)} {options.batch_size} {options.batches}",
    )


def fixed_batch_size(proto: ModelProto) -> int | None:
    """Return the fixed batch size of a model; None if it is dynamic."""
    from amct.onnx_model.reading import input_shape

    shape = input_shape(proto, proto.graph.input[0].name)
    return shape[0] if shape and isinstance(shape[0], int) else None


def is_plain(proto: ModelProto) -> bool:
    """Return whether a model has exactly one input, of a float type, and so accepts images."""
    from amct.onnx_model.reading import element_dtype

    names = [value.name for value in proto.graph.input]
    return len(names) == 1 and element_dtype(proto, names[0]).startswith("float")


def _slices(arrays: Mapping[str, NDArray[Any]], size: int) -> Iterator[dict[str, NDArray[Any]]]:
    for start in range(0, len(next(iter(arrays.values()))), size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def _arrays(proto: ModelProto, options: DataOptions) -> dict[str, NDArray[Any]]:
    from amct.data.arrays import read_arrays

    if options.changes_values:
        raise ArgumentError(
            "--mean, --scale, --size and --crop are for pictures; arrays of inputs are used as they are"
        )
    found = read_arrays(options.data)
    names = [value.name for value in proto.graph.input]
    if len(names) == 1 and len(found) == 1:
        return {names[0]: next(iter(found.values()))}
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(
            f'{options.data}: the model has an input "{missing[0]}", and there is no array of that name; '
            f"it has {', '.join(found)}"
        )
    lengths = {name: len(found[name]) if found[name].ndim else 0 for name in names}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ArgumentError(
            f"{options.data}: expected as many samples in every array, got {counts}. Arrays are cut along their first "
            "axis; for a model whose inputs are not, give the batches in Python: amct.onnx_model.quantize(model, [...])"
        )
    return {name: found[name] for name in names}
