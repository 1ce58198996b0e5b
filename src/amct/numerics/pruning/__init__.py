"""Pruning: which channels of a layer to remove, and which weights of every four to keep."""
