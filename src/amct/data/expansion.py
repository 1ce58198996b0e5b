"""How much memory a compressed file may need: a small file cannot demand a large amount of it."""

from __future__ import annotations

import zlib

from amct.errors import ParseError
from amct.memory import gibibytes, machine_bytes

FREE_BYTES = 2**29
"""Any file may expand to this many bytes."""
RATIO = 100
"""A larger result must be at most this many times the size of the file; data rarely compresses better than 10 times."""
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_BLOCK_BYTES = 2**20


def check_expansion(expanded: int, stored: int, source: str) -> None:
    """Check the size of decompressed data before it is allocated.

    Args:
        expanded: The number of bytes that the file announces.
        stored: The number of bytes of the file.
        source: The name in messages.

    Raises:
        ParseError: The file announces too much.
    """
    if expanded > max(FREE_BYTES, RATIO * stored):
        raise ParseError(
            f"{source}: {expanded} bytes of data in {stored} bytes, more than {RATIO} times: the file is damaged or "
            "hostile. If it is yours, store it without compression"
        )
    if expanded > machine_bytes():
        raise ParseError(
            f"{source}: {gibibytes(expanded)} of data, more than the {gibibytes(machine_bytes())} of memory of this "
            "machine. Split the file"
        )


def gunzip(content: bytes, source: str) -> bytes:
    """Decompress a gzip file, also of several members.

    Raises:
        ParseError: The file is damaged, or expands too much.
    """
    parts: list[bytes] = []
    total, rest = 0, content
    try:
        while rest:
            decoder = zlib.decompressobj(_GZIP_WINDOW)
            while rest and not decoder.eof:
                parts.append(decoder.decompress(rest, _BLOCK_BYTES))
                rest = decoder.unconsumed_tail
                total += len(parts[-1])
                check_expansion(total, len(content), source)
            if not decoder.eof:
                raise ParseError(f"{source}: a damaged gzip file: it ends early. Copy it again")
            rest = decoder.unused_data.lstrip(b"\0")  # zeros may follow the last member
    except zlib.error as error:
        raise ParseError(f"{source}: a damaged gzip file: {error}. Copy it again") from error
    return b"".join(parts)
