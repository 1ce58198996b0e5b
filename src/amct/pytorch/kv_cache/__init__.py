"""Calibration of key/value caches: the factors with which the outputs of layers are quantized in a cache."""
