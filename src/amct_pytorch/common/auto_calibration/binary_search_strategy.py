"""AMCT's module of ``BinarySearchStrategy``."""

from __future__ import annotations

from amct.search.roll_back import BinarySearchStrategy

__all__ = ["BinarySearchStrategy"]
