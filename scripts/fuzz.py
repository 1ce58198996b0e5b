"""Reads damaged files with every reader: each must end with a result or one of our errors, soon and in little memory.

Usage: ``python scripts/fuzz.py --inputs 100000 --seed 7``. Inputs depend only on the seed and their number, so that
``--only NUMBER`` repeats one. Inputs that did not end well are kept in the folder ``--keep``.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fuzz_mutations import mutate
from fuzz_readers import Reader, all_readers

from amct.errors import AmctError

if TYPE_CHECKING:
    from collections.abc import Sequence

HANG_CPU_SECONDS = 5.0
HANG_WALL_SECONDS = 60.0
GROWTH_BYTES = 2 << 30
CHUNK = 400
"""Inputs of one child process: starting one costs a few milliseconds, and its memory is given back."""
SHOWN_LINES = 6
SHOWN_EVERY = 25 * CHUNK


class Fuzzer:
    """All readers and the damaged inputs for them, by number."""

    def __init__(self, readers: dict[str, Reader], seed: int, place: Path) -> None:
        self.readers, self.seed, self.place = readers, seed, place
        self._names = [name for name, reader in readers.items() for _ in range(reader.weight)]

    def damaged(self, number: int) -> tuple[str, bytes]:
        """The reader and the content of one input."""
        rng = random.Random(f"{self.seed} {number}")
        name = rng.choice(self._names)
        reader = self.readers[name]
        return name, mutate(rng.choice(reader.files), reader.structure, rng)

    def warm(self) -> None:
        """Read a sound file with every reader, so that what is imported on first use is there for every child."""
        for name, reader in self.readers.items():
            outcome = self._read(name, reader.files[0])
            if outcome not in ("result", "error"):
                raise SystemExit(f"{name} cannot read a sound file: {outcome}")

    def read(self, number: int) -> str:
        """Read one input in this process: "result", "error", or what went wrong."""
        return self._read(*self.damaged(number))

    def _read(self, name: str, content: bytes) -> str:
        folder = self.place / "input"
        folder.mkdir()
        try:
            os.chdir(folder)
            self.readers[name].read(content, folder)
        except AmctError:
            return "error"
        except BaseException as error:  # noqa: BLE001  that is what is looked for
            if isinstance(error, MemoryError):
                return "memory: " + "".join(traceback.format_exception(error)[-SHOWN_LINES:])
            return "stray: " + "".join(traceback.format_exception(error)[-SHOWN_LINES:])
        finally:
            os.chdir(self.place)
            shutil.rmtree(folder, ignore_errors=True)
        return "result"

    def chunk(self, numbers: Sequence[int]) -> list[tuple[int, str]]:
        """Read some inputs in child processes, a new one after each that did not survive."""
        found: list[tuple[int, str]] = []
        while len(found) < len(numbers):
            found += self._child(numbers[len(found) :])
            shutil.rmtree(self.place / "input", ignore_errors=True)
        return found

    def _child(self, numbers: Sequence[int]) -> list[tuple[int, str]]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._work(numbers, writing)
        os.close(writing)
        found: list[tuple[int, str]] = []
        with os.fdopen(reading, "rb") as answers:
            while len(found) < len(numbers) and (answer := _answer(pid, answers)) is not None:
                found.append((numbers[len(found)], answer))
                if answer.startswith("hang"):
                    os.kill(pid, signal.SIGKILL)
                    break
        _, status = os.waitpid(pid, 0)
        if len(found) < len(numbers) and os.WIFSIGNALED(status) and not (found and found[-1][1].startswith("hang")):
            found.append((numbers[len(found)], f"crash: signal {os.WTERMSIG(status)}"))
        return found

    def _work(self, numbers: Sequence[int], writing: int) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + GROWTH_BYTES, resource.RLIM_INFINITY))
        for number in numbers:
            os.write(writing, self.read(number).encode(errors="replace")[:4000].replace(b"\n", b"\r") + b"\n")
        os._exit(0)


def _answer(pid: int, answers: object) -> str | None:
    """The next line of a child, "hang" if it takes too long, or None if the child has ended."""
    moved, begun = time.monotonic(), _cpu_seconds(pid)
    used = begun
    while not select.select([answers], [], [], 0.2)[0]:
        before, used = used, _cpu_seconds(pid)
        if used - begun > HANG_CPU_SECONDS:
            return f"hang: more than {HANG_CPU_SECONDS:.0f} CPU seconds"
        if used > before:  # other work on the machine may leave it little time
            moved = time.monotonic()
        if time.monotonic() - moved > HANG_WALL_SECONDS:
            return f"hang: {HANG_WALL_SECONDS:.0f} seconds without work"
    line = answers.readline()  # type: ignore[attr-defined]
    return line.decode().replace("\r", "\n").rstrip("\n") if line else None


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(fuzzer: Fuzzer, numbers: Sequence[int], keep: Path | None) -> tuple[Counter[tuple[str, str]], int]:
    """Read all inputs: how often each reader ended how, and how many inputs did not end well."""
    counts: Counter[tuple[str, str]] = Counter()
    failures = 0
    for start in range(0, len(numbers), CHUNK):
        if start % SHOWN_EVERY == 0 and start:
            sys.stderr.write(f"{start} of {len(numbers)} inputs, {failures} failures\n")
        for number, outcome in fuzzer.chunk(numbers[start : start + CHUNK]):
            name, content = fuzzer.damaged(number)
            kind = outcome.partition(":")[0]
            counts[name, kind] += 1
            if kind in ("result", "error"):
                continue
            failures += 1
            sys.stdout.write(f"input {number}, {name}: {outcome}\n")
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{number}_{name.replace(' ', '_')}.bin").write_bytes(content)
    return counts, failures


def main() -> int:
    """Print the outcomes by reader; the exit code is 1 if an input did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one, to go on from there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one input, in this process, with its traceback")
    parser.add_argument("--reader", help="only this reader")
    parser.add_argument("--keep", type=Path, help="folder for inputs that did not end well")
    options = parser.parse_args()
    os.environ["AMCT_LOG_LEVEL"] = "error"
    keep = options.keep.absolute() if options.keep else None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        readers = all_readers(place)
        if options.reader:
            readers = {options.reader: readers[options.reader]}
        fuzzer = Fuzzer(readers, options.seed, place)
        if options.only is not None:
            name, content = fuzzer.damaged(options.only)
            (place / "input").mkdir()
            os.chdir(place / "input")
            sys.stdout.write(f"{name}: {fuzzer.readers[name].read(content, place / 'input')}\n")
            return 0
        fuzzer.warm()
        counts, failures = fuzz(fuzzer, range(options.first, options.first + options.inputs), keep)
    for name in readers:
        outcomes = ", ".join(f"{count} {kind}" for (each, kind), count in sorted(counts.items()) if each == name)
        sys.stdout.write(f"{name:22} {outcomes}\n")
    sys.stdout.write(f"{counts.total()} inputs, {failures} failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
