"""A forward pass of which nothing but the values changes, with the tensors in a list instead of blobs.

A net of small layers takes as long to look after its blobs as to compute some of its layers. With ``keep_blobs=False``
nobody sees the blobs between the layers: once every step is bound (``plan.BoundStep``), a pass only needs its inputs
and the blobs that are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from amct.caffe.engine.plans.plan import parameters_of

if TYPE_CHECKING:
    from typing import Protocol

    import torch

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.layer import Call, Layer
    from amct.caffe.engine.plans.plan import Plan

    #: Layer, whether it may overwrite its bottom, call, and the places of bottoms, tops and what is freed.
    Move: TypeAlias = tuple[Layer, bool, Call, list[int], list[int], list[int]]

    class BoundPass(Protocol):
        """A way to run a plan again."""

        def is_current(self) -> bool:
            """Whether it still computes what the steps would."""

        def run(self) -> None:
            """Compute the blobs that are kept; if this fails, all that the pass reads is unchanged."""


def bind_plan(plan: Plan) -> BoundPlan | None:
    """The plan as it was just run, if it frees blobs and all its steps can be run again in the same way."""
    steps = [step for step in plan.steps if not step.node.layer.is_filled_by_user]
    if not plan.frees_blobs or any(step.bound is None or step.has_loss for step in steps):
        return None
    bound = BoundPlan(plan)
    return None if any(blob.values.is_exposed for blob in bound.unseen) else bound


class BoundPlan:
    """The calls of all steps; valid until a shape or a parameter changes or a blob between the layers is looked at."""

    __slots__ = ("_loads", "_moves", "_old", "_places", "_shapes", "_states", "_stores", "unseen")

    def __init__(self, plan: Plan) -> None:
        self._places: dict[int, int] = {}
        self._moves: list[Move] = []
        self._loads: list[tuple[int, Blob]] = []
        written: dict[int, Blob] = {}
        freed: set[int] = set()
        parameters: list[Blob] = []
        self._shapes: list[tuple[Blob, tuple[int, ...]]] = []
        for step in plan.steps:
            if step.bound is None:
                continue
            for blob in step.bottoms:
                if id(blob) not in self._places:
                    self._loads.append((self._place(blob), blob))
            bottoms, tops, release = (
                [self._place(blob) for blob in blobs] for blobs in (step.bottoms, step.tops, step.release)
            )
            self._moves.append((step.node.layer, step.overwrite, step.bound.call, bottoms, tops, release))
            written.update((id(blob), blob) for blob in step.tops)
            freed.update(id(blob) for blob in step.release)
            parameters += parameters_of(step)
            self._shapes += [(blob, blob.shape) for blob in step.bottoms]
        self._stores = [(self._places[key], blob) for key, blob in written.items() if key not in freed]
        loaded = {id(blob) for _, blob in self._loads}
        self._old = [blob.values for _, blob in self._stores if id(blob) not in loaded]
        #: Blobs that this pass does not write, though a layer does.
        self.unseen = [blob for key, blob in written.items() if key in freed]
        self._states = [(blob, blob.values, blob.values.epoch) for blob in (*parameters, *self.unseen)]

    @property
    def stored(self) -> list[Blob]:
        """The blobs that a pass writes."""
        return [blob for _, blob in self._stores]

    def _place(self, blob: Blob) -> int:
        return self._places.setdefault(id(blob), len(self._places))

    def is_current(self) -> bool:
        """Whether no parameter and no shape has changed, and no blob between the layers was written or looked at."""
        for blob, values, epoch in self._states:
            if blob.values is not values or values.epoch != epoch:
                return False
        for blob, shape in self._shapes:  # noqa: SIM110  all() with a generator takes three times as long
            if blob.shape != shape:
                return False
        return True

    def run(self) -> None:
        """Compute the blobs that are kept; if this fails, all that the pass reads is unchanged."""
        for values in self._old:
            values.release()
        tensors: list[torch.Tensor] = [None] * len(self._places)  # type: ignore[list-item]  # no reader before a writer
        for place, blob in self._loads:
            tensors[place] = blob.tensor
        for layer, overwrite, call, bottoms, tops, freed in self._moves:
            layer.may_overwrite = overwrite
            if len(tops) == 1:
                tensors[tops[0]] = call([tensors[place] for place in bottoms])[0]
            else:
                for place, value in zip(tops, call([tensors[place] for place in bottoms]), strict=True):
                    tensors[place] = value
            for place in freed:
                tensors[place] = None  # type: ignore[call-overload]
        for place, blob in self._stores:
            blob.set_tensor(tensors[place])
