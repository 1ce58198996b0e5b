"""Run the tests with other versions of torch, each in a fresh virtual environment, and print the counts.

    python scripts/try_versions.py 2.8.0 2.15.0
    python scripts/try_versions.py 2.8.0 --tests tests/pytorch tests/export
    python scripts/try_versions.py 2.8.0 --python /env/bin/python     an environment that has this torch already
    python scripts/try_versions.py 2.8.0 --table     and write the outcome into the table of the READMEs

The wheels of one version take 3 to 5 GB, so this is not part of CI. The environments are kept in ``build/versions`` and
used again; beside each lie what pip and pytest printed and pytest's results, ``torch-2.8.0.pip.log``, ``.log`` and
``.xml``. All other packages have the versions of constraints.txt, except those that a torch pins itself. Tests marked
``assets`` are not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
START, END = "<!-- versions -->\n", "<!-- end -->"
HEAD = "| torch | Python | date | passed | failed | skipped |\n| --- | --- | --- | ---: | ---: | ---: |\n"
OWN_PINS = ("torch", "torchvision", "sympy", "networkx", "setuptools", "triton", "typing_extensions")
"""Packages whose version torch decides."""
EXTRAS = ("test", "caffe", "demo", "docs", "assets", "dev")
"""What the tests need beside the package."""


@dataclass(frozen=True)
class Counts:
    """The outcome of a run of pytest; an error is a test that could not be set up."""

    passed: int
    failed: int
    errors: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.errors} errors, {self.skipped} skipped"


def other_constraints(folder: Path) -> Path:
    """A copy of constraints.txt without the packages whose version torch decides."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in lines if line.partition("==")[0].strip() not in OWN_PINS) + "\n")
    return path


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this torch and the packages of the tests; made on first use."""
    home = folder / f"torch-{version}"
    python, complete = home / "bin" / "python", home / "complete"
    wanted = [f"torch=={version}", "setuptools", *dependencies()]
    content = "\n".join([*wanted, str(ROOT)])
    if complete.exists() and complete.read_text() == content:
        return python
    if not complete.exists():
        say(f"torch {version}: making {home}, which takes several minutes and GB")
        venv.create(home, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    log = folder / f"torch-{version}.pip.log"
    with tempfile.TemporaryDirectory() as scratch:
        others = ["-c", str(other_constraints(Path(scratch))), *wanted]
        # Without dependencies: the package's own lower bound of torch must not forbid the trial.
        itself = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
        for packages in (others, itself):
            if run([*pip, *packages], log, shown=False):
                raise SystemExit(f"torch {version}: pip failed, see {log}")
    complete.write_text(content)
    return python


def dependencies() -> list[str]:
    """The requirements of the package and of its tests, without torch and without the package itself."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    return [line for line in wanted if not line.startswith(("torch>", "amct["))]


def run(command: Sequence[str], log: Path, *, shown: bool, more: Mapping[str, str] | None = None) -> int:
    """Run a command in the project; keep what it prints in ``log``, and print it as it comes if ``shown``."""
    environ = {**os.environ, **(more or {})}
    with (
        log.open("w") as kept,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            kept.flush()
            if shown:
                say(line.rstrip("\n"))
        return process.wait()


def release_of(python: Path, version: str) -> str:
    """The Python that an environment has, which must have this torch."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    release, _, found = told.stdout.strip().partition(" ")
    if found.partition("+")[0] != version:
        raise SystemExit(f"{python}: expected torch {version}, got {found or told.stderr.strip()[-300:]}")
    return release.rpartition(".")[0]


def tried(version: str, python: Path, folder: Path, tests: Sequence[str], processes: int) -> Counts:
    """Run the tests with one version; return how many passed, failed, could not be set up and were skipped."""
    log, results = folder / f"torch-{version}.log", folder / f"torch-{version}.xml"
    results.unlink(missing_ok=True)
    pytest = [str(python), "-m", "pytest", "-q", "-m", "not assets", "-p", "no:cacheprovider", f"--junitxml={results}"]
    pytest += ["-n", str(processes)] if processes > 1 else []
    say(f"torch {version}: running the tests; their output is kept in {log}")
    code = run([*pytest, *tests], log, shown=True, more={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"})
    if not results.exists():
        raise SystemExit(f"torch {version}: pytest ended with exit code {code} and without results, see {log}")
    return counted(results)


def counted(results: Path) -> Counts:
    """The counts in a file of ``pytest --junitxml``."""
    suite = next(ElementTree.parse(results).getroot().iter("testsuite"))
    total, failed, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    return Counts(total - failed - errors - skipped, failed, errors, skipped)


def write_table(found: Sequence[tuple[str, str, Counts]]) -> None:
    """Put the outcome of whole runs into the table of the READMEs, the newest torch first; other rows stay."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    for page in READMES:
        before, _, rest = page.read_text().partition(START)
        table, _, after = rest.partition(END)
        rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in table.splitlines()[2:]}
        for version, release, each in found:
            cells = (version, release, today, each.passed, each.failed + each.errors, each.skipped)
            rows[version, release] = f"| {' | '.join(map(str, cells))} |"
        order = sorted(rows, key=lambda key: [int(part) for part in ".".join(key).split(".")], reverse=True)
        page.write_text(f"{before}{START}{HEAD}" + "".join(f"{rows[key]}\n" for key in order) + END + after)


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)  # noqa: T201  what was asked for


def main() -> int:
    """Try each version; the exit code is 1 if a test of one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="TORCH", help="a version of torch, such as 2.8.0")
    parser.add_argument("--tests", nargs="*", default=[], help="only these files, folders or tests")
    parser.add_argument("--processes", type=int, default=1, help="how many tests run at once; each takes one core")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    parser.add_argument("--python", type=Path, help="of an environment with this torch and the packages of the tests")
    parser.add_argument("--table", action="store_true", help="write the outcome of whole runs into the READMEs")
    given = parser.parse_args()
    if given.table and given.tests:
        parser.error("--table is for whole runs; leave --tests out")
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[str, str, Counts]] = []
    for version in given.versions:
        python = given.python or environment(version, folder)
        release = release_of(python, version)
        found.append((version, release, tried(version, python, folder, given.tests, given.processes)))
    for version, release, counts in found:
        say(f"torch {version}, Python {release}: {counts}")
    if given.table:
        write_table(found)
    return int(any(counts.failed + counts.errors or not counts.passed for *_, counts in found))


if __name__ == "__main__":
    sys.exit(main())
