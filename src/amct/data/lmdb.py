"""Reads and writes LMDB databases of Datums, as Caffe's Data layer and ``convert_imageset`` do.

``lmdb_pages.py`` reads; the lmdb library only writes, because it does not survive a damaged file.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError

from amct.atomic import is_file, is_folder
from amct.data.images import decode_image
from amct.errors import AmctError, ArgumentError, FileError, ParseError
from amct.schema import message_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

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


# -- Reads the pages of an LMDB file directly, without the lmdb library and without a memory map -----------------------
#
# The library trusts every number in the file: a page number beyond the end of the file kills the process (SIGBUS). Here
# every number is checked before it is used, so a damaged file costs an error. The format (version 1, little endian)::
#
#     page     0 number (8 bytes), 8 pad (2), 10 flags (2), 12 lower (2), 14 upper (2), 16 node offsets (2 each)
#              an overflow page has its number of pages (4 bytes) at 12
#     node     0 low, 2 high, 4 flags, 6 key size (2 bytes each), 8 key, then the value
#              leaf: the size of the value is low + high * 65536; a big value is the number of an overflow page (8
# bytes)
#              branch: the child page is low + high * 65536 + flags * 2^32
#     meta     after the page header: magic (4), version (4), address (8), map size (8), two databases (48 each),
#              last page (8), transaction (8). Pages 0 and 1 are meta pages; the later transaction is valid.
#     database pad (4), flags (2), depth (2), branch pages (8), leaf pages (8), overflow pages (8), entries (8), root
# (8)


_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER_BYTES, _NODE_BYTES, _DATABASE_BYTES = 16, 8, 48
_META = struct.Struct("<IIQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_ENDS = struct.Struct("<QQ")
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG_VALUE, _SUB_DATABASE, _SEVERAL_VALUES = 0x01, 0x02, 0x04
_NO_PAGE = 2**64 - 1
_DEEPEST = 32
_PAGE_SIZES = frozenset(2**power for power in range(9, 17))


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """The valid meta page."""

    page_bytes: int
    depth: int
    entries: int
    root: int
    last_page: int
    transaction: int


class LmdbPages:
    """The entries of the main database of an LMDB file, in key order.

    Args:
        file: The open data file. It is read, never written, and not closed here.
        source: The name in messages.
        size: The size of the file in bytes.

    Raises:
        ParseError: It is not an LMDB, or is truncated.
    """

    def __init__(self, file: BinaryIO, source: str, size: int) -> None:
        self._file = file
        self._source = source
        self._meta = self._read_meta(size)
        self.entries = self._meta.entries
        needed = (self._meta.last_page + 1) * self._meta.page_bytes
        if size < needed:
            raise ParseError(
                f"{source}: the LMDB is truncated: {size} bytes where its pages need {needed}. Copy it again."
            )

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key with its value.

        Raises:
            ParseError: The database is damaged.
        """
        found = 0
        for entry in () if self._meta.root == _NO_PAGE else _Walk(self).entries(self._meta.root, 1):
            found += 1
            if found > self.entries:
                break
            yield entry
        if found != self.entries:
            raise self.damaged(f"its tree does not have the {self.entries} entries that are announced")

    # ------------------------------------------------------------------ for the walk over the tree

    @property
    def depth(self) -> int:
        """The number of levels of the tree."""
        return self._meta.depth

    @property
    def page_count(self) -> int:
        """The number of pages in use."""
        return self._meta.last_page + 1

    @property
    def page_bytes(self) -> int:
        """The size of a page."""
        return self._meta.page_bytes

    def read(self, page: int, start: int, count: int) -> bytes:
        """Read ``count`` bytes of a page (or of a run of overflow pages), beginning ``start`` bytes after its start."""
        begin = page * self._meta.page_bytes + start
        if page > self._meta.last_page or begin + count > (self._meta.last_page + 1) * self._meta.page_bytes:
            raise self.damaged(f"page {page} is beyond the last page, {self._meta.last_page}")
        self._file.seek(begin)
        content = self._file.read(count)
        if len(content) != count:
            raise self.damaged(f"the file ends inside page {page}")
        return content

    def damaged(self, reason: str) -> ParseError:
        """The error for a database with a wrong number in it."""
        return ParseError(f"{self._source}: the LMDB is damaged: {reason}. Copy or create it again.")

    # ------------------------------------------------------------------ the meta pages

    def _read_meta(self, size: int) -> _Meta:
        first = self._meta_at(0)
        second = None if first is None else self._meta_at(first.page_bytes)
        found = [meta for meta in (first, second) if meta is not None]
        if not found:
            raise ParseError(f"{self._source}: not an LMDB, or damaged: its first page is no meta page of version 1")
        meta = max(found, key=lambda each: each.transaction)
        if meta.page_bytes not in _PAGE_SIZES or meta.depth > _DEEPEST:
            raise self.damaged(f"pages of {meta.page_bytes} bytes, a tree of {meta.depth} levels")
        if meta.entries > size:
            raise self.damaged(f"{meta.entries} entries in a file of {size} bytes")
        return meta

    def _meta_at(self, offset: int) -> _Meta | None:
        self._file.seek(offset)
        content = self._file.read(_HEADER_BYTES + _META.size + 2 * _DATABASE_BYTES + _ENDS.size)
        start = _HEADER_BYTES + _META.size
        if len(content) < start + 2 * _DATABASE_BYTES + _ENDS.size:
            return None
        magic, version, _, _ = _META.unpack_from(content, _HEADER_BYTES)
        if magic != _MAGIC or version != _VERSION:
            return None
        page_bytes = _DATABASE.unpack_from(content, start)[0]  # kept in the unused field of the free list
        database = _DATABASE.unpack_from(content, start + _DATABASE_BYTES)
        last_page, transaction = _ENDS.unpack_from(content, start + 2 * _DATABASE_BYTES)
        return _Meta(
            page_bytes=page_bytes,
            depth=database[2],
            entries=database[6],
            root=database[7],
            last_page=last_page,
            transaction=transaction,
        )


