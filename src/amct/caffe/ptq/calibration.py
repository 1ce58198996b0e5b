"""Calibration of a Caffe model in memory, without prototxt and record files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.engine.layers.ifmr import IFMR, start_session
from amct.caffe.model import build_net
from amct.caffe.ptq.insertion import insert_ifmr
from amct.calibration import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.caffe.engine.net import Net
    from amct.caffe.ptq.graph import QuantGraph
    from amct.calibration import CalibrationSession, Ranks
    from amct.numerics.observer import TensorObserver


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """A net with IFMR layers to run on calibration data, and the session that observes it."""

    net: Net
    session: CalibrationSession
    tensors: tuple[str, ...]
    """The observed blobs between layers."""

    def forward(self) -> None:
        """Run the batch that the net's inputs hold (``amct.caffe.model.feed``).

        Raises:
            CalibrationError: an activation cannot be quantized; the message names the layer and the batch.
        """
        with self.session.batch():
            self.net.forward()
            for name in self.tensors:
                self.session.observe_tensor(name, self.net.blob(name).tensor)


def start_calibration(graph: QuantGraph, tensors: Mapping[str, TensorObserver], ranks: Ranks = ALONE) -> Calibration:
    """Build the calibration net of a graph whose weights are quantized.

    Args:
        graph: the graph.
        tensors: observers of blobs between layers, by name.
        ranks: the processes that calibrate together.

    Raises:
        CalibrationError: every layer is disabled.
    """
    model = graph.with_quantized_weights()
    insert_ifmr(model, graph.plans())
    net = build_net(model, keep_blobs=tensors)
    session = start_session([layer for layer in net.layers if isinstance(layer, IFMR)], tensors=tensors, ranks=ranks)
    return Calibration(net=net, session=session, tensors=tuple(tensors))
