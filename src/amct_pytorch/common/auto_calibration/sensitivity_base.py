"""AMCT's module of ``SensitivityBase``."""

from amct.search.roll_back import SensitivityBase

__all__ = ["SensitivityBase"]
