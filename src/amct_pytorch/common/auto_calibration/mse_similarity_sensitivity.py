"""AMCT's module of ``MseSimilaritySensitivity``."""

from amct.search.roll_back import MseSimilaritySensitivity

__all__ = ["MseSimilaritySensitivity"]
