"""Tensors as NumPy arrays, whatever their type and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor; an array of a CPU tensor shares its memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:  # NumPy has no such type of its own
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
