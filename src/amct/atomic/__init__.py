"""Files that are either the old ones or the new ones, never half of each, whatever kills the process.

One file is written under a temporary name in the same folder, synced and renamed. Several files that belong together
form a ``FileGroup``: all are written and synced under temporary names first; then a small journal names them; then they
are renamed, and the journal goes. ``recover`` puts a folder right after a kill: with a journal the renames are finished
(the group is new), without one the temporary files go (the group is old). Every function here calls it before it
touches a folder, so nobody has to remember::

    temporary files ── synced ──▶ journal ── renames ──▶ journal removed
    └──────── killed: old group ─────────┘└── killed: new group, after recover ──┘

Files are created with mode 640 and folders with mode 750, as AMCT does.
"""

from __future__ import annotations

from amct.atomic._files import FileGroup, check_writable, modify, open_write, read_bytes, write_bytes, write_text
from amct.atomic._recovery import recover

__all__ = ["FileGroup", "check_writable", "modify", "open_write", "read_bytes", "recover", "write_bytes", "write_text"]
