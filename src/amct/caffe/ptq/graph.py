"""The graph that ``init`` returns and the later functions take: the model, the plan and the stage of the flow.

After weights were clustered, BatchNorm statistics can be updated by forward passes (``refresh_statistics``) and then
folded without changing the clusters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from amct.caffe.engine.layers.batch_norm import dump_path
from amct.caffe.engine.weights import read_file
from amct.caffe.engine.wire import read_weights
from amct.caffe.model import FEEDFORWARD_TYPES, RECURRENT_TYPES
from amct.caffe.ptq.folding import FusionReport, accelerate, fuse
from amct.caffe.ptq.quantized_weights import fold_quantized, quantize_weights, real_blobs
from amct.config.layers import CAFFE_TYPES
from amct.errors import ArgumentTypeError, CalibrationError, FileError
from amct.record import CaffeRecord, RecordLayer
from amct.record.conversion import caffe_layer_record

if TYPE_CHECKING:
    from amct.caffe.model import CaffeModel
    from amct.config.plan import LayerPlan, Plan
    from amct.numerics.settings import BatchNormUpdate
    from amct.pipeline.weights import QuantizedWeights


IMAGE_AXES = 4


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
        record_file: The record file passed to ``init``; None for a calibration in memory.
        calibration_record: Where calibration writes: the record, or its ``_update`` form after BatchNorm updates.
    """

    original: CaffeModel
    plan: Plan
    model: CaffeModel
    record_file: Path | None = None
    weights: dict[str, QuantizedWeights] = field(default_factory=dict)
    fusion: FusionReport = field(default_factory=FusionReport)
    equalized: tuple[str, ...] = ()
    calibration_record: Path | None = None
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
        if plan.update_bn is None and plan.do_fusion:
            self.fusion = fuse(self.model, skip=plan.skip_fusion_layers)
            enabled = {layer.name for layer in plan.enabled}
            accelerate(self.model, enabled, self.fusion, skip=plan.skip_fusion_layers)
            for head, folded in self.fusion.folded.items():
                logger.debug("fusion: %s <- %s", head, ", ".join(folded))

    def quantize_weights(self) -> None:
        """Quantize the weights of the model."""
        self.weights = {
            name: quantize_weights(
                self.model.layer(name),
                self.model.weights[name],
                layer.weight,
                rounding=layer.weight_rounding,
                scale=layer.weight_scale,
            )
            for name, layer in self.plans().items()
            if self.model.layer(name).type in (*FEEDFORWARD_TYPES, *RECURRENT_TYPES)
        }

    def calibration_file(self) -> Path:
        """The record file passed to ``init``."""
        assert self.record_file is not None, "init sets it"
        return self.record_file

    def with_quantized_weights(self) -> CaffeModel:
        """A copy of ``model`` whose weights are quantized and dequantized."""
        model = self.model.copy()
        for name, weights in self.weights.items():
            model.weights[name] = real_blobs(weights, model.weights[name])
        return model

    def weights_record(self) -> CaffeRecord:
        """The factors of the weights."""
        return CaffeRecord(
            {name: caffe_layer_record(name, weights.qparams()) for name, weights in self.weights.items()}
        )

    @property
    def not_quantized(self) -> dict[str, str]:
        """The reason for each layer of ``model`` that stays float."""
        quantized = self.plans()
        reasons = dict(self.plan.not_quantized)
        return {
            layer.name: reasons.get(layer.name, f"type {layer.type} cannot be quantized")
            for layer in self.model.layers
            if layer.name not in quantized
        }


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
