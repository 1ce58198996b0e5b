"""From a model and a plan to everything calibration and export need: folded model, quantized weights, reasons."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from amct.config.plan_text import config_text
from amct.config.settings import AdaRoundSettings
from amct.errors import CalibrationError, ConfigError
from amct.export.onnx.layer_lookup import find_layers
from amct.export.qdq.exporter import observed_tensors
from amct.model import Skip
from amct.model.kinds import LayerKind
from amct.numerics.layer_inputs import LayerInputObserver
from amct.numerics.min_max import MinMaxObserver
from amct.onnx_model.folding import Folded, fold
from amct.onnx_model.layers import Layers, find_all_layers, placeholder_factors
from amct.onnx_model.weights import LayerWeights, quantize_weights
from amct.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnx import ModelProto
    from torch import Tensor

    from amct.config.plan import LayerPlan, Plan
    from amct.export.binding import LayerBinding
    from amct.numerics.observer import TensorObserver
    from amct.onnx_model.reading import SourceModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Preparation:
    """A model made ready for calibration.

    Attributes:
        source: The user's model, as it was read.
        plan: What is done to each layer.
        found: The layers of the user's model.
        folded: The float model with its batch norms folded.
        weights: The quantized weights by layer, in graph order; exactly the layers that are quantized.
    """

    source: SourceModel
    plan: Plan
    found: Layers
    folded: Folded
    weights: Mapping[str, LayerWeights]

    @property
    def layers(self) -> list[LayerPlan]:
        """The layers that are quantized, in graph order."""
        found = (self.plan.find(name) for name in self.weights)
        return [layer for layer in found if layer is not None]

    @property
    def bindings(self) -> list[LayerBinding]:
        """The layers that are quantized, as the exporters want them."""
        return [self.found.found[name].binding for name in self.weights]

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every layer that stays float, with the reason, and every batch norm that was not folded."""
        reasons = {skip.layer: skip for skip in self.found.skips}
        for name in self.found.found:
            if name not in self.weights:
                reasons[name] = Skip(name, self.plan.not_quantized.get(name, "not in the config"))
        return (*reasons.values(), *self.folded.skips)

    @property
    def fusions(self) -> dict[str, list[str]]:
        """By layer: the batch norm folded into it."""
        return {layer: [norm] for layer, norm in self.folded.fusions.items()}

    @property
    def skipped(self) -> dict[str, str]:
        """What stays float, and why."""
        return {skip.layer: skip.reason for skip in self.skips}

    @property
    def config(self) -> str:
        """The plan as text for people."""
        return config_text(self.plan)

    def record(self) -> Record:
        """The record before calibration: factors of the weights only."""
        return Record({name: weights.record() for name, weights in self.weights.items()})

    @cached_property
    def between(self) -> tuple[str, ...] | None:
        """The tensors between layers that the fast QDQ placement wants observed; None where it is not possible."""
        if not all(weights.layer.is_wide_float for weights in self.weights.values()):
            logger.info("the QDQ file will quantize layer inputs only (placement exact): the model is not float32")
            return None
        return observed_tensors(
            self.folded.model,
            self.bindings,
            balanced=[name for name, weights in self.weights.items() if weights.balance is not None],
            other_bits=[layer.name for layer in self.layers if layer.activation.num_bits != 8],
        )

    def tensor_observers(self) -> dict[str, TensorObserver]:
        """What watches the tensors that only the QDQ file wants: between layers, and inputs channel by channel."""
        if self.between is None:
            return {}
        return {**self._input_observers(), **{name: MinMaxObserver() for name in self.between}}

    def _input_observers(self) -> dict[str, TensorObserver]:
        """Of the inputs of 8-bit convolutions and linear layers, whose weights the QDQ file may round anew."""
        readers: dict[str, list[LayerWeights]] = {}
        for plan in self.layers:
            weights = self.weights[plan.name]
            eight_bits = plan.activation.num_bits == weights.bits == 8
            if weights.layer.kind in (LayerKind.CONV, LayerKind.LINEAR) and eight_bits and weights.balance is None:
                readers.setdefault(weights.layer.reader.input[0], []).append(weights)
        found: dict[str, TensorObserver] = {}
        for tensor, layers in readers.items():
            is_linear = all(weights.layer.kind is LayerKind.LINEAR for weights in layers)
            rows = torch.cat([weights.floats[0] for weights in layers]) if is_linear else None
            found[tensor] = LayerInputObserver(channel_axis=-1 if is_linear else 1, weight=rows)
        return found

    def rounded_model(self) -> ModelProto:
        """The folded model with the quantized weights in float."""
        usual = dict.fromkeys(self.weights, placeholder_factors())
        graph, layers, _ = find_layers(self.folded.model, self.bindings, usual)
        for layer in layers:
            self.weights[layer.name].put_into(graph, layer)
        return graph.build()


def prepare(
    source: SourceModel, plan: Plan, found: Layers, folded: Folded, balance: Mapping[str, Tensor] | None = None
) -> Preparation:
    """Quantize the weights of the folded model.

    Args:
        source: the model.
        plan: what to do.
        found: the model's layers.
        folded: the model with its batch norms folded.
        balance: DMQ's factors by layer, for the layers that are balanced.

    Raises:
        CalibrationError: nothing is to be quantized, or the weights of a layer cannot be; names the layer.
    """
    chosen = {layer.name: layer for layer in plan.enabled}
    if not chosen:
        raise CalibrationError(
            f"{plan.source}: no layer is to be quantized; set quant_enable of at least one layer to true"
        )
    after = find_all_layers(folded.model).found
    weights = {
        name: quantize_weights(chosen[name], after[name], (balance or {}).get(name))
        for name in found.found
        if name in chosen
    }
    return Preparation(source=source, plan=plan, found=found, folded=folded, weights=weights)


def fold_as_planned(source: SourceModel, plan: Plan) -> Folded:
    """The model with the batch norms folded that the plan wants folded.

    Raises:
        ConfigError: the plan asks for what cannot be done with an ONNX file.
    """
    for warning in plan.warnings:
        logger.warning("%s", warning)
    learned = [layer.name for layer in plan.enabled if isinstance(layer.weight, AdaRoundSettings)]
    if learned:
        raise ConfigError(
            f'{plan.source}: layer "{learned[0]}": ada_quantize learns in PyTorch and is not possible for an ONNX '
            "file; use arq_quantize, or quantize the PyTorch model"
        )
    return fold(source.model, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers)
