"""Chooses the intermediate tensors that calibration observes for the fast placement of the QDQ file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from amct.pytorch.watch.intermediate_tensors import find_tensors

if TYPE_CHECKING:
    from amct.pytorch.onnx.float_onnx import FloatOnnx
    from amct.pytorch.preparation import TorchPreparation
    from amct.pytorch.watch.intermediate_tensors import TensorWatch


def intermediate_watch(preparation: TorchPreparation, onnx: FloatOnnx) -> TensorWatch | None:
    """What to observe; None when the fast placement is impossible, with the reason in the log."""
    facts = preparation.traced.layers
    wanted = preparation.fast_tensors(
        onnx.model,
        [binding for binding in onnx.bindings if binding.layer in preparation.weights],
        is_float32=all(facts[name].dtype == "float32" for name in preparation.weights),
    )
    if wanted is None:
        return None
    watch = find_tensors(preparation.traced, preparation.fused.fusions, wanted, onnx.tensors)
    inputs = {node.name: node.input[0] for node in onnx.model.graph.node if node.input}
    return replace(watch, given=preparation.layer_inputs(inputs))
