"""The lowering rules, one family per file; importing this package fills the table."""

from amct.pytorch.onnx.lowering.registry import RULES
from amct.pytorch.onnx.lowering.rules import elementwise, indexing, normalization, products, shaping, windows

__all__ = ["RULES", "elementwise", "indexing", "normalization", "products", "shaping", "windows"]
