"""Run the tests with other versions of torch, each in a fresh virtual environment, and print the counts.

    python scripts/try_versions.py 2.8.0 2.15.0
    python scripts/try_versions.py 2.8.0 --tests tests/pytorch tests/export

The wheels of one version take 3 to 5 GB, so this is not part of CI. The environments are kept in ``build/versions`` and
used again. All other packages have the versions of constraints.txt, except those that a torch pins itself. Tests marked
``assets`` are not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN_PINS = ("torch", "torchvision", "sympy", "networkx", "setuptools", "triton", "typing_extensions")
"""Packages whose version torch decides."""


def other_constraints(folder: Path) -> Path:
    """A copy of constraints.txt without the packages whose version torch decides."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in lines if line.partition("==")[0].strip() not in OWN_PINS) + "\n")
    return path


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this torch and the packages of the tests; made on first use."""
    home = folder / f"torch-{version}"
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    venv.create(home, with_pip=True, clear=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["-c", other_constraints(Path(scratch)), f"torch=={version}"]
        # The package itself is found by PYTHONPATH: its own lower bound of torch must not forbid the trial.
        subprocess.run([*pip, "setuptools", *dependencies()], check=True)
    (home / "complete").touch()
    return python


def dependencies() -> list[str]:
    """The requirements of the package and of its tests, without torch and without the package itself."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["caffe"], *extras["demo"]]
    return [line for line in wanted if not line.startswith(("torch>", "amct["))]


def counts(python: Path, tests: list[str]) -> dict[str, int]:
    """Run the tests; return how many passed, failed, could not be set up and were skipped."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        subprocess.run(
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-m",
                "not assets",
                "-p",
                "no:cacheprovider",
                f"--junitxml={results}",
                *tests,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            check=False,
        )
        suite = next(ElementTree.parse(results).getroot().iter("testsuite"))
    found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"passed": found.pop("tests") - sum(found.values()), **found}


def main() -> int:
    """Try each version; the exit code is 1 if a test of one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="TORCH", help="a version of torch, such as 2.8.0")
    parser.add_argument("--tests", nargs="*", default=[], help="only these tests, and other arguments of pytest")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where environments are kept")
    given = parser.parse_args()
    found = {version: counts(environment(version, given.folder), given.tests) for version in given.versions}
    for version, numbers in found.items():
        print(  # noqa: T201  what was asked for
            f"torch {version}, Python {sys.version_info.major}.{sys.version_info.minor}: "
            + ", ".join(f"{count} {name}" for name, count in numbers.items())
        )
    return int(any(numbers["failures"] + numbers["errors"] for numbers in found.values()))


if __name__ == "__main__":
    sys.exit(main())
