"""The reader of LMDB pages: what the lmdb library wrote is read alike, and no damaged file ends the process."""

from __future__ import annotations

import ast
import os
import struct
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from amct.data.lmdb import LmdbReader, write_lmdb
from amct.errors import ParseError

PAGE = 4096
MAIN_DATABASE = 16 + 24 + 48
"""Where a meta page describes the main database."""
ROOT = MAIN_DATABASE + 40
LAST_PAGE = MAIN_DATABASE + 48


def write_entries(path, entries, deleted=()):
    """A database written in several transactions, so that it has free and copied pages."""
    with lmdb.open(str(path), subdir=False, map_size=2**28) as environment:
        for start in range(0, len(entries), 500):
            with environment.begin(write=True) as transaction:
                for key, value in entries[start : start + 500]:
                    transaction.put(key, value)
        with environment.begin(write=True) as transaction:
            for key in deleted:
                transaction.delete(key)


@pytest.mark.parametrize("size", [0, 10, 700, 2000, 2100, 5000])
@pytest.mark.parametrize("count", [1, 30, 1700])
def test_the_entries_are_those_of_the_lmdb_library(tmp_path, size, count):
    path, generator = tmp_path / "a.mdb", np.random.default_rng(size + count)
    entries = [
        (generator.bytes(int(generator.integers(1, 60))), generator.bytes(int(size * generator.uniform(0.5, 1.5))))
        for _ in range(count)
    ]
    write_entries(path, entries, deleted=[key for key, _ in entries[3::7]])
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment, environment.begin() as reading:
        expected = [(key.decode("utf-8", errors="backslashreplace"), value) for key, value in reading.cursor()]
    reader = LmdbReader(path)
    assert list(reader.items()) == expected
    assert len(reader) == len(expected)


@pytest.fixture
def database(tmp_path):
    """A tree of two levels with small values in its leaves and one large value on pages of its own."""
    images = [np.full((3, 8, 8), index, np.uint8) for index in range(60)] + [np.full((3, 60, 60), 9, np.uint8)]
    write_lmdb(tmp_path / "db", [(image, index) for index, image in enumerate(images)])
    return tmp_path / "db" / "data.mdb"


def test_no_damaged_copy_ends_the_process(database, tmp_path):
    script = Path(__file__).with_name("lmdb_mutants.py")
    run = subprocess.run(
        [sys.executable, str(script), str(database), str(tmp_path), "0", "1500"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results = ast.literal_eval(run.stdout)
    assert set(results) == {"read", "refused"}
    assert results["refused"] > 500
    assert results["read"] > 100  # wrong bytes in unused pages and in values do no harm


def patched(database, changes):
    """Change numbers of the valid meta page; returns the number of the root page."""
    content = bytearray(database.read_bytes())
    latest = max((0, PAGE), key=lambda start: struct.unpack_from("<Q", content, start + LAST_PAGE + 8)[0])
    for offset, value in changes.items():
        struct.pack_into("<Q", content, latest + offset, value)
    database.write_bytes(content)
    return struct.unpack_from("<Q", content, latest + ROOT)[0]


def test_a_root_beyond_the_file(database):
    patched(database, {ROOT: 10**12})
    with pytest.raises(ParseError, match=r"page 1000000000000 is beyond the last page, \d+\. Copy or create it again"):
        list(LmdbReader(database).items())


def test_a_tree_that_contains_itself(database):
    root = patched(database, {})
    content = bytearray(database.read_bytes())
    (offset,) = struct.unpack_from("<H", content, root * PAGE + 16)
    struct.pack_into("<I", content, root * PAGE + offset, root)
    database.write_bytes(content)
    with pytest.raises(ParseError, match=rf"page {root} occurs twice in the tree"):
        list(LmdbReader(database).items())


def test_a_number_of_entries_that_is_not_true(database):
    patched(database, {MAIN_DATABASE + 32: 5})
    reader = LmdbReader(database)
    assert len(reader) == 5
    with pytest.raises(ParseError, match="does not have the 5 entries that are announced"):
        list(reader.items())
    patched(database, {MAIN_DATABASE + 32: 2**63})
    with pytest.raises(ParseError, match="9223372036854775808 entries in a file of"):
        LmdbReader(database)


def test_a_file_that_shrinks_after_it_was_opened(database):
    items = LmdbReader(database).items()
    next(items)
    os.truncate(database, 2 * PAGE)
    with pytest.raises(ParseError, match="the LMDB is damaged"):
        list(items)
