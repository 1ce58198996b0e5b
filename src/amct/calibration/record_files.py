"""The files of a calibration: the record, accompanying files, and the progress file.

Until the calibration is complete, ``<record>.progress.json`` has the number of batches that each layer has observed,
so that another process can report what is missing. It is deleted when the record is complete.

::

    {"version": 1, "layers": {"conv1": [2, 8]}}      2 of 8 batches observed
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
    from collections.abc import Callable, Iterable, Mapping

    from amct.record import AnyRecord, Progress


class _ProgressDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1]
    layers: dict[str, tuple[NonNegativeInt, NonNegativeInt]]


def progress_path(record: str | os.PathLike[str]) -> Path:
    """Return the path of the progress file of a record: ``<record>.progress.json``."""
    return Path(f"{os.fspath(record)}.progress.json")


def read_progress(record: str | os.PathLike[str]) -> dict[str, Progress]:
    """Return the batches observed and needed for each layer; empty if there is no valid progress file."""
    with suppress(FileError, ValidationError):  # the progress is only used in error messages
        return dict(_ProgressDocument.model_validate_json(atomic.read_bytes(progress_path(record))).layers)
    return {}


class RecordFiles:
    """Writes the record of one calibration.

    Args:
        record: The record file.
        stale: Files of an earlier calibration, deleted at the beginning.
        writes: Whether this process writes; of several that calibrate together only one does.
    """

    def __init__(self, record: str | os.PathLike[str], *, stale: Iterable[Path] = (), writes: bool = True) -> None:
        self.record = Path(record)
        self._stale = tuple(stale)
        self._writes = writes

    def check(self) -> None:
        """Check that the record can be written.

        Raises:
            FileError: It cannot be written.
        """
        if self.record.is_dir():
            raise FileError(f'"{self.record}" is a folder; expected the name of a record file')
        atomic.check_writable(self.record.parent)

    def begin(self, record: AnyRecord, progress: Mapping[str, Progress]) -> None:
        """Write the initial record and progress, and delete the stale files."""
        if not self._writes:
            return
        with atomic.FileGroup() as group:
            group.write_bytes(self.record, self._encoded(record))
            group.write_text(progress_path(self.record), _text(progress))
        for path in self._stale:
            path.unlink(missing_ok=True)

    def note(self, progress: Mapping[str, Progress]) -> None:
        """Write the progress; cheap enough to be called after every batch."""
        if not self._writes:
            return
        atomic.replace_fleeting(progress_path(self.record), _text(progress).encode())

    def complete(self, record: AnyRecord, beside: Mapping[Path, str | Callable[[bytes], bytes]] | None = None) -> None:
        """Write the complete record and the files ``beside`` it as one group, and delete the progress file.

        Each of those files is a text, or made from the content of the record file.
        """
        if not self._writes:
            return
        content = self._encoded(record)
        with atomic.FileGroup() as group:
            group.write_bytes(self.record, content)
            for path, make in (beside or {}).items():
                group.write_bytes(path, make.encode() if isinstance(make, str) else make(content))
        progress_path(self.record).unlink(missing_ok=True)

    def _encoded(self, record: AnyRecord) -> bytes:
        return encode_record(record, form_of(self.record) or "text")


def _text(progress: Mapping[str, Progress]) -> str:
    return json.dumps({"version": 1, "layers": {layer: list(counts) for layer, counts in progress.items()}}) + "\n"
