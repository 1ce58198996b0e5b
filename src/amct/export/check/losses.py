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
data (``likely_loss``). One that is surely (``sure_loss``) worse is repaired (``repair.py``): tensors between its layers
stay float as long as they give up a small share of the time that integers save; above ``ENOUGH`` a smaller one: one
rounding of normally distributed numbers to the 256 steps of eight standard deviations leaves 10 log10(12 · (255/8)²) =
41 dB, so the noise of such a file is that of rounding the output alone. One that is surely worse by more than
``expected_loss`` + ``WORSE``, and not Good, may even become slower than float, if that takes away half of the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.errors import ExportError
from amct.export.check.batch import RANDOM
from amct.model.quant_json import FileCheck
from amct.model.verdict import judge
from amct.numerics.similarity import LEAST_SCORE, BoxMatching, Comparison

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.export.check.running import Speed
    from amct.numerics.similarity import BoxComparison

    OutputsByName = Mapping[str, NDArray[Any]]

logger = logging.getLogger(__name__)

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
FEWEST_SAMPLES = 5
"""Batches with so many samples are run however short the job was: one sample may hide a loss.

The bound of a mean of n samples is t/√n of their deviations away, where t is Student's quantile for n samples: 2.5 of
them for 3 samples, with which every file might be worse, 1.2 for 5, 0.8 for 8. Where the data has fewer, nothing is
said of other data: a warning that every file gets says nothing.
"""
ENOUGH = 41.0
"""Decibels of SQNR from which a file is as good as 8-bit outputs can be."""
WORSE = 1.0
"""Decibels by which a file may be worse than the simulation without a warning."""
LIKELY = 0.975
"""How sure it is that the loss on other data is at most the likely one."""
SURE = 0.84
"""How sure it is that the loss on other data is at least the sure one, by which a repair is decided.

A repair that was not needed costs speed, one that is left out costs accuracy.
"""
_AS_GOOD_AS_NORMAL = 200
"""Degrees of freedom above which the quantiles of Student's distribution are those of the normal one, to 0.6 %."""
_STEPS = 60
_NONE = np.zeros(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A batch and what the front door's own models make of it.

    Attributes:
        inputs: The batch by the input names of the ONNX files.
        origin: What the batch is, for people.
        expected: The floating-point outputs of the float model in the order of the ONNX files, with their names where
            the front door has names; None: the float ONNX model gives them.
        simulated: Those of the simulation; None: the fake-quant form of the float ONNX model gives them.
        handed_in: Those of the model that was handed in for training, which the verdict rests on; None: ``expected``.
        further: More batches of the same shapes, on which QDQ files run too: a single sample may hide a loss.
        seconds: The CPU time of the job so far: of a short one the check takes fewer batches and fewer timed runs.
    """

    inputs: Mapping[str, NDArray[Any]]
    origin: str
    expected: Outputs | None = None
    simulated: Outputs | None = None
    handed_in: Outputs | None = None
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


# -- similarity of outputs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """How near the outputs of a model are to those of another; of several outputs, the one with the lowest SQNR.

    Attributes:
        output: The name of the output.
        cosine: As ``LayerComparison.cosine``.
        sqnr: As ``LayerComparison.sqnr``, in dB; infinite for equal outputs.
    """

    output: str
    cosine: float
    sqnr: float


def output_similarity(expected: OutputsByName, got: OutputsByName) -> tuple[Similarity | None, dict[str, str]]:
    """Compare the floating-point outputs of two models on the same batch.

    Returns:
        The similarity of the output that differs most, None if there is none to compare; and the outputs that were not
        compared, with the reason.
    """
    return similarity_over([(expected, got)])


def similarity_over(batches: Iterable[tuple[OutputsByName, OutputsByName]]) -> tuple[Similarity | None, dict[str, str]]:
    """As ``output_similarity``, over several batches."""
    comparison, reasons, detections = Comparison(), dict[str, str](), BoxMatching()
    for expected, got in batches:
        detections.take(expected, got)
        for name, reference in expected.items():
            other = got.get(name)
            if reference.dtype.kind != "f":
                reasons[name] = f"it holds {reference.dtype}, not floating-point numbers"
            elif other is None:
                reasons[name] = "the file has no output of this name"
            elif other.shape != reference.shape:
                reasons[name] = f"its shape is {list(other.shape)}, expected {list(reference.shape)}"
            else:
                comparison.add(name, _tensor(reference), _tensor(other))
    found = [
        Similarity(output=each.layer, cosine=each.cosine, sqnr=each.sqnr)
        for each in comparison.layers()
        if each.values and each.layer not in detections.names
    ]
    for name in detections.names:
        reasons.pop(name, None)
    return min(found, key=lambda each: -math.inf if math.isnan(each.sqnr) else each.sqnr, default=None), reasons


def matched_boxes(batches: Iterable[tuple[OutputsByName, OutputsByName]]) -> tuple[BoxComparison, ...]:
    """What the second of two models makes of the boxes that the first one finds, over several batches."""
    detections = BoxMatching()
    for expected, got in batches:
        detections.take(expected, got)
    return detections.comparisons()


def likely_loss(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> float:
    """Decibels by which a file may be worse than the simulation on data like this: the upper bound of a loss.

    Of two losses the larger result counts, see ``_losses``.

    Args:
        expected: The outputs of the float model, batch by batch.
        simulated: Those of the simulation.
        got: Those of the file.
        output: The name of the output.
    """
    losses = _losses(expected, simulated, got, output)
    return max((loss + _student_quantile(LIKELY, count - 1) * error for loss, error, count in losses), default=0.0)


def sure_loss(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> float:
    """Decibels by which a file is worse than the simulation on other data too: the lower bound of a loss.

    Of two losses the larger result counts: either of them is proof enough. Arguments as for ``likely_loss``.
    """
    losses = _losses(expected, simulated, got, output)
    return max((loss - _student_quantile(SURE, count - 1) * error for loss, error, count in losses), default=0.0)


def _losses(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> list[tuple[float, float, int]]:
    """Two measures of the decibels by which a file is worse than the simulation, each with its standard error.

    Behind them, the number of samples from which the error was taken.

    The loss of all data is that of the sums of noise, f and s: 10 log10(Σf / Σs). The error of such a ratio of sums
    follows from the residuals of the samples, f_i - r s_i, where r is the ratio (linearization, as for every ratio
    estimator). Where one sample has nearly all noise, such as the one undecided sample of a classifier, this says
    nothing of the others: so the mean of the samples' own losses counts too. A sample is a row of the output; of a
    single row, each of its numbers is one, and only the first loss counts.
    """
    rows_of_simulation, rows_of_file = (_noise_by_row(expected, each, output) for each in (simulated, got))
    if rows_of_simulation is None or rows_of_file is None:
        return []
    several = len(rows_of_file) > 1
    of_simulation, of_file = (
        np.array([row.sum() for row in rows]) if several else rows[0] for rows in (rows_of_simulation, rows_of_file)
    )
    if not of_simulation.sum() or not of_file.sum():
        return []
    ratio = float(of_file.sum() / of_simulation.sum())
    loss = 10 * math.log10(ratio)
    count = of_file.size
    if count == 1:
        return [(loss, 0.0, 2)]
    residuals = of_file - ratio * of_simulation
    relative = math.sqrt(count / (count - 1) * float(np.sum(residuals**2))) / float(of_file.sum())
    found = [(loss, 10 / math.log(10) * relative, count)]
    counted = (of_file > 0) & (of_simulation > 0)
    if several and counted.sum() > 1:
        losses = 10 * np.log10(of_file[counted] / of_simulation[counted])
        found.append((float(losses.mean()), float(losses.std(ddof=1)) / math.sqrt(losses.size), losses.size))
    return found


def _student_quantile(share: float, freedom: int) -> float:
    """The number below which that share of Student's distribution lies; ``share`` is at least a half."""
    if freedom > _AS_GOOD_AS_NORMAL:
        return NormalDist().inv_cdf(share)
    low, high = 0.0, math.tan(math.pi * (share - 0.5))  # of one degree of freedom, the largest
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < share else (low, middle)
    return high


def _student_share(value: float, freedom: int) -> float:
    """The share of Student's distribution below a value, by its finite sum for whole degrees of freedom."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd else 1.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    within = math.sin(angle) * (total if freedom > 1 else 0.0)
    return 0.5 + ((angle + within) / math.pi if odd else within / 2)


def _noise_by_row(
    expected: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> list[NDArray[np.float64]] | None:
    """The squared errors of each row of an output; None if an output is missing or has another shape."""
    rows: list[NDArray[np.float64]] = []
    for exact, other in ((one.get(output), two.get(output)) for one, two in zip(expected, got, strict=True)):
        if exact is None or other is None or exact.shape != other.shape:
            return None
        error: NDArray[np.float64] = (exact.astype(np.float64) - other) ** 2
        rows += list(error.reshape(len(error) if error.ndim > 1 else 1, -1))
    return rows or None


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


# -- the result, and what is said about it -----------------------------------------------------------------------------


class UnusableFileError(ExportError):
    """A written file cannot be loaded or run."""

    def __init__(self, target: Path, origin: str, error: Exception) -> None:
        super().__init__(
            f'"{target}" cannot be loaded or run on {origin}, so nothing was saved: {error}; please report this with '
            "the model; check=False (--no-check) writes the files as they are"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedBatch:
    """One batch and the outputs that a file is compared with.

    Attributes:
        inputs: The batch by the input names of the files.
        expected: The outputs of the float model.
        simulated: Those of the simulation.
    """

    inputs: Mapping[str, NDArray[Any]]
    expected: Mapping[str, NDArray[Any]]
    simulated: Mapping[str, NDArray[Any]]


def compared(
    target: Path, origin: str, batches: Sequence[ComparedBatch], outputs: Sequence[Mapping[str, NDArray[Any]]]
) -> FileCheck:
    """Compare the outputs of a file with those of the float model and of the simulation.

    Args:
        target: The path of the file, for the log.
        origin: What the inputs were.
        batches: The batches.
        outputs: The outputs of the file, batch by batch.
    """
    expected, simulated = [each.expected for each in batches], [each.simulated for each in batches]
    found = similarity_over(zip(expected, outputs, strict=True))
    near = similarity_over(zip(expected, simulated, strict=True))[0]
    result = outcome(target, origin, found, near, matched_boxes(zip(expected, outputs, strict=True)))
    samples = sum(len(each[result.output]) for each in expected if each.get(result.output, _NONE).ndim > 1)
    if result.sqnr is None or result.simulation_sqnr is None or 1 < samples < FEWEST_SAMPLES:
        return result
    return replace(result, likely_loss=likely_loss(expected, simulated, outputs, result.output))


def outcome(
    target: Path,
    origin: str,
    found: tuple[Similarity | None, Mapping[str, str]],
    simulated: Similarity | None,
    boxes: tuple[BoxComparison, ...] = (),
) -> FileCheck:
    """The result of a comparison, whose outputs that were not compared have a reason."""
    similarity, reasons = found
    nothing = f"no box has a score of {LEAST_SCORE} or more"
    empty = {each.output: nothing for each in boxes if not each.boxes + each.more}
    reasons = {**reasons, **empty}
    boxes = tuple(each for each in boxes if each.output not in empty)
    missing = "; ".join(f'output "{name}": {reason}' for name, reason in reasons.items())
    if similarity is not None and math.isnan(similarity.sqnr):
        missing = f'output "{similarity.output}" has values that are not finite'
        logger.warning("%s: %s", target.name, missing)
        return FileCheck(batch=origin, not_checked=missing, verdict=None if origin == RANDOM else "broken")
    judged = None if origin == RANDOM else judge([] if similarity is None else [similarity.sqnr], boxes=boxes)
    result = FileCheck(batch=origin, boxes=boxes, verdict=None if judged is None else judged.level, not_checked=missing)
    if similarity is None:
        return result
    return replace(
        result,
        output=similarity.output,
        cosine=similarity.cosine,
        sqnr=_finite(similarity.sqnr),
        simulation_sqnr=None if simulated is None else _finite(simulated.sqnr),
    )


def judged_by(
    check: FileCheck, handed_in: Sequence[OutputsByName | None], outputs: Sequence[OutputsByName]
) -> FileCheck:
    """A check whose verdict rests on the outputs of the model that was handed in for training, where they are known."""
    pairs = zip(handed_in, outputs, strict=False)
    similarity = similarity_over((expected, got) for expected, got in pairs if expected is not None)[0]
    judged = None if similarity is None else judge([similarity.sqnr])
    if similarity is None or judged is None or check.sqnr is None:
        return check
    return replace(check, handed_in_sqnr=_finite(similarity.sqnr), verdict=judged.level)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lost(check: FileCheck) -> float:
    """Decibels by which a file is worse than the simulation; 0 if that is not known."""
    if check.sqnr is None or check.simulation_sqnr is None:
        return 0.0
    return max(0.0, check.simulation_sqnr - check.sqnr)


def is_worse(check: FileCheck) -> bool:
    """Whether a file is, or may be, so much worse than the simulation that it must be said."""
    return max(lost(check), check.likely_loss or 0.0) > WORSE


def needs_action(check: FileCheck) -> bool:
    """Whether a file that is worse than the simulation is, or may be on other data, less than Good."""
    if check.sqnr is None or check.simulation_sqnr is None:
        return check.verdict == "broken"
    expected = judge([min(check.sqnr, check.simulation_sqnr - (check.likely_loss or 0.0))])
    return expected is not None and expected.level != "good"


def say_worse(target: Path, check: FileCheck) -> None:
    """Say that a file is worse than the simulation, and where that begins; a warning if the user should act."""
    found = lost(check)
    act = needs_action(check)
    logger.log(
        logging.WARNING if act else logging.INFO,
        "%s %s worse than the simulation%s (SQNR %.1f instead of %.1f dB%s)%s%s",
        target.name,
        f"is {found:.1f} dB" if found > WORSE else f"may be {check.likely_loss:.1f} dB",
        "" if found > WORSE else " on other data",
        check.sqnr,
        check.simulation_sqnr,
        "" if found > WORSE else f" on {check.batch}",
        f'; the first tensor that is worse is "{check.differs_at}"' if check.differs_at else "",
        '; save with placement="exact" (--placement exact) to get the numbers of the simulation, at less speed'
        if act and target.name.endswith("qdq_model.onnx")
        else "",
    )


def say_different(target: Path, check: FileCheck, exact: float) -> None:
    """Say, at the level of ``say_worse``, that a file is worse because its float model is not the user's."""
    logger.log(
        logging.WARNING if needs_action(check) else logging.INFO,
        "%s is %.1f dB worse than the simulation (SQNR %.1f instead of %.1f dB), because what was exported does not "
        "compute what the model computes: already in float the SQNR is %.1f dB. The model keeps a state from run to "
        "run, draws random numbers, or its code takes another way while it is captured (torch.compiler.is_compiling)",
        target.name,
        lost(check),
        check.sqnr,
        check.simulation_sqnr,
        exact,
    )


def say_checked(target: Path, check: FileCheck) -> None:
    """Log the numbers of a file; random inputs only show that it runs, since no range was calibrated for them."""
    where = f"{RANDOM}, which say nothing about accuracy" if check.batch == RANDOM else check.batch
    logger.info("%s: %s (%s)", target.name, check.text(), where)


def say_slow(target: Path, check: FileCheck, speed: Speed) -> None:
    """Say that a file is slower than the float model, or may be; a warning if that matters."""
    logger.log(
        logging.WARNING if speed.matters(check.verdict) else logging.INFO,
        "%s %s slower than the float model on this machine (%.2f of its speed); most time is taken by %s",
        target.name,
        "is" if check.speed is not None and check.speed < 1 else "may be",
        check.speed,
        ", ".join(check.costliest),
    )
