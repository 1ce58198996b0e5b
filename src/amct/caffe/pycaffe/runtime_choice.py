"""Whether a net computes in torch or in onnxruntime.

Torch takes 20 to 30 µs to begin any convolution. A net of small convolutions spends up to half of its time there, so
one that frees its blobs runs in onnxruntime, unless the user chose. The choice follows from the net and its shapes,
never from a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.caffe.engine.blob import current_device
from amct.caffe.engine.layer import TEST, count
from amct.caffe.engine.layers.weighted import Convolution, Deconvolution
from amct.caffe.engine.plan import bind_plan
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from amct.caffe.engine.net import Net
    from amct.caffe.engine.plan import BoundPass, Plan

TORCH, ONNXRUNTIME = "torch", "onnxruntime"
#: Torch computes so many products in about six times the time that it takes to begin.
SMALL_CONVOLUTION = 2**23
#: onnxruntime copies the parameters, several times while it loads them: 64 MiB are few.
FEW_PARAMETERS = 2**24
#: Loading a net takes as long as some passes: one whose shapes or parameters change all the time runs in torch.
MOST_SESSIONS = 4


class RuntimeChoice:
    """The runtime of one net.

    Args:
        net: The net.
        runtime: The user's choice, or None.
        frees_blobs: Whether the net frees blobs after their last reader.

    Raises:
        ArgumentError: There is no such runtime, or the net cannot run in it.
    """

    def __init__(self, net: Net, runtime: object, *, frees_blobs: bool) -> None:
        if runtime not in (None, TORCH, ONNXRUNTIME):
            raise ArgumentError(f'Net: runtime: expected None, "{TORCH}" or "{ONNXRUNTIME}", got {runtime!r}')
        can_run = frees_blobs and net.phase == TEST
        if runtime == ONNXRUNTIME and not can_run:
            raise ArgumentError(
                f'Net: runtime="{ONNXRUNTIME}" computes only inputs, outputs and blobs named in keep_blobs: it needs '
                "keep_blobs=False (or names) and phase caffe.TEST"
            )
        self._is_demanded = runtime == ONNXRUNTIME
        self._sessions_left = MOST_SESSIONS if can_run and runtime != TORCH else 0

    def bind(self, net: Net, plan: Plan) -> BoundPass | None:
        """A plan of all layers of the net, which was just run, as a pass that can be repeated; see ``bind_plan``."""
        bound = bind_plan(plan)
        if bound is None or not self._wants_session(net):
            return bound
        from amct.caffe.onnx.session_pass import session_pass  # onnx and onnxruntime take a while to import

        found = session_pass(net, bound, lambda: bind_plan(plan), is_demanded=self._is_demanded)
        if found is None:
            self._sessions_left = 0  # the log says why
        elif not self._is_demanded:
            self._sessions_left -= 1
        return found or bind_plan(plan)

    def _wants_session(self, net: Net) -> bool:
        if not self._sessions_left or current_device().type != "cpu":
            return False
        return self._is_demanded or (_has_small_convolutions(net) and _has_few_parameters(net))


def _has_small_convolutions(net: Net) -> bool:
    """Whether the net's convolutions, of which there is one at least, are small on average, in its current shapes."""
    products = [
        count(net.graph.blobs[index].shape) * count(node.layer.weight_shape()[1:])
        for node in net.graph.nodes
        if isinstance(node.layer, Convolution | Deconvolution)
        for index in (node.bottoms if node.layer.transposed else node.tops)
    ]
    return 0 < sum(products) <= SMALL_CONVOLUTION * len(products)


def _has_few_parameters(net: Net) -> bool:
    return sum(count(blob.shape) for layer in net.layers for blob in layer.blobs) <= FEW_PARAMETERS
