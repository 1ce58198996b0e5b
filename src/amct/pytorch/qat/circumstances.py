"""The circumstances of a training step that a quantizer must know: other processes, a repeated forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def is_recomputing() -> bool:
    """Whether a backward pass runs this forward again (gradient checkpointing): its batch was observed before."""
    return bool(torch._C._current_graph_task_id() != -1)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over all processes of distributed training, so that every process starts with the same clips."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()
