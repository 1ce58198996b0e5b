"""Batches of the command line's data in the form that a model takes: converted, of a fixed size, one array per input.

A model with one float input takes all data formats. One with several inputs or with integer inputs (such as token ids)
takes an array file: an .npz with arrays named as the inputs, or a .npy for one input, without preprocessing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from amct.errors import ArgumentError, CalibrationError
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from onnx import ModelProto

    from amct.cli.options import DataOptions
    from amct.data import DataFacts, StoredBatches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataBatches:
    """Batches of the data in the form that a model takes; they can be read repeatedly, in parts, and ahead.

    Attributes:
        start: Returns an iterator over batches first, first + step, first + 2 · step, …
        length: Returns the number of batches.
        identity: Returns a fingerprint of the data.
        facts: Returns what the data says of itself.
    """

    start: Callable[[int, int], Iterator[Any]]
    length: Callable[[], int]
    identity: Callable[[], str]
    facts: Callable[[], DataFacts | None] = lambda: None
    reads_ahead: bool = True

    @classmethod
    def converted(cls, data: StoredBatches | DataBatches, convert: Callable[[Any], Any]) -> DataBatches:
        """The batches of some data, each converted."""
        return cls(lambda first, step: map(convert, data.part(first, step)), data.__len__, data.identity, data.facts)

    def __iter__(self) -> Iterator[Any]:
        return self.start(0, 1)

    def __len__(self) -> int:
        return self.length()

    def part(self, first: int, step: int) -> Iterator[Any]:
        """Return every ``step``-th batch, from number ``first`` on."""
        return self.start(first, step)


def full_batches(batches: Iterable[Any], size: int | None, source: Path, *, first: int = 0) -> Iterator[Any]:
    """Yield the batches, without an incomplete last one.

    Args:
        batches: Each an array, a dict of arrays by input name, or an array with its labels.
        size: The fixed batch size of the model; None: all batches are yielded.
        source: The data, for error messages.
        first: The number of the first of these batches in the data.

    Raises:
        CalibrationError: The first batch of the data has fewer samples than ``size``.
    """
    for count, batch in enumerate(batches, first):
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        length = len(parts[0]) if isinstance(parts, (list, tuple)) else len(parts)
        if size is not None and length < size:
            if count == 0:
                raise CalibrationError(f"{source}: the model takes {counted(size, 'sample')} at once, got {length}")
            logger.warning("left out, as the model takes %d at once: %s", size, counted(length, "sample"))
            return
        yield batch


def with_fixed_size(options: DataOptions, size: int | None) -> DataOptions:
    """The options with the fixed batch size of a model, if it has one; a warning tells of another one that is given."""
    if size is None:
        return options
    if options.batch_size not in (1, size):
        logger.warning(
            "--batch-size %d is left out: the model takes %s at once", options.batch_size, counted(size, "sample")
        )
    return replace(options, batch_size=size)


def stored_batches(options: DataOptions, size: int | None = None) -> DataBatches:
    """The batches of data for the only input of a model; ``size`` is the fixed batch size of the model.

    Raises:
        AmctError: An option is invalid, or the data cannot be read.
    """
    stored = with_fixed_size(options, size).stored()
    return DataBatches(
        lambda first, step: full_batches(stored.part(first, step), size, options.data, first=first),
        lambda: len(stored) if size is None else stored.samples // size,
        stored.identity,
        stored.facts,
    )


def named_batches(names: Sequence[str], options: DataOptions, size: int | None = None) -> DataBatches:
    """Return the batches of an array file whose arrays have the names of a model's inputs.

    Args:
        names: The names of the inputs.
        options: The data.
        size: The fixed batch size of the model.

    Raises:
        AmctError: It is no such file, or an array is missing.
    """
    from amct.data import DataFacts
    from amct.data.samples import file_fingerprint

    arrays, _ = named_arrays(names, options)
    options = with_fixed_size(options, size)
    slices = partial(_slices, arrays, options.batch_size)
    samples = len(next(iter(arrays.values())))
    count = -(-samples // options.batch_size) if size is None else samples // size
    return DataBatches(
        lambda first, step: islice(full_batches(slices(), size, options.data), first, options.batches, step),
        lambda: count if options.batches is None else min(count, options.batches),
        lambda: f"{file_fingerprint(options.data)} {options.batch_size} {options.batches}",
        lambda: DataFacts(samples=samples, batch_size=options.batch_size),
    )


def named_arrays(names: Sequence[str], options: DataOptions) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
    """The arrays of a file that have the names of a model's inputs, and its labels if it has any.

    Raises:
        AmctError: It is no such file, or an array is missing.
    """
    from amct.data.arrays import LABEL_NAMES, is_array_file, read_arrays

    if not is_array_file(options.data):
        inputs = ", ".join(names)
        raise ArgumentError(f"--data: a model with the inputs {inputs} needs an .npz with arrays of these names")
    found = read_arrays(options.data)
    arrays = _arrays(names, options, found)
    count = len(next(iter(arrays.values())))
    labels = next((found[name] for name in LABEL_NAMES if name in found and name not in arrays), None)
    is_class = labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) == count
    return arrays, labels if is_class else None


def is_plain(proto: ModelProto) -> bool:
    """Return whether a model has exactly one input, of a float type, and so accepts images."""
    from amct.onnx_model.reading import element_dtype

    names = [value.name for value in proto.graph.input]
    return len(names) == 1 and element_dtype(proto, names[0]).startswith("float")


def _slices(arrays: Mapping[str, NDArray[Any]], size: int) -> Iterator[dict[str, NDArray[Any]]]:
    for start in range(0, len(next(iter(arrays.values()))), size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def _arrays(names: Sequence[str], options: DataOptions, found: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if options.changes_values:
        raise ArgumentError(
            "--mean, --scale, --size and --crop are for pictures; arrays of inputs are used as they are"
        )
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
            "axis; for a model whose inputs are not, give the batches in Python: quantize(model, ..., [...])"
        )
    return {name: found[name] for name in names}
