"""Which tensors between the layers calibration should observe, for the fast placement of the QDQ file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct.export.onnx_qdq import observed_tensors
from amct.pytorch.between import find_tensors

if TYPE_CHECKING:
    from amct.pytorch.between import TensorWatch
    from amct.pytorch.float_onnx import FloatOnnx
    from amct.pytorch.preparation import Preparation

logger = logging.getLogger(__name__)


def watch_between(preparation: Preparation, onnx: FloatOnnx) -> TensorWatch | None:
    """What to observe; None when the placement is not possible at all, with the reason in the log."""
    layers = {layer.name: layer for layer in preparation.layers}
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
    return find_tensors(preparation.traced, preparation.fused.fusions, wanted, onnx.tensors)
