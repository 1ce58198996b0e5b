"""Chooses the intermediate tensors that calibration observes for the fast placement of the QDQ file.

Layer inputs are also observed channel by channel: their means give the bias correction for rounded weights, and their
ranges show whether balancing would reduce the error.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from amct.export.qdq.exporter import observed_tensors
from amct.pytorch.watch.intermediate_tensors import LayerInput, find_tensors

if TYPE_CHECKING:
    from amct.pytorch.onnx.float_onnx import FloatOnnx
    from amct.pytorch.preparation import TorchPreparation
    from amct.pytorch.watch.intermediate_tensors import TensorWatch

logger = logging.getLogger(__name__)


def intermediate_watch(preparation: TorchPreparation, onnx: FloatOnnx) -> TensorWatch | None:
    """What to observe; None when the fast placement is impossible, with the reason in the log."""
    layers = {layer.name: layer for layer in preparation.layer_plans}
    facts = preparation.traced.layers
    if any(facts[name].dtype != "float32" for name in layers):
        logger.info("the QDQ file will quantize layer inputs only (placement exact): the model is not float32")
        return None
    wanted = observed_tensors(
        onnx.model,
        [binding for binding in onnx.bindings if binding.layer in layers],
        balanced=[name for name, weights in preparation.weights.items() if weights.balance is not None],
        other_bits=[name for name, layer in layers.items() if layer.activation.num_bits != 8],
    )
    watch = find_tensors(preparation.traced, preparation.fused.fusions, wanted, onnx.tensors)
    return replace(watch, given=_layer_inputs(preparation, onnx))


def _layer_inputs(preparation: TorchPreparation, onnx: FloatOnnx) -> dict[str, LayerInput]:
    """Each tensor that is observed channel by channel, by the first layer that reads it.

    Those are the inputs of 8-bit convolutions and linear layers that are neither balanced nor learned by AdaRound; the
    QDQ file may round their weights again.
    """
    inputs = {node.name: node.input[0] for node in onnx.model.graph.node if node.input}
    readers: dict[str, list[str]] = {}
    for layer in preparation.layer_plans:
        weights = preparation.weights[layer.name]
        eight_bits = layer.activation.num_bits == weights.bits == 8
        plain = weights.balance is None and not weights.custom_rounding
        if preparation.traced.layers[layer.name].type in _ROUNDED_AGAIN and eight_bits and plain:
            readers.setdefault(inputs[layer.name], []).append(layer.name)
    found = {}
    for tensor, names in readers.items():
        modules = [preparation.fused.model.get_submodule(name) for name in names]
        linear = [module.weight.detach() for module in modules if isinstance(module, nn.Linear)]
        is_linear = len(linear) == len(modules)
        weight = torch.cat(linear) if is_linear else None
        found[names[0]] = LayerInput(tensor=tensor, channel_axis=-1 if is_linear else 1, weight=weight)
    return found


_ROUNDED_AGAIN = frozenset({"Conv1d", "Conv2d", "Conv3d", "Linear"})