class _Walk:
    """One walk over the tree; every page may be used once, so a damaged tree cannot make it endless."""

    def __init__(self, pages: LmdbPages) -> None:
        self._pages = pages
        self._seen: set[int] = set()
        self._value_bytes = 0

    def entries(self, number: int, level: int) -> Iterator[tuple[bytes, bytes]]:
        page, flags = self._tree_page(number)
        if flags & _LEAF:
            for low, high, kind, key, value_start in self._nodes(number, page):
                yield key, self._value(number, page, kind, low + (high << 16), value_start)
            return
        if level >= self._pages.depth:
            raise self._pages.damaged(f"page {number} has children below the lowest level, {self._pages.depth}")
        for low, high, upper, _, _ in self._nodes(number, page):
            yield from self.entries(low + (high << 16) + (upper << 32), level + 1)

    def _tree_page(self, number: int) -> tuple[bytes, int]:
        if number in self._seen:
            raise self._pages.damaged(f"page {number} occurs twice in the tree")
        self._seen.add(number)
        page = self._pages.read(number, 0, self._pages.page_bytes)
        stored, _, flags, _, _ = _PAGE.unpack_from(page)
        if stored != number or flags & (_BRANCH | _LEAF | _OVERFLOW) not in (_BRANCH, _LEAF):
            raise self._pages.damaged(f"page {number} is not a page of the tree")
        return page, flags

    def _nodes(self, number: int, page: bytes) -> Iterator[tuple[int, int, int, bytes, int]]:
        """For each node its three numbers, its key, and the place behind the key."""
        lower = _PAGE.unpack_from(page)[3]
        if not _HEADER_BYTES <= lower <= len(page) or lower % 2:
            raise self._pages.damaged(f"page {number}: its list of nodes ends at byte {lower}")
        for (offset,) in struct.iter_unpack("<H", page[_HEADER_BYTES:lower]):
            if offset + _NODE_BYTES > len(page):
                raise self._pages.damaged(f"page {number}: a node begins at byte {offset}")
            low, high, flags, key_bytes = _NODE.unpack_from(page, offset)
            end = offset + _NODE_BYTES + key_bytes
            if end > len(page):
                raise self._pages.damaged(f"page {number}: a key of {key_bytes} bytes at byte {offset}")
            yield low, high, flags, page[offset + _NODE_BYTES : end], end

    def _value(self, number: int, page: bytes, kind: int, size: int, start: int) -> bytes:
        self._value_bytes += size
        if self._value_bytes > self._pages.page_count * self._pages.page_bytes:
            raise self._pages.damaged("its values are larger than the file")
        if kind & (_SUB_DATABASE | _SEVERAL_VALUES):
            raise self._pages.damaged(
                f"page {number}: an entry is a database of its own; Caffe writes one database of single values"
            )
        if not kind & _BIG_VALUE:
            if start + size > len(page):
                raise self._pages.damaged(f"page {number}: a value of {size} bytes at byte {start}")
            return page[start : start + size]
        if start + 8 > len(page):
            raise self._pages.damaged(f"page {number}: a page number at byte {start}")
        return self._big_value(int.from_bytes(page[start : start + 8], "little"), size)

    def _big_value(self, number: int, size: int) -> bytes:
        stored, _, flags, _, _ = _PAGE.unpack(self._pages.read(number, 0, _HEADER_BYTES))
        if stored != number or not flags & _OVERFLOW:
            raise self._pages.damaged(f"page {number} does not hold a large value")
        return self._pages.read(number, _HEADER_BYTES, size)


