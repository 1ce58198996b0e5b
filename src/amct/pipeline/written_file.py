"""Runs a written QDQ file on the batches of a front door, so that a report shows the numbers of the file."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.errors import AmctError, CalibrationError
from amct.export.formats import layer_outputs, rescaled_layers
from amct.export.onnx.file_parts import read_parts
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.messages import first_line
from amct.export.onnx.runtime import Runner, as_tensor, open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.pipeline.door import ModelOutput, OnTensor, PreparedModel

    Arrays = dict[str, NDArray[Any]]

logger = logging.getLogger(__name__)

QDQ_FILE = "qdq_model.onnx"


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
                raise CalibrationError(f"the file takes {size} samples at once, and its outputs are not per sample")
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
