"""A step of which nothing changes from one forward pass to the next: only its call is left to do.

Small nets take less time in their kernels than in finding them. So a layer chooses its kernel and prepares its
parameters once (``Layer.bind``), and the call is used until a bottom's shape, a parameter or the device changes.
Parameters of which a NumPy array is alive may change at any time: steps with such parameters are not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.plan import Step


class BoundStep:
    """A step with its call, for the current shapes, parameters and device."""

    __slots__ = ("_bottoms", "_call", "_layer", "_overwrite", "_parameters", "_release", "_tops")

    def __init__(self, step: Step) -> None:
        self._layer, self._overwrite = step.node.layer, step.overwrite
        self._bottoms, self._tops = [(blob, blob.shape) for blob in step.bottoms], step.tops
        self._release = [blob.values for blob in step.release]
        maker = self._layer if step.chain is None else step.chain
        self._layer.may_overwrite = step.overwrite
        self._call = maker.bind([blob.tensor for blob in step.bottoms])
        # An array that is taken later counts as a change.
        self._parameters = [(blob, blob.values, blob.values.epoch) for blob in parameters_of(step)]

    def is_current(self) -> bool:
        """Whether no parameter and no shape has changed (the net checks the device)."""
        for blob, values, epoch in self._parameters:
            if blob.values is not values or values.epoch != epoch:
                return False
        for blob, shape in self._bottoms:  # noqa: SIM110  all() with a generator takes three times as long
            if blob.shape != shape:
                return False
        return True

    def run(self) -> None:
        """Compute the tops and free what has no other reader."""
        self._layer.may_overwrite = self._overwrite
        results = self._call([blob.tensor for blob, _ in self._bottoms])
        if len(results) == 1:
            self._tops[0].set_tensor(results[0])
        else:
            for blob, value in zip(self._tops, results, strict=True):
                blob.set_tensor(value)
        del results
        for values in self._release:
            values.release()


def parameters_of(step: Step) -> list[Blob]:
    """The parameters of all layers of a step."""
    nodes = [step.node] if step.chain is None else step.chain.nodes
    return [blob for node in nodes for blob in node.layer.blobs]
