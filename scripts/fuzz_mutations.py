"""Damages files of a known structure: text, words of a command, JSON, protobuf, zip, gzip, or any bytes."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

NUMBERS = (
    b"0", b"-1", b"1", b"2", b"3", b"7", b"127", b"128", b"255", b"256", b"65536", b"31000000", b"2147483647",
    b"2147483648", b"-2147483648", b"4294967296", b"9223372036854775807", b"18446744073709551616", b"1e38", b"1e39",
    b"-1e-45", b"0.5", b"nan", b"-inf", b"1e999", b"0x7f", b"true", b'""', b'"1"',
)  # fmt: skip
WORDS = (
    b"\x00", b"\xff\xfe", "é".encode(), "\u202e".encode(), b"\x1b[31m", b"../x", b"/proc/version", b"", b"%s", b"{}",
    b"a" * 300,
)  # fmt: skip
INTEGERS = (
    0,
    1,
    2,
    3,
    8,
    127,
    128,
    255,
    1 << 16,
    31_000_000,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
MAX_GROWTH = 4
"""A damaged file is at most this many times as long as the file that it was made from."""

LEAST_CUT = 8192
"""Shorter ones are never cut to that."""

Mutation = Callable[[bytes, random.Random], bytes]


def mutate(content: bytes, structure: str, rng: random.Random) -> bytes:
    """Damage a file in one to four places."""
    damaged = content
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Flipped bits in a command line could name files outside of its folder.
        change = STRUCTURES[structure] if structure == "words" or rng.random() < 0.8 else any_bytes
        damaged = change(damaged, rng)
    return damaged[: max(MAX_GROWTH * len(content), LEAST_CUT)]


# -- any bytes ---------------------------------------------------------------------------------------------------------


def any_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert, copy or overwrite bytes, more often near the beginning."""
    if not content:
        return rng.randbytes(rng.randrange(1, 16))
    end = len(content) if rng.random() < 0.5 else min(len(content), 128)
    at = rng.randrange(end)
    length = min(rng.choice((1, 1, 2, 4, 8, 64)), len(content) - at)
    choice = rng.randrange(6)
    if choice == 0:
        return content[:at]
    if choice == 1:
        return content[:at] + content[at + length :]
    if choice == 2:
        return content[:at] + rng.randbytes(length) + content[at:]
    if choice == 3:
        return (
            content[:at]
            + rng.choice(INTEGERS).to_bytes(8, rng.choice(("little", "big")))[:length]
            + content[at + length :]
        )
    if choice == 4:
        source = rng.randrange(len(content))
        return content[:at] + content[source : source + length] + content[at:]
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


# -- text --------------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(rb"-?\b\d+(?:\.\d+)?(?:[eE][-+]?\d+)?\b")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_STRING = re.compile(rb'"[^"\n]*"')


def text(content: bytes, rng: random.Random) -> bytes:
    """Replace a number, a word or a string, or drop, repeat or swap lines."""
    choice = rng.randrange(5)
    if choice == 0:
        return _lines(content, rng)
    pattern = (_NUMBER, _NUMBER, _WORD, _STRING)[choice - 1]
    places = list(pattern.finditer(content))
    if not places:
        return any_bytes(content, rng)
    place = rng.choice(places)
    if pattern is _NUMBER:
        new = rng.choice(NUMBERS)
    elif rng.random() < 0.3:
        new = rng.choice(WORDS) if pattern is _WORD else b'"' + rng.choice(WORDS) + b'"'
    else:
        new = rng.choice(places).group()
    return content[: place.start()] + new + content[place.end() :]


def _lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    at, count = rng.randrange(len(lines)), rng.randrange(1, 8)
    block, rest = lines[at : at + count], lines[:at] + lines[at + count :]
    choice = rng.randrange(3)
    if choice == 0:
        return b"".join(rest)
    other = rng.randrange(len(rest) + 1)
    if choice == 1:
        return b"".join(rest[:other] + block + rest[other:])
    return b"".join(lines[:at] + block * rng.choice((2, 2, 3)) + lines[at:])


# -- words of a command ----------------------------------------------------------------------------------------------

ARGUMENTS = (
    *b"os:system json:loads os.path:join nets.py:needs nets.py:nothing nets.py:number nets:twice ./nets.py:net".split(),
    *b"nets.py : missing.py:net numpy:array 1,3,8 1,3,8,9 0,3,8,8 9,9,9,9 99999,99999,99999 100000 -1 0 1 2".split(),
    *b"0.5 1e9 nan inf 99999999999999999999 x.npy x.npz net.onnx net.prototxt net.caffemodel list.txt missing".split(),
    *b". .. /dev/null /proc/version --data --size --crop --mean --scale --batches --formats --part --config".split(),
    *b"--json --report --sparse --flops --placement --help -- -o qdq,record record \xff {} %s".split(),
    "é".encode(), b"a" * 5000,
)  # fmt: skip


