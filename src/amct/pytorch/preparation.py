"""From a model and a plan to everything calibration and export need: folded copy, quantized weights, float ONNX."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from amct.config.settings import AdaRoundSettings
from amct.errors import CalibrationError, ExportError
from amct.model import Skip
from amct.pytorch.adaround.layers import learn_rounding
from amct.pytorch.fuse import Fused, fuse
from amct.pytorch.layer_weights import put_weight, weight_parts
from amct.pytorch.model_copy import copy_model
from amct.pytorch.onnx.float_onnx import DEFAULT_OPSET, FloatOnnx, float_onnx
from amct.pytorch.quantized_weights import LayerWeights, arq_weights, final_weight
from amct.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from amct.config.plan import LayerPlan, Plan
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.watch.layer_hooks import Arguments

logger = logging.getLogger(__name__)

AdaRoundMode = Literal["plain", "fast"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Preparation:
    """A model made ready for calibration.

    Attributes:
        traced: The user's model, as it was looked at.
        plan: What is done to each layer.
        fused: A folded float copy of the model.
        weights: The quantized weights by layer, in execution order; exactly the layers that are quantized.
    """

    traced: Traced
    plan: Plan
    fused: Fused
    weights: Mapping[str, LayerWeights]

    @property
    def layers(self) -> list[LayerPlan]:
        """The layers that are quantized, in execution order."""
        found = (self.plan.find(name) for name in self.weights)
        return [layer for layer in found if layer is not None]

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Every layer that stays float, with the reason, and every batch norm that was not folded."""
        reasons = {skip.layer: skip for skip in self.traced.skips}
        for name in self.traced.layers:
            if name not in self.weights:
                reasons[name] = Skip(name, self.plan.not_quantized.get(name, "not in the config"))
        return (*reasons.values(), *self.fused.skips)

    def record(self) -> Record:
        """The record before calibration: factors of the weights only, layers in the order of the model."""
        names = [layer.name for layer in self.plan.enabled if layer.name in self.weights]
        return Record({name: self.weights[name].record(self.fused.model.get_submodule(name)) for name in names})

    def quantized_copy(self) -> nn.Module:
        """A copy of the folded model that computes with the quantized weights."""
        model = copy_model(self.fused.model)
        for name, weights in self.weights.items():
            weights.put_into(model.get_submodule(name))
        return model

    def float_onnx(self, opset: int = DEFAULT_OPSET) -> FloatOnnx:
        """The folded model as ONNX: float weights, except where the rounding was learned and cannot be computed again.

        Raises:
            ArgumentError: the opset is outside 16..21.
            ExportError: the model cannot be exported.
        """
        learned = {name: weights for name, weights in self.weights.items() if weights.learned}
        if not learned:
            return float_onnx(self.traced, self.fused, opset=opset)
        model = copy_model(self.fused.model, share_tensors=True)
        for name, weights in learned.items():
            module = model.get_submodule(name)
            for part in weight_parts(module):
                put_weight(module, part.attribute, final_weight(weights, part))
        return float_onnx(self.traced, replace(self.fused, model=model), opset=opset)


def prepare(
    traced: Traced,
    plan: Plan,
    *,
    balance: Mapping[str, Tensor] | None = None,
    data: Callable[[], Iterable[Arguments]] | None = None,
    adaround: AdaRoundMode = "plain",
) -> Preparation:
    """Fold, and quantize the weights; the user's model stays as it is.

    Args:
        traced: the model.
        plan: what to do.
        balance: DMQ's factors by layer, for the layers that are balanced.
        data: makes the inputs that AdaRound learns from; the example input when None.
        adaround: how AdaRound learns.

    Raises:
        CalibrationError: nothing is to be quantized, or the weights of a layer cannot be; names the layer.
        ArgumentTypeError: weights of a type that cannot be quantized.
        ModelError: the model cannot be copied.
    """
    for warning in plan.warnings:
        logger.warning("%s", warning)
    fused = fuse(traced, do_fusion=plan.do_fusion, skip=plan.skip_fusion_layers)
    by_name = {layer.name: layer for layer in plan.enabled}
    chosen = [by_name[name] for name in traced.layers if name in by_name]
    if not chosen:
        raise CalibrationError(
            f"{plan.source}: no layer is to be quantized; set quant_enable of at least one layer to true"
        )
    weights: dict[str, LayerWeights] = {}
    for layer in chosen:
        module = fused.model.get_submodule(layer.name)
        weights[layer.name] = arq_weights(layer, module, (balance or {}).get(layer.name))
    preparation = Preparation(traced=traced, plan=plan, fused=fused, weights=weights)
    if any(isinstance(layer.weight, AdaRoundSettings) for layer in chosen):
        inputs = (traced.inputs.args, traced.inputs.kwargs)
        learned = learn_rounding(preparation, data or (lambda: [inputs]), fast=adaround == "fast")
        preparation = replace(preparation, weights={**weights, **learned})
    return preparation


def try_float_onnx(preparation: Preparation, opset: int = DEFAULT_OPSET) -> FloatOnnx | ExportError:
    """The float ONNX model, or why there is none."""
    try:
        return preparation.float_onnx(opset)
    except ExportError as error:
        return error
