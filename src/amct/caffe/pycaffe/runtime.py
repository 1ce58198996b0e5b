"""Small functions of the caffe module that are about the process, not about nets."""

from __future__ import annotations

import logging
import time

import torch

from amct.errors import ArgumentError

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


def set_solver_count(count: int) -> None:
    """Exists for scripts that call it: one solver trains here.

    Raises:
        ArgumentError: Several are asked for.
    """
    if count != 1:
        raise ArgumentError(f"several solvers (GPUs) cannot train together here, got {count}; train with one")


def set_solver_rank(rank: int) -> None:
    """Exists for scripts that call it: the only solver is the first.

    Raises:
        ArgumentError: Another rank is asked for.
    """
    if rank != 0:
        raise ArgumentError(f"the only solver has rank 0, got {rank}")


def set_multiprocess(multiprocess: bool) -> None:
    """Exists for scripts that call it: one process trains here.

    Raises:
        ArgumentError: Several are asked for.
    """
    if multiprocess:
        raise ArgumentError("several processes cannot train together here; train with one")


class Timer:
    """A stop watch in milliseconds: ``start()``, ``stop()``, ``ms``."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Start, or start again."""
        self._start = time.perf_counter()

    def stop(self) -> None:
        """Stop."""
        if self._start is not None:
            self._seconds, self._start = time.perf_counter() - self._start, None

    @property
    def ms(self) -> float:
        """Milliseconds between start and stop."""
        return self._seconds * 1e3


def init_log(level: int = 0) -> None:
    """Exists for scripts that call it; logging is Python's own here."""
    del level


def log(message: str) -> None:
    """Write a line to the log."""
    logger.info("%s", message)
