"""Runs an ONNX model in onnxruntime and returns any of its tensors; stops a run of too much time or memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from threading import TIMEOUT_MAX, Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import torch
from onnx import ModelProto

from amct.errors import CalibrationError, ModelError
from amct.export.formats import EXTERNAL_THRESHOLD, save_model
from amct.export.onnx.kept_weights import copy_fields, kept_arrays, light_copy, tensor_array, weights_as_inputs
from amct.export.onnx.messages import (
    MODEL_LIMIT_VARIABLE,
    any_value,
    check_sizes_of_run,
    first_line,
    model_limit,
    parameter_bytes,
    subgraphs,
)
from amct.memory import LARGE_MODEL, gibibytes, give_back_freed, number_from_environment, process_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import GraphProto
    from onnxruntime import RunOptions


_FATAL_ONLY = 4
"""Errors are raised; onnxruntime would print them too, with the names of the file unescaped."""
_PROVIDERS = ["CPUExecutionProvider"]
_PLAIN = frozenset(f"tensor({kind})" for kind in ("float", "double", "int8", "uint8", "int32", "int64", "bool"))
_DEEP = 4000
"""From so many nodes the time in which onnxruntime looks for equal constants, their number squared, is not worth it."""
_NO_SHARED_CONSTANTS = {"optimization.disable_specified_optimizers": "ConstantSharing"}
_NO_PACKED_WEIGHTS = {"session.disable_prepacking": "1"}
NO_SPINNING = {"session.intra_op.allow_spinning": "0"}  # leaves the cores to the observers


class Runner:
    """A model ready to run.

    Args:
        model: any model that onnxruntime supports; it is not changed.
        watched: tensors to return in addition to the outputs: node outputs, inputs or constants.
        lean: Whether a large model runs without copies of its weights in the order of fast kernels.
        options: What the session begins with; it is changed.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """

    def __init__(
        self,
        model: ModelProto,
        watched: Iterable[str] = (),
        *,
        lean: bool = False,
        options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        self.outputs = tuple(value.name for value in model.graph.output)
        wanted = dict.fromkeys(watched)
        inputs = {value.name for value in model.graph.input}
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._fed = tuple(name for name in wanted if name in inputs)
        self._constants = {name: tensor_array(stored[name]) for name in wanted if name in stored}
        computed = [name for name in wanted if name not in inputs and name not in stored]
        self._fetched = tuple(dict.fromkeys([*self.outputs, *computed]))
        self._seconds = longest_run(model)
        self._light = light_copy(model)
        self._checked_shapes: dict[str, tuple[int, ...]] | None = None
        is_lean = lean and parameter_bytes(model) >= LARGE_MODEL  # sums in another order: small models stay as they are
        extended = with_outputs(model, computed)
        self._session = open_session(extended, NO_SPINNING, lean=is_lean, options=options)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The outputs and the watched tensors, by name.

        Raises:
            CalibrationError: the model rejects these inputs, or does not end.
            ModelError: it would need too much memory for inputs of these shapes.
        """
        self._check_memory(feeds)
        found = run_watched(self._session, self._fetched, feeds, self._seconds)
        return {**found, **{name: feeds[name] for name in self._fed}, **self._constants}

    def _check_memory(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Check the sizes of all tensors, once for every shape of the inputs."""
        shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        if shapes != self._checked_shapes:
            check_sizes_of_run("the model", self._light, shapes, self._fetched)
            self._checked_shapes = shapes


def run_watched(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], seconds: int
) -> dict[str, NDArray[Any]]:
    """Some outputs of a session by name, unless it does not end in so many seconds.

    Raises:
        CalibrationError: the model rejects these inputs, or does not end.
    """
    options = quiet_options()
    watch = RunWatch(options, seconds)
    try:
        with watch:
            results = session.run(list(names), dict(feeds), options)
    except Exception as error:
        reason = watch.reason or f"onnxruntime cannot run the model on this batch: {first_line(error)}"
        raise CalibrationError(reason) from error
    return dict(zip(names, results, strict=True))


def quiet_options() -> onnxruntime.RunOptions:
    """Options of a run that prints nothing: errors are raised."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    return options


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Convert an array to a tensor for the observers; read-only arrays are copied, as torch requires."""
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """The model with further tensors among its outputs; the model itself if they are already."""
    present = {value.name for value in model.graph.output}
    more = [name for name in names if name not in present]
    if not more:
        return model
    extended = ModelProto()
    copy_fields(model, extended, skip={"graph"})
    copy_fields(model.graph, extended.graph, skip=set())
    extended.graph.output.extend(any_value(name) for name in more)
    return extended


class _Session(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session that reads weights where they are in memory, and keeps them.

    Args:
        model: The serialized model, whose weights are references.
        options: Of the session.
        weights: By name.
    """

    def __init__(self, model: bytes, options: onnxruntime.SessionOptions, weights: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = _in_order(weights)
        self._weights = {name: onnxruntime.OrtValue.ortvalue_from_numpy(each) for name, each in self._arrays.items()}
        options.add_external_initializers(list(self._weights), list(self._weights.values()))
        for name, value in self._weights.items():
            options.add_initializer(name, value)  # external ones alone would be copied
        super().__init__(model, options, providers=_PROVIDERS)


class _LeanSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session whose weights are inputs: onnxruntime makes no copy of them.

    Args:
        model: A model with weights beside it.
        options: Of the session.
        weights: By name.
    """

    def __init__(
        self, model: ModelProto, options: onnxruntime.SessionOptions, weights: Mapping[str, NDArray[Any]]
    ) -> None:
        self._arrays = _in_order(weights)
        options.enable_cpu_mem_arena = False  # it would keep the memory of results that were freed
        super().__init__(weights_as_inputs(model).SerializeToString(), options, providers=_PROVIDERS)
        self._takes_values = all(value.type in _PLAIN for value in (*super().get_inputs(), *self.get_outputs()))

    def get_inputs(self) -> list[Any]:
        """The inputs that are no weights."""
        return [value for value in super().get_inputs() if value.name not in self._arrays]

    def run(self, names: list[str], feeds: Mapping[str, NDArray[Any]], options: onnxruntime.RunOptions = None) -> Any:  # noqa: ANN401  as the base class
        """Run the model with its weights.

        Each result is freed as soon as it is copied to an array; the base class copies all before it frees any.
        """
        given = {**feeds, **self._arrays}
        if not self._takes_values:
            return super().run(names, given, options)
        arrays = _in_order(given)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        results = self.run_with_ort_values(names, values, options)
        results.reverse()
        return [results.pop().numpy() for _ in names]


def _in_order(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Arrays in C order, the only one that onnxruntime reads where it is; a transposed matrix is copied."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def open_session(
    model: ModelProto | Path,
    settings: Mapping[str, str] | None = None,
    *,
    threads: int = 0,
    profile: Path | None = None,
    lean: bool = False,
    is_large: bool | None = None,
    options: onnxruntime.SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """Load a model, or the file of one, in onnxruntime on the CPU; nothing is logged.

    Args:
        model: The model; it is not changed. A file may have tensors in files beside it.
        settings: Further settings of the session.
        threads: That compute one operator; 0: one for each core.
        profile: Prefix of the file to which onnxruntime writes the time of each node.
        lean: Whether a large model is loaded without copies of its weights in the order of fast kernels.
        is_large: Whether it counts as large; by default its size tells.
        options: What the session begins with; it is changed.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """
    options = options or onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    size = model.stat().st_size if isinstance(model, Path) else parameter_bytes(model)
    unpacked = lean and (size >= LARGE_MODEL if is_large is None else is_large)
    if unpacked:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.intra_op_num_threads = threads
    for name, value in _all_settings(model, settings, unpacked=unpacked).items():
        options.add_session_config_entry(name, value)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    try:
        if isinstance(model, Path):
            return onnxruntime.InferenceSession(str(model), options, providers=_PROVIDERS)
        kept = kept_arrays(model)
        if kept and lean:
            return _LeanSession(model, options, kept)
        if kept:
            return _Session(model.SerializeToString(), options, kept)
        if size < EXTERNAL_THRESHOLD:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=_PROVIDERS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save_model(path, model)
            return onnxruntime.InferenceSession(str(path), options, providers=_PROVIDERS)
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run the model: {first_line(error)}{_half_converted(error)}") from error
    finally:
        if size >= LARGE_MODEL:  # onnxruntime copies the weights as it loads them
            give_back_freed()


def _half_converted(error: Exception) -> str:
    """What to do about a file in which float16 meets float32, as conversions leave behind that miss a Cast."""
    text = str(error)
    if "Type Error" not in text or "tensor(float16)" not in text or "tensor(float)" not in text:
        return ""
    return " A conversion to float16 is incomplete there: give the float32 file, or convert it anew"


def _all_settings(model: ModelProto | Path, given: Mapping[str, str] | None, *, unpacked: bool) -> dict[str, str]:
    """The settings of a session: what the caller wants, and what spares memory or time."""
    found = dict(given or {})
    if unpacked:
        found |= _NO_PACKED_WEIGHTS
    if not isinstance(model, Path) and len(model.graph.node) >= _DEEP:
        found |= _NO_SHARED_CONSTANTS
    return found


SECONDS_VARIABLE = "AMCT_ONNX_RUN_SECONDS"
"""Environment variable with the longest time of one batch."""
DEFAULT_SECONDS = 600
LOOP_SECONDS = 60
"""The longest time of one batch of a model with a Loop, the only operator that may never end."""
_POLL_SECONDS = 0.1


def longest_run(model: ModelProto | Path) -> int:
    """The seconds that one batch may take; a file is one of ours and is not searched for a Loop.

    Raises:
        ModelError: the environment variable is not a number.
    """
    default = LOOP_SECONDS if not isinstance(model, Path) and _has_loop(model.graph) else DEFAULT_SECONDS
    return min(number_from_environment(SECONDS_VARIABLE, default, "seconds"), int(TIMEOUT_MAX))


def _has_loop(graph: GraphProto) -> bool:
    return any(node.op_type == "Loop" or any(map(_has_loop, subgraphs(node))) for node in graph.node)


class RunWatch:
    """Watches one run while the ``with`` block is active; it ends between two nodes or two repetitions of a Loop.

    Attributes:
        reason: Why the run was stopped, with what to do; empty if it was not.
    """

    def __init__(self, options: RunOptions, seconds: int) -> None:
        self.reason = ""
        self._options, self._seconds = options, seconds
        self._done = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> RunWatch:
        self._limit, self._before = model_limit(), process_bytes()
        self._deadline = time.monotonic() + self._seconds
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(_POLL_SECONDS, self._seconds)):
            if time.monotonic() > self._deadline:
                self._stop(
                    f"the model does not finish one batch in {self._seconds} seconds: does it have a Loop that never "
                    f"ends? If it needs more time, set {SECONDS_VARIABLE}"
                )
            elif process_bytes() - self._before > self._limit:
                self._stop(
                    f"one batch of the model needs more than {gibibytes(self._limit)} of memory: does it have a Loop "
                    f"that never ends? Use a smaller batch; or, if this is intended, set {MODEL_LIMIT_VARIABLE} to a "
                    "larger number of bytes"
                )

    def _stop(self, reason: str) -> None:
        self.reason, self._options.terminate = reason, True
        self._done.set()
