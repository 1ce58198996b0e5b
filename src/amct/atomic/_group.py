"""How the files of a group get their names: all of them, or noticed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amct.atomic._disk import file_error, sync_folder
from amct.atomic._notices import Notice, notices_in, settle, write_notices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LAST = "quant.json"  # programs that know no notices take a save for complete when this file is there


def put_in_place(temporaries: Mapping[Path, Path]) -> None:
    """Rename the files of a group to their names; the folders are locked. One file alone needs no notice.

    Args:
        temporaries: The temporary file of each target, all of them complete and synced.

    Raises:
        FileError: A file cannot be renamed. If others were renamed before it, their notices stay.
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
                with suppress(OSError):  # the error that led here is the one to tell
                    notice.unlink()


def _finish(
    temporaries: Mapping[Path, Path], own: Sequence[Path], earlier: Sequence[Notice], *, again: bool = False
) -> None:
    """Rename, sync, and remove the notices; ``again`` finishes what was interrupted in here."""
    target = Path()
    done_before: tuple[type[OSError], ...] = (FileNotFoundError,) if again else ()
    try:
        for target, temporary in temporaries.items():  # nothing else in this loop: a reader may look right now
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
    """Whether no file has been renamed yet: all are still there under their temporary names."""
    return all(temporary.exists() for temporary in temporaries.values())
