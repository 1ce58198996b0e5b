"""Placeholder docstring, to be replaced by the package owner."""