def words(content: bytes, rng: random.Random) -> bytes:
    """Replace, drop, insert or swap words of a command; its first word stays."""
    found = content.split(b" ")
    at = rng.randrange(1, len(found)) if len(found) > 1 else 0
    choice = rng.randrange(5)
    if choice == 0 and len(found) > 1:
        del found[at]
    elif choice == 1:
        found.insert(at + 1, rng.choice(ARGUMENTS))
    elif choice == 2:
        other = rng.randrange(1, len(found)) if len(found) > 1 else 0
        found[at], found[other] = found[other], found[at]
    elif at:
        found[at] = rng.choice(ARGUMENTS)
    return b" ".join(found)


# -- JSON --------------------------------------------------------------------------------------------------------------


def json_text(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove or rename one value of a JSON document."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return text(content, rng)
    owners = [owner for owner in _json_nodes(document) if owner]
    if not owners:
        return text(content, rng)
    owner = rng.choice(owners)
    key = rng.choice(list(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
    choice = rng.randrange(4)
    if choice == 0:
        del owner[key]
    elif choice == 1 and isinstance(owner, dict):
        owner[rng.choice(("", "a.b", "\x1b[2J", key + "x", "__class__"))] = owner.pop(key)
    elif choice == 2:
        owner[key] = rng.choice(list(_json_nodes(document)))
        return _dumped(document, content)
    else:
        owner[key] = rng.choice((None, True, -1, 0, 1e300, 10**30, "", "x", [], {}, [[]], {"a": 1}, "\ud800", 0.5))
    return _dumped(document, content)


def _json_nodes(node: Any) -> list[Any]:  # noqa: ANN401  any JSON value
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = [node] if isinstance(node, (dict, list)) else []
    return found + [each for child in children for each in _json_nodes(child)]


def _dumped(document: Any, content: bytes) -> bytes:  # noqa: ANN401  any JSON value
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):  # a node became part of itself
        return content[: len(content) // 2]


# -- protobuf ----------------------------------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_DEEPEST = 12


def protobuf(content: bytes, rng: random.Random, depth: int = 0) -> bytes:
    """Change, drop, repeat or move one field of a message, or of a message inside it."""
    fields = _fields(content)
    if not fields:
        return any_bytes(content, rng)
    at = rng.randrange(len(fields))
    number, kind, value = fields[at]
    choice = rng.randrange(8)
    if choice == 0:
        del fields[at]
    elif choice == 1:
        fields.insert(rng.randrange(len(fields) + 1), fields[at])
    elif choice == 2:
        fields[at] = (max(1, number + rng.choice((-1, 1, 16))), kind, value)
    elif kind == _VARINT:
        fields[at] = (number, kind, _varint(rng.choice(INTEGERS)))
    elif kind in _FIXED:
        fields[at] = (number, kind, rng.choice((b"\0" * 8, b"\xff" * 8, rng.randbytes(8)))[: _FIXED[kind]])
    elif depth < _DEEPEST and _fields(value) and rng.random() < 0.9:
        fields[at] = (number, kind, protobuf(value, rng, depth + 1))
    else:
        fields[at] = (number, kind, rng.choice(WORDS) if rng.random() < 0.4 else any_bytes(value, rng))
    return b"".join(_encoded(*field) for field in fields)


def _fields(content: bytes) -> list[tuple[int, int, bytes]]:
    """The fields of a message as number, wire type and value; empty if the bytes are no message."""
    found, at = [], 0
    while at < len(content):
        tag, at = _read_varint(content, at)
        number, kind = tag >> 3, tag & 7
        start = at
        if number == 0 or at > len(content) or kind not in (_VARINT, _BYTES, *_FIXED):
            return []
        if kind == _VARINT:
            _, at = _read_varint(content, at)
        elif kind == _BYTES:
            length, start = _read_varint(content, at)
            at = start + length
        else:
            at += _FIXED[kind]
        if at > len(content):
            return []
        found.append((number, kind, content[start:at]))
    return found


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content):
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    return value, len(content) + 1


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _encoded(number: int, kind: int, value: bytes) -> bytes:
    length = _varint(len(value)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + value


# -- containers --------------------------------------------------------------------------------------------------------


def zipped(content: bytes, rng: random.Random) -> bytes:
    """Damage one member of a zip file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # noqa: BLE001  damaged before
        return any_bytes(content, rng)
    if not members:
        return any_bytes(content, rng)
    name = rng.choice(list(members))
    members[name] = any_bytes(members[name], rng)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return stream.getvalue()


def gzipped(content: bytes, rng: random.Random) -> bytes:
    """Damage the content of a gzip file."""
    try:
        return gzip.compress(any_bytes(gzip.decompress(content), rng))
    except Exception:  # noqa: BLE001  damaged before
        return any_bytes(content, rng)


STRUCTURES: dict[str, Mutation] = {
    "bytes": any_bytes,
    "text": text,
    "words": words,
    "json": json_text,
    "protobuf": protobuf,
    "zip": zipped,
    "gzip": gzipped,
}
