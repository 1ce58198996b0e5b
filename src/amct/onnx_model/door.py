"""The ONNX front door: quantization of a float ONNX model in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from amct.calibration import ALONE
from amct.calibration.ranks import fingerprint
from amct.config.python_config import plan_of
from amct.errors import ArgumentError, ConfigError
from amct.export.deploy import fake_quant_model
from amct.export.onnx.kept_weights import KeptWeights, tensor_array, with_values
from amct.export.onnx.layer import replace_bias, replace_weight
from amct.export.onnx.layer_lookup import find_layers
from amct.export.onnx.messages import model_opset, parameter_bytes
from amct.export.onnx.runtime import Runner, as_tensor
from amct.numerics.observer import TensorRangeObserver
from amct.numerics.settings import AdaRoundSettings
from amct.onnx_model.batches import onnx_batches, sample_count
from amct.onnx_model.calibrating import balance_of, start_calibration
from amct.onnx_model.comparing import Pair, onnx_output
from amct.onnx_model.folding import fold
from amct.onnx_model.layers import find_all_layers, float_weights, put_weights
from amct.onnx_model.reading import input_shape, read_model, with_opset
from amct.pipeline import flow
from amct.pipeline.equalization import check_alone, equalization
from amct.pipeline.preparation import PreparedForOnnx, enabled_layers
from amct.pipeline.weights import quantize_weights
from amct.search.choices import FLOAT, HFMG8, INT4, INT8, INT16, MINMAX8
from amct.search.doctor import diagnose as find_causes
from amct.search.request import SearchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import Tensor
    from typing_extensions import Self, Unpack

    from amct.calibration import Ranks
    from amct.config.plan import Plan
    from amct.config.python_config import AnyConfig
    from amct.export.onnx.layer import OnnxLayer
    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.export.qdq.exporter import TensorPlan
    from amct.numerics.observer import TensorObserver
    from amct.numerics.qparams import LayerQParams
    from amct.onnx_model.batches import Feeds
    from amct.onnx_model.layers import FoundLayers
    from amct.onnx_model.reading import AnyModel, SourceModel
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.door import Calibration, ComparedModel, ModelOutput
    from amct.pipeline.flow import AnyResume, Passes
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.pipeline.weights import QuantizedWeights
    from amct.search.doctor import Diagnosis
    from amct.search.request import SearchOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxPreparation(PreparedForOnnx):
    """A prepared ONNX model.

    Attributes:
        source: The user's model as read.
        found: The layers of the user's model.
        folded: The float model with its batch norms folded.
        onnx_layers: The quantized layers in the folded model.
        kept: The weights of the folded model and of those made of it.
    """

    source: SourceModel
    found: FoundLayers
    folded: ModelProto
    onnx_layers: Mapping[str, OnnxLayer]
    kept: KeptWeights

    def with_weights(self, plan: Plan, weights: Mapping[str, QuantizedWeights]) -> Self:
        """The same folded model with another plan and other quantized weights."""
        onnx_layers = {name: self.onnx_layers[name] for name in weights}
        return replace(self, plan=plan, weights=weights, onnx_layers=onnx_layers)

    @property
    def bindings(self) -> list[LayerBinding]:
        """The bindings of the quantized layers, for the exporters."""
        return [self.found.found[name].binding for name in self.weights]

    @cached_property
    def tensor_plan(self) -> TensorPlan | None:
        """What the fast placement of the QDQ file quantizes beside what layers read; None if it is impossible."""
        is_float32 = all(layer.is_wide_float for layer in self.onnx_layers.values())
        return self.plan_tensors(self.folded, self.bindings, is_float32=is_float32)

    def bias(self, layer: str) -> Tensor | None:
        """The bias of a layer, folded; None: it has none, or one for each gate."""
        found = self.onnx_layers[layer]
        return None if found.bias is None or found.kind.is_recurrent else as_tensor(found.bias)

    def tensor_observers(self) -> dict[str, TensorObserver]:
        """Observers of tensors that only the QDQ file needs: tensors between layers, and layer inputs per channel."""
        if self.tensor_plan is None:
            return {}
        inputs = self.layer_inputs(self.input_tensors())
        observers: dict[str, TensorObserver] = {each.tensor: each.observer() for each in inputs}
        return observers | {name: TensorRangeObserver() for name in self.tensor_plan.observed}

    def input_tensors(self) -> Mapping[str, str]:
        """By layer: the name of its input."""
        return {name: layer.reader.input[0] for name, layer in self.onnx_layers.items()}

    @cached_property
    def exported_model(self) -> ModelProto:
        """The folded model; weights are float, except where the integers do not follow from weight and scale."""
        rounded = [name for name, weights in self.weights.items() if weights.custom_rounding]
        return self.partly_rounded(rounded, self.kept) if rounded else self.folded

    def partly_rounded(self, names: Collection[str], kept: KeptWeights) -> ModelProto:
        """The folded model with the rounded weights of some layers; ``kept`` takes large ones."""
        graph, layers, _ = find_layers(self.folded, self.bindings, kept=kept)
        for layer in layers:
            if layer.name in names:
                put_weights(self.weights[layer.name], graph, layer)
        return graph.build()

    # -- interface of the quantization flow ----------------------------------------------------------------------------

    def start_calibration(self, ranks: Ranks = ALONE) -> Calibration:
        """Start a calibration in onnxruntime with the quantized weights."""
        return start_calibration(self, ranks)

    def simulation(self, layers: Mapping[str, LayerQParams], *, deploy: bool = False) -> ModelProto:
        """The fake-quant model, built from standard operators."""
        if deploy:
            raise ArgumentError("deploy: the deploy model of an ONNX model runs on the chip only; leave it out")
        return with_values(fake_quant_model(self.exported_model, self.bindings, layers).model)

    def runner(self, simulation: ModelProto) -> Callable[[Feeds], dict[str, Any]]:
        """A function that runs the model on a batch and returns the outputs by name."""
        return Runner(simulation).run

    def compared_models(
        self, layers: Mapping[str, LayerQParams], *, deploy: bool = False
    ) -> tuple[ComparedModel, ComparedModel]:
        """The folded float model and the fake-quant one, in onnxruntime."""
        inputs = {
            name: (layer.reader.input[0], self.weights[name].balanced_input) for name, layer in self.onnx_layers.items()
        }
        return Pair.of(self.folded, self.simulation(layers, deploy=deploy)).models(inputs)

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert data to feeds of the model."""
        return onnx_batches(self.source.model, data, inputs)

    def sample_count(self, batch: object, arguments: Feeds) -> int:
        """The size of the first dimension of the first input."""
        del batch
        return sample_count(arguments)

    @property
    def any_batch_size(self) -> bool:
        """Whether the first axis of every input is open."""
        model = self.source.model
        shapes = [input_shape(model, value.name) for value in model.graph.input]
        return all(shape is None or (len(shape) > 0 and not isinstance(shape[0], int)) for shape in shapes)

    def models_to_check(self, layers: Mapping[str, LayerQParams]) -> tuple[ComparedModel | None, ComparedModel | None]:
        """None, unless the exported model holds rounded weights."""
        return (None, None) if self.exported_model is self.folded else self.compared_models(layers)

    def onnx_inputs(self, arguments: Feeds) -> Feeds:
        """The batch itself."""
        return arguments

    def onnx_outputs(self, arrays: Mapping[str, NDArray[Any]]) -> ModelOutput:
        """The outputs by name."""
        return onnx_output(arrays)

    def float_model(self, opset: int | None) -> ModelProto:
        """The folded model in the requested opset, or in its own."""
        return with_opset(self.exported_model, opset if opset is not None else model_opset(self.folded))


