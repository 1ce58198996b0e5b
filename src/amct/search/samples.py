"""The samples that a search is judged by, and what a model answers to them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from amct.errors import ArgumentError, ArgumentTypeError, ExportError
from amct.export.check.batch import batch_size
from amct.export.onnx.messages import fixed_batch_size
from amct.export.onnx.runtime import Runner
from amct.interrupts import raise_if_interrupted
from amct.memory import gibibytes
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from amct.export.formats import ExportedModel
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import PreparedModel
    from amct.pipeline.quantized_model import QuantizedModel

CHUNK = 64
"""Samples that a model answers at a time, where its files take batches of any size."""
MOST_BYTES = 4 << 30
"""Bytes of the samples, which are kept in memory: a search reads them several times in another order."""

Answer = tuple["NDArray[np.int64]", Any]
"""The numbers of some samples and what a model answers to them, in the form of its door."""


class Samples:
    """All samples in memory.

    Args:
        prepared: A quantized model, which says what its inputs are.
        labelled: What ``labelled_pairs`` returned; without labels batches of inputs.
        has_labels: Whether there are labels.
        inputs: Turns the inputs of a batch into those of the model.

    Raises:
        ArgumentTypeError: A batch has another form.
        ArgumentError: There is no sample, too many, or their shapes differ.
    """

    def __init__(
        self, prepared: PreparedModel, labelled: object, *, has_labels: bool, inputs: BatchInputs | None = None
    ) -> None:
        pairs: list[tuple[Any, Any]] = labelled if has_labels else []  # type: ignore[assignment]
        data = [pair[0] for pair in pairs] if has_labels else labelled
        arguments, labels, total = [], [], 0
        for number, (original, given) in enumerate(prepared.batches(data, inputs).with_originals()):
            count = prepared.sample_count(original, given)
            arguments.append(given)
            total += batch_size(given)[1]
            if total > MOST_BYTES:
                raise ArgumentError(
                    f"labelled: a search keeps its samples in memory, at most {gibibytes(MOST_BYTES)}; give fewer, or "
                    "evaluate= instead"
                )
            if has_labels:
                labels.append(_labels(pairs[number][1], count, number))
        if not arguments:
            raise ArgumentError("labelled: there is no batch; expected batches of (inputs, labels)")
        self._arguments, self.count = _joined(arguments)
        self.labels = np.concatenate(labels) if labels else None
        if self.labels is not None and len(self.labels) != self.count:
            raise ArgumentError(
                f"labelled: {counted(self.count, 'sample')} with {counted(len(self.labels), 'label')}; "
                "one each is expected"
            )

    def __len__(self) -> int:
        return self.count

    def arguments(self, numbers: NDArray[np.int64]) -> Any:  # noqa: ANN401  the door's arguments
        """Some samples as arguments of the model."""

        def take(leaf: Any) -> Any:  # noqa: ANN401  an array or a tensor
            if leaf.ndim == 0 or len(leaf) != self.count:
                return leaf
            return leaf[torch.from_numpy(numbers)] if isinstance(leaf, Tensor) else leaf[numbers]

        return pytree.tree_map_only((Tensor, np.ndarray), take, self._arguments)


def labelled_pairs(labelled: object) -> tuple[list[tuple[Any, Any]], int]:
    """The batches of (inputs, labels), or the one such pair, that a user gives, and the number of labels.

    Raises:
        ArgumentTypeError: It has another form.
    """
    if isinstance(labelled, tuple) and len(labelled) == 2 and all(_is_array(each) for each in labelled):
        labelled = [labelled]
    if isinstance(labelled, (str, bytes, Tensor, np.ndarray)) or not isinstance(labelled, Iterable):
        raise ArgumentTypeError(f"labelled: expected batches of (inputs, labels), got {type(labelled).__name__}")
    found, count = [], 0
    for number, batch in enumerate(labelled):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
            raise ArgumentTypeError(f"labelled: batch {number}: expected (inputs, labels), got a {what}")
        found.append((batch[0], batch[1]))
        count += len(batch[1]) if getattr(batch[1], "ndim", 1) and hasattr(batch[1], "__len__") else 1
    if not found:
        raise ArgumentError("labelled: there is no batch; expected batches of (inputs, labels)")
    return found, count


def counted_samples(data: object) -> int | None:
    """The number of samples of inputs where that can be told without running anything: of arrays, and lists of them."""
    batches = [data] if _is_array(data) else data
    if not isinstance(batches, (list, tuple)) or not all(_is_array(each) and each.ndim for each in batches):
        return None
    return sum(map(len, batches))


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _labels(given: Any, count: int, number: int) -> NDArray[Any]:  # noqa: ANN401  the user's own kind
    labels = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if labels.ndim == 0:
        labels = labels.reshape(1)
    if len(labels) != count:
        raise ArgumentError(
            f"labelled: batch {number}: {counted(count, 'sample')} with {counted(len(labels), 'label')}"
        )
    return labels


def _joined(batches: Sequence[Any]) -> tuple[Any, int]:
    """The arguments of several batches as those of one, and the number of samples in it."""
    leaves, forms = zip(*(pytree.tree_flatten(batch) for batch in batches), strict=True)
    if any(form != forms[0] for form in forms):
        raise ArgumentError("labelled: the batches have different forms")
    found: list[Any] = []
    for parts in zip(*leaves, strict=True):
        if not _is_array(parts[0]) or parts[0].ndim == 0:
            found.append(parts[0])
            continue
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            shown = " and ".join(map(str, sorted(shapes)[:2]))
            raise ArgumentError(
                f"labelled: samples of different shapes, {shown}; bring them to one, or give evaluate= instead"
            )
        found.append(torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts))
    sizes = {len(leaf) for leaf in found if _is_array(leaf) and leaf.ndim}
    if len(sizes) > 1 and len(batches) > 1:
        raise ArgumentError(
            f"labelled: one input has {max(sizes)} rows, another {min(sizes)}: such batches cannot be divided into "
            "samples; give evaluate= instead"
        )
    return pytree.tree_unflatten(found, forms[0]), max(sizes, default=0)


class Answers:
    """What a model answers: its QDQ file in onnxruntime, or its simulation where it has no such file.

    Args:
        quantized: The model; ``is_float``: the float model that it was made of.
        model: The file in memory, or why there is none.
        is_float: Whether the float model is run instead.
    """

    def __init__(
        self, quantized: QuantizedModel, model: ExportedModel | ExportError, *, is_float: bool = False
    ) -> None:
        self._prepared = quantized.prepared
        self.measured_on = "the QDQ file"
        self.milliseconds: float | None = None
        """The CPU time of a sample, of the fastest batch."""
        self._size: int | None = None
        self._runner: Runner | None = None
        self._run: Callable[[Any], Any] | None = None
        self._kept = model  # it owns the weights of its model
        if isinstance(model, ExportError):
            self.measured_on = "the simulation"
            pair = self._prepared.compared_models(quantized.qparams)
            self._watched = pair[0 if is_float else 1]
            return
        self._runner = Runner(model.model)
        self._size = fixed_batch_size(model.model)

    @classmethod
    def of_float(cls, quantized: QuantizedModel) -> Answers:
        """The answers of the float model."""
        try:
            model: ExportedModel | ExportError = quantized.prepared.with_only(quantized.qparams, ())
        except ExportError as error:
            model = error
        return cls(quantized, model, is_float=True)

    def over(self, samples: Samples, numbers: NDArray[np.int64], chunk: int = CHUNK) -> Iterator[Answer]:
        """The answers to some samples, in their order, some at a time."""
        size = self._size or chunk
        for start in range(0, len(numbers), size):
            raise_if_interrupted()
            part = numbers[start : start + size]
            begin = time.process_time()
            answer = self._answer(samples, part)
            taken = 1000 * (time.process_time() - begin) / len(part)
            self.milliseconds = taken if self.milliseconds is None else min(self.milliseconds, taken)
            yield part, answer

    def _answer(self, samples: Samples, part: NDArray[np.int64]) -> Any:  # noqa: ANN401  the door's outputs
        if self._runner is None:
            with self._watched.watch() as run:
                return run(samples.arguments(part)).value
        filled = part
        if self._size is not None and len(part) < self._size:  # the file takes batches of one size only
            filled = np.concatenate([part, np.repeat(part[:1], self._size - len(part))])
        arrays = self._runner.run(self._prepared.onnx_inputs(samples.arguments(filled)))
        if len(filled) > len(part):
            arrays = {name: _first(array, len(filled), len(part)) for name, array in arrays.items()}
        return self._prepared.onnx_outputs(arrays).value


def _first(array: NDArray[Any], count: int, wanted: int) -> NDArray[Any]:
    return array[:wanted] if array.ndim and len(array) == count else array
