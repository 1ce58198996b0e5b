"""Reads the pages of an LMDB file directly, without the lmdb library and without a memory map.

The library trusts every number in the file: a page number beyond the end of the file kills the process (SIGBUS). Here
every number is checked before it is used, so a damaged file costs an error. The format (version 1, little endian)::

    page     0 number (8 bytes), 8 pad (2), 10 flags (2), 12 lower (2), 14 upper (2), 16 node offsets (2 each)
             an overflow page has its number of pages (4 bytes) at 12
    node     0 low, 2 high, 4 flags, 6 key size (2 bytes each), 8 key, then the value
             leaf: the size of the value is low + high * 65536; a big value is the number of an overflow page (8 bytes)
             branch: the child page is low + high * 65536 + flags * 2^32
    meta     after the page header: magic (4), version (4), address (8), map size (8), two databases (48 each),
             last page (8), transaction (8). Pages 0 and 1 are meta pages; the later transaction is valid.
    database pad (4), flags (2), depth (2), branch pages (8), leaf pages (8), overflow pages (8), entries (8), root (8)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from amct.errors import ParseError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        if self._meta.root == _NO_PAGE:
            return
        found = 0
        for entry in _Walk(self).entries(self._meta.root, 1):
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
