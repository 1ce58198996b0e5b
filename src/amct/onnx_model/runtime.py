"""Runs an ONNX model in onnxruntime and returns any of its tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import torch
from onnx import ModelProto

from amct.errors import CalibrationError, ModelError
from amct.export.onnx.messages import any_value, copy_fields, tensor_array
from amct.export.writer import EXTERNAL_THRESHOLD, save_model
from amct.onnx_model.opset import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

_ERRORS_ONLY = 3


class Runner:
    """A model ready to run.

    Args:
        model: any model that onnxruntime supports; it is not changed.
        watched: tensors to return in addition to the outputs: node outputs, inputs or constants.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """

    def __init__(self, model: ModelProto, watched: Iterable[str] = ()) -> None:
        self.outputs = tuple(value.name for value in model.graph.output)
        wanted = dict.fromkeys(watched)
        inputs = {value.name for value in model.graph.input}
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._fed = tuple(name for name in wanted if name in inputs)
        self._constants = {name: tensor_array(stored[name]) for name in wanted if name in stored}
        computed = [name for name in wanted if name not in inputs and name not in stored]
        self._fetched = tuple(dict.fromkeys([*self.outputs, *computed]))
        self._session = _session(_with_outputs(model, computed))

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs and the watched tensors, by name.

        Raises:
            CalibrationError: the model rejects these inputs.
        """
        try:
            results = self._session.run(list(self._fetched), dict(feeds))
        except Exception as error:
            raise CalibrationError(f"onnxruntime cannot run the model on this batch: {first_line(error)}") from error
        found = dict(zip(self._fetched, results, strict=True))
        return {**found, **{name: feeds[name] for name in self._fed}, **self._constants}


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Convert an array to a tensor for the observers; read-only arrays are copied, as torch requires."""
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def _with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    present = {value.name for value in model.graph.output}
    more = [name for name in names if name not in present]
    if not more:
        return model
    extended = ModelProto()
    copy_fields(model, extended, skip={"graph"})
    copy_fields(model.graph, extended.graph, skip=set())
    extended.graph.output.extend(any_value(name) for name in more)
    return extended


def _session(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leaves the cores to the observers
    try:
        if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < EXTERNAL_THRESHOLD:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save_model(path, model)
            return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run the model: {first_line(error)}") from error
