"""Quantization-aware training of torch models: modules with trained quantizers in place of layers."""
