"""The lowering rules, one family per file; importing this package fills the table."""

from amct.pytorch.onnx.lowering.rules import elementwise, indexing, normalization, products, shaping, windows
from amct.pytorch.onnx.lowering.writer import RULES

__all__ = ["RULES", "elementwise", "indexing", "normalization", "products", "shaping", "windows"]
