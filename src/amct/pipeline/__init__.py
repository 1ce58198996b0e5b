"""The one flow of post-training quantization, for every front door: prepare, calibrate, save, compare, report."""
