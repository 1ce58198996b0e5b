"""Renames the files of a group to their final names, protected by notices."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amct.atomic._disk import file_error, sync_folder
from amct.atomic._notices import Notice, notices_in, settle, write_notices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LAST = "quant.json"  # renamed last: programs that do not check notices take it as the sign of a complete save


def put_in_place(temporaries: Mapping[Path, Path]) -> None:
    """Rename the files of a group to their final names; the caller has locked the folders. One file needs no notice.

    Args:
        temporaries: The temporary file of each target, all of them complete and synced.

    Raises:
        FileError: A file cannot be renamed. If other files have been renamed already, the notices remain.
    """
    ordered = {
        target: temporaries[target] for target in sorted(temporaries, key=lambda path: path.name.endswith(_LAST))
    }
    earlier = [notice for folder in _folders(ordered) for notice in notices_in(folder)]
    own: list[Path] = []
    try:
        if len(ordered) > 1:
            write_notices(ordered, own)
        _finish(ordered, own, earlier)
    except KeyboardInterrupt:
        if not _untouched(ordered):
            _finish(ordered, own, earlier, again=True)
        raise
    finally:
        if _untouched(ordered):
            for notice in own:
                with suppress(OSError):  # the original error is raised instead
                    notice.unlink()


def _finish(
    temporaries: Mapping[Path, Path], own: Sequence[Path], earlier: Sequence[Notice], *, again: bool = False
) -> None:
    """Rename, sync, and remove the notices; ``again`` completes an interrupted call."""
    target = Path()
    done_before: tuple[type[OSError], ...] = (FileNotFoundError,) if again else ()
    try:
        for target, temporary in temporaries.items():  # kept short: readers may see old and new files
            with suppress(*done_before):
                os.replace(temporary, target)  # noqa: PTH105 - twice as fast as Path.replace
        for target in _folders(temporaries):
            sync_folder(target)
        settle(earlier, temporaries)
        for target in own:
            target.unlink(missing_ok=True)
    except OSError as error:
        raise file_error("finish the write of", target, error) from error


def _folders(targets: Mapping[Path, Path]) -> list[Path]:
    return list(dict.fromkeys(target.parent for target in targets))


def _untouched(temporaries: Mapping[Path, Path]) -> bool:
    """Return whether no file has been renamed yet, that is, all temporary files still exist."""
    return all(temporary.exists() for temporary in temporaries.values())
