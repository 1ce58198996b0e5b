"""The lowering rules by family; importing them fills the table."""

from amct.pytorch.onnx.lowering.registry import RULES
from amct.pytorch.onnx.lowering.rules import (
    activations,
    attention,
    convolution,
    creation,
    elementwise,
    indexing,
    joining,
    normalization,
    padding,
    pooling,
    products,
    recurrent,
    reductions,
    resampling,
    shaping,
)

__all__ = [
    "RULES",
    "activations",
    "attention",
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "joining",
    "normalization",
    "padding",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "resampling",
    "shaping",
]