class OnnxDoor:
    """Reads a float ONNX model for quantization."""

    def __init__(self, source: SourceModel, *, equalize: bool = False) -> None:
        self._source = source
        self._equalize = equalize
        self._found = find_all_layers(source.model)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the stored tensors."""
        return parameter_bytes(self._source.model)

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert calibration data to feeds of the model."""
        return onnx_batches(self._source.model, data, inputs, name="calibration_data")

    def plan(self, config: AnyConfig, example: Feeds, batches: int | None) -> tuple[Plan, bool]:
        """The plan of a config in the PyTorch dialect."""
        del example
        return plan_of(config, self._found.config_layers(), batches)

    def fingerprint(self) -> str:
        """Of the whole model, part by part: one message of all its bytes would be a copy of its weights."""
        model = self._source.model
        graph = model.graph
        small = [*model.opset_import, *model.functions, *graph.input, *graph.output, *graph.sparse_initializer]
        messages = (part.SerializeToString(deterministic=True) for part in (*small, *graph.node))
        weights = (part for each in graph.initializer for part in (each.name, tensor_array(each)))
        return fingerprint(chain(["equalized"] if self._equalize else [], messages, weights))

    def reads_data_first(self, plan: Plan) -> bool:
        """True with DMQ and equalization, which need the activations of all batches before the weights."""
        return self._equalize or bool(plan.balanced)

    def prepare(self, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> OnnxPreparation:
        """Fold, balance, and quantize the weights.

        Raises:
            ConfigError: The plan has settings that ONNX files do not support.
            CalibrationError: No layer is to be quantized, or weights cannot be quantized; the message names the layer.
        """
        _refuse_adaround(plan)
        chosen = enabled_layers(plan, self._found.found)
        kept = KeptWeights()
        folded = fold(self._source.model, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers, kept=kept)
        if self._equalize:
            bindings = [each.binding for each in self._found.found.values()]
            folded = replace(folded, model=_equalized(folded.model, bindings, plan, data.all(), kept))
        kept.adopt(folded.model)
        # The weights from before the folding are not needed any more, only the inputs and names of the model.
        self._source = replace(self._source, kept=None)
        self._found = self._found.without_weights()
        balance = balance_of(folded.model, plan, data, ranks)
        after = find_all_layers(folded.model).found
        weights = {
            layer.name: quantize_weights(
                layer,
                float_weights(after[layer.name].layer),
                balance=balance.get(layer.name),
                can_pack=after[layer.name].can_pack,
            )
            for layer in chosen
        }
        return OnnxPreparation(
            name=self._source.name,
            plan=plan,
            weights=weights,
            quantizable=tuple(self._found.found),
            unquantizable=self._found.skips,
            folded_layers={layer: (norm,) for layer, norm in folded.fusions.items()},
            unfolded=folded.skips,
            source=self._source,
            found=self._found,
            folded=folded.model,
            onnx_layers={name: after[name].layer for name in weights},
            kept=kept,
        )


def _equalized(
    model: ModelProto, bindings: Sequence[LayerBinding], plan: Plan, feeds: Iterable[Feeds], kept: KeptWeights
) -> ModelProto:
    """The folded model with channels of more equal size; ``kept`` has its large weights.

    Raises:
        ConfigError: The plan balances layers too.
        CalibrationError: There is no data.
    """
    check_alone(plan)
    graph, layers, _ = find_layers(model, bindings, kept=kept)
    one_scale = [layer.name for layer in plan.layers if layer.has_one_scale]
    found = equalization(model, graph, layers, feeds, one_scale=one_scale)
    for layer in layers:
        if layer.name not in found.layers:
            continue
        (source,) = float_weights(layer)
        replace_weight(graph, layer, found.weight(layer.name, source.tensor, source.kind, source.groups).numpy())
        if layer.bias is not None and layer.name in found.divisors:
            divisor = found.divisors[layer.name].numpy()
            replace_bias(graph, layer, (layer.bias / divisor).astype(np.float32))
    return graph.build()


def _refuse_adaround(plan: Plan) -> None:
    learned = [layer.name for layer in plan.enabled if isinstance(layer.weight, AdaRoundSettings)]
    if learned:
        raise ConfigError(
            f'{plan.source}: layer "{learned[0]}": ada_quantize learns in PyTorch and is not possible for an ONNX '
            "file; use arq_quantize, or quantize the PyTorch model"
        )


def quantize(
    model: AnyModel,
    calibration_data: object,
    config: AnyConfig = None,
    *,
    inputs: BatchInputs | None = None,
    resume: AnyResume = None,
    equalize: bool = False,
) -> QuantizedModel:
    """Quantize a float ONNX model: fold batch norms, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that can
    be quantized, all the data. A layer has the name of its node; its type in a config is that of the same layer in
    PyTorch ("Conv2d", "Linear", "AvgPool2d", "LSTM", …).

    Args:
        model: The path of a file, its bytes, or a ModelProto, which is not changed.
        calibration_data: An array, a dict of arrays by input name, or an iterable of batches; see ``onnx_batches``.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), or a ``QuantConfig``.
        inputs: Turns a batch into the model's inputs, for batches in other forms: ``lambda b: b["image"]``.
        resume: A file such as ``out/net.calibration.npz``: what was observed is kept there at most every 30 s, and a
            calibration that was killed goes on from it; it is removed at the end.
        equalize: As for ``amct.pytorch.quantize``: first scale the channels between layers to more equal ranges.

    Raises:
        AmctError: The subclass tells whether model, config, data or files are invalid.
    """
    door = OnnxDoor(read_model(model, keep_weights=True), equalize=equalize)
    return flow.quantize(door, calibration_data, config, inputs, resume)


def quantize_to(
    model: AnyModel,
    calibration_data: object,
    labelled: object = None,
    *,
    config: AnyConfig = None,
    inputs: BatchInputs | None = None,
    equalize: bool = False,
    **options: Unpack[SearchOptions],
) -> QuantizedModel:
    """Quantize an ONNX model to a goal: find the smallest or fastest settings that lose no more than allowed.

    The model is calibrated once. The result meets the goal or is the best that was found; ``certificate`` says which,
    by samples that the search has not used, and ``history`` has everything that was tried.

    Args:
        model: The path of a file, its bytes, or a ModelProto, which is not changed.
        calibration_data: As for ``quantize``.
        labelled: Batches of (inputs, labels), or one such pair; batches of inputs for ``min_agreement`` and
            ``min_sqnr``; nothing with ``evaluate``. Other samples than those of the calibration.
        config: As for ``quantize``, the settings to begin with; layers that it leaves float stay so.
        inputs: As for ``quantize``.
        equalize: As for ``quantize``.
        options: The goal and the limits of the search, see ``SearchOptions``; ``evaluate`` gets a ModelProto.

    Raises:
        AmctError: The subclass tells whether model, config, data, goal or files are invalid.
    """
    request = SearchRequest.of(labelled, options, (FLOAT, INT8, HFMG8, MINMAX8, INT16, INT4))
    door = OnnxDoor(read_model(model, keep_weights=True), equalize=equalize)
    base = flow.quantize(door, calibration_data, config, inputs, others=request.ranges)
    return request.run(base, with_values(read_model(model).model), inputs)


def diagnose(
    model: AnyModel,
    calibration_data: object,
    data: object,
    config: AnyConfig = None,
) -> Diagnosis:
    """Find out why a quantized model is worse than it should be, and what helps.

    The layers to blame are found without labels; remedies are tried on these layers only.

    Args:
        model: the path of a file, its bytes, or a ModelProto.
        calibration_data: as for ``quantize``.
        data: samples as the model will see them, in the same form; the first 16 or so are used.
        config: as for ``quantize``.

    Returns:
        Causes and remedies; its text is a table.

    Raises:
        AmctError: the subclass tells whether model, config or data are invalid.
    """
    return find_causes(partial(quantize, model), calibration_data, data, config)
