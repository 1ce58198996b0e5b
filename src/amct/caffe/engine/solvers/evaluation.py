"""Runs a net on several batches and averages its outputs, as ``caffe test`` does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.engine.net import Net
from amct.caffe.engine.solvers.outputs import MeanScores, Score, scores
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The mean loss and the mean of each output."""

    loss: float
    scores: Sequence[Score]

    def lines(self) -> list[str]:
        """The lines that Caffe prints."""
        return [f"Loss: {self.loss:g}", *(str(score) for score in self.scores)]


def evaluate(net: Net, iterations: int) -> Evaluation:
    """Run a net ``iterations`` times and log each batch.

    Raises:
        ArgumentError: The number of iterations is not positive.
    """
    if iterations < 1:
        raise ArgumentError(f"iterations must be at least 1, got {iterations}")
    logger.info("Running for %d iterations.", iterations)
    mean, loss = MeanScores(), 0.0
    for batch in range(iterations):
        loss += Net.forward(net)
        found = scores(net)
        for score in found:
            logger.info("Batch %d, %s = %g", batch, score.name, score.value)
        mean.add(found)
    return Evaluation(loss / iterations, mean.means())
