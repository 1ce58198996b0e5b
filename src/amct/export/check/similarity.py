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


def loss_uncertainty(
    expected: Sequence[OutputsByName], simulated: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> float:
    """The standard error, in dB, of the loss of a file: of 10 log10(noise of the file / noise of the simulation).

    Both noises are sums over the same samples. The error of such a ratio of sums follows from the residuals of the
    samples: f_i - r s_i, where r is the ratio (linearization, as for every ratio estimator). A sample is a row of the
    output; of a single row, each of its numbers is one.

    Args:
        expected: The outputs of the float model, batch by batch.
        simulated: Those of the simulation.
        got: Those of the file.
        output: The name of the output.
    """
    noises = [_noise_by_row(expected, each, output) for each in (simulated, got)]
    if any(noise is None for noise in noises):
        return 0.0
    of_simulation, of_file = (np.asarray(noise) for noise in noises)
    if of_file.shape != of_simulation.shape or of_file.size <= 1 or not of_simulation.sum() or not of_file.sum():
        return 0.0
    residuals = of_file - of_file.sum() / of_simulation.sum() * of_simulation
    count = residuals.size
    relative = math.sqrt(count / (count - 1) * float(np.sum(residuals**2))) / float(of_file.sum())
    return 10 / math.log(10) * relative


def _noise_by_row(
    expected: Sequence[OutputsByName], got: Sequence[OutputsByName], output: str
) -> NDArray[np.float64] | None:
    """The squared error of each row of an output; None if an output is missing or has another shape."""
    pairs = [(one.get(output), other.get(output)) for one, other in zip(expected, got, strict=True)]
    errors: list[NDArray[np.float64]] = []
    for one, other in pairs:
        if one is None or other is None or one.shape != other.shape:
            return None
        errors.append((one.astype(np.float64) - other) ** 2)
    rows = [error.reshape(len(error) if error.ndim > 1 else 1, -1) for error in errors]
    found: NDArray[np.float64] = np.concatenate([each.sum(axis=1) for each in rows])
    return rows[0][0] if found.size == 1 else found


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
