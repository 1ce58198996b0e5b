"""AMCT's import paths of modules."""
