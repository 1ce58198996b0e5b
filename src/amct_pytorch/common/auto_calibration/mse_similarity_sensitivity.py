"""AMCT's module of ``MseSimilaritySensitivity``."""

from __future__ import annotations

from amct.search.roll_back import MseSimilaritySensitivity

__all__ = ["MseSimilaritySensitivity"]
