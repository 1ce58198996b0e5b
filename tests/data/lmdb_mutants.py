"""Reads many damaged copies of one LMDB; a process of its own, because a crash must not end the test run.

Prints how many copies were read, and how many were refused by an error of this package.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from amct.data.lmdb import LmdbReader
from amct.errors import AmctError

HEADER_BYTES = 16
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF)


def mutants(good: bytes, page: int, seed: int, count: int):
    """Copies cut inside every page, and copies with wrong bytes in page headers, node lists and nodes."""
    generator = random.Random(seed)
    pages = len(good) // page
    for number in range(pages):
        yield good[: number * page]
        yield good[: number * page + generator.randrange(1, page)]
    for _ in range(count):
        copy = bytearray(good)
        for _ in range(generator.choice((1, 1, 2, 6))):
            number = generator.randrange(pages)
            span = generator.choice((HEADER_BYTES, 160, page))  # a header, a meta page or a list of nodes, any byte
            start = number * page + generator.randrange(span)
            width = generator.choice((1, 2, 4, 8))
            value = bytes(generator.choice(NUMBERS) for _ in range(width))
            copy[start : start + width] = value if generator.random() < 0.7 else generator.randbytes(width)
        yield bytes(copy[: len(good)])


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    results: Counter[str] = Counter()
    path = folder / "mutant.mdb"
    for content in mutants(source.read_bytes(), 4096, seed=int(sys.argv[3]), count=int(sys.argv[4])):
        path.write_bytes(content)
        try:
            for _ in LmdbReader(path).datums():
                pass
            results["read"] += 1
        except AmctError as error:
            results["refused" if str(path) in str(error) else "refused without place"] += 1
    print(dict(results))


if __name__ == "__main__":
    main()
