"""Functional calls on parameters (``F.linear(x, self.weight)``), found in a model and turned into layers of a copy."""
