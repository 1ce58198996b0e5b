"""The lowering rules, one family per file; importing this package fills the table."""

from amct.pytorch.onnx.lowering.rules import elementwise, indexing, layers, normalization, products, shaping
from amct.pytorch.onnx.lowering.writer import RULES

__all__ = ["RULES", "elementwise", "indexing", "layers", "normalization", "products", "shaping"]
