"""Quantization-aware training: from a simple or full config of either dialect to a plan."""
