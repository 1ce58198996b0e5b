"""Programs that the tests of ``amct.atomic`` start in order to kill them: ``python atomic_writer.py <program> …``.

``group FOLDER COUNT SIZE``     writes generation after generation of COUNT files of SIZE bytes until killed
``stopped FOLDER COUNT SIZE RENAMES``  writes generation 1, says ``now`` after some renames, and waits to be killed
``crash FOLDER``                kills itself at every single step of writing a group to two folders, and reports each
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from amct import atomic
from amct.errors import FileError


def generation_bytes(generation: int, size: int) -> bytes:
    return (b"%08d" % generation) * (size // 8)


def write_generation(folder: Path, count: int, size: int, generation: int) -> None:
    with atomic.FileGroup() as group:
        for index in range(count):
            group.write_bytes(folder / f"file{index}.bin", generation_bytes(generation, size))


def group(folder: Path, count: int, size: int) -> None:
    generation = 1
    while True:
        os.write(1, b"%d\n" % generation)
        write_generation(folder, count, size, generation)
        generation += 1


def stopped(folder: Path, count: int, size: int, renames: int) -> None:
    replace, left = os.replace, renames

    def counted(source: Path, target: Path) -> None:
        nonlocal left
        if Path(target).name.startswith("file"):
            if left == 0:
                os.write(1, b"now\n")
                signal.pause()
            left -= 1
        replace(source, target)

    os.fsync = lambda _: None  # a kill, unlike a power cut, loses nothing that was written
    os.replace = counted
    write_generation(folder, count, size, 1)


class Countdown:
    """Wraps functions of the operating system: the process dies right before the step the count says."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, function):
        def counted(*args, **kwargs):
            self.steps -= 1
            if self.steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted


def write_two_folders(folder: Path, word: bytes) -> None:
    with atomic.FileGroup() as both:
        both.write_bytes(folder / "one" / "a", word)
        both.write_bytes(folder / "two" / "b", word)
        both.path(folder / "one" / "c.h5").write_bytes(word)


def crash(folder: Path) -> None:
    """Print ``step files-on-disk files-as-read files-after-next-save leftovers`` for a kill at each step; ``done``."""
    for step in range(10_000):
        write_two_folders(folder, b"old")
        sys.stdout.flush()  # or the child would have the same lines to say
        pid = os.fork()
        if pid == 0:
            count = Countdown(step)
            for name in ("open", "fsync", "fchmod", "close", "replace", "rename", "unlink", "listdir"):
                setattr(os, name, count(getattr(os, name)))
            write_two_folders(folder, b"new")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        before, names = words(folder), everything(folder)
        read = "+".join(word(folder / name) for name in FILES)
        assert (before, names) == (words(folder), everything(folder)), "reading changed something"
        write_two_folders(folder, b"next")
        after = "+".join(word(folder / name) for name in FILES)
        left = [name for name in everything(folder) if "/." in name]
        sys.stdout.write(f"{step} {before} {read} {after} {','.join(left) or '-'}\n")
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            sys.stdout.write("done\n")
            return


FILES = ("one/a", "two/b", "one/c.h5")


def words(folder: Path) -> str:
    return "+".join((folder / name).read_text() for name in FILES)


def word(path: Path) -> str:
    try:
        return atomic.read_bytes(path).decode()
    except FileError as error:
        return "refused" if "was interrupted" in str(error) else "wrong"


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


if __name__ == "__main__":
    program, where, *numbers = sys.argv[1:]
    {"group": group, "stopped": stopped, "crash": crash}[program](Path(where), *map(int, numbers))
