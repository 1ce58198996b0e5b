"""Quantizers with gradients, for quantization-aware training: trained clips and learned or measured steps."""
