"""The Caffe front door: quantization of a Caffe model in one call."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from amct import log
from amct.arguments import input_files
from amct.caffe.comparing import compared_nets, watched_layers
from amct.caffe.engine.messages import located_in
from amct.caffe.model import (
    FEEDFORWARD_TYPES,
    CaffeModel,
    caffe_batches,
    input_blobs,
    inputs_by_name,
    read_model,
    run_net,
    sample_count,
)
from amct.caffe.onnx.graph import DEFAULT_OPSET, NetOnnx, float_onnx
from amct.caffe.onnx.quant import export_net, qdq_observers
from amct.caffe.prototxt import layer_infos
from amct.caffe.ptq.blocks import parts_of
from amct.caffe.ptq.deploy import Results
from amct.caffe.ptq.equalization import divide_channels, equalization_proposal, find_factors
from amct.caffe.ptq.graph import QuantGraph, caffe_record, calibrated_layers, start_calibration
from amct.caffe.ptq.save import CaffeFiles, SaveNotes
from amct.caffe.reporting import caffe_network, fused_notes, report_layers
from amct.calibration import ALONE
from amct.calibration.ranks import fingerprint
from amct.config.layers import CAFFE_TYPES
from amct.config.ptq.caffe import CAFFE
from amct.config.python_config import plan_of
from amct.errors import ConfigError, ExportError
from amct.export.formats import ExportedModel
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.runtime import as_tensor
from amct.export.request import ExportOptions, Placement, Target
from amct.pipeline import flow
from amct.pipeline.blocks.reconstruction import refinement
from amct.pipeline.door import Calibration, LayerFreedom, ModelOutput
from amct.pipeline.weights import QuantizedWeights, with_bits
from amct.search.choices import FLOAT, INT4, INT8, INT12, INT16, MINMAX8
from amct.search.doctor import diagnose as find_causes
from amct.search.request import SearchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt
    from onnx import ModelProto
    from torch import Tensor
    from typing_extensions import Unpack

    from amct.atomic import AnyPath
    from amct.caffe.engine.net import Net
    from amct.caffe.model import Batch
    from amct.calibration import CalibrationResult, Ranks
    from amct.config.plan import LayerPlan, Plan
    from amct.config.python_config import AnyConfig
    from amct.export.check.losses import Reference
    from amct.export.request import SaveRequest
    from amct.model import Skip
    from amct.numerics.qparams import LayerQParams, Observed
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.blocks.reconstruction import AdaRoundMode, Reconstruct
    from amct.pipeline.blocks.regions import Parts
    from amct.pipeline.door import ComparedModel
    from amct.pipeline.flow import AnyResume, Passes
    from amct.pipeline.quantized_model import QuantizedModel
    from amct.record import CaffeRecord
    from amct.report.content import LayerNote
    from amct.report.filling import ReportLayer
    from amct.report.network import Network
    from amct.search.doctor import Diagnosis
    from amct.search.request import SearchOptions

logger = logging.getLogger(__name__)


@log.screen_only()
def quantize(  # noqa: PLR0913  most of them are optional
    model: AnyPath,
    weights: AnyPath,
    calibration_data: object,
    config: AnyConfig = None,
    *,
    inputs: BatchInputs | None = None,
    equalize: bool = False,
    custom_proto: AnyPath | None = None,
    resume: AnyResume = None,
    adaround: AdaRoundMode | None = None,
    reconstruct: Reconstruct | None = None,
    reconstruct_seconds: float | None = None,
) -> QuantizedModel:
    """Quantize a Caffe model: fold BatchNorm, Scale and Bias, quantize weights, find the ranges of activations.

    Without a config: IFMR with offset for activations, ARQ per output channel for weights, 8 bits, every layer that is
    on by default, all the data.

    Args:
        model: The prototxt.
        weights: The caffemodel.
        calibration_data: An array, or batches: arrays, dicts of arrays by input name, or tuples of arrays followed by
            labels. Every batch is used, unless the config sets a number.
        config: A simple config (``.cfg``), a full config (``.json``, or its content as a dict), or a ``QuantConfig``.
        inputs: Turns a batch into the net's inputs; needed when the batch is not in one of the standard forms.
        equalize: First scale the channels between layers to more equal ranges, in an extra pass over the data: 8-bit
            quantization then loses less, most of all in nets with depthwise convolutions. The record belongs to
            the equalized float model, which ``save`` writes too.
        custom_proto: A ``custom.proto`` with messages of your own layers.
        resume: A file such as ``out/net.calibration.npz``: what was observed is kept there at most every 30 s, and a
            calibration that was killed goes on from it; it is removed at the end.
        adaround: after calibration learn for each weight of a convolution or product which of its two neighbours on the
            grid (of 256 values, or of the 16 of SNQ) it is rounded to: "plain" by forwards as AMCT does for PyTorch,
            "fast" from the Gram matrix of the layer's input.
        reconstruct: "blocks": after calibration learn so, without labels, how the weights of each block are rounded
            and its biases, so that the block computes what it does in the float model. Takes the place of AdaRound. The
            same data give the same bytes.
        reconstruct_seconds: About how long that may take, by the clock; how far it gets then depends on the machine.

    Raises:
        FileError, ParseError, ModelError, ConfigError: A file cannot be read or is invalid.
        CalibrationError: There is too little data, or it cannot be used.
        ArgumentError: ``reconstruct`` or its seconds cannot be used.
    """
    refine = refinement(reconstruct, reconstruct_seconds, adaround)
    input_files(model=model, weights=weights)
    with located_in(model):
        learns = "blocks" if reconstruct else adaround or ""
        door = CaffeDoor(read_model(model, weights, custom_proto), equalize=equalize, learns=learns)
        return flow.quantize(door, calibration_data, config, inputs, resume, refine=refine)


@log.screen_only()
def quantize_to(  # noqa: PLR0913  most of them are optional
    model: AnyPath,
    weights: AnyPath,
    calibration_data: object,
    labelled: object = None,
    *,
    config: AnyConfig = None,
    inputs: BatchInputs | None = None,
    equalize: bool = False,
    custom_proto: AnyPath | None = None,
    **options: Unpack[SearchOptions],
) -> QuantizedModel:
    """Quantize a Caffe model to a goal: find the smallest or fastest settings that lose no more than allowed.

    The model is calibrated once. The result meets the goal or is the best that was found; ``certificate`` says which,
    by samples that the search has not used, and ``history`` has everything that was tried.

    Args:
        model: The prototxt.
        weights: The caffemodel.
        calibration_data: As for ``quantize``.
        labelled: Batches of (inputs, labels), or one such pair; batches of inputs for ``min_agreement`` and
            ``min_sqnr``; nothing with ``evaluate``. Other samples than those of the calibration.
        config: As for ``quantize``, the settings to begin with; layers that it leaves float stay so.
        inputs: As for ``quantize``.
        equalize: As for ``quantize``.
        custom_proto: As for ``quantize``.
        options: The goal and the limits of the search, see ``SearchOptions``; ``evaluate`` gets a net of our engine.

    Raises:
        AmctError: The subclass tells whether files, config, data or goal are invalid.
    """
    request = SearchRequest.of(labelled, options, (FLOAT, INT8, MINMAX8, INT12, INT16, INT4))
    input_files(model=model, weights=weights)
    with located_in(model):
        door = CaffeDoor(read_model(model, weights, custom_proto), equalize=equalize)
        base = flow.quantize(door, calibration_data, config, inputs, others=request.ranges)
        net = read_model(model, weights, custom_proto).build(())
        return request.run(base, net, inputs)


def diagnose(
    model: AnyPath,
    weights: AnyPath,
    calibration_data: object,
    data: object,
    config: AnyConfig = None,
) -> Diagnosis:
    """Find out why a quantized model is worse than it should be, and what helps.

    The layers to blame are found without labels; remedies are tried on these layers only.

    Args:
        model: the prototxt.
        weights: the caffemodel.
        calibration_data: as for ``quantize``.
        data: samples as the model will see them, in the same form; the first 16 or so are used.
        config: as for ``quantize``.

    Returns:
        Causes and remedies; its text is a table.

    Raises:
        AmctError: the subclass tells whether model, config or data are invalid.
    """
    return find_causes(partial(quantize, model, weights), calibration_data, data, config)


class CaffePreparation:
    """A folded Caffe model with quantized weights.

    Attributes:
        graph: The model, its plan and its integer weights.
    """

    def __init__(self, graph: QuantGraph) -> None:
        self.graph = graph
        self.plan = graph.plan
        self._results: Results | None = None

    @property
    def name(self) -> str:
        """The net's name."""
        return self.graph.model.net.name or "net"

    @property
    def layers(self) -> tuple[str, ...]:
        """The quantized layers, in model order."""
        return tuple(self.graph.plans())

    @property
    def folded_layers(self) -> Mapping[str, list[str]]:
        """By layer: the layers of the original model that were folded into it."""
        folded = self.graph.fusion.folded
        return {head: others for head, names in folded.items() if (others := [name for name in names if name != head])}

    @property
    def fused_notes(self) -> tuple[LayerNote, ...]:
        """A note for each folded layer."""
        return tuple(fused_notes(self.graph.fusion.folded, self.graph.fusion.accelerated))

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every layer that stays float and every layer that was not folded, with the reason."""
        return SaveNotes.of(self.graph).skipped

    def start_calibration(self, ranks: Ranks = ALONE) -> Calibration:
        """Start a calibration by the IFMR layers of a copy of the net."""
        graph = self.graph
        return start_calibration(graph, qdq_observers(self.onnx_form, graph.plans()), ranks)

    @cached_property
    def onnx_form(self) -> NetOnnx | ExportError:
        """The folded float net as ONNX in the default opset, or the error that prevents it."""
        try:
            return float_onnx(self.graph.model.build(), kept=KeptWeights())
        except ExportError as error:
            return error

    def quantized_layers(self, result: CalibrationResult) -> Mapping[str, LayerQParams]:
        """The final parameters; a weight scale may have been increased so that the bias fits int32."""
        return self._finished(calibrated_layers(self.graph, result)).layers

    def freedom(self) -> dict[str, LayerFreedom]:
        """By quantized layer: what it could become instead."""
        found = {}
        for name, plan in self.graph.plans().items():
            weights = self.graph.weights.get(name)
            values = 0 if weights is None else sum(source.tensor.numel() for source in weights.sources)
            can_cluster = weights is not None and CAFFE_TYPES[plan.type].snq
            found[name] = LayerFreedom(values=values, can_pack=can_cluster, clustered=True, wide=True)
        return found

    def variant(
        self,
        plan: Plan,
        layers: Mapping[str, LayerQParams],
        learned: Mapping[str, QuantizedWeights] = MappingProxyType({}),
    ) -> tuple[CaffePreparation, Mapping[str, LayerQParams]]:
        """The same calibrated model with other layers, weights or bits, and the parameters of its layers."""
        del learned
        graph = self.graph.with_plan(plan)
        inputs = {
            name: replace(layers[name], inputs=with_bits(layers[name].inputs, each))
            for name, each in graph.plans().items()
        }
        made = CaffePreparation(graph)
        return made, made._finished(inputs).layers

    # -- learning by blocks --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Mapping[str, QuantizedWeights]:
        """The quantized weights by layer, also of layers that have none."""
        return {name: self.graph.weights.get(name, QuantizedWeights()) for name in self.layers}

    @property
    def layer_plans(self) -> list[LayerPlan]:
        """The plans of the quantized layers."""
        return list(self.graph.plans().values())

    def bias(self, layer: str) -> Tensor | None:
        """The folded bias of a convolution or product, if it has one."""
        blobs = self.graph.model.weights.get(layer, [])
        return blobs[1] if len(blobs) > 1 and self.graph.model.layer(layer).type in FEEDFORWARD_TYPES else None

    def parts(self) -> Parts:
        """The folded net in parts."""
        return parts_of(self.graph)

    def float_outputs(self, arguments: Batch) -> list[Tensor]:
        """What the folded float net returns."""
        return [as_tensor(array) for array in run_net(self.graph.model.build(()), arguments).values()]

    def with_learned(
        self, weights: Mapping[str, QuantizedWeights], layers: Mapping[str, LayerQParams]
    ) -> tuple[CaffePreparation, Mapping[str, LayerQParams]]:
        """The model with learned weights, and the parameters of its layers."""
        own = {name: each for name, each in weights.items() if each.weights}
        made = CaffePreparation(replace(self.graph, weights=own))
        return made, made._finished(layers).layers

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """A full config that gives this plan."""
        return CAFFE.config_of(plan)

    def record_of(self, layers: Mapping[str, LayerQParams]) -> CaffeRecord:
        """The parameters as a record."""
        return caffe_record(layers)

    def _finished(self, layers: Mapping[str, LayerQParams]) -> Results:
        if self._results is None or self._results.layers is not layers:
            self._results = Results(self.graph.model, self.graph.weights, layers)
        return self._results

    def caffe_model(self, layers: Mapping[str, LayerQParams], *, deploy: bool = False) -> CaffeModel:
        """The fake-quant or deploy model."""
        results = self._finished(layers)
        return (results.deploy() if deploy else results.fake_quant()).model

    def simulation(self, layers: Mapping[str, LayerQParams], *, deploy: bool = False) -> Net:
        """A net that runs the fake-quant model, or the deploy model in integer arithmetic."""
        return self.caffe_model(layers, deploy=deploy).build(())

    def runner(self, simulation: Net) -> Callable[[Batch], dict[str, Any]]:
        """A function that runs the net on a batch and returns the outputs by name."""
        return lambda batch: run_net(simulation, batch)

    def compared_models(
        self, layers: Mapping[str, LayerQParams], *, deploy: bool = False
    ) -> tuple[ComparedModel, ComparedModel]:
        """The folded float net and the quantized one."""
        return compared_nets(self.graph.model, self.caffe_model(layers, deploy=deploy))

    def models_to_check(self, layers: Mapping[str, LayerQParams]) -> tuple[ComparedModel, None]:
        """The float net: the fake-quant pair is the simulation, if it is written."""
        return self.compared_models(layers)[0], None

    def output_tensors(self, layers: Mapping[str, LayerQParams]) -> dict[str, tuple[str, ...]]:
        """By layer: its output blobs, whose tensors have their names."""
        return {layer.name: layer.outputs for layer in watched_layers(self.caffe_model(layers).net)}

    def report_layers(self, layers: Mapping[str, LayerQParams]) -> list[ReportLayer]:
        """The report entry of each quantized layer."""
        bits = {name: qparams.weight.bits for name, qparams in layers.items() if qparams.weights}
        return report_layers(self.caffe_model(layers).net, self.graph.model.weights, bits)

    def with_only(self, layers: Mapping[str, LayerQParams], names: Collection[str]) -> ExportedModel:
        """The folded float net as ONNX with just some layers quantized, by standard operators."""
        rounded = self._finished(layers).float_model(rounded=FEEDFORWARD_TYPES)
        weights = {name: (rounded if name in names else self.graph.model).weights[name] for name in rounded.weights}
        form = float_onnx(CaffeModel(self.graph.model.net, weights).build(), kept=KeptWeights())
        options = ExportOptions(placement=Placement.EXACT.value, target=Target.EXACT8.value)
        found = export_net("qdq", form, {name: layers[name] for name in names}, options=options)
        assert isinstance(found, ExportedModel)
        return found

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert data to batches of the net."""
        return caffe_batches(data, inputs)

    simulation_batches = batches

    def sample_count(self, batch: object, arguments: Batch) -> int:
        """The size of the first dimension of the first input."""
        del batch
        return sample_count(arguments)

    deploy_file = "deploy_model.prototxt"
    any_batch_size = False  # a Reshape or a recurrent layer may need the sizes of the batch as they are

    def onnx_inputs(self, arguments: Batch) -> dict[str, npt.NDArray[Any]]:
        """The batch by the names of the input blobs."""
        return inputs_by_name(input_blobs(self.graph.model), arguments)

    def onnx_outputs(self, arrays: Mapping[str, npt.NDArray[Any]]) -> ModelOutput:
        """The outputs by the names of their blobs."""
        return ModelOutput(value=dict(arrays), tensors=[(name, as_tensor(array)) for name, array in arrays.items()])

    def network(self, integer_tensors: Collection[str] = ()) -> Network:
        """The folded net as a graph for the report."""
        return caffe_network(self.graph.model.net, self.layers, integer_tensors)

    def files(
        self,
        request: SaveRequest,
        layers: Mapping[str, LayerQParams],
        tensors: Mapping[str, Observed] | None,
        reference: Reference | None,
    ) -> CaffeFiles:
        """The model as files."""
        results, notes = self._finished(layers), SaveNotes.of(self.graph)
        form = None if isinstance(self.onnx_form, ExportError) else self.onnx_form
        files = CaffeFiles(request, results, notes, tensors=tensors, reference=reference, form=form)
        if not self.graph.equalized:
            files.propose = lambda compared: equalization_proposal(self.graph, compared)
        return files

    def float_model(self, opset: int | None) -> ModelProto:
        """The folded net as ONNX."""
        if opset not in (None, DEFAULT_OPSET):
            return float_onnx(self.graph.model.build(), opset=opset).model
        if isinstance(self.onnx_form, ExportError):
            raise self.onnx_form
        return self.onnx_form.model


