"""Forward passes of a net in onnxruntime: ``caffe.Net(..., keep_blobs=False, runtime="onnxruntime")``.

The net is exported in memory and loaded once. The first pass, and every pass in which a shape or a parameter has
changed, runs in the engine, which finds the shapes, and then again in the new session: equal inputs give equal bits in
every pass. A net that has no ONNX form runs in the engine.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layers.combine import Silence
from amct.caffe.onnx.graph import float_onnx
from amct.errors import AmctError, ExportError
from amct.export.onnx.messages import first_line
from amct.export.onnx.runtime import as_tensor, open_session, quiet_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.net import Net
    from amct.caffe.engine.plan import PassPlan

logger = logging.getLogger(__name__)


def repeat_in_session(net: Net, plan: PassPlan, *, is_demanded: bool) -> bool:
    """Let a plan repeat its pass in onnxruntime; False if it cannot run there, and the log says why.

    Args:
        net: A net of the TEST phase that frees its blobs.
        plan: Its plan of all layers, bound after its first pass.
        is_demanded: Whether the user wants onnxruntime: then a net that cannot run there is worth a warning.
    """
    kept = {id(blob) for blob in plan.results()}
    outputs = {name: blob for name, blob in net.named_blobs().items() if id(blob) in kept}
    try:
        session = SessionPass(_whole_model(net, list(outputs)), net, outputs)
        session()
    except (AmctError, RuntimeError) as error:
        level = logging.WARNING if is_demanded else logging.DEBUG
        logger.log(level, 'net "%s" runs without onnxruntime: %s', net.name, error)
        plan.bind()
        return False
    if plan.bind():  # again: exporting the net took arrays of its parameters, which counts as a change
        plan.repeat = session
    return True


def _whole_model(net: Net, outputs: list[str]) -> onnx.ModelProto:
    """The net with these outputs.

    Raises:
        ExportError: A layer has no ONNX form, or would be left out.
    """
    for node in net.graph.nodes:
        if not node.tops and not isinstance(node.layer, Silence):  # such as one that rounds the weights of another
            raise ExportError(f'layer "{node.layer.name}" ({node.layer.type}) has no tops')
    exported = float_onnx(net, outputs=outputs, dynamic_batch=False)
    notes = list(exported.notes)
    if {value.name for value in exported.model.graph.output} != set(outputs):
        notes.append("some of its outputs have no ONNX form")
    if notes:
        raise ExportError(notes[0])
    return exported.model


class SessionPass:
    """A whole net in onnxruntime; a call computes its outputs."""

    def __init__(self, model: onnx.ModelProto, net: Net, outputs: Mapping[str, Blob]) -> None:
        self._threads = torch.get_num_threads()
        self._session = open_session(model, threads=self._threads)
        self._inputs = {value.name: net.blob(value.name) for value in model.graph.input}
        self._outputs = dict(outputs)
        self._options = quiet_options()

    def __call__(self) -> None:
        """Compute the outputs.

        Raises:
            RuntimeError: onnxruntime failed, or torch uses another number of threads than when the session was made.
        """
        if torch.get_num_threads() != self._threads:
            raise RuntimeError("the number of threads has changed")
        feeds = {name: blob.data for name, blob in self._inputs.items()}
        try:
            results = self._session.run(list(self._outputs), feeds, self._options)
        except Exception as error:
            raise RuntimeError(first_line(error)) from error
        for blob, value in zip(self._outputs.values(), results, strict=True):
            blob.set_tensor(as_tensor(value))
