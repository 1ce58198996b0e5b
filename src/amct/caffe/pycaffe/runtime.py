"""What concerns the process, not nets: seeds, timers, the log, and ``import caffe`` for scripts written for Caffe."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amct.caffe.installed_alias import is_alias
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


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
        """End the measurement that ``start`` began."""
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


_PACKAGE = "amct.caffe.pycaffe"


def install_as_caffe(*, force: bool = False) -> ModuleType:
    """Put this package into ``sys.modules`` as ``caffe``, with all sub-modules (``caffe.io``), and return it.

    Args:
        force: Replace a real Caffe that is installed or imported.

    Raises:
        ArgumentError: There is a real Caffe, and ``force`` is not set.
    """
    package = importlib.import_module(_PACKAGE)
    present = sys.modules.get("caffe")
    if present is not package and not force:
        spec = None if present is not None else importlib.util.find_spec("caffe")
        # A folder called caffe (such as its sources) is a namespace package without origin; it may be hidden.
        origin = None if spec is None else spec.origin
        if present is not None or not (origin is None or is_alias(Path(origin))):
            raise ArgumentError(
                "install_as_caffe: a package called caffe is already installed here, and would be hidden. Uninstall "
                "it, or call install_as_caffe(force=True) (amct caffe run --force) to hide it in this process"
            )
    if present is not None and present is not package:
        for name in _modules_of_caffe():
            del sys.modules[name]
    sys.modules["caffe"] = package
    alias_modules("caffe")
    return package


@contextmanager
def imported_as_caffe(*, force: bool = False) -> Iterator[None]:
    """``install_as_caffe`` for the length of a ``with`` block."""
    before = _modules_of_caffe()
    install_as_caffe(force=force)
    try:
        yield
    finally:
        for name in _modules_of_caffe():
            del sys.modules[name]
        sys.modules.update(before)


def _modules_of_caffe() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name == "caffe" or name.startswith("caffe.")}


def alias_modules(name: str) -> None:
    """Make the modules of this package importable as ``<name>.io``, ``<name>.proto.caffe_pb2``, ..."""
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
        sys.modules[name + module.name.removeprefix(_PACKAGE)] = importlib.import_module(module.name)
