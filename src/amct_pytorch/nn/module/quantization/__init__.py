"""AMCT's import paths of modules that quantize; everything is implemented in ``amct``."""
