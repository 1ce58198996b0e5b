"""The runtimes in which a file can be run and counted: onnxruntime at each level of its optimizations, and OpenVINO.

A file means the same everywhere; what a runtime makes of it does not: it joins operators, chooses kernels, and falls
back to float where it has none for integers. ``onnxruntime-none`` runs each operator as the standard says, so that the
others can be compared with it.
"""

from __future__ import annotations

import importlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnxruntime

from amct.atomic import check_whole
from amct.errors import AmctError, ArgumentError, CalibrationError, ModelError, did_you_mean
from amct.export.formats import save_model
from amct.export.onnx.messages import first_line
from amct.export.onnx.runtime import Runner, open_session, with_outputs

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from onnx import ModelProto

    Arrays = dict[str, NDArray[Any]]

PLAIN, DEFAULT, OPENVINO = "onnxruntime-none", "onnxruntime", "openvino"
_LEVELS = {
    PLAIN: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "onnxruntime-basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "onnxruntime-extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    DEFAULT: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
RUNTIMES = (*_LEVELS, OPENVINO)

INTEGER_KERNELS = frozenset(
    {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"}
)
FLOAT_KERNELS = frozenset({"Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "NhwcFusedConv"})
"""Names of onnxruntime; ConvTranspose and recurrent layers are not counted."""
_OPENVINO_KERNELS = frozenset({"Convolution", "FullyConnected", "MatMul"})
_OPENVINO_INTEGERS = frozenset({"i8", "u8"})


class Loaded(Protocol):
    """A model in a runtime."""

    outputs: tuple[str, ...]

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """The outputs and the watched tensors, by name."""


@dataclass(frozen=True)
class KernelCount:
    """What a runtime makes of a model, by the runtime's own names of operators."""

    operators: Counter[str] = field(default_factory=Counter)
    integer_operators: Counter[str] = field(default_factory=Counter)

    @property
    def integer(self) -> int:
        """How many convolutions and matrix products run in integers."""
        return sum(self.integer_operators.values())

    @property
    def total(self) -> int:
        """How many convolutions and matrix products there are."""
        names = INTEGER_KERNELS | FLOAT_KERNELS | _OPENVINO_KERNELS
        return sum(count for name, count in self.operators.items() if name in names)

    @property
    def share(self) -> float:
        """``integer / total``; 1 when there is nothing to count."""
        return self.integer / self.total if self.total else 1.0


def check_runtime(name: str) -> str:
    """Check the name of a runtime, and that its package is there; return the name.

    Raises:
        ArgumentError: there is no such runtime.
        AmctError: its package is not installed.
    """
    if name not in RUNTIMES:
        raise ArgumentError(f'runtime: expected {", ".join(RUNTIMES)}, got "{name}".{did_you_mean(name, RUNTIMES)}')
    if name == OPENVINO:
        _openvino()
    return name


def load(model: ModelProto, runtime: str, watched: Iterable[str] = ()) -> Loaded:
    """A model in a runtime, with further tensors among what a run returns.

    Raises:
        AmctError: there is no such runtime, or it is not installed.
        ModelError: it cannot load the model.
    """
    check_runtime(runtime)
    return _OpenVino(model, watched) if runtime == OPENVINO else Runner(model, watched, options=_options(runtime))


def count_integer_kernels(path: str | os.PathLike[str], runtime: str = DEFAULT) -> KernelCount:
    """Let a runtime load and optimize a file for this CPU, and count what it will run.

    Raises:
        FileError: the file is part of an interrupted save.
        AmctError: there is no such runtime, or it is not installed.
        ModelError: it cannot load the file.
    """
    check_whole(path)
    check_runtime(runtime)
    if runtime == OPENVINO:
        return _compiled_kernels(_compiled(Path(path)))
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = _options(runtime)
        options.optimized_model_filepath = str(optimized)
        open_session(Path(path), options=options)
        model = onnx.load(str(optimized), load_external_data=False)
    operators = Counter(node.op_type for node in model.graph.node)
    return KernelCount(operators, Counter({name: operators[name] for name in INTEGER_KERNELS & operators.keys()}))


def _options(runtime: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = _LEVELS[runtime]
    return options


# -- OpenVINO ----------------------------------------------------------------------------------------------------------


def _openvino() -> Any:  # noqa: ANN401  a package without types
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise AmctError(
            "runtime openvino needs the openvino package, which is not installed: pip install amct[bench]"
        ) from error


def _compiled(path: Path) -> Any:  # noqa: ANN401  of a package without types
    """A file compiled for this CPU; sums and what is left in float are float32, as on any CPU, not bfloat16."""
    openvino = _openvino()
    try:
        return openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except Exception as error:
        raise ModelError(f"OpenVINO cannot load the model: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What OpenVINO complains of, which stands behind the places in its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check ", "FrontEnd API"))]
    return told[-1] if told else first_line(error)


class _OpenVino:
    """A model in OpenVINO."""

    def __init__(self, model: ModelProto, watched: Iterable[str]) -> None:
        self.outputs = tuple(value.name for value in model.graph.output)
        inputs = {value.name for value in model.graph.input}
        names = dict.fromkeys(watched)
        self._fed = tuple(name for name in names if name in inputs)
        self._fetched = tuple(dict.fromkeys([*self.outputs, *(name for name in names if name not in inputs)]))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save_model(path, with_outputs(model, [name for name in self._fetched if name not in self.outputs]))
            self._model = _compiled(path)
        self._takes = {name: port for port in self._model.inputs for name in port.get_names()}

    @cached_property
    def _ports(self) -> dict[str, Any]:
        return {name: port for port in self._model.outputs for name in port.get_names()}

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """The outputs and the watched tensors, by name.

        Raises:
            CalibrationError: the model rejects these inputs.
        """
        try:
            found = self._model({self._takes[name]: value for name, value in feeds.items() if name in self._takes})
        except Exception as error:
            raise CalibrationError(f"OpenVINO cannot run the model on this batch: {_reason(error)}") from error
        values = {name: np.array(found[self._ports[name]]) for name in self._fetched}
        return {**values, **{name: np.asarray(feeds[name]) for name in self._fed}}


def _compiled_kernels(model: Any) -> KernelCount:  # noqa: ANN401  of a package without types
    operators: Counter[str] = Counter()
    integers: Counter[str] = Counter()
    for node in model.get_runtime_model().get_ordered_ops():
        told = node.get_rt_info()
        kind, precision = (str(told[key].astype(str)) for key in ("layerType", "runtimePrecision"))
        operators[kind] += 1
        if kind in _OPENVINO_KERNELS and precision in _OPENVINO_INTEGERS:
            integers[kind] += 1
    return KernelCount(operators, integers)
