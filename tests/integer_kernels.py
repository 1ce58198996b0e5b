"""Ask onnxruntime what it makes of a model: which of its matrix products run in integer kernels."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from amct.atomic import check_whole

if TYPE_CHECKING:
    import os

INTEGER_KERNELS = frozenset(
    {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"}
)
FLOAT_KERNELS = frozenset({"Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "NhwcFusedConv"})


@dataclass(frozen=True)
class KernelCount:
    """Operators of a model after onnxruntime's own optimization."""

    operators: Counter[str] = field(default_factory=Counter)

    @property
    def integer(self) -> int:
        """How many convolutions and matrix products run in integers."""
        return sum(self.operators[name] for name in INTEGER_KERNELS)

    @property
    def total(self) -> int:
        """How many convolutions and matrix products there are; ConvTranspose and recurrent layers are not counted."""
        return self.integer + sum(self.operators[name] for name in FLOAT_KERNELS)

    @property
    def share(self) -> float:
        """``integer / total``; 1 when there is nothing to count."""
        return self.integer / self.total if self.total else 1.0


def count_integer_kernels(path: str | os.PathLike[str]) -> KernelCount:
    """Let onnxruntime load and optimize a model for the CPU, and count what it will run."""
    import onnxruntime  # here: importing an exporter must not start a runtime

    check_whole(path)
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(optimized)
        options.log_severity_level = 3  # it warns that the saved model fits this machine only, which is the point
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(str(optimized), load_external_data=False)
    return KernelCount(Counter(node.op_type for node in model.graph.node))
