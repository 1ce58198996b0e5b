"""Runs the code of a document: Python blocks as one program, shell blocks between them where they stand.

A page runs in a process of its own and in an empty folder. Commands of shell blocks are read by a very small shell: it
knows what the documents use and refuses everything else, so that no line goes by unchecked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PYTHON = "python"
SHELLS = ("sh", "bash", "console")
NOT_CODE = ("", "text", "protobuf")  # a listing of output, of a folder, of a config
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
HEREDOC = re.compile(r"cat > (\S+) <<'(\w+)'$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language == PYTHON or self.language in SHELLS


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text[: found.start()].count("\n") + 2) for found in FENCE.finditer(text)]


# -- a page in a process of its own ------------------------------------------------------------------------------------


def run_page(page: Path, folder: Path) -> None:
    """All blocks of a page in ``folder``; what they say goes to ``output.txt`` beside it."""
    output = (folder.parent / "output.txt").open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = output
    os.environ["AMCT_LOG_LEVEL"] = "WARNING"
    os.chdir(folder)
    if any(block.language in SHELLS for block in blocks(page)):
        from document_files import make_files

        make_files(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == PYTHON:
            lines = "\n" * (block.line - 1)  # tracebacks then name the line of the page
            exec(compile(lines + block.text, str(page), "exec"), names)
        elif block.language in SHELLS:
            for command in commands(block):
                run_command(command, folder)


# -- a very small shell ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """One command: its words, or a file and what is written to it."""

    words: tuple[str, ...]
    file: str = ""
    content: str = ""


def commands(block: Block) -> list[Command]:
    """The commands of a shell block; of a ``console`` block those behind ``$``, the rest is output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    waiting = iter(lines)
    for line in waiting:
        heredoc = HEREDOC.match(line.strip())
        if heredoc:
            content = iter(waiting.__next__, heredoc[2])
            found.append(Command((), heredoc[1], "\n".join(content) + "\n"))
        elif words := shlex.split(line, comments=True):
            found.append(Command(tuple(words)))
    return found


def run_command(command: Command, folder: Path) -> None:
    """Run a command; those that install or take minutes are checked against the files that say what they do."""
    if command.file:
        (folder / command.file).write_text(command.content)
        return
    program, *arguments = command.words
    if program == "amct":
        from amct.cli import main

        code = main(arguments)
        assert code == 0, f"{shlex.join(command.words)}: exit code {code}"
    elif program == "python":
        run_python(arguments, folder)
    elif program in CHECKS:
        CHECKS[program](arguments)
    else:
        raise AssertionError(f"what does this command do? {shlex.join(command.words)}")


def run_python(arguments: list[str], folder: Path) -> None:
    script = arguments[0]
    if script.startswith(("examples/", "scripts/", "benchmarks/")):
        # These have tests of their own, or take minutes.
        assert (ROOT / script).is_file(), f"{script}: there is no such file"
        return
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True)


def check_make(arguments: list[str]) -> None:
    """The targets run what CI runs: tests of tests would never end."""
    makefile = (ROOT / "Makefile").read_text()
    for target in arguments:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"


def check_install(arguments: list[str]) -> None:
    """Installing needs a network; that the extras exist is known from the project file."""
    if Path(arguments[0]).name == "pip":
        arguments = arguments[1:]
    assert arguments[0] == "install", arguments
    for what in (word for word in arguments[1:] if not word.startswith("-")):
        found = re.fullmatch(r"(?:\.|amct)(?:\[([\w,-]+)\])?", what)
        assert found, f"pip install {what}: expected this project"
        project = (ROOT / "pyproject.toml").read_text()
        for extra in filter(None, (found[1] or "").split(",")):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"pyproject.toml has no extra {extra}"


def check_nothing(arguments: list[str]) -> None:
    """Fetching the project, and going into its folder: where it is kept is not known here."""
    assert arguments


def run_torchrun(arguments: list[str]) -> None:
    """Several processes on this machine; the page is in the current folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    if (
        done.returncode and "(SIGABRT)" in done.stderr
    ):  # torch's own, at the end of a process: docs/scaling.md tells of it
        done = subprocess.run(command, check=False)
    done.check_returncode()


CHECKS = {
    "torchrun": run_torchrun,
    "make": check_make,
    "pip": check_install,
    "git": check_nothing,
    "cd": check_nothing,
    ".venv/bin/pre-commit": check_nothing,  # changes the clone it runs in
}
