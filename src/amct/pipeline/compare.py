"""Runs a float model, its quantized one and its written files on the same batches, for a report and for their check.

One batch at a time is in memory, and what is kept does not grow with the data.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from amct import log
from amct.errors import AmctError, CalibrationError
from amct.export.check.batch import CALIBRATION, LARGEST_BATCH, MOST_SAMPLES, first_samples, with_samples
from amct.export.check.losses import SHARE, UNNAMED, Outputs, Reference, fewest_batches
from amct.export.formats import layer_outputs, rescaled_layers
from amct.export.onnx.kept_weights import KeptWeights, read_parts
from amct.export.onnx.messages import first_line
from amct.export.onnx.runtime import Runner, as_tensor, open_session
from amct.printable import counted
from amct.report.measuring import Measuring

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from amct.numerics.qparams import LayerQParams
    from amct.pipeline.door import ComparedModel, ModelOutput, OnTensor, PreparedModel
    from amct.report.activations import InputStatistics
    from amct.report.measuring import Measured, Metric

    Arrays = dict[str, NDArray[Any]]

logger = logging.getLogger(__name__)

QDQ_FILE = "qdq_model.onnx"


def measure(  # noqa: PLR0913  most of them say what is measured besides
    reference: ComparedModel,
    quantized: ComparedModel,
    batches: Iterable[tuple[Any, Any]],
    *,
    statistics: Mapping[str, InputStatistics] | None = None,
    metric: Metric | None = None,
    sample_count: Callable[[Any, Any], int] = lambda _batch, _arguments: 1,
    written: Callable[[Any], ModelOutput] | None = None,
    before: Callable[[Any], ModelOutput] | None = None,
) -> Measured:
    """Run both models on each batch.

    Args:
        reference: The float model.
        quantized: The quantized model.
        batches: Each batch as the data gave it, and as arguments of the models.
        statistics: What is summed up of the float inputs of layers, by their key.
        metric: ``metric(output, batch) -> float``, the mean over one batch.
        sample_count: The number of samples of a batch: its weight in the metric.
        written: Runs a written file of the quantized model; outputs and metric are then measured of the file.
        before: Runs the model whose outputs and metric are those of the float model; None: ``reference``.

    Raises:
        ArgumentError: A layer's output has different shapes in both models.
        ArgumentTypeError: The metric returns no number.
        CalibrationError: There is no data.
    """
    measuring = Measuring(statistics or {}, metric)
    pairs = _Pairs(quantized.shapes_vary)
    expected_layers: dict[str, list[Tensor]] = {}

    def keep(layer: str, tensor: Tensor) -> None:
        expected_layers.setdefault(layer, []).append(tensor)

    def compare(layer: str, tensor: Tensor) -> None:
        if expected_layers.get(layer):
            for pair in pairs.of(layer, f'the output of layer "{layer}"', expected_layers[layer].pop(0), tensor):
                measuring.layers.add(layer, *pair)

    def add_input(key: str, tensor: Tensor) -> None:
        measuring.inputs[key].add(tensor)

    watch_inputs = add_input if statistics else None
    with (
        reference.watch(outputs=keep, inputs=watch_inputs) as run_reference,
        quantized.watch(outputs=compare) as run_quantized,
    ):
        for batch, arguments in log.track(batches, "Comparing"):
            expected_layers.clear()
            expected, got = run_reference(arguments), run_quantized(arguments)
            if written is not None:
                got = written(arguments)
            if before is not None:
                expected = before(arguments)
            measuring.detections.take(_arrays(expected), _arrays(got))
            measuring.add(pairs.outputs(expected, got, measuring.detections.names))
            measuring.score(expected.value, got.value, batch, sample_count(batch, arguments))
    return measuring.result()


def _by_name(output: ModelOutput) -> dict[str, Tensor]:
    """The outputs by name; of several with one name the further ones are numbered."""
    found: dict[str, Tensor] = {}
    seen: Counter[str] = Counter()
    for name, tensor in output.tensors:
        found[f"{name} {seen[name] + 1}" if seen[name] else name] = tensor
        seen[name] += 1
    return found


def _arrays(output: ModelOutput) -> dict[str, NDArray[Any]]:
    tensors = {name: tensor.detach().cpu() for name, tensor in _by_name(output).items()}
    return {
        name: np.asarray(tensor.float() if tensor.dtype.is_floating_point else tensor)
        for name, tensor in tensors.items()
    }


class _Pairs:
    """Tensors of one name in both models."""

    def __init__(self, shapes_vary: bool) -> None:
        self._shapes_vary = shapes_vary
        self._warned: set[str] = set()

    def of(self, name: str, what: str, expected: Tensor, got: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Both tensors, or nothing where their shapes differ and that is allowed."""
        if expected.shape == got.shape or not self._shapes_vary:
            yield expected, got
        elif name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "%s has different shapes in both nets, %s and %s; such batches are not compared",
                what,
                list(expected.shape),
                list(got.shape),
            )

    def outputs(
        self, expected: ModelOutput, got: ModelOutput, without: Collection[str]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The outputs that both models have, with their name, but for some."""
        others = _by_name(got)
        for (name, _), (key, tensor) in zip(expected.tensors, _by_name(expected).items(), strict=True):
            if key in others and key not in without:
                for pair in self.of(name, f'output "{name}"', tensor, others[key]):
                    yield name, *pair


# -- what the written files are compared with --------------------------------------------------------------------------


def reference(
    prepared: PreparedModel,
    layers: Mapping[str, LayerQParams],
    examples: Sequence[Any],
    seconds: float = math.inf,
    *,
    batch_size: int | None = None,
    handed_in: Callable[[Any], ModelOutput] | None = None,
) -> Reference:
    """Run the float model and the simulation on calibration batches, or on first samples if their number may vary.

    Args:
        prepared: The model.
        layers: Its parameters.
        examples: The batches as arguments of the model; of the further ones those count that have the shapes of the
            first, up to ``LARGEST_BATCH`` bytes of outputs.
        seconds: The CPU time of the job so far.
        batch_size: The only one that the files take, if that of the model may vary.
        handed_in: As the attribute of ``QuantizedModel``.
    """
    first = _sample(prepared, examples[0], batch_size)
    shapes = _shapes(first[1])
    further = (_sample(prepared, example, batch_size) for example in examples[1:])
    samples = [first, *(each for each in further if _shapes(each[1]) == shapes)]
    batches, fewest = [batch for batch, _ in samples], fewest_batches(first[1])
    models = prepared.models_to_check(layers)
    expected = _outputs(models[0], batches, fewest, SHARE * seconds)
    simulated = _outputs(models[1], batches[: len(expected)], fewest, SHARE * seconds)
    found = [
        Reference(inputs=inputs, origin=CALIBRATION, expected=exact, simulated=rounded)
        for (_, inputs), exact, rounded in zip(samples, expected, simulated, strict=False)
    ]
    if handed_in is not None and batch_size is None:
        known = [handed_in(batch).tensors for batch in batches[: len(found)]]
        by_position = ([(UNNAMED, np.asarray(tensor)) for _, tensor in each] for each in known)
        found = [replace(each, handed_in=outputs) for each, outputs in zip(found, by_position, strict=True)]
    return replace(found[0], further=tuple(found[1:]), seconds=seconds)


def _sample(
    prepared: PreparedModel,
    example: Any,  # noqa: ANN401  the door's own
    batch_size: int | None,
) -> tuple[Any, dict[str, NDArray[Any]]]:
    """A batch, or its first samples, as arguments of the model and by the input names of the files."""
    batch = example
    if batch_size is not None:
        batch = with_samples(example, batch_size)
    elif prepared.any_batch_size:
        batch = first_samples(example, most=MOST_SAMPLES)
    return batch, prepared.onnx_inputs(batch)


def _shapes(inputs: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in inputs.items()}


def _outputs(
    model: ComparedModel | None, batches: Sequence[Any], fewest: int, seconds: float
) -> Sequence[Outputs | None]:
    if model is None:
        return [None] * len(batches)
    with model.watch() as run:  # once: loading a small model takes longer than all its runs

        def arrays(batch: Any) -> Outputs:  # noqa: ANN401  the door's own
            return [(name, np.asarray(tensor.detach().cpu()).copy()) for name, tensor in run(batch).tensors]

        return first_outputs(arrays, batches, fewest, seconds)


def first_outputs(run: Callable[[Any], Outputs], batches: Sequence[Any], fewest: int, seconds: float) -> list[Outputs]:
    """The outputs of the fewest batches, of more up to half of ``LARGEST_BATCH`` bytes and up to so many seconds."""
    found: list[Outputs] = []
    size, end = 0, time.process_time() + seconds
    for batch in batches:
        late = len(found) >= fewest and time.process_time() > end
        if found and (late or size >= LARGEST_BATCH // 2):
            break
        found.append(run(batch))
        size += sum(array.nbytes for _, array in found[-1])
    return found


# -- a written QDQ file ------------------------------------------------------------------------------------------------


def qdq_file(files: Iterable[Path]) -> Path | None:
    """Return the QDQ file among the files of a save; None if there is none."""
    return next((file for file in files if file.name.endswith(QDQ_FILE)), None)


class WrittenFile:
    """A QDQ file in onnxruntime.

    Args:
        prepared: The model that it was written of.
        path: The file.

    Raises:
        ModelError: onnxruntime cannot load it.
    """

    def __init__(self, prepared: PreparedModel, path: Path) -> None:
        self._prepared = prepared
        self._session = open_session(path)
        self._outputs = [value.name for value in self._session.get_outputs()]
        shape = self._session.get_inputs()[0].shape
        self._batch_size = shape[0] if shape and isinstance(shape[0], int) else None

    def run(self, arguments: Any) -> ModelOutput:  # noqa: ANN401  the door's own kind
        """Run the file on the arguments of one batch; its outputs in the form of the door.

        Raises:
            CalibrationError: onnxruntime rejects the batch.
        """
        try:
            arrays = self._run(self._prepared.onnx_inputs(arguments))
        except AmctError:
            raise
        except Exception as error:  # onnxruntime raises many types
            raise CalibrationError(f"onnxruntime cannot run the model on this batch: {first_line(error)}") from error
        return self._prepared.onnx_outputs(arrays)

    def fits(self, arguments: Any) -> bool:  # noqa: ANN401  the door's own kind
        """Return whether the file takes this batch; a warning tells why not."""
        try:
            self.run(arguments)
        except AmctError as error:
            logger.warning("the report shows outputs and metric of the simulation, not of the QDQ file: %s", error)
            return False
        return True

    def _run(self, feeds: Arrays) -> Arrays:
        count = len(next(iter(feeds.values())))
        if self._batch_size in (None, count):
            return dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        return self._in_parts(feeds, count, self._batch_size or count)

    def _in_parts(self, feeds: Arrays, count: int, size: int) -> Arrays:
        """Run a file of a fixed batch size on any number of samples; the last part is filled with the last sample."""
        parts: list[list[NDArray[Any]]] = []
        for start in range(0, count, size):
            chosen = np.minimum(np.arange(start, start + size), count - 1)
            results = self._session.run(self._outputs, {name: values[chosen] for name, values in feeds.items()})
            if any(len(result) != size for result in results):
                raise CalibrationError(
                    f"the file takes {counted(size, 'sample')} at once, and its outputs are not per sample"
                )
            parts.append([result[: count - start] for result in results])
        columns = zip(self._outputs, zip(*parts, strict=True), strict=True)
        return {name: np.concatenate(column) for name, column in columns}


class FileLayers:
    """A QDQ file in onnxruntime that also shows what its layers compute.

    Tensors between the layers are outputs then, so that onnxruntime fuses fewer operations.

    Args:
        prepared: The model that it was written of.
        path: The file.
        outputs: By layer: the tensors of the float ONNX model with its output.

    Raises:
        FileError, ParseError: the file cannot be read.
    """

    shapes_vary = True  # a tensor of another shape is not compared

    def __init__(self, prepared: PreparedModel, path: Path, outputs: Mapping[str, tuple[str, ...]]) -> None:
        self._prepared = prepared
        self._kept = KeptWeights()
        self._model = read_parts(path, self._kept)
        renamed, rescaled = layer_outputs(self._model), rescaled_layers(self._model)
        made = {name for node in self._model.graph.node for name in node.output}
        found = {
            layer: (renamed[layer],) if layer in renamed and len(names) == 1 else names
            for layer, names in outputs.items()
        }
        self._tensors = {
            layer: names for layer, names in found.items() if names and made.issuperset(names) and layer not in rescaled
        }

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self._model, [name for names in self._tensors.values() for name in names])

    def shows_all(self, arguments: Any) -> bool:  # noqa: ANN401  the door's own kind
        """Return whether the file takes this batch and shows every quantized layer of the model."""
        if not self._tensors.keys() >= set(self._prepared.layers):
            return False
        try:
            self._runner.run(self._prepared.onnx_inputs(arguments))
        except AmctError as error:
            logger.debug("the QDQ file cannot be compared layer by layer: %s", error)
            return False
        return True

    @contextmanager
    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> Iterator[Callable[[Any], ModelOutput]]:
        """A context whose value is a function that runs the file on the arguments of one batch."""
        del inputs

        def run(arguments: Any) -> ModelOutput:  # noqa: ANN401  the door's own kind
            values = self._runner.run(self._prepared.onnx_inputs(arguments))
            if outputs is not None:
                for layer, name in ((layer, name) for layer, names in self._tensors.items() for name in names):
                    outputs(layer, as_tensor(values[name]))
            return self._prepared.onnx_outputs({name: values[name] for name in self._runner.outputs})

        yield run
