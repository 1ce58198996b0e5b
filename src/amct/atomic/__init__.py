"""Files that are the old ones or the new ones after a kill; a mixture of both is noticed and never read.

One file is written under a temporary name in the same folder, synced and renamed. Several files that belong together
form a ``FileGroup``: all are written and synced under temporary names first; then a *notice* that lists their names is
written to the folder; then the files are renamed, and the notice is removed::

    temporary files ── synced ──▶ notice ── renames ──▶ notice removed
    └───── killed: old files ────┘└─ killed: noticed ─┘└── new files

A notice is information and never an instruction: nothing is renamed, moved or written because of it. Reading changes
nothing in a folder. ``read_bytes`` and ``check_whole`` refuse a file that the notice of a dead writer lists, and say
that the save has to run again; the next save of these files removes the notice. Every folder of a group has a notice of
its own with plain names of files in that folder, so no notice ever names a place outside its folder.

A folder may come from a stranger. Notices of any other form are left alone with a warning; leftovers are removed, by
the next write only, if they have a temporary name of ours, are regular files and belong to this user; links are not
followed.

Files are created with mode 640 and folders with mode 750, as AMCT does.
"""

from __future__ import annotations

from amct.atomic._files import FileGroup, check_writable, modify, open_write, read_bytes, write_bytes, write_text
from amct.atomic._notices import check_whole

__all__ = [
    "FileGroup",
    "check_whole",
    "check_writable",
    "modify",
    "open_write",
    "read_bytes",
    "write_bytes",
    "write_text",
]
