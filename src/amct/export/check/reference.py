"""What the files of a save are compared with, and how much worse than the simulation they may be.

The noise of a quantized model is the sum of many roundings. A value rounded to steps of s is off by s²/12 in the mean
square.

* **A file that computes the integers of the simulation** (fake-quant, deploy, QDQ with placement exact) differs only
  where a value lies so near a tie that float32 sums in another order round it to the other side: it is then off by a
  whole step, s², twelve times its share of the noise. Sums of K products are accurate to about √K · 2^-24 of their
  size, so of values up to 127 steps at most 2 · 127 · √K · 2^-24 are that near: 0.15 % for K = 10 000, which adds 12 ·
  0.15 % = 2 % to the noise of one layer, 0.1 dB. ``WORSE`` = 1 dB is 26 % more noise: ten such layers in a row.
* **The fast QDQ file** also rounds the tensors between the layers, and weights again. With n further roundings
  beside the m of the record, each as large as those, the noise of the tensors grows by 1 + n/m. Steps of twice the size
  make the noise of the weights 4 times as large. So the whole noise grows by at most the larger of both factors:
  ``expected_loss``. What exceeds it by ``WORSE`` is no matter of number: 8 bits cannot hold the range of some tensor.

A file that is worse than the simulation by more than ``WORSE`` is reported, also if it is only likely to be on other
data (``likely_loss``). One that is surely (``sure_loss``) worse by more than ``expected_loss`` + ``WORSE`` is repaired,
if its further tensors are the cause of at least half of the loss: without them, fewer layers run in integer kernels, so
they are not given up for little, nor for a loss that the spread of a few samples may have lifted over that bound. A
file above ``ENOUGH`` is not repaired: one rounding of normally distributed numbers to the 256 steps of eight standard
deviations leaves 10 log10(12 · (255/8)²) = 41 dB, so its noise is that of rounding the output alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from amct.export.check.similarity import Similarity

Outputs = Sequence[tuple[str, "NDArray[Any]"]]
"""The outputs of a model with their names."""
UNNAMED = "output"
"""The name of every output of a model that has no names for them."""
SEVEN_BIT_NOISE = 4.0
"""How much larger the rounding noise of weights is with 7 bits than with 8."""
SHARE = 0.025
"""Of the time of a job: what each model may take for further batches, and what timing may take.

Float model, simulation and file on further batches, and the timing, are then a tenth of the job; to load all of them
and to run each once is another tenth.
"""
FEWEST_SAMPLES = 3
"""Batches with so many samples are run however short the job was: one sample may hide a loss."""
ENOUGH = 41.0
"""Decibels of SQNR from which a file is as good as 8-bit outputs can be."""
WORSE = 1.0
"""Decibels by which a file may be worse than the simulation without a warning."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A batch and what the front door's own models make of it.

    Attributes:
        inputs: The batch by the input names of the ONNX files.
        origin: What the batch is, for people.
        expected: The floating-point outputs of the float model in the order of the ONNX files, with their names where
            the front door has names; None: the float ONNX model gives them.
        simulated: Those of the simulation; None: the fake-quant form of the float ONNX model gives them.
        further: More batches of the same shapes, on which QDQ files run too: a single sample may hide a loss.
        seconds: The CPU time of the job so far: of a short one the check takes fewer batches and fewer timed runs.
    """

    inputs: Mapping[str, NDArray[Any]]
    origin: str
    expected: Outputs | None = None
    simulated: Outputs | None = None
    further: tuple[Reference, ...] = ()
    seconds: float = math.inf

    @property
    def batches(self) -> tuple[Reference, ...]:
        """This batch and the further ones."""
        return self, *self.further


def fewest_batches(inputs: Mapping[str, NDArray[Any]]) -> int:
    """How many batches of these shapes have ``FEWEST_SAMPLES`` samples, which the first axis of the largest counts."""
    largest = max(inputs.values(), key=lambda array: array.nbytes, default=None)
    samples = largest.shape[0] if largest is not None and largest.ndim else 1
    return math.ceil(FEWEST_SAMPLES / max(1, samples))


def by_name(outputs: Outputs | None, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
    """Outputs by their names in a file, matched by name or, without names, by position; None if they do not match.

    A file may have other outputs than its model: it ends in front of a layer that ONNX lacks.
    """
    if outputs is None:
        return None
    found = dict(outputs)
    if set(names) <= set(found):
        return {name: found[name] for name in names}
    if len(outputs) != len(names) or any(name != UNNAMED for name, _ in outputs):
        return None
    return {name: value for name, (_, value) in zip(names, outputs, strict=True)}


def loss(simulated: Similarity | None, got: Similarity | None) -> float:
    """Decibels by which a file is worse than the simulation; 0 if that is not known."""
    if simulated is None or got is None or math.isinf(simulated.sqnr) or math.isnan(simulated.sqnr):
        return 0.0
    return math.inf if math.isnan(got.sqnr) else max(0.0, simulated.sqnr - got.sqnr)


def expected_loss(layers: int, tensors: int) -> float:
    """Decibels by which a QDQ file with ``tensors`` further quantized tensors may be worse than the simulation.

    Each of the layers has one rounding of a tensor, that of its input.
    """
    return 10 * math.log10(max(1 + tensors / max(1, layers), SEVEN_BIT_NOISE))
