"""A model made ready for calibration: what the doors of the PyTorch dialect (PyTorch and ONNX) share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from amct.calibration.session import HIDDEN, INPUT
from amct.config.layers import PTQ_TYPES
from amct.config.plan import config_text
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import CalibrationError, ExportError
from amct.export.deploy import fake_quant_model
from amct.export.onnx.kept_weights import KeptWeights
from amct.export.onnx.layer_lookup import bindings_by_name, find_layers
from amct.export.qdq.exporter import plan_tensors
from amct.export.request import RECORD
from amct.export.saving import OnnxFiles
from amct.model import Skip
from amct.numerics.layer_inputs import LayerInputObserver
from amct.numerics.qparams import with_means
from amct.numerics.settings import AdaRoundSettings, WeightKind
from amct.pipeline.door import LayerFreedom
from amct.pipeline.weights import corrected_bias, mean_loss, quantize_weights, suited_to_bias, with_bits
from amct.record import Record
from amct.record.conversion import layer_record
from amct.report.filling import ReportLayer, folded_notes
from amct.report.network import onnx_network

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from onnx import ModelProto
    from torch import Tensor
    from typing_extensions import Self

    from amct.calibration import CalibrationResult
    from amct.config.plan import LayerPlan, LayerPlans, Plan, PlannedLayer
    from amct.export.check.losses import Reference
    from amct.export.formats import ExportedModel
    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.export.qdq.exporter import TensorPlan
    from amct.export.request import SaveRequest
    from amct.numerics.qparams import LayerQParams, Observed, QParams
    from amct.pipeline.batches import Batches, BatchInputs
    from amct.pipeline.weights import QuantizedWeights
    from amct.report.content import LayerNote
    from amct.report.network import Network

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerInput:
    """A layer input that is observed channel by channel.

    Attributes:
        layer: The first layer that reads it.
        tensor: Its ONNX name.
        channel_axis: The axis of its channels.
        weight: The weights of all layers that read it, if these are linear: then it may be balanced.
    """

    layer: str
    tensor: str
    channel_axis: int = 1
    weight: Tensor | None = None

    def observer(self) -> LayerInputObserver:
        """A new observer."""
        return LayerInputObserver(channel_axis=self.channel_axis, weight=self.weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedForOnnx(ABC):
    """A folded model with quantized weights.

    Attributes:
        name: The model's name.
        plan: What is done to each layer.
        weights: The quantized weights by layer, in execution order; exactly the layers that are quantized.
        quantizable: Every layer that could be quantized, in execution order.
        unquantizable: The layers that cannot be quantized, with the reason.
        folded_layers: By layer: the batch norms folded into it.
        unfolded: The batch norms that were not folded, with the reason.
        is_trained: Whether its weights were trained quantized.
    """

    name: str
    plan: Plan
    weights: Mapping[str, QuantizedWeights]
    quantizable: Sequence[str]
    unquantizable: tuple[Skip, ...]
    folded_layers: Mapping[str, Sequence[str]]
    unfolded: tuple[Skip, ...]
    is_trained: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """The quantized layers, in execution order."""
        return tuple(self.weights)

    @property
    def layer_plans(self) -> list[LayerPlan]:
        """The plans of the quantized layers, in execution order."""
        found = (self.plan.find(name) for name in self.weights)
        return [layer for layer in found if layer is not None]

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every layer that stays float, with the reason, and every batch norm that was not folded."""
        reasons = {skip.layer: skip for skip in self.unquantizable}
        for name in self.quantizable:
            if name not in self.weights:
                reasons[name] = Skip(name, self.plan.not_quantized.get(name, "not in the config"))
        return (*reasons.values(), *self.unfolded)

    @property
    def fused_notes(self) -> tuple[LayerNote, ...]:
        """A note for each folded batch norm."""
        return folded_notes(self.folded_layers)

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each layer is computed in one forward, if more than once."""
        return {}

    def weight_qparams(self) -> dict[str, LayerQParams]:
        """The parameters before calibration: those of the weights only, layers in the order of the plan."""
        names = [layer.name for layer in self.plan.enabled if layer.name in self.weights]
        return {name: self.weights[name].qparams() for name in names}

    def with_inputs(self, result: CalibrationResult) -> dict[str, LayerQParams]:
        """The parameters of weights and inputs."""
        weights, seen = self.weight_qparams(), result.layers
        return {
            name: replace(qparams, inputs={0: seen[name][INPUT]}, hidden=seen[name].get(HIDDEN))
            for name, qparams in weights.items()
        }

    def record_of(self, layers: Mapping[str, LayerQParams]) -> Record:
        """The parameters as a record; it says which layers keep the batch norm behind them."""
        entries = {name: layer_record(qparams) for name, qparams in layers.items()}
        for layer in self.layer_plans:
            if layer.skip_fusion and layer.name in entries:
                entries[layer.name] = replace(entries[layer.name], skip_fusion=True)
        return Record({name: each.for_retraining() for name, each in entries.items()} if self.is_trained else entries)

    @abstractmethod
    def batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Data as batches of the model."""

    def simulation_batches(self, data: object, inputs: BatchInputs | None = None) -> Batches:
        """Data as batches of the simulation, which may hold the model as a part."""
        return self.batches(data, inputs)

    @abstractmethod
    def bias(self, layer: str) -> Tensor | None:
        """The bias of a layer, folded; None: it has none, or one for each gate."""

    def quantized_layers(self, result: CalibrationResult) -> dict[str, LayerQParams]:
        """The parameters of weights and inputs; a few weight scales are changed to suit the bias of their channel."""
        observed = self.observed_channels(self.input_tensors()) if result.tensors else {}
        return self._suited(with_means(self.with_inputs(result), result.tensors, observed))

    def freedom(self) -> dict[str, LayerFreedom]:
        """By quantized layer: what it could become instead."""
        found = {}
        for layer in self.layer_plans:
            weights = self.weights[layer.name]
            types = PTQ_TYPES[layer.type]
            found[layer.name] = LayerFreedom(
                values=sum(source.tensor.numel() for source in weights.sources),
                can_pack=weights.can_pack and bool(weights.sources),
                wide=types.int16 and (not types.int16_needs_bias or self.bias(layer.name) is not None),
            )
        return found

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """A full config that gives this plan."""
        return PYTORCH.config_of(plan)

    def with_weights(self, plan: Plan, weights: Mapping[str, QuantizedWeights]) -> Self:
        """The same folded model with another plan and other quantized weights."""
        return replace(self, plan=plan, weights=weights)

    def variant(
        self,
        plan: Plan,
        layers: Mapping[str, LayerQParams],
        learned: Mapping[str, QuantizedWeights] = MappingProxyType({}),
    ) -> tuple[Self, dict[str, LayerQParams]]:
        """The same calibrated model with other layers, weights or bits, and the parameters of its layers."""
        weights, chosen = {}, {layer.name: layer for layer in plan.enabled}
        for layer in (chosen[name] for name in self.quantizable if name in chosen):
            before, known = self.weights[layer.name], self.plan.find(layer.name)
            same = known is not None and (known.weight, known.weight_rounding) == (layer.weight, layer.weight_rounding)
            if not same and isinstance(layer.weight, AdaRoundSettings):
                before = learned[layer.name]
            elif not same:
                before = quantize_weights(layer, before.sources, balance=before.balance, can_pack=before.can_pack)
            weights[layer.name] = before
        made = self.with_weights(plan, weights)
        found = {
            name: replace(
                qparams,
                inputs=with_bits(layers[name].inputs, plan.find(name)),
                hidden=layers[name].hidden,
                mean=layers[name].mean,
                lost=layers[name].lost if weights[name] is self.weights[name] else None,
            )
            for name, qparams in made.weight_qparams().items()
        }
        return made, made._suited(found)

    def _suited(self, layers: dict[str, LayerQParams]) -> dict[str, LayerQParams]:
        for name, qparams in layers.items():
            plan, bias = self.plan.find(name), self.bias(name)
            weights = self.weights[name]
            layers[name] = replace(qparams, corrects_bias=plan is not None and plan.bias_correction)
            if bias is not None:
                if weights.custom_rounding and layers[name].lost is None:
                    layers[name] = replace(layers[name], lost=mean_loss(layers[name], weights))
                corrected = corrected_bias(layers[name], weights, bias)
                layers[name] = suited_to_bias(name, layers[name], weights, corrected)
        return layers

    @abstractmethod
    def input_tensors(self) -> Mapping[str, str]:
        """By layer: the ONNX name of its input; none if the model has no ONNX form."""

    def output_tensors(self, layers: Mapping[str, LayerQParams]) -> dict[str, tuple[str, ...]]:
        """By layer: the outputs of its nodes; recurrent layers, which have several, and models without ONNX: none."""
        try:
            model = self.float_model(None)
        except ExportError:
            return {}
        bindings = bindings_by_name(model, layers, self.calls)
        _, bound, _ = find_layers(model, bindings)
        found: dict[str, tuple[str, ...]] = {}
        for layer in bound:
            if not layer.kind.is_recurrent:
                found[layer.layer] = (*found.get(layer.layer, ()), layer.output)
        return found

    def report_layers(self, layers: Mapping[str, LayerQParams]) -> list[ReportLayer]:
        """What a report shows of each quantized layer."""
        return [_report_layer(plan, layers[plan.name].input, self.weights[plan.name]) for plan in self.layer_plans]

    # -- what the fast placement of the QDQ file needs -----------------------------------------------------------------

    def plan_tensors(
        self, model: ModelProto, bindings: Sequence[LayerBinding], *, is_float32: bool
    ) -> TensorPlan | None:
        """What the fast placement quantizes beside what layers read; None: it is impossible."""
        if not is_float32:
            logger.info("the QDQ file will quantize layer inputs only (placement exact): the model is not float32")
            return None
        return plan_tensors(
            model,
            bindings,
            balanced=[name for name, weights in self.weights.items() if weights.balance is not None],
            other_bits=[layer.name for layer in self.layer_plans if layer.activation.num_bits != 8],
        )

    def layer_inputs(self, tensors: Mapping[str, str]) -> list[LayerInput]:
        """The layer inputs that are observed channel by channel; ``tensors`` has the ONNX name of each layer's input.

        Their means are needed to correct biases. Where all readers are linear layers of 8 bits with plain weights, they
        may be balanced too, because the QDQ file may round these weights again.
        """
        readers: dict[str, list[str]] = {}
        for name, tensor in self.observed_channels(tensors).items():
            readers.setdefault(tensor, []).append(name)
        found = []
        for tensor, names in readers.items():
            sources = [self.weights[name].sources[0] for name in names]
            weight = None
            if all(source.kind is WeightKind.LINEAR for source in sources) and all(map(self._is_plain, names)):
                rows = [source.tensor for source in sources]
                weight = rows[0] if len(rows) == 1 else torch.cat(rows)
            axis = -1 if sources[0].kind is WeightKind.LINEAR else 1
            found.append(LayerInput(layer=names[0], tensor=tensor, channel_axis=axis, weight=weight))
        return found

    def _is_plain(self, name: str) -> bool:
        """Whether a layer has 8 bits, and weights that are neither balanced nor rounded in a learned way."""
        plan, weights = self.plan.find(name), self.weights[name]
        own_integers = weights.balance is None and not weights.custom_rounding
        return plan is not None and own_integers and plan.activation.num_bits == weights.bits == 8

    def observed_channels(self, tensors: Mapping[str, str]) -> dict[str, str]:
        """By layer whose input is observed channel by channel: the ONNX name of that input.

        Those are convolutions and linear layers if their bias is corrected, else those of 8 bits with plain weights.
        Not a layer that is computed several times, whose inputs differ but share its weights.
        """
        found = {}
        for layer in self.layer_plans:
            weights = self.weights[layer.name]
            if layer.name in self.calls or len(weights.sources) != 1:
                continue
            (source,) = weights.sources
            plain = self._is_plain(layer.name)
            is_product = source.kind in (WeightKind.CONV, WeightKind.LINEAR) and not source.gates
            if is_product and (plain or layer.bias_correction) and layer.name in tensors:
                found[layer.name] = tensors[layer.name]
        return found

    def network(self, integer_tensors: Collection[str] = ()) -> Network | None:
        """The network as a graph for the report; None if the model has no ONNX form."""
        try:
            return onnx_network(self.float_model(None), self.layers, integer_tensors)
        except ExportError:
            return None

    # -- files ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def float_model(self, opset: int | None) -> ModelProto:
        """The folded float model as ONNX, its nodes named after their layers.

        Raises:
            ArgumentError: The opset is outside 16..21.
            ExportError: The model cannot be exported.
        """

    deploy_file = ""  # only the chip computes it as it is

    def with_only(self, layers: Mapping[str, LayerQParams], names: Collection[str]) -> ExportedModel:
        """The folded float model with just some layers quantized, by standard operators."""
        kept = KeptWeights()
        model = self.partly_rounded([name for name in names if self.weights[name].custom_rounding], kept)
        chosen = {name: layers[name] for name in names}
        return fake_quant_model(model, bindings_by_name(model, chosen, self.calls), chosen, kept=kept)

    @abstractmethod
    def partly_rounded(self, names: Collection[str], kept: KeptWeights) -> ModelProto:
        """The folded float model as ONNX with the rounded weights of some layers; ``kept`` takes large weights."""

    def files(
        self,
        request: SaveRequest,
        layers: Mapping[str, LayerQParams],
        tensors: Mapping[str, Observed] | None,
        reference: Reference | None,
    ) -> OnnxFiles:
        """The model as files."""
        return OnnxFiles(
            request=request,
            model=self.float_model(request.opset) if request.models else None,
            layers=layers,
            record=self.record_of(layers) if RECORD in request.formats else None,
            tensors=tensors,
            reference=reference,
            calls=self.calls,
            folded=self.folded_layers,
            skipped=self.skips,
            config=config_text(self.plan),
        )