class CaffeDoor:
    """Reads a Caffe model for quantization."""

    def __init__(self, original: CaffeModel, *, equalize: bool, learns: str = "") -> None:
        self._original = original
        self._equalize = equalize
        self._learns = learns

    @property
    def weight_bytes(self) -> int:
        """The bytes of the blobs."""
        return sum(blob.nbytes for blobs in self._original.weights.values() for blob in blobs)

    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Convert calibration data to batches of the net."""
        return caffe_batches(data, inputs, name="calibration_data")

    def plan(self, config: AnyConfig, example: Batch, batches: int | None) -> tuple[Plan, bool]:
        """The plan of a config in the Caffe dialect."""
        del example
        plan, open_ended = plan_of(config, layer_infos(self._original.net), batches, CAFFE)
        for warning in plan.warnings:
            logger.warning("%s", warning)
        if plan.update_bn is not None:
            raise ConfigError(
                "quantize: update_bn needs two rounds of data; use init, weights_quantize_model and so on"
            )
        return plan, open_ended

    def fingerprint(self) -> str:
        """Of the net and all its blobs."""
        blobs = [part for name, tensors in self._original.weights.items() for part in (name, *tensors)]
        net = self._original.net.SerializeToString(deterministic=True)
        return fingerprint(["equalized" if self._equalize else "", self._learns, net, *blobs])

    def reads_data_first(self, plan: Plan) -> bool:
        """True with equalization, which needs the activations of all batches before the weights are quantized."""
        del plan
        return self._equalize

    def prepare(self, plan: Plan, data: Passes, ranks: Ranks = ALONE) -> CaffePreparation:
        """Fold, equalize by all batches in every process, and quantize the weights."""
        del ranks
        graph = QuantGraph(original=self._original, plan=plan, model=self._original.copy())
        graph.fold()
        # The weights from before the folding are not needed any more, only the layers and names of the net.
        self._original = graph.original = CaffeModel(self._original.net, {})
        if self._equalize:
            factors = find_factors(graph.model, data.all(), one_scale=graph.one_scale_layers())
            divide_channels(graph.model, factors)
            graph.equalized = tuple(factors)
        graph.quantize_weights()
        return CaffePreparation(graph)
