"""The graph that ``init`` returns and the later functions take: the model, the plan and the stage of the flow."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from amct.caffe.model import FEEDFORWARD_TYPES, RECURRENT_TYPES
from amct.caffe.ptq.folding import FusionReport
from amct.config.layers import CAFFE_TYPES
from amct.errors import ArgumentTypeError, CalibrationError
from amct.record import CaffeRecord, RecordLayer

if TYPE_CHECKING:
    from pathlib import Path

    from amct.caffe.model import CaffeModel
    from amct.caffe.ptq.quantized_weights import QuantizedWeights
    from amct.config.plan import LayerPlan, Plan

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

    def has_weights(self, name: str) -> bool:
        """Whether a layer's weights are quantized."""
        return self.model.layer(name).type in (*FEEDFORWARD_TYPES, *RECURRENT_TYPES)

    def calibration_file(self) -> Path:
        """The record file passed to ``init``."""
        assert self.record_file is not None, "init sets it"
        return self.record_file

    def with_quantized_weights(self) -> CaffeModel:
        """A copy of ``model`` whose weights are quantized and dequantized."""
        model = self.model.copy()
        for name, weights in self.weights.items():
            model.weights[name] = weights.real_blobs(model.weights[name])
        return model

    def weights_record(self) -> CaffeRecord:
        """The factors of the weights."""
        return CaffeRecord({name: weights.record() for name, weights in self.weights.items()})

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
