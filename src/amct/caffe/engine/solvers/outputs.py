"""The output values of a net, and Caffe's log lines for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from amct.caffe.engine.net import Net


@dataclass(frozen=True)
class Score:
    """One value of one output blob."""

    name: str
    value: float
    loss_weight: float

    def __str__(self) -> str:
        """The form that Caffe prints: ``loss = 0.5 (* 2 = 1 loss)``."""
        loss = f" (* {self.loss_weight:g} = {self.loss_weight * self.value:g} loss)" if self.loss_weight else ""
        return f"{self.name} = {self.value:g}{loss}"


def scores(net: Net) -> list[Score]:
    """All values of all outputs, in order."""
    graph = net.graph
    return [
        Score(graph.blob_names[index], value, graph.loss_weights[index])
        for index in graph.outputs
        for value in graph.blobs[index].tensor.reshape(-1).tolist()
    ]


class MeanScores:
    """The mean of a net's outputs over several forward passes."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Score] = []

    def add(self, new: list[Score]) -> None:
        """Add the outputs of one forward pass; surplus values (a batch of another size) are ignored."""
        if self.count == 0:
            self._sums = new
        else:
            self._sums = [
                Score(total.name, float(np.float32(total.value) + np.float32(score.value)), total.loss_weight)
                for total, score in zip(self._sums, new, strict=False)
            ]
        self.count += 1

    def means(self) -> list[Score]:
        """The mean of each value so far."""
        return [
            Score(total.name, total.value / self.count if self.count else math.nan, total.loss_weight)
            for total in self._sums
        ]
