"""Reads and writes LMDB databases of Datums, as Caffe's Data layer and ``convert_imageset`` do (library: lmdb)."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct.data.datum import make_datum, parse_datum
from amct.errors import AmctError, ArgumentError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from amct.data.datum import DatumValues

_DATA_FILE = "data.mdb"
_LARGEST_BATCH = 1000
_FIRST_MAP_BYTES = 2**24
_ENTRY_BYTES = 4096


def _library() -> Any:  # noqa: ANN401 - lmdb ships no types
    try:
        import lmdb
    except ImportError as error:
        raise AmctError(
            "reading an LMDB needs the lmdb package, which is not installed: pip install amct[caffe]"
        ) from error
    return lmdb


class _Environments:
    """Open LMDB environments, with reference counts: lmdb cannot open one twice in a process, and nets may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int, int], tuple[Any, int]] = {}

    def acquire(self, path: Path) -> tuple[tuple[int, int, int], Any]:
        file = data_file(path)
        status = file.stat()
        key = (os.getpid(), status.st_dev, status.st_ino)
        with self._lock:
            environment, users = self._open.get(key, (None, 0))
            if environment is None:
                environment = _open_environment(path, file)
            self._open[key] = (environment, users + 1)
        return key, environment

    def release(self, key: tuple[int, int, int]) -> None:
        with self._lock:
            environment, users = self._open[key]
            if users > 1:
                self._open[key] = (environment, users - 1)
                return
            del self._open[key]
            environment.close()


_environments = _Environments()


class LmdbReader:
    """Reads an LMDB of Datums in key order; several readers may share one database.

    Args:
        path: The folder or the single file of the database.

    Raises:
        FileError: There is no such database, it cannot be read, or it is open for writing in this process.
        ParseError: It is not an LMDB, or is truncated or empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        key, self._environment = _environments.acquire(Path(path))
        self._finalizer = weakref.finalize(self, _environments.release, key)
        self._length = int(self._environment.stat()["entries"])
        if self._length == 0:
            self.close()
            raise ParseError(f"{path}: the LMDB is empty: it has no entries. Was it written to the end?")

    def __len__(self) -> int:
        return self._length

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key, as text, and the bytes of every entry.

        Raises:
            ParseError: The database is damaged.
        """
        lmdb = _library()
        try:
            with self._environment.begin(buffers=False) as transaction:
                for key, value in transaction.cursor():
                    yield key.decode("utf-8", errors="backslashreplace"), value
        except lmdb.Error as error:
            raise ParseError(f"{self.path}: the LMDB is damaged: {error}") from error

    def datums(self, *, color: bool | None = None) -> Iterator[DatumValues]:
        """Yield every Datum; ``color`` as for ``parse_datum``.

        Raises:
            ParseError: The database or a Datum is damaged.
        """
        for key, value in self.items():
            yield parse_datum(value, f'{self.path}: entry "{key}"', color=color)

    def close(self) -> None:
        """Release the database; this also happens when the reader is garbage-collected."""
        self._finalizer()


def data_file(path: Path) -> Path:
    """Return the data file of a database that is given as a folder or as the file itself.

    Raises:
        FileError: The file does not exist.
    """
    file = path / _DATA_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"the folder has no {_DATA_FILE}" if path.is_dir() else f"there is no such folder (in {Path.cwd()})"
        raise FileError(f"{path}: cannot open the LMDB: {what}")
    return file


def is_lmdb(path: Path) -> bool:
    """Return whether a path is a folder with an LMDB, or a single-file LMDB."""
    return (path / _DATA_FILE).is_file() or (path.is_file() and path.suffix.lower() in (".mdb", ".lmdb"))


def write_lmdb(path: str | os.PathLike[str], samples: Iterable[tuple[npt.NDArray[Any], int]]) -> int:
    """Write a new LMDB of Datums with the keys 00000000, 00000001, …, as ``convert_imageset`` does.

    Args:
        path: The folder to create; it must not contain a database.
        samples: (channels, height, width) arrays, uint8 or float, with their labels.

    Returns:
        The number of samples written.

    Raises:
        ArgumentError: The folder already contains a database, or a sample does not have three axes.
        FileError: The database cannot be written.
    """
    lmdb = _library()
    place = Path(path)
    if (place / _DATA_FILE).exists():
        raise ArgumentError(f"{path}: there is an LMDB already; remove it or choose another folder")
    count = 0
    try:
        place.mkdir(parents=True, exist_ok=True)
        with lmdb.open(str(place), map_size=_FIRST_MAP_BYTES) as environment:
            pending: list[tuple[bytes, bytes]] = []
            for values, label in samples:
                pending.append((b"%08d" % count, make_datum(values, label)))
                count += 1
                if len(pending) >= _LARGEST_BATCH:
                    _put(environment, pending)
                    pending = []
            _put(environment, pending)
    except (lmdb.Error, OSError) as error:
        raise FileError(f"{path}: the LMDB cannot be written: {error}") from error
    return count


def _put(environment: Any, entries: list[tuple[bytes, bytes]]) -> None:  # noqa: ANN401 - lmdb ships no types
    # upper bound: pages are at least half full, and a transaction copies the inner pages of the tree
    needed = 4 * sum(len(key) + len(value) + _ENTRY_BYTES for key, value in entries) + _FIRST_MAP_BYTES
    info, page = environment.info(), environment.stat()["psize"]
    environment.set_mapsize(max(info["map_size"], (info["last_pgno"] + 1) * page + needed))
    with environment.begin(write=True) as transaction:
        for key, value in entries:
            transaction.put(key, value, append=True)


def _open_environment(path: Path, file: Path) -> Any:  # noqa: ANN401 - lmdb ships no types
    lmdb = _library()
    try:
        environment = lmdb.open(
            str(path), subdir=path.is_dir(), readonly=True, lock=False, create=False, max_readers=1024
        )
    except lmdb.Error as error:
        if "already open" in str(error):
            raise FileError(
                f"{path}: the LMDB is open in this process already, perhaps for writing: close that environment first"
            ) from error
        raise ParseError(f"{path}: not an LMDB, or damaged: {error}") from error
    # reading a memory map beyond the end of a truncated file would kill the process with SIGBUS
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    size = file.stat().st_size
    if size < needed:
        environment.close()
        raise ParseError(f"{path}: the LMDB is truncated: {size} bytes where its pages need {needed}. Copy it again.")
    return environment
