"""AMCT's module of ``CosineSimilaritySensitivity``."""

from amct.search.roll_back import CosineSimilaritySensitivity

__all__ = ["CosineSimilaritySensitivity"]
