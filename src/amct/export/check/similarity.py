"""Cosine and SQNR of the outputs of two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amct.numerics.similarity import Comparison

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


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


def output_similarity(
    expected: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]
) -> tuple[Similarity | None, dict[str, str]]:
    """Compare the floating-point outputs of two models on the same batch.

    Returns:
        The similarity of the output that differs most, None if there is none to compare; and the outputs that were not
        compared, with the reason.
    """
    comparison, reasons = Comparison(), {}
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


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
