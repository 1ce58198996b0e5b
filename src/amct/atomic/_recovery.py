"""How a group of files is decided, finished and, after a kill, put right; and the lock under which names change."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from filelock import FileLock, Timeout

from amct.atomic._disk import create, file_error, real_path, sync_folder
from amct.atomic._names import JOURNAL, LOCK_NAME, POINTER, TEMPORARY, dead_names, names_in, new_path
from amct.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LOCK_PATIENCE_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.01


class Journal(NamedTuple):
    """The decision that a group is new: where it is written, and what tells the group's other folders about it."""

    path: Path
    pointers: list[Path]


def write_journal(temporaries: Mapping[Path, Path]) -> Journal | None:
    """Make a group's decision permanent: from the rename in here on, it is new. One file alone needs none.

    Args:
        temporaries: The temporary file of each target, all of them complete and synced.
    """
    if len(temporaries) < 2:
        return None
    folders = list(dict.fromkeys(target.parent for target in temporaries))
    home = folders[0]
    journal = Journal(new_path(home, JOURNAL), [new_path(folder, POINTER) for folder in folders[1:]])
    content = {
        "files": [[os.path.relpath(temp, home), os.path.relpath(target, home)] for target, temp in temporaries.items()],
        "pointers": [os.path.relpath(pointer, home) for pointer in journal.pointers],
    }
    waiting = new_path(home, TEMPORARY)
    try:
        for pointer in journal.pointers:
            with create(pointer, pointer) as stream:
                stream.write(os.path.relpath(journal.path, pointer.parent).encode())
        with create(waiting, journal.path) as stream:
            stream.write(json.dumps(content).encode())
        for folder in folders:
            sync_folder(folder)  # the temporary names are on the disk before the journal that names them
        waiting.rename(journal.path)
    except BaseException as error:
        for leftover in (waiting, *journal.pointers):
            leftover.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise file_error("write", journal.path, error) from error
        raise
    sync_folder(home)
    return journal


def complete(temporaries: Mapping[Path, Path], journal: Journal | None, *, durable: bool = True) -> None:
    """Rename what still has its temporary name, and forget the journal. Doing it twice does no harm.

    Args:
        temporaries: The temporary file of each target.
        journal: The group's decision; None for a single file.
        durable: Sync the folders, so that the new names survive a power cut as well.
    """
    target = Path()
    done_before: tuple[type[OSError], ...] = () if journal is None else (FileNotFoundError,)
    try:
        for target, temporary in temporaries.items():  # nothing else in this loop: a reader may look right now
            with suppress(*done_before):
                os.replace(temporary, target)  # noqa: PTH105 - twice as fast as Path.replace
        for target in {target.parent for target in temporaries} if durable else ():
            sync_folder(target)
        if journal is not None:
            for target in (journal.path, *journal.pointers):
                target.unlink(missing_ok=True)
    except KeyboardInterrupt:
        if journal is not None:
            complete(temporaries, journal, durable=durable)
        raise
    except OSError as error:
        raise file_error("finish the write of", target, error) from error


def recover(folder: str | os.PathLike[str]) -> None:
    """Put a folder right after writers were killed: finish decided groups, remove the rest of undecided ones.

    Raises:
        FileError: An interrupted group cannot be finished, for example because the folder is now read-only.
    """
    place = real_path(Path(folder))
    while True:
        found = names_in(place)
        if not found:
            return
        dead = dead_names(place, found)
        journals = _journals(place)  # looked for after the dead were counted: those write no more journals
        if not journals:
            break
        for journal in journals:
            _finish(journal)
    for name in dead:
        # Someone who may only read the folder leaves the leftovers to the next writer: they harm nobody.
        with suppress(PermissionError, FileNotFoundError):
            (place / name).unlink()
    if LOCK_NAME in found and os.access(place, os.W_OK):
        with _folder_lock(place):  # waits for a living holder, removes a dead one's file
            pass


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of folders that have no interrupted group in them."""
    ordered = sorted(set(folders))
    while True:
        for folder in ordered:
            recover(folder)
        with _folder_locks(ordered):
            if any(_journals(folder) for folder in ordered):
                continue  # its writer died between our look and our lock
            yield
            return


def _finish(path: Path) -> None:
    """Finish a group whose writer died after its decision (or wait for the writer, when it lives)."""
    content = _read_journal(path)
    if content is None:
        return
    with _folder_locks({target.parent for target in content[0]} | {path.parent}):
        content = _read_journal(path)
        if content is not None:
            complete(content[0], Journal(path, content[1]))


def _read_journal(path: Path) -> tuple[dict[Path, Path], list[Path]] | None:
    """What a journal decided: temporary file by target, and its pointers; None when it is gone."""
    home = path.parent
    try:
        content = json.loads(path.read_bytes())
        files = {_joined(home, target): _joined(home, temporary) for temporary, target in content["files"]}
        return files, [_joined(home, pointer) for pointer in content["pointers"]]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error("read", path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f'"{path}" is not a journal of ours; remove it to go on') from error


def _joined(home: Path, relative: str) -> Path:
    return Path(os.path.normpath(home / relative))


def _journals(folder: Path) -> list[Path]:
    """The journals that concern a folder: its own, and those its pointers lead to."""
    journals = []
    for name in names_in(folder):
        if name.endswith(f".{JOURNAL}"):
            journals.append(folder / name)
        elif name.endswith(f".{POINTER}"):
            with suppress(FileNotFoundError):
                journal = _joined(folder, (folder / name).read_text())
                if journal.suffix == f".{JOURNAL}" and journal.exists():  # else its writer has not decided
                    journals.append(journal)
    return journals


@contextmanager
def _folder_locks(folders: Iterable[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for folder in sorted(folders):  # one order for everyone: no two processes wait for each other
            stack.enter_context(_folder_lock(folder))
        yield


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    path = folder / LOCK_NAME
    lock = FileLock(path, timeout=_LOCK_PATIENCE_SECONDS)
    try:
        lock.acquire(poll_interval=_LOCK_POLL_SECONDS)
    except Timeout as error:
        raise FileError(
            f'"{folder}" has been locked by another process for {_LOCK_PATIENCE_SECONDS:.0f} seconds ("{path}"); '
            "end that process and run this again"
        ) from error
    except OSError as error:
        raise file_error("write to folder", folder, error) from error
    try:
        yield
    finally:
        # Removed while held: whoever waits on this inode sees that it lost its name (filelock does) and tries again.
        with suppress(OSError):
            path.unlink()
        lock.release()