def inputs_of_nodes(model: ModelProto) -> dict[str, str]:
    """By name of a node: its first input. Nodes that compute a layer have its name."""
    return {node.name: node.input[0] for node in model.graph.node if node.input}


def _report_layer(plan: LayerPlan, data: QParams, weights: QuantizedWeights) -> ReportLayer:
    return ReportLayer(
        name=plan.name,
        type=plan.type,
        inputs=(data,),
        weight_bits=weights.bits if weights.weights else None,
        weight_rows=weights.rows(),
        weight_bytes=weights.stored_bytes(),
    )


def enabled_layers(
    plan: LayerPlans[PlannedLayer], names: Iterable[str], *, switch: str = "quant_enable"
) -> list[PlannedLayer]:
    """The plans of the layers to be quantized, in the order of ``names``; the plan's warnings are logged.

    ``switch`` is the key of the config that switches a layer on.

    Raises:
        CalibrationError: There is none.
    """
    for warning in plan.warnings:
        logger.warning("%s", warning)
    by_name = {layer.name: layer for layer in plan.enabled}
    chosen = [by_name[name] for name in names if name in by_name]
    if not chosen:
        raise CalibrationError(
            f"{plan.source}: no layer is to be quantized; set {switch} of at least one layer to true"
        )
    return chosen
