"""Functions of the caffe module that concern the process, not nets."""

from __future__ import annotations

import logging
import time

import torch

from amct.errors import ArgumentError

TRAIN, TEST = 0, 1

logger = logging.getLogger(__name__)


def set_random_seed(seed: int) -> None:
    """Seed torch's global generator, which fillers, dropout and shuffling use."""
    torch.manual_seed(seed)


def has_nccl() -> bool:
    """Whether several GPUs can train together: not supported."""
    return False


def solver_count() -> int:
    """The number of solvers that train together: always 1."""
    return 1


def solver_rank() -> int:
    """The rank of this solver: always 0."""
    return 0


def set_solver_count(count: int) -> None:
    """For compatibility: only one solver is supported.

    Raises:
        ArgumentError: ``count`` is not 1.
    """
    if count != 1:
        raise ArgumentError(f"training with several solvers (GPUs) is not supported: count must be 1, got {count}")


def set_solver_rank(rank: int) -> None:
    """For compatibility: the only solver has rank 0.

    Raises:
        ArgumentError: ``rank`` is not 0.
    """
    if rank != 0:
        raise ArgumentError(f"the only solver has rank 0, got {rank}")


def set_multiprocess(multiprocess: bool) -> None:
    """For compatibility: only one process is supported.

    Raises:
        ArgumentError: ``multiprocess`` is set.
    """
    if multiprocess:
        raise ArgumentError("training with several processes is not supported")


class Timer:
    """A timer in milliseconds: ``start()``, ``stop()``, ``ms``."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Start, or restart."""
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
    """For compatibility; logging is Python's."""
    del level


def log(message: str) -> None:
    """Write a line to the log."""
    logger.info("%s", message)
