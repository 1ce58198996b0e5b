"""Small functions of the caffe module that are about the process, not about nets."""

from __future__ import annotations

import logging

import torch

TRAIN, TEST = 0, 1

logger = logging.getLogger(__name__)


def set_random_seed(seed: int) -> None:
    """Seed what fillers, dropout and shuffling draw from (torch's global generator)."""
    torch.manual_seed(seed)


def has_nccl() -> bool:
    """Whether several GPUs can train together: not here."""
    return False


def solver_count() -> int:
    """How many solvers train together: one."""
    return 1


def solver_rank() -> int:
    """Which of them this one is: the first."""
    return 0


def init_log(level: int = 0) -> None:
    """Exists for scripts that call it; logging is Python's own here."""
    del level


def log(message: str) -> None:
    """Write a line to the log."""
    logger.info("%s", message)
