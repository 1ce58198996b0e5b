"""The journal of a search: the losses of samples that were measured, so that an interrupted search repeats none.

A line of JSON for each piece of work, with a checksum, added to the end of the file as soon as it is done. A kill can
only cut the last line, which is then left out. Any other damage is an error: a search must not go on from numbers that
nobody measured. The first line says what the journal belongs to: model, data, goal and seed.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from amct import atomic
from amct.errors import FileError, SearchError
from amct.printable import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FORMAT = 1
_LONGEST = 1 << 30


class Journal:
    """What was measured, by name of the candidate and part of the samples.

    Args:
        path: The file; None: nothing is kept.
        bound: What it belongs to.
        read: Whether a journal that exists is gone on from; if not, it is replaced.

    Raises:
        SearchError: The journal is damaged, or belongs to another search.
        FileError: The file cannot be read or written.
    """

    def __init__(self, path: Path | None, bound: Mapping[str, str], *, read: bool = True) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        self.repeated = 0
        """How many samples were taken from the file."""
        if path is None:
            return
        atomic.check_writable(path.parent)
        if read and os.path.lexists(path):
            self._read(path, dict(bound))
        else:
            atomic.write_bytes(path, _line({"format": FORMAT, "bound": dict(bound)}))

    def losses(self, name: str) -> NDArray[np.float64]:
        """What is known of a candidate, the first samples first."""
        return np.array(self._known.get(name, ()), np.float64)

    def add(self, name: str, losses: Sequence[float] | NDArray[np.float64]) -> None:
        """Note further samples of a candidate, in the file too."""
        values = [float(each) for each in losses]
        start = len(self._known.setdefault(name, []))
        self._known[name] += values
        if self._path is not None:
            self._append(_line({"name": name, "start": start, "losses": values}))

    def remove(self) -> None:
        """Remove the file: the search has ended and its result is saved."""
        if self._path is not None and atomic.is_file(self._path):
            self._path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "wb") as stream:
                stream.write(line)
        except OSError as error:
            raise FileError(f'"{self._path}" cannot be written: {error.strerror or error}') from error

    def _read(self, path: Path, bound: dict[str, str]) -> None:
        if not atomic.is_file(path):
            raise SearchError(f"{path}: not a file, so no search can be resumed from it")
        content = atomic.read_bytes(path)
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            raise self._damaged(path, 1)
        header = _parsed(lines[0])
        if header is None or header.get("format") != FORMAT or not isinstance(header.get("bound"), dict):
            raise self._damaged(path, 1)
        for key, wanted in bound.items():
            if header["bound"].get(key) != wanted:
                raise SearchError(
                    f"{path}: the search in it cannot be resumed here: another {key}. Use what it was begun with, or "
                    "leave out resume (--resume) to start from the beginning"
                )
        for number, line in enumerate(lines[1:], 2):
            entry = _parsed(line)
            if entry is None or not self._take(entry):
                raise self._damaged(path, number)
        self.repeated = sum(map(len, self._known.values()))
        if len(whole) < len(content):
            logger.info("%s: its last line was cut off and is left out", path)
            atomic.write_bytes(path, whole)
        logger.info("%s: goes on after %s", path, counted(self.repeated, "sample"))

    def _take(self, entry: dict[str, Any]) -> bool:
        name, start, losses = entry.get("name"), entry.get("start"), entry.get("losses")
        if not isinstance(name, str) or not isinstance(losses, list):
            return False
        if not all(isinstance(each, float) for each in losses) or not np.isfinite(losses).all():
            return False
        known = self._known.setdefault(name, [])
        if start != len(known):
            return False
        known += losses
        return True

    @staticmethod
    def _damaged(path: Path, number: int) -> SearchError:
        return SearchError(
            f"{path}:{number}: not the journal of a search, or damaged. Leave out resume (--resume) to start from the "
            "beginning"
        )


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
