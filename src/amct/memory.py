"""Memory: how much a model from elsewhere may need, counted before it is allocated; and what was freed, given back."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amct.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

LARGE_MODEL = 2**24
"""Bytes of parameters from which memory counts more than the time to ask the system for it."""
_UNKNOWN_MACHINE_BYTES = 8 * 2**30
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@functools.cache
def machine_bytes() -> int:
    """The memory of this machine, or of its container if that is less; 8 GiB where the system does not say."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        found.append(_UNKNOWN_MACHINE_BYTES)
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)


def process_bytes() -> int:
    """The memory that this process uses now; 0 on systems other than Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; None with another C library."""
    try:
        library = ctypes.CDLL(None)
        _ = library.gnu_get_libc_version
        found: Callable[..., int] = getattr(library, name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


def give_back_freed() -> None:
    """Give freed memory back to the system: glibc keeps blocks below 32 MB for later, which nobody may need.

    Called where as much as all parameters of a model was freed. It takes some milliseconds.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def free_unused_models(parameter_bytes: int) -> None:
    """Free large models that nobody uses any more, although their parts refer to each other.

    Python would find them late, because they consist of few objects. The search takes some tenths of a second.
    """
    if parameter_bytes >= LARGE_MODEL:
        gc.collect()
        give_back_freed()


def number_from_environment(variable: str, default: int, what: str = "bytes") -> int:
    """Return a limit: the value of an environment variable, or the default.

    Raises:
        ModelError: The variable is not a positive number.
    """
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or int(text) == 0:
        raise ModelError(f"{variable} must be a number of {what}, got {text!r}")
    return int(text)


class _CollectorPause:
    """The collector is one for the whole process: the first of several threads stops it, the last one restarts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_on = False

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._was_on = gc.isenabled()
                gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._was_on:
                gc.enable()


_COLLECTOR_PAUSE = _CollectorPause()


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python does not search for unreachable cycles of objects.

    For steps that make many small objects which stay, such as the import of a large package: the search would look
    at all of them again and again, a sixth of the time of a short job. Not for steps that run the user's code for long.
    """
    _COLLECTOR_PAUSE.enter()
    try:
        yield
    finally:
        _COLLECTOR_PAUSE.leave()


class LiveTensors:
    """The tensors that exist at the same time while a model runs, and the bytes that they need together.

    Args:
        limit: The largest allowed number of bytes.
        held: Bytes that are in use all the time.
    """

    def __init__(self, limit: int, held: int = 0) -> None:
        self.limit, self.bytes = limit, held
        self._sizes: dict[Hashable, int] = {}
        self._owner: dict[Hashable, Hashable] = {}
        self._users: dict[Hashable, set[Hashable]] = {}

    @property
    def is_too_much(self) -> bool:
        """Whether the tensors need more than the limit."""
        return self.bytes > self.limit

    def make(self, sizes: Mapping[Hashable, int], view_of: Hashable = None) -> None:
        """Add the results of a step, with their bytes; ``view_of`` is the tensor whose memory they use, if any."""
        for key, size in sizes.items():
            if key in self._owner:  # computed in place
                continue
            owner = key if view_of is None else self._owner.get(view_of, view_of)
            self._owner[key] = owner
            self._users.setdefault(owner, set()).add(key)
            if view_of is None:
                self._sizes[key] = size
                self.bytes += size

    def free(self, keys: Iterable[Hashable]) -> None:
        """Remove tensors; memory is free when no view of it is left."""
        for key in keys:
            owner = self._owner.pop(key, None)
            if owner is None:
                continue
            self._users[owner].discard(key)
            if not self._users[owner]:
                self.bytes -= self._sizes.pop(owner, 0)


def gibibytes(count: int) -> str:
    """Format a number of bytes, as in ``1.5 GiB``."""
    return f"{count / 2**30:.1f} GiB"
