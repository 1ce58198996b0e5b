"""The QDQ file: QuantizeLinear/DequantizeLinear pairs, and which tensors get them."""
