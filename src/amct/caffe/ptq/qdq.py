"""The QDQ file of ``amct.caffe.quantize``: the observers it needs during calibration, and its export."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct.caffe.model import FEEDFORWARD_TYPES
from amct.caffe.onnx.quant import NARROW, tensors_to_observe
from amct.errors import ExportError
from amct.export.request import Placement, Target
from amct.model.kinds import KIND_OF_CAFFE_TYPE, LayerKind
from amct.numerics.min_max import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.caffe.engine.net import Net
    from amct.config.plan import LayerPlan
    from amct.numerics.observer import TensorObserver

logger = logging.getLogger(__name__)


def types_with_ready_integers(placement: str, target: str) -> tuple[str, ...]:
    """The layer types whose weights in the QDQ file are the integers of the deploy model.

    All others stay float or are rounded again from the float weights, with a scale per output: for every CPU all are,
    so that pairs of them fit 16 bits.
    """
    if target == Target.PORTABLE.value:
        return ()
    others: set[LayerKind] = set()
    if placement != Placement.EXACT.value:
        others = {LayerKind.CONV_TRANSPOSE} | ({LayerKind.LINEAR} if target == Target.VNNI.value else set())
    return tuple(each for each in FEEDFORWARD_TYPES if KIND_OF_CAFFE_TYPE[each] not in others)


def qdq_observers(net: Net, plans: Mapping[str, LayerPlan]) -> dict[str, TensorObserver]:
    """Observers of the blobs that placement ``fast`` quantizes and for which the record has no factors.

    Args:
        net: The folded float net.
        plans: The layers that will be quantized.
    """
    wide = [name for name, plan in plans.items() if any(each.num_bits != NARROW for each in plan.activations)]
    try:
        wanted = tensors_to_observe(net, plans, other_bits=wide)
    except ExportError as error:
        logger.debug("nothing is observed for the QDQ file: %s", error)
        return {}
    known = {
        blob
        for layer in net.layers
        if layer.name in plans and layer.name not in wide
        for blob in layer.parameter.bottom
    }
    return {name: MinMaxObserver() for name in wanted if name not in known}
