"""Reconstruction by blocks, for every front door whose models can be run in parts with gradients."""
