"""One rule for each kind of operation: which channels it couples or keeps, and where they are in its result."""

from __future__ import annotations

from amct.pytorch.pruning.rules import shapes  # noqa: F401 - its rules are registered
from amct.pytorch.pruning.rules.computing import broadcast, unknown

__all__ = ["broadcast", "unknown"]
