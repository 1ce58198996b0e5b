"""A model as the float ONNX file that its quantized files are made of, for comparing with these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.pytorch.capture.cached_trace import cached_trace
from amct.pytorch.fuse import fuse
from amct.pytorch.onnx.float_onnx import float_onnx

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import nn


def reference_onnx(model: nn.Module, example: NDArray[np.float32]) -> ModelProto:
    """The model with its batch norms folded, in memory; nodes and tensors are called as in its quantized files.

    Args:
        model: any nn.Module; it stays as it is.
        example: an input of the batch size that will be run.

    Raises:
        ExportError: the model cannot be captured, or uses an operation that ONNX lacks.
        ModelError: it cannot be captured.
    """
    traced = cached_trace(model, torch.from_numpy(example))
    return float_onnx(traced, fuse(traced)).model
