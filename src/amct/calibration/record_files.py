"""The files of a calibration: the record, what stands beside it, and how far the calibration has come.

While batches are missing, ``<record>.progress.json`` says how many each layer has seen, so that even another process
can tell what is left to do. It goes when the record is complete.

::

    {"version": 1, "layers": {"conv1": [2, 8]}}      2 of 8 batches seen
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from amct import atomic
from amct.errors import FileError
from amct.record import encode_record
from amct.record.files import form_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from amct.record import AnyRecord, Progress


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1]
    layers: dict[str, tuple[NonNegativeInt, NonNegativeInt]]


def progress_path(record: str | os.PathLike[str]) -> Path:
    """Where the progress of an unfinished calibration is kept: ``<record>.progress.json``."""
    return Path(f"{os.fspath(record)}.progress.json")


def read_progress(record: str | os.PathLike[str]) -> dict[str, Progress]:
    """For each layer the batches seen and needed; empty when the calibration is finished or nothing is known."""
    with suppress(FileError, ValidationError):  # it only makes a message better
        return dict(_Document.model_validate_json(atomic.read_bytes(progress_path(record))).layers)
    return {}


class RecordFiles:
    """Writes the record of one calibration; ``stale`` are files beside it that belong to an earlier one."""

    def __init__(self, record: str | os.PathLike[str], *, stale: Iterable[Path] = ()) -> None:
        self.record = Path(record)
        self._stale = tuple(stale)

    def check(self) -> None:
        """Find out before any work whether the record can be written.

        Raises:
            FileError: it cannot.
        """
        if self.record.is_dir():
            raise FileError(f'"{self.record}" is a folder; expected the name of a record file')
        atomic.check_writable(self.record.parent)

    def begin(self, record: AnyRecord, progress: Mapping[str, Progress]) -> None:
        """Write what is known before the first batch."""
        with atomic.FileGroup() as group:
            group.write_bytes(self.record, self._encoded(record))
            group.write_text(progress_path(self.record), _text(progress))
        for path in self._stale:
            path.unlink(missing_ok=True)

    def note(self, progress: Mapping[str, Progress]) -> None:
        """Write how far the calibration has come; cheap enough for every batch."""
        text = _text(progress)
        atomic.modify(progress_path(self.record), lambda _: text.encode())

    def complete(self, record: AnyRecord, beside: Mapping[Path, str] | None = None) -> None:
        """Write the complete record and the files beside it, all or none."""
        with atomic.FileGroup() as group:
            group.write_bytes(self.record, self._encoded(record))
            for path, text in (beside or {}).items():
                group.write_text(path, text)
        progress_path(self.record).unlink(missing_ok=True)

    def _encoded(self, record: AnyRecord) -> bytes:
        return encode_record(record, form_of(self.record) or "text")


def _text(progress: Mapping[str, Progress]) -> str:
    return json.dumps({"version": 1, "layers": {layer: list(counts) for layer, counts in progress.items()}}) + "\n"
