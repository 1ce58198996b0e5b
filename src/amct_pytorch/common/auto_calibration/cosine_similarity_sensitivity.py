"""AMCT's module of ``CosineSimilaritySensitivity``."""

from __future__ import annotations

from amct.search.roll_back import CosineSimilaritySensitivity

__all__ = ["CosineSimilaritySensitivity"]
