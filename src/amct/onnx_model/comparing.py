"""Runs two ONNX models side by side in onnxruntime and compares the outputs of their layers.

Layers are matched by tensor names, which quantization keeps. Where a batch norm was folded, the layer is compared with
the output of the batch norm. One batch at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from amct.errors import ModelError
from amct.export.formats import layer_outputs, rescaled_layers
from amct.export.onnx.graph import OnnxGraph
from amct.export.onnx.runtime import as_tensor
from amct.export.onnx.runtimes import DEFAULT, PLAIN, check_runtime, load
from amct.model.operators import BATCH_NORM
from amct.onnx_model.batches import onnx_batches
from amct.onnx_model.layers import find_all_layers
from amct.onnx_model.reading import AnyModel, read_model
from amct.pipeline import compare as flow_compare
from amct.pipeline.door import ModelOutput
from amct.pipeline.quantized_model import QuantizedModel
from amct.report.filling import input_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from amct.export.onnx.layer import OnnxLayer
    from amct.numerics.similarity import LayerComparison
    from amct.onnx_model.batches import Feeds
    from amct.pipeline.batches import BatchInputs
    from amct.pipeline.door import OnTensor
    from amct.report.measuring import Measured


def compare(
    float_model: AnyModel,
    quantized_model: AnyModel | QuantizedModel,
    data: object,
    *,
    inputs: BatchInputs | None = None,
    runtime: str | None = None,
) -> list[LayerComparison]:
    """Run both models on data and compare the outputs of their layers, in execution order.

    Args:
        float_model: the original: a path, the bytes of a file or a ModelProto.
        quantized_model: its QDQ or fake-quant form likewise, or the result of ``quantize``; files of other tools
            work if they keep tensor names.
        data: an array, a dict of arrays by input name, or an iterable of batches, as for ``quantize``.
        inputs: as for ``quantize``.
        runtime: what runs the quantized model: "onnxruntime" (the default), with fewer optimizations
            "onnxruntime-extended", "onnxruntime-basic" or "onnxruntime-none", or "openvino".

    Raises:
        FileError, ParseError: a file cannot be read.
        ModelError: the models have no layer in common, or one cannot be run (a deploy file).
        ArgumentError: the outputs of a layer have different shapes, or the data does not fit the model.
        CalibrationError: there is no data.
    """
    measured = measure(float_model, quantized_model, data, inputs=inputs, runtime=runtime)
    if not measured.layers:
        raise ModelError(
            "float_model and quantized_model must have layers in common, with the same tensor names; "
            "compare a file with the float file that it was made of"
        )
    return list(measured.layers.values())


def measure(
    float_model: AnyModel,
    quantized_model: AnyModel | QuantizedModel,
    data: object,
    *,
    inputs: BatchInputs | None = None,
    runtime: str | None = None,
) -> Measured:
    """As ``compare``, including the model outputs; without common layers only the outputs are compared.

    Raises:
        ModelError: inputs and outputs do not correspond, or a model cannot be run.
    """
    reference = read_model(float_model, "float_model").model
    given = quantized_model.model if isinstance(quantized_model, QuantizedModel) else quantized_model
    other = read_model(given, "quantized_model", allow_quantized=True).model
    pair = Pair.of(reference, other)
    batches = onnx_batches(reference, data, inputs)
    batches.first()  # fails before the models are loaded if data is missing or does not fit
    return flow_compare.measure(*pair.models(runtime=runtime), batches.with_originals())


def measure_runtime(file: AnyModel, data: object, runtime: str, *, inputs: BatchInputs | None = None) -> Measured:
    """Run one file in a runtime and, operator by operator, in onnxruntime without optimizations.

    Instead of layers, the tensors that the file quantizes are compared, in the order of execution; runtimes compute
    them in integers also while they are watched. Of a file without any, the outputs of its layers are compared.

    Raises:
        FileError, ParseError: the file cannot be read.
        ModelError: a runtime cannot run it.
        AmctError: there is no such runtime, or it is not installed.
        ArgumentError, CalibrationError: the data does not fit the model.
    """
    model = read_model(file, "model", allow_quantized=True).model
    batches = onnx_batches(model, data, inputs)
    batches.first()  # as above
    names = [value.name for value in model.graph.input], [value.name for value in model.graph.output]
    integers = _quantized_tensors(model)
    layers = {name: tensor for tensor, (name, _) in integers.items()}
    plain = OnnxRun(
        model=model,
        feeds={name: name for name in names[0]},
        outputs={name: name for name in names[1]},
        layers=layers or {name: tensors[0] for name, tensors in common_layers(model, model).items()},
        inputs={},
        zeros={tensor: zero for tensor, (_, zero) in integers.items()},
        runtime=PLAIN,
    )
    return flow_compare.measure(plain, replace(plain, runtime=check_runtime(runtime)), batches.with_originals())


def _quantized_tensors(model: ModelProto) -> dict[str, tuple[str, NDArray[Any]]]:
    """By tensor of integers: the float tensor that it holds, and the integer that stands for 0."""
    graph = OnnxGraph(model)
    found = {}
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear" and graph.constant(node.input[0]) is None:
            zero = graph.constant(node.input[2]) if len(node.input) > 2 else None
            if zero is None or zero.size == 1:
                found[node.output[0]] = node.input[0], np.zeros(1) if zero is None else zero.astype(np.float64)
    return found


WatchedInputs = Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]
"""By layer: the tensor of its quantized input in the float model, and what divides it by balance factors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxRun:
    """One of two compared models in onnxruntime; names are those of the float model.

    Attributes:
        model: The model.
        feeds: By input of the float model: the input of this model.
        outputs: By output of the float model: the output of this model.
        layers: By layer: the tensor with its output.
        inputs: The layer inputs that can be observed.
        zeros: By tensor of integers: the integer that stands for 0.
        runtime: What runs the model; its outputs are then those of the model as it is, without watched tensors.
    """

    shapes_vary: ClassVar[bool] = False
    model: ModelProto
    feeds: Mapping[str, str]
    outputs: Mapping[str, str]
    layers: Mapping[str, str]
    inputs: WatchedInputs
    zeros: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    runtime: str | None = None

    @contextmanager
    def watch(
        self, *, outputs: OnTensor | None = None, inputs: OnTensor | None = None
    ) -> Iterator[Callable[[Feeds], ModelOutput]]:
        """A context whose value is a function that runs the model on one batch."""
        watched = self.inputs if inputs is not None else {}
        layers = self.layers if outputs is not None else {}
        tensors = [*(tensor for tensor, _ in watched.values()), *layers.values()]
        runner = load(self.model, self.runtime or DEFAULT, tensors)
        whole = load(self.model, self.runtime) if self.runtime and tensors else None

        def run(feeds: Feeds) -> ModelOutput:
            given = {self.feeds[name]: value for name, value in feeds.items()}
            values = runner.run(given)
            for layer, tensor in layers.items():
                assert outputs is not None
                outputs(layer, as_tensor(self._number(tensor, values[tensor])))
            for layer, (tensor, balanced) in watched.items():
                assert inputs is not None
                inputs(input_key(layer), balanced(as_tensor(values[tensor])))
            results = values if whole is None else whole.run(given)
            return onnx_output({name: results[own] for name, own in self.outputs.items()})

        yield run

    def _number(self, tensor: str, values: NDArray[Any]) -> NDArray[Any]:
        """The values of a tensor; integers in steps from 0."""
        return values - self.zeros[tensor] if tensor in self.zeros else values


