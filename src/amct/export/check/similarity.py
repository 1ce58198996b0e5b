"""Cosine and SQNR of the outputs of two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.numerics.similarity import Comparison

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    OutputsByName = Mapping[str, NDArray[Any]]


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
    comparison, reasons = Comparison(), dict[str, str]()
    for expected, got in batches:
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
        Similarity(output=each.layer, cosine=each.cosine, sqnr=each.sqnr) for each in comparison.layers() if each.values
    ]
    return min(found, key=lambda each: -math.inf if math.isnan(each.sqnr) else each.sqnr, default=None), reasons


LIKELY = 2.0
"""Standard errors above a measured loss up to which the loss on other data is expected: 97.5 % of normal errors."""
SURE = 1.0
"""Standard errors below a measured loss down to which it is counted on: for the decision on a repair.

That is 84 % of normal errors. A repair that was not needed costs speed, one that is left out costs accuracy.
"""


def likely_loss(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> float:
    """Decibels by which a file may be worse than the simulation on data like this: a loss plus ``LIKELY`` errors of it.

    Of two losses the larger result counts, see ``_losses``.

    Args:
        expected: The outputs of the float model, batch by batch.
        simulated: Those of the simulation.
        got: Those of the file.
        output: The name of the output.
    """
    return max((loss + LIKELY * error for loss, error in _losses(expected, simulated, got, output)), default=0.0)


def sure_loss(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> float:
    """Decibels by which a file is worse than the simulation on other data too: a loss minus ``SURE`` errors of it.

    Of two losses the larger result counts: either of them is proof enough. Arguments as for ``likely_loss``.
    """
    return max((loss - SURE * error for loss, error in _losses(expected, simulated, got, output)), default=0.0)


def _losses(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> list[tuple[float, float]]:
    """Two measures of the decibels by which a file is worse than the simulation, each with its standard error.

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
        return [(loss, 0.0)]
    residuals = of_file - ratio * of_simulation
    relative = math.sqrt(count / (count - 1) * float(np.sum(residuals**2))) / float(of_file.sum())
    found = [(loss, 10 / math.log(10) * relative)]
    counted = (of_file > 0) & (of_simulation > 0)
    if several and counted.sum() > 1:
        losses = 10 * np.log10(of_file[counted] / of_simulation[counted])
        found.append((float(losses.mean()), float(losses.std(ddof=1)) / math.sqrt(losses.size)))
    return found


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
