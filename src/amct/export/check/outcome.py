"""The result of a check: numbers from outputs, and what is said about them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from amct.errors import ExportError
from amct.export.check.reference import WORSE
from amct.export.check.similarity import likely_loss, similarity_over
from amct.model.quant_json import FileCheck

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from amct.export.check.similarity import Similarity

logger = logging.getLogger(__name__)


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
    result = outcome(target, origin, found, near)
    if result.sqnr is None or result.simulation_sqnr is None:
        return result
    return replace(result, likely_loss=likely_loss(expected, simulated, outputs, result.output))


def outcome(
    target: Path,
    origin: str,
    found: tuple[Similarity | None, Mapping[str, str]],
    simulated: Similarity | None,
) -> FileCheck:
    """The result of a comparison, whose outputs that were not compared have a reason."""
    similarity, reasons = found
    missing = "; ".join(f'output "{name}": {reason}' for name, reason in reasons.items())
    if similarity is not None and math.isnan(similarity.sqnr):
        missing, similarity = f'output "{similarity.output}" has values that are not finite', None
        logger.warning("%s: %s", target.name, missing)
    if similarity is None:
        return FileCheck(batch=origin, not_checked=missing)
    return FileCheck(
        batch=origin,
        output=similarity.output,
        cosine=similarity.cosine,
        sqnr=_finite(similarity.sqnr),
        simulation_sqnr=None if simulated is None else _finite(simulated.sqnr),
        not_checked=missing,
    )


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


def warn_worse(target: Path, check: FileCheck) -> None:
    """Say that a file is worse than the simulation, and where that begins."""
    found = lost(check)
    logger.warning(
        "%s %s worse than the simulation%s (SQNR %.1f instead of %.1f dB%s)%s",
        target.name,
        f"is {found:.1f} dB" if found > WORSE else f"may be {check.likely_loss:.1f} dB",
        "" if found > WORSE else " on other data",
        check.sqnr,
        check.simulation_sqnr,
        "" if found > WORSE else f" on {check.batch}",
        f'; the first tensor that is worse is "{check.differs_at}"' if check.differs_at else "",
    )


def warn_different(target: Path, check: FileCheck, exact: float) -> None:
    """Say that a file is worse than the simulation because its float model is not the user's."""
    logger.warning(
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
    """Log the numbers of a file."""
    logger.info("%s: %s (%s)", target.name, check.text(), check.batch)


def warn_slow(target: Path, check: FileCheck) -> None:
    """Say that a file is slower than the float model, or may be."""
    logger.warning(
        "%s %s slower than the float model on this machine (%.2f of its speed); most time is taken by %s",
        target.name,
        "is" if check.speed is not None and check.speed < 1 else "may be",
        check.speed,
        ", ".join(check.costliest),
    )