# -- Reads and writes Caffe's Datum message: one image or array with its label, as stored in a database ----------------


_COLORS = 3


@dataclass(frozen=True, eq=False)
class DatumValues:
    """The content of a Datum: a (channels, height, width) array of uint8 or float32, and the label."""

    values: npt.NDArray[Any]
    label: int
    was_encoded: bool = False


@cache
def _datum_class() -> Any:  # noqa: ANN401 - made at run time from the descriptor set, no static type
    return message_class("caffe.Datum", schema="caffe")


def parse_datum(content: bytes, source: str, *, color: bool | None = None) -> DatumValues:
    """Read a serialized Datum.

    Args:
        content: The bytes.
        source: The name used in error messages.
        color: Channels of an encoded image (JPEG, PNG): True: three, False: one, None: as stored. The channel order is
            OpenCV's: blue, green, red.

    Raises:
        ParseError: The bytes are not a Datum, the number of values does not match the shape, or the image is damaged.
    """
    datum = _datum_class()()
    try:
        datum.ParseFromString(content)
    except DecodeError as error:
        raise ParseError(f"{source}: not a Datum, or damaged: {error}") from error
    if datum.encoded:
        picture = decode_image(datum.data, source, color=color, upright=color is not None)  # as OpenCV does
        return DatumValues(to_bgr(picture), datum.label, was_encoded=True)
    shape = (datum.channels, datum.height, datum.width)
    values = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float32)
    if min(shape) < 1 or values.size != shape[0] * shape[1] * shape[2]:
        raise ParseError(
            f"{source}: a Datum of {shape[0]} x {shape[1]} x {shape[2]} (channels, height, width) with {values.size} "
            "values: the database is damaged or was not written by Caffe's tools"
        )
    return DatumValues(values.reshape(shape), datum.label)


def to_bgr(picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an RGB(A) image (height, width, channels) to BGR(A) (channels, height, width), OpenCV's channel order."""
    planes: npt.NDArray[Any] = picture.transpose(2, 0, 1)
    return np.concatenate([planes[2::-1], planes[3:]]) if len(planes) >= _COLORS else planes


def make_datum(values: npt.NDArray[Any], label: int = 0) -> bytes:
    """Serialize a (channels, height, width) array as a Datum: uint8 as bytes, other types as float32.

    Raises:
        ArgumentError: The array does not have three axes.
    """
    if values.ndim != 3:
        raise ArgumentError(f"a Datum holds an array of 3 axes (channels, height, width), got shape {values.shape}")
    datum = _datum_class()(channels=values.shape[0], height=values.shape[1], width=values.shape[2], label=int(label))
    if values.dtype == np.uint8:
        datum.data = values.tobytes()
    else:
        datum.float_data.extend(values.astype(np.float32).ravel().tolist())
    content: bytes = datum.SerializeToString()
    return content
