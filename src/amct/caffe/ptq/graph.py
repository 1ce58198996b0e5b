"""The graph that ``init`` returns and the later functions take, and the layers that are put before others' inputs.

The graph holds the model, the plan and the stage of the flow. After weights were clustered, BatchNorm statistics can be
updated by forward passes (``refresh_statistics``) and then folded without changing the clusters.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layer import moves_values
from amct.caffe.engine.layers.batch_norm import dump_path
from amct.caffe.engine.layers.ifmr import IFMR, observed_inputs, start_session
from amct.caffe.engine.messages import new_message
from amct.caffe.engine.weights import read_file
from amct.caffe.engine.wire import read_weights
from amct.caffe.model import FEEDFORWARD_TYPES, RECURRENT_TYPES, feed
from amct.caffe.prototxt import free_name
from amct.caffe.ptq.folding import FusionReport, accelerate, fuse
from amct.caffe.ptq.quantized_weights import fold_quantized, quantize_weights, real_blobs
from amct.calibration import ALONE
from amct.config.layers import CAFFE_TYPES
from amct.config.registry import settings_to_dict
from amct.errors import ArgumentTypeError, CalibrationError, FileError
from amct.model import Skip, TensorIndex
from amct.model.kinds import KIND_OF_CAFFE_TYPE, LayerKind
from amct.numerics.layer_inputs import LayerInputObserver
from amct.numerics.qparams import with_means
from amct.numerics.settings import IfmrSettings
from amct.pipeline.door import Calibration
from amct.record import CaffeRecord, RecordLayer
from amct.record.conversion import caffe_layer_record

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from amct.caffe.engine.messages import ProtoMessage
    from amct.caffe.model import Batch, CaffeModel
    from amct.calibration import CalibrationResult, Ranks
    from amct.config.plan import LayerPlan, Plan
    from amct.numerics.observer import TensorObserver
    from amct.numerics.qparams import LayerQParams
    from amct.numerics.settings import BatchNormUpdate
    from amct.pipeline.weights import QuantizedWeights

    Input = tuple[str, int]
    """A layer and the index of one of its bottoms."""
    End = tuple[str, Hashable]
    """The last blob where values are rounded, and the settings of that rounding."""


class Stage(IntEnum):
    """The stages of the flow."""

    INITIALIZED = 0
    WEIGHTS_QUANTIZED = 1
    CALIBRATING = 2


_DONE_BY = {Stage.WEIGHTS_QUANTIZED: "weights_quantize_model", Stage.CALIBRATING: "activation_quantize_model"}


@dataclass
class QuantGraph:
    """A model, its plan and the results of each stage of quantization.

    Attributes:
        original: The float model as read, without in-place layers.
        plan: The quantization plan from the config.
        model: The current float model; folded once the weights are quantized.
        weights: The integer weights, by layer.
        fusion: The folding report.
        equalized: The layers whose output channels were divided by factors.
        record_file: The record file passed to ``init``; empty for a calibration in memory.
    """

    original: CaffeModel
    plan: Plan
    model: CaffeModel
    record_file: Path = Path()
    weights: dict[str, QuantizedWeights] = field(default_factory=dict)
    fusion: FusionReport = field(default_factory=FusionReport)
    equalized: tuple[str, ...] = ()
    stage: Stage = Stage.INITIALIZED

    def plans(self) -> dict[str, LayerPlan]:
        """The layers of ``model`` that will be quantized, by name, in model order."""
        enabled = {plan.name: plan for plan in self.plan.enabled}
        return {layer.name: enabled[layer.name] for layer in self.model.layers if layer.name in enabled}

    def need(self, stage: Stage, function: str) -> None:
        """Reject a call out of order.

        Raises:
            CalibrationError: The stage was not reached.
        """
        if self.stage < stage:
            raise CalibrationError(f"{function}: call {_DONE_BY[stage]} with this graph first")

    def fold(self) -> None:
        """Replace the model by a folded copy of the original; with ``update_bn`` folding follows the updates."""
        plan = self.plan
        self.model, self.fusion = self.original.copy(), FusionReport()
        if plan.update_bn is None:
            if plan.do_fusion:
                self.fusion = fuse(self.model, skip=plan.skip_fusion_layers)
            enabled = {layer.name for layer in plan.enabled}
            accelerate(self.model, enabled, self.fusion, skip=plan.skip_fusion_layers)
            for head, folded in self.fusion.folded.items():
                logger.debug("fusion: %s <- %s", head, ", ".join(folded))

    def one_scale_layers(self) -> list[str]:
        """The quantized layers that have one weight scale for all output channels."""
        return [name for name, layer in self.plans().items() if layer.has_one_scale]

    def quantize_weights(self) -> None:
        """Quantize the weights of the model."""
        self.weights = {
            name: self._quantized(layer)
            for name, layer in self.plans().items()
            if self.model.layer(name).type in (*FEEDFORWARD_TYPES, *RECURRENT_TYPES)
        }

    def _quantized(self, plan: LayerPlan) -> QuantizedWeights:
        layer, blobs = self.model.layer(plan.name), self.model.weights[plan.name]
        return quantize_weights(layer, blobs, plan.weight, rounding=plan.weight_rounding, scale=plan.weight_scale)

    def with_plan(self, plan: Plan) -> QuantGraph:
        """The same folded model with another plan: the weights of layers whose settings differ are quantized anew."""
        made = replace(self, plan=plan, weights={})
        before = self.plans()
        for name, layer in made.plans().items():
            known, old = self.weights.get(name), before.get(name, layer)
            if known is not None:
                same = (old.weight, old.weight_rounding) == (layer.weight, layer.weight_rounding)
                made.weights[name] = known if same else self._quantized(layer)
        return made

    @property
    def calibration_record(self) -> Path:
        """Where calibration writes: the record, or its ``_update`` form after BatchNorm updates."""
        record = self.record_file
        return record if self.plan.update_bn is None else record.with_name(f"{record.stem}_update{record.suffix}")

    def with_quantized_weights(self) -> CaffeModel:
        """A copy of ``model`` whose weights are quantized and dequantized."""
        model = self.model.copy()
        for name, weights in self.weights.items():
            model.weights[name] = real_blobs(weights, model.weights[name])
        return model

    def weights_record(self) -> CaffeRecord:
        """The factors of the weights."""
        return caffe_record({name: weights.qparams() for name, weights in self.weights.items()})

    @property
    def not_quantized(self) -> list[Skip]:
        """Every layer of ``model`` that stays float, with the reason."""
        quantized, reasons = self.plans(), self.plan.not_quantized
        return [
            Skip(layer.name, reasons.get(layer.name, f"type {layer.type} cannot be quantized"))
            for layer in self.model.layers
            if layer.name not in quantized
        ]


def caffe_record(layers: Mapping[str, LayerQParams]) -> CaffeRecord:
    """The parameters of layers as a record."""
    return CaffeRecord({name: caffe_layer_record(name, qparams) for name, qparams in layers.items()})


def check_graph(function: str, graph: object) -> QuantGraph:
    """Check that the argument is a graph and return it.

    Raises:
        ArgumentTypeError: it is of another type.
    """
    if not isinstance(graph, QuantGraph):
        raise ArgumentTypeError(f"{function}: graph must be what init returned, got {type(graph).__name__}")
    return graph


def record_layers(model: CaffeModel, expected: set[str], types: set[str] | None = None) -> list[RecordLayer]:
    """The layers of a model for checking a record; ``types`` are the quantizable types."""
    allowed = set(CAFFE_TYPES) if types is None else types
    result = []
    for layer in model.layers:
        blobs = model.weights.get(layer.name, [])
        outputs = layer.convolution_param.num_output or layer.inner_product_param.num_output or None
        if layer.type == "DepthwiseConv":
            outputs = blobs[0].shape[0]
        result.append(
            RecordLayer(
                name=layer.name,
                type=layer.type,
                quantizable=layer.type in allowed,
                reason="" if layer.type in allowed else "its type is not among those that can be quantized",
                expected=layer.name in expected,
                cout=outputs,
                inputs=max(1, len(layer.bottom)),
                weight_blobs=sum(blob.ndim == 2 for blob in blobs) if layer.type in RECURRENT_TYPES else 1,
            )
        )
    return result


logger = logging.getLogger(__name__)


def refresh_statistics(model: CaffeModel, settings: BatchNormUpdate) -> None:
    """Make every BatchNorm of the modified model update its statistics; remove the files of an earlier run."""
    folder = str(Path(settings.bn_dump_dir).resolve())
    for layer in model.net.layer:
        if layer.type != "BatchNorm":
            continue
        options = layer.batch_norm_param
        options.use_global_stats = False
        if not options.HasField("moving_average_fraction"):
            options.moving_average_fraction = settings.bn_moving_average_fraction
        options.update_iterations = settings.bn_update_iterations
        options.dump_dir = folder
        dump_path(folder, layer.name).unlink(missing_ok=True)


def fold_updated_statistics(graph: QuantGraph) -> None:
    """Read the updated statistics into the graph's model and fold them.

    Raises:
        CalibrationError: a BatchNorm was not updated; the message gives the number of forwards needed.
    """
    settings = graph.plan.update_bn
    assert settings is not None
    model = graph.model
    for layer in model.net.layer:
        if layer.type == "BatchNorm":
            model.weights[layer.name] = _read_dump(layer.name, settings)
            layer.batch_norm_param.use_global_stats = True
    if graph.plan.do_fusion:
        graph.fusion = fold_quantized(model, graph.weights, skip=graph.plan.skip_fusion_layers)


def _read_dump(name: str, settings: BatchNormUpdate) -> list[torch.Tensor]:
    path = dump_path(settings.bn_dump_dir, name)
    try:
        layers = read_weights(read_file(path), str(path))
    except FileError as error:
        raise CalibrationError(
            f'layer "{name}" (BatchNorm): no updated statistics in "{settings.bn_dump_dir}"; run the modified model '
            f"of weights_quantize_model for {settings.bn_update_iterations} batches (bn_update_iterations) before "
            "activation_quantize_model"
        ) from error
    if len(layers) != 1 or layers[0].name != name:
        raise CalibrationError(f'{path}: not the statistics of layer "{name}"')
    return [torch.from_numpy(np.array(blob.values, np.float32)).reshape(blob.shape) for blob in layers[0].blobs]


# -- Layers before the inputs of others: IFMR for calibration, Quant in the results ------------------------------------


def taken_names(model: CaffeModel) -> set[str]:
    """The names of all layers and blobs, which new names must not repeat."""
    return model.blob_names() | {layer.name for layer in model.layers}


def input_layer(kind: str, owner: ProtoMessage, index: int, taken: set[str]) -> ProtoMessage:
    """Create a layer for one bottom of ``owner``, named after it, and connect its top to the owner."""
    suffix = f"_{index}" if len(owner.bottom) > 1 else ""
    name = free_name(f"{owner.name}_{kind.lower()}{suffix}", taken)
    made = new_message("LayerParameter", name=name, type=kind)
    made.bottom.append(owner.bottom[index])
    made.top.append(name)
    owner.bottom[index] = name
    return made


def insert_ifmr(model: CaffeModel, plans: Mapping[str, LayerPlan], record_file: str = "") -> None:
    """Insert an IFMR layer before every quantized input, in place; only with a record file it holds the settings.

    Layers that read one blob at the same index with the same settings share one IFMR layer. Where several IFMR layers
    see the same values, one observes and the others reuse its factors: those of one blob at different indices, and
    those of layers that only move or select values (Concat, MAX pooling ...), whose values are rounded behind them.
    Rounding twice on one grid equals rounding once, so such a layer costs no accuracy.
    """
    taken = taken_names(model)
    settings_of = {name: [(settings, plan.batch_num) for settings in plan.activations] for name, plan in plans.items()}
    leaders = shared_inputs(model.layers, settings_of)
    made: dict[Input, ProtoMessage] = {}
    shared: dict[object, ProtoMessage] = {}
    result: list[ProtoMessage] = []
    for layer in model.layers:
        for index, settings in enumerate(settings_of.get(layer.name, ())[: len(layer.bottom)]):
            key = (layer.bottom[index], index, settings)
            if key in shared:
                shared[key].ifmr_param.object_layer.append(layer.name)
                layer.bottom[index] = shared[key].top[0]
                continue
            own = made[layer.name, index] = shared[key] = input_layer("IFMR", layer, index, taken)
            _fill_ifmr(own.ifmr_param, plans[layer.name], index, record_file)
            own.ifmr_param.object_layer.append(layer.name)
            result.append(own)
        result.append(layer)
    for place, own in made.items():
        if place in leaders:
            own.ifmr_param.factors_from = made[leaders[place]].name
    watching = [own for own in made.values() if not own.ifmr_param.factors_from]
    if watching:
        watching[-1].ifmr_param.reports_progress = True
    model.set_layers(result)


def shared_inputs(layers: Sequence[ProtoMessage], settings_of: Mapping[str, Sequence[Hashable]]) -> dict[Input, Input]:
    """By input whose values are those of another one, rounded with the same settings: that other input.

    Args:
        layers: The layers of a net without in-place layers.
        settings_of: By quantized layer, the settings of each bottom.
    """
    ends = _ends(layers, settings_of)
    inputs = [
        (layer, index, settings)
        for layer in layers
        for index, settings in enumerate(settings_of.get(layer.name, ())[: len(layer.bottom)])
    ]
    watching: dict[End, Input] = {}
    for layer, index, settings in inputs:
        blob = layer.bottom[index]
        if ends[blob] in (None, (blob, settings)):
            watching.setdefault((blob, settings), (layer.name, index))
    found = {}
    for layer, index, settings in inputs:
        end = ends[layer.bottom[index]]
        leader = watching.get((layer.bottom[index] if end is None else end[0], settings))
        if leader is not None and leader != (layer.name, index):
            found[layer.name, index] = leader
    return found


def _ends(layers: Sequence[ProtoMessage], settings_of: Mapping[str, Sequence[Hashable]]) -> dict[str, End | None]:
    """By blob: the blob where its values are observed, which is itself or one behind layers that only move values.

    It is another blob if all readers, through such layers, finally read that blob with the same settings; None if they
    do not agree.
    """
    index: TensorIndex[ProtoMessage] = TensorIndex()
    for layer in layers:
        index.add(layer, layer.bottom, layer.top)
    ends: dict[str, End | None] = {}
    for blob in reversed(list(dict.fromkeys(blob for layer in layers for blob in (*layer.bottom, *layer.top)))):
        found = {
            _end_of(blob, layer, place, settings_of.get(layer.name), ends)
            for layer in index.consumers(blob)
            for place, bottom in enumerate(layer.bottom)
            if bottom == blob
        }
        ends[blob] = found.pop() if len(found) == 1 else None
    return ends


def _end_of(
    blob: str, layer: ProtoMessage, index: int, settings: Sequence[Hashable] | None, ends: Mapping[str, End | None]
) -> End | None:
    """Where the values that a layer reads are rounded last, or None if unknown."""
    is_identity = layer.type == "Dropout" and bool(layer.dropout_param.scale_train)  # at inference
    if len(layer.top) == 1 and (moves_values(layer) or is_identity):
        end = ends.get(layer.top[0])
        if end is not None and (settings is None or {*settings[: len(layer.bottom)]} <= {end[1]}):
            return end
    return None if settings is None else (blob, settings[index])


def _fill_ifmr(options: ProtoMessage, plan: LayerPlan, index: int, record_file: str) -> None:
    options.index = index
    if not record_file:
        return  # in memory the session takes the settings from the plan
    settings = plan.activations[index]
    if isinstance(settings, IfmrSettings):
        options.search_range_start, options.search_range_end = settings.search_range
        options.search_step = settings.search_step
        options.max_percentile = settings.max_percentile
        options.min_percentile = settings.min_percentile
    else:
        options.settings = json.dumps(settings_to_dict(settings))
    options.with_offset = settings.asymmetric
    options.batch_num = plan.batch_num
    options.record_file_path = record_file
    options.num_bits_d = settings.num_bits


def start_calibration(graph: QuantGraph, tensors: Mapping[str, TensorObserver], ranks: Ranks = ALONE) -> Calibration:
    """Start a calibration by the IFMR layers of a copy of the net of a graph whose weights are quantized.

    Args:
        graph: the graph.
        tensors: observers of blobs between layers, by name.
        ranks: the processes that calibrate together.

    Raises:
        CalibrationError: every layer is disabled.
    """
    model = graph.with_quantized_weights()
    insert_ifmr(model, graph.plans())
    net = model.build(tensors)
    layers = [layer for layer in net.layers if isinstance(layer, IFMR)]
    means = {blob: LayerInputObserver(channel_axis=1) for blob in _corrected_layers(graph).values()}
    flat = {layer.bottom[0] for layer in graph.model.layers if layer.type == "InnerProduct"}
    for layer in layers:  # a net reads a blob of several readers by other names
        bottoms = graph.model.layer(layer.options.object_layer[0]).bottom
        blob = bottoms[layer.options.index]
        layer.shows, layer.flattens = blob if blob in means.keys() - tensors.keys() else "", blob in flat
    session = start_session(layers, plans=graph.plans(), tensors={**means, **tensors}, ranks=ranks)

    def run(batches: Iterable[Batch]) -> None:
        for batch in batches:
            feed(net, batch)
            del batch  # the net holds a copy: only one batch stays in memory
            with session.batch():
                net.forward()
                for name in tensors:
                    session.observe_tensor(name, net.blob(name).tensor)

    return Calibration(session=session, run=run)


def _corrected_layers(graph: QuantGraph) -> dict[str, str]:
    """By layer whose bias is to be corrected: the blob that it reads."""
    found = {}
    for name, plan in graph.plans().items():
        layer = graph.model.layer(name)
        is_product = KIND_OF_CAFFE_TYPE.get(layer.type) in (LayerKind.CONV, LayerKind.LINEAR)
        if plan.bias_correction and is_product and len(layer.bottom) == 1 and len(graph.model.weights[name]) > 1:
            found[name] = layer.bottom[0]
    return found


def calibrated_layers(graph: QuantGraph, result: CalibrationResult) -> dict[str, LayerQParams]:
    """The parameters of all inputs after calibration, with what correcting the biases needs."""
    corrected = _corrected_layers(graph)
    layers = with_means(observed_inputs(result), result.tensors, corrected)
    return {name: replace(each, corrects_bias=name in corrected) for name, each in layers.items()}
