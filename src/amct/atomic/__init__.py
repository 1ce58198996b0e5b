"""Atomic file writes: after a kill files are the old or the new ones; a mixture of both is detected and never read.

One file is written under a temporary name in the same folder, synced and renamed. Several files that belong together
form a ``FileGroup``: all are written and synced under temporary names first; then a *notice* that lists their names is
written to the folder; then the files are renamed, and the notice is removed::

    temporary files ── synced ──▶ notice ── renames ──▶ notice removed
    └───── killed: old files ────┘└ killed: detected ─┘└── new files

A notice is only checked, never replayed: no file is renamed, moved or written because of it. Reading changes nothing
in a folder. ``read_bytes`` and ``check_whole`` reject a file that the notice of a dead process lists, and report that
the save must be repeated; the next save of these files removes the notice. ``Snapshot`` detects a save that ran between
the reads of two files. Every folder of a group has its own notice
with plain file names, so a notice cannot refer to a path outside its folder.

The content of a folder is not trusted. Malformed notices are ignored with a warning. Leftover temporary files are
removed, by the next write only, if they are regular files of this user with a temporary name of this package. Links are
not followed: a link that has the name of an output file is replaced by the file.

Files are created with mode 640 and folders with mode 750, as AMCT does.
"""

from __future__ import annotations

from amct.atomic._disk import is_file, is_folder
from amct.atomic._files import (
    AnyPath,
    FileGroup,
    check_writable,
    modify,
    open_write,
    read_bytes,
    replace_fleeting,
    write_bytes,
    write_text,
)
from amct.atomic._group import Snapshot, check_whole

__all__ = [
    "AnyPath",
    "FileGroup",
    "Snapshot",
    "check_whole",
    "check_writable",
    "is_file",
    "is_folder",
    "modify",
    "open_write",
    "read_bytes",
    "replace_fleeting",
    "write_bytes",
    "write_text",
]
