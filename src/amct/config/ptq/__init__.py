"""Post-training quantization: from a simple or full config of either dialect, or from Python, to a plan."""
