"""AMCT's module of ``BinarySearchStrategy``."""

from amct.search.roll_back import BinarySearchStrategy

__all__ = ["BinarySearchStrategy"]
