"""Reads and writes LMDB databases of Datums, as Caffe's Data layer and ``convert_imageset`` do.

``lmdb_pages.py`` reads; the lmdb library only writes, because it does not survive a damaged file.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct.atomic import is_file, is_folder
from amct.data.datum import make_datum, parse_datum
from amct.data.lmdb_pages import LmdbPages
from amct.errors import AmctError, ArgumentError, FileError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from amct.data.datum import DatumValues

_DATA_FILE = "data.mdb"
_LOCK_FILE = "lock.mdb"
_LARGEST_BATCH = 1000
_FIRST_MAP_BYTES = 2**24
_ENTRY_BYTES = 4096


class LmdbReader:
    """Reads an LMDB of Datums in key order. The file is open only while entries are read.

    Args:
        path: The folder or the single file of the database.

    Raises:
        FileError: There is no such database, or it cannot be read.
        ParseError: It is not an LMDB, or is truncated or empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._file = data_file(Path(path))
        with self._pages() as pages:
            self._length = pages.entries
        if self._length == 0:
            raise ParseError(f"{path}: the LMDB is empty: it has no entries. Was it written to the end?")

    def __len__(self) -> int:
        return self._length

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key, as text, and the bytes of every entry.

        Raises:
            ParseError: The database is damaged.
        """
        with self._pages() as pages:
            for key, value in pages.items():
                yield key.decode("utf-8", errors="backslashreplace"), value

    def datums(self, *, color: bool | None = None) -> Iterator[DatumValues]:
        """Yield every Datum; ``color`` as for ``parse_datum``.

        Raises:
            ParseError: The database or a Datum is damaged.
        """
        for key, value in self.items():
            yield parse_datum(value, f'{self.path}: entry "{key}"', color=color)

    @contextmanager
    def _pages(self) -> Iterator[LmdbPages]:
        try:
            with self._file.open("rb") as file:
                yield LmdbPages(file, self.path, self._file.stat().st_size)
        except AmctError:
            raise
        except OSError as error:
            raise FileError(f"{self.path}: the LMDB cannot be read: {error.strerror or error}") from error


def data_file(path: Path) -> Path:
    """Return the data file of a database that is given as a folder or as the file itself.

    Raises:
        FileError: The file does not exist.
    """
    file = path / _DATA_FILE if is_folder(path) else path
    if not is_file(file):
        what = f"the folder has no {_DATA_FILE}" if is_folder(path) else f"there is no such folder (in {Path.cwd()})"
        raise FileError(f"{path}: cannot open the LMDB: {what}")
    return file


def is_lmdb(path: Path) -> bool:
    """Return whether a path is a folder with an LMDB, or a single-file LMDB."""
    return is_file(path / _DATA_FILE) or (is_file(path) and path.suffix.lower() in (".mdb", ".lmdb"))


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
    # lexists: a dangling link is refused too, because lmdb would follow it
    if any(os.path.lexists(place / name) for name in (_DATA_FILE, _LOCK_FILE)):
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


def _library() -> Any:  # noqa: ANN401 - lmdb ships no types
    try:
        import lmdb
    except ImportError as error:
        raise AmctError(
            "writing an LMDB needs the lmdb package, which is not installed: pip install amct[caffe]"
        ) from error
    return lmdb


def _put(environment: Any, entries: list[tuple[bytes, bytes]]) -> None:  # noqa: ANN401 - lmdb ships no types
    # upper bound: pages are at least half full, and a transaction copies the inner pages of the tree
    needed = 4 * sum(len(key) + len(value) + _ENTRY_BYTES for key, value in entries) + _FIRST_MAP_BYTES
    info, page = environment.info(), environment.stat()["psize"]
    environment.set_mapsize(max(info["map_size"], (info["last_pgno"] + 1) * page + needed))
    with environment.begin(write=True) as transaction:
        for key, value in entries:
            transaction.put(key, value, append=True)