def onnx_output(arrays: Mapping[str, NDArray[Any]]) -> ModelOutput:
    """The outputs of a model by name; a metric gets the only one of them as it is."""
    value = next(iter(arrays.values())) if len(arrays) == 1 else dict(arrays)
    floats = [(name, as_tensor(array)) for name, array in arrays.items() if array.dtype.kind == "f"]
    return ModelOutput(value=value, tensors=floats)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two models whose inputs, outputs and layers correspond.

    Attributes:
        reference: The float model.
        other: The model compared with it.
        inputs: By input of the reference: the input of the other model.
        outputs: By output of the reference: the output of the other model.
        layers: By layer: the tensor in the reference and that in the other.
    """

    reference: ModelProto
    other: ModelProto
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    layers: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, reference: ModelProto, other: ModelProto) -> Pair:
        """Match inputs, outputs and layers of two models.

        Raises:
            ModelError: the models do not have the same inputs and outputs.
        """
        sides = [(model.graph.input, model.graph.output) for model in (reference, other)]
        inputs, outputs = (
            _matched(what, [value.name for value in own], [value.name for value in others])
            for what, own, others in zip(("inputs", "outputs"), *sides, strict=True)
        )
        return cls(
            reference=reference, other=other, inputs=inputs, outputs=outputs, layers=common_layers(reference, other)
        )

    def models(self, inputs: WatchedInputs | None = None, *, runtime: str | None = None) -> tuple[OnnxRun, OnnxRun]:
        """Both models, ready to be compared.

        Args:
            inputs: The layer inputs of the reference to observe.
            runtime: What runs the other model.
        """
        own = OnnxRun(
            model=self.reference,
            feeds={name: name for name in self.inputs},
            outputs={name: name for name in self.outputs},
            layers={name: tensors[0] for name, tensors in self.layers.items()},
            inputs=inputs or {},
        )
        other = OnnxRun(
            model=self.other,
            feeds=self.inputs,
            outputs=self.outputs,
            layers={name: tensors[1] for name, tensors in self.layers.items()},
            inputs={},
            runtime=None if runtime is None else check_runtime(runtime),
        )
        return own, other


def _matched(what: str, own: list[str], others: list[str]) -> dict[str, str]:
    if set(own) == set(others):
        return {name: name for name in own}
    if len(own) != len(others):
        raise ModelError(
            f"float_model and quantized_model must have the same {what}, got {', '.join(own)} and {', '.join(others)}"
        )
    return dict(zip(own, others, strict=True))


def common_layers(reference: ModelProto, other: ModelProto) -> dict[str, tuple[str, str]]:
    """The layers of the float model whose output also exists in the other model, with the tensor in each."""
    own, theirs = OnnxGraph(reference), OnnxGraph(other)
    rescaled, outputs = rescaled_layers(other), layer_outputs(other)
    found = {}
    for name, layer in find_all_layers(reference).found.items():
        if name in rescaled:
            continue
        tensor = next(filter(None, (_compared(own, theirs, result) for result in _results(layer.layer))), None)
        if tensor is not None:
            found[name] = (tensor, outputs.get(name, tensor))
    return found


def _results(layer: OnnxLayer) -> list[str]:
    """The tensors that can be compared as a layer's output, the preferred first; a recurrent layer has several."""
    return [name for name in layer.node.output if name] if layer.kind.is_recurrent else [layer.output]


def _compared(own: OnnxGraph, theirs: OnnxGraph, tensor: str) -> str | None:
    """The tensor of the float model to compare: the output of the batch norm if the other model has it folded."""
    norm = _sole_norm(own, tensor)
    if norm is None or _is_norm(theirs.producer(norm.output[0])):
        return tensor if theirs.producer(tensor) is not None else None
    if theirs.producer(tensor) is not None:  # folded, but the tensor kept its name: its values differ
        return None
    return norm.output[0] if theirs.producer(norm.output[0]) is not None else None


def _sole_norm(graph: OnnxGraph, tensor: str) -> NodeProto | None:
    user = graph.only_consumer(tensor)
    return user if _is_norm(user) else None


def _is_norm(node: NodeProto | None) -> bool:
    return node is not None and node.op_type == BATCH_NORM
