"""Which data a calibration used, in the words of the log, of commands and of ``quant.json``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """The data of the calibration.

    Attributes:
        used: How many pictures, samples or batches were used.
        of: How many there are; None: not known.
        unit: What is counted: "pictures", "samples" or "batches".
        preparation: What was done to each picture; empty where that is not known, or nothing.
    """

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  read by quant_json, which needs pydantic
    used: int
    of: int | None = None
    unit: str = "batches"
    preparation: str = ""

    def __str__(self) -> str:
        """``50 of 200 pictures``."""
        if self.of is not None:
            return f"{self.used} of {self.of} {self.unit}"
        return f"{self.used} {self.unit if self.used != 1 else self.unit.removesuffix('es').removesuffix('s')}"
