"""Which data a calibration used, in the words of the log, of commands and of ``quant.json``."""

from __future__ import annotations

from dataclasses import dataclass

from amct.model.verdict import Closed
from amct.printable import counted


@dataclass(frozen=True, kw_only=True)
class CalibrationData(Closed):
    """The data of the calibration.

    Attributes:
        used: How many pictures, samples or batches were used.
        of: How many there are; None: not known.
        unit: What is counted: "pictures", "samples" or "batches".
        preparation: What was done to each picture; empty where that is not known, or nothing.
    """

    used: int
    of: int | None = None
    unit: str = "batches"
    preparation: str = ""

    def __str__(self) -> str:
        """``50 of 200 pictures``."""
        one = "batch" if self.unit == "batches" else self.unit.removesuffix("s")
        if self.of is not None:
            return f"{self.used} of {counted(self.of, one)}"
        return counted(self.used, one)
