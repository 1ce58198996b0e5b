"""The public functions: write one file, write a group of files, change a file in place, read a file."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from amct.atomic._disk import (
    FILE_MODE,
    TEMPORARY,
    create,
    file_error,
    is_plain_file,
    locked,
    make_folders,
    new_path,
    real_path,
    remove_leftovers,
    replaceable,
    seal,
    temporary_path,
    warn_of_link,
)
from amct.atomic._group import check_whole, interrupted, notices_in, put_in_place
from amct.errors import ArgumentError, FileError, MissingFileError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

AnyPath = str | os.PathLike[str]


class FileGroup:
    """A group of files that are created together when the ``with`` block ends, and not at all when it raises.

    If the process is killed during the renames, readers reject the files until they are saved again.

    ``open`` and ``write_bytes`` write a file of the group; ``path`` returns a temporary path in the target's folder,
    with the target's suffix, for libraries that write files themselves.

    Raises:
        FileError: At the end of the block, when a file cannot be put in place or was never written.
    """

    def __init__(self) -> None:
        self._temporaries: dict[Path, Path] = {}
        self._given: dict[Path, Path] = {}
        self._folders: set[Path] = set()
        self._created_folders: list[Path] = []
        self._active = False
        self._failed: Path | None = None

    def __enter__(self) -> FileGroup:
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        done = False
        try:
            if kind is None:
                self._check_complete()
                with locked(self._folders):
                    for target in self._temporaries:
                        replaceable(target)
                    put_in_place(self._temporaries)
                done = True
        finally:
            if not done:
                self._discard()

    def path(self, path: AnyPath) -> Path:
        """Add a file to the group and return the temporary path to which it must be written before the block ends."""
        if not self._active:
            raise ArgumentError("a FileGroup takes files inside its with block only")
        target = replaceable(path)
        if target in self._temporaries:
            raise ArgumentError(f'"{target}" is already in this group of files; write each file once')
        warn_of_link(target)
        if target.parent not in self._folders:
            self._created_folders += make_folders(target.parent)
            remove_leftovers(target.parent)
            self._folders.add(target.parent)
        self._given[target] = Path(path)
        self._temporaries[target] = temporary_path(target)
        return self._temporaries[target]

    @contextmanager
    def open(self, path: AnyPath) -> Iterator[BinaryIO]:
        """Open a file of the group for writing bytes."""
        temporary = self.path(path)
        try:
            with create(temporary, Path(path)) as stream:
                yield stream
        except BaseException:
            self._failed = Path(path)
            raise

    def write_bytes(self, path: AnyPath, data: bytes) -> None:
        """Write a whole file of the group."""
        with self.open(path) as stream:
            stream.write(data)

    def write_text(self, path: AnyPath, text: str) -> None:
        """Write a whole UTF-8 text file of the group; line ends are not converted."""
        self.write_bytes(path, text.encode())

    def remove(self, path: AnyPath) -> None:
        """Take a file out of the group again, so that it can be written anew."""
        self._temporaries.pop(replaceable(path)).unlink(missing_ok=True)

    def temporary(self, path: AnyPath) -> Path:
        """Return the temporary file of a file that is already in the group."""
        return self._temporaries[replaceable(path)]

    def written(self) -> dict[Path, Path]:
        """Return the files added so far, by the paths that were given, each with its temporary file."""
        return {self._given[target]: temporary for target, temporary in self._temporaries.items()}

    def _check_complete(self) -> None:
        if self._failed is not None:
            raise FileError(f'"{self._failed}" was not completely written, so none of its group is')
        for target, temporary in self._temporaries.items():
            seal(temporary, target)

    def _discard(self) -> None:
        for temporary in self._temporaries.values():
            with suppress(OSError):  # the original error is raised instead
                temporary.unlink()
        for folder in reversed(self._created_folders):
            with suppress(OSError):  # not empty: another program uses it
                folder.rmdir()


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a whole file; missing folders are created.

    Raises:
        FileError: The file cannot be written; an existing file is unchanged.
    """
    with open_write(path) as stream:
        stream.write(data)


def write_text(path: AnyPath, text: str) -> None:
    """Write a whole UTF-8 text file; line ends are not converted."""
    write_bytes(path, text.encode())


@contextmanager
def open_write(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file for writing bytes; it is created when the block ends, and not at all when the block raises."""
    with FileGroup() as group, group.open(path) as stream:
        yield stream


def read_bytes(path: AnyPath) -> bytes:
    """Read a whole file; nothing in its folder is changed.

    Raises:
        MissingFileError: It does not exist; the message suggests a similar name in the folder.
        FileError: It cannot be read, or the save that writes it was interrupted.
    """
    file = Path(path)
    check_whole(file)
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        folder = real_path(file).parent
        beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise MissingFileError(f'"{file}" does not exist.{did_you_mean(file.name, beside)}') from error
    except (OSError, ValueError) as error:
        raise file_error("read", file, error) from error


def modify(path: AnyPath, change: Callable[[bytes | None], bytes]) -> None:
    """Replace a file's content by ``change(content)`` while no other process or thread changes the file.

    ``change`` gets None if the file does not exist, and must not write to the same folder. The folder is not synced:
    after a power failure the file is the old or the new one.

    Raises:
        FileError: The file cannot be read or written, or its save was interrupted; the file is unchanged.
    """
    target = replaceable(path)
    make_folders(target.parent)
    remove_leftovers(target.parent)
    with locked([target.parent]):
        for notice in notices_in(target.parent):
            if target.name in notice.files:  # of a dead process: a running one would hold the lock
                raise interrupted(Path(path), notice)
        before = _content(target)
        after = change(before)
        if after == before:
            return
        warn_of_link(target)
        _replace(target, after)


def replace_fleeting(path: AnyPath, data: bytes) -> None:
    """Replace a file that only this process writes and that a power failure may destroy: nothing is locked or synced.

    Raises:
        FileError: The file cannot be written; it is unchanged.
    """
    target = Path(path)
    if not is_plain_file(target):  # what it is, and its folder, need a closer look
        target = replaceable(path)
        make_folders(target.parent)
        warn_of_link(target)
    _replace(target, data, sync=False)


def _replace(target: Path, data: bytes, *, sync: bool = True) -> None:
    temporary = temporary_path(target)
    try:
        with create(temporary, target, sync=sync) as stream:
            stream.write(data)
        os.replace(temporary, target)  # noqa: PTH105 - twice as fast as Path.replace
    except OSError as error:
        raise error if isinstance(error, FileError) else file_error("write", target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error("read", file, error) from error


def check_writable(folder: AnyPath) -> None:
    """Check that files can be written to a folder, or that the folder can be created.

    Raises:
        FileError: This is not possible; the message gives the reason.
    """
    wanted = real_path(Path(folder))
    existing = wanted
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        probe = new_path(existing, TEMPORARY)
        if existing == wanted:
            probe.touch(FILE_MODE, exist_ok=False)
            probe.unlink()
        else:
            probe.mkdir()
            probe.rmdir()
    except OSError as error:
        raise file_error("write to folder", wanted, error) from error
