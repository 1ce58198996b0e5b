"""The QDQ file among the results of ``amct.caffe.quantize``: what calibration observes for it, and writing it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.model import FEEDFORWARD_TYPES
from amct.caffe.onnx.quant import NARROW, quantized_onnx, tensors_to_observe
from amct.errors import ExportError
from amct.export.formats import file_name
from amct.export.qdq.exporter import Placement
from amct.export.qdq.nodes import Target
from amct.export.writer import add_model
from amct.numerics.min_max import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from amct.atomic import FileGroup
    from amct.caffe.engine.net import Net
    from amct.config.plan import LayerPlan
    from amct.export.binding import TensorFactors
    from amct.export.exported import ExportedModel
    from amct.numerics.observer import TensorObserver
    from amct.record import CaffeRecord

logger = logging.getLogger(__name__)


def types_with_ready_integers(placement: str, target: str) -> tuple[str, ...]:
    """The layer types whose weights are, in the QDQ file, the integers of the deploy model.

    The others are rounded anew from the float weights: to 7 bits for every CPU, with a scale for each output.
    """
    if target == Target.PORTABLE.value:
        return ()
    rescaled = placement == Placement.FAST.value and target == Target.VNNI.value
    return tuple(each for each in FEEDFORWARD_TYPES if not (rescaled and each == "InnerProduct"))


def qdq_observers(net: Net, plans: Mapping[str, LayerPlan]) -> dict[str, TensorObserver]:
    """Observers of the blobs that placement ``fast`` quantizes and no layer of the record has factors of.

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


@dataclass(frozen=True, kw_only=True)
class QdqFile:
    """The QDQ form of a quantized net, or why it has none."""

    exported: ExportedModel | None
    reason: str = ""

    @classmethod
    def of(
        cls,
        net: Net,
        record: CaffeRecord,
        tensors: Mapping[str, TensorFactors],
        *,
        placement: str,
        target: str,
        opset: int,
    ) -> QdqFile:
        """Export a folded float net with the factors of its record and of the blobs between layers.

        Raises:
            ArgumentError: There is no such placement, target or opset.
        """
        try:
            exported = quantized_onnx(net, record, tensors, placement=placement, target=target, opset=opset)
        except ExportError as error:
            logger.warning("no QDQ file is written: %s", error)
            return cls(exported=None, reason=str(error))
        return cls(exported=exported)

    def write(self, group: FileGroup, path: Path) -> list[Path]:
        """Write it as part of a group; returns its files."""
        if self.exported is None:
            return []
        return add_model(group, path, self.exported.model, file_name("qdq"))
