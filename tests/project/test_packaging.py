"""What an installed package needs beside its Python files is packed."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent


def test_every_data_file_of_the_package_is_packed():
    found = re.search(r"\[tool\.setuptools\.package-data\]\n\"\*\" = (\[.*\])", (ROOT / "pyproject.toml").read_text())
    assert found is not None
    patterns = json.loads(found[1])
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    data = [Path(name) for name in listed.split() if not name.endswith(".py")]
    assert {path.name for path in data} >= {"py.typed", "descriptors.binpb", "caffe.proto"}
    assert [path for path in data if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)] == []


def test_every_package_says_that_it_is_typed():
    packages = [path for path in (ROOT / "src").iterdir() if path.is_dir() and path.name.isidentifier()]
    assert {path.name for path in packages} == {"amct", "amct_caffe", "amct_pytorch", "caffe_patch", "hotwheels"}
    without = [path.name for path in packages if not list(path.glob("py.typed")) and not list(path.glob("*/py.typed"))]
    assert without == []


def test_the_readmes_promise_the_torch_of_the_package():
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    for page in ROOT.glob("README*.md"):
        assert f"torch {bound}" in page.read_text()


def test_trying_another_torch_keeps_all_pins_but_those_that_torch_decides(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_versions

    kept = try_versions.other_constraints(tmp_path).read_text().splitlines()
    left_out = set((ROOT / "constraints.txt").read_text().splitlines()) - set(kept)
    assert {line.partition("==")[0] for line in left_out} <= set(try_versions.OWN_PINS)
    assert any(line.startswith("torch==") for line in left_out)
    wanted = try_versions.dependencies()
    assert any(line.startswith("onnx>") for line in wanted)
    assert [line for line in wanted if re.match(r"(torch|amct)\b(?!-)", line)] == []


OUTCOMES = """
import pytest

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise OSError("not there")
def test_has_no_fixture(broken): pass
"""


def test_trying_another_torch_prints_the_counts_and_keeps_the_output(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_versions

    monkeypatch.setattr(try_versions, "environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(try_versions, "release_of", lambda *_: "3.11")
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    given = ["2.0.0", "--folder", str(tmp_path / "kept"), "--tests", str(tmp_path / "test_outcomes.py")]
    monkeypatch.setattr(sys, "argv", ["try_versions.py", *given])
    assert try_versions.main() == 1
    said = capsys.readouterr().out
    assert "torch 2.0.0, Python" in said.splitlines()[-1]
    assert "2 passed, 1 failed, 1 errors, 1 skipped" in said.splitlines()[-1]
    assert "assert 1 == 2" in said
    assert "assert 1 == 2" in (tmp_path / "kept" / "torch-2.0.0.log").read_text()
    (tmp_path / "test_outcomes.py").write_text("def test_passes(): pass")
    assert try_versions.main() == 0
    monkeypatch.setattr(sys, "argv", ["try_versions.py", *given[:-1], str(tmp_path / "missing.py")])
    assert try_versions.main() == 1  # a run without tests shows nothing


def test_the_table_of_the_readmes_keeps_the_rows_of_other_versions(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_versions

    old = "| 2.9.0 | 3.11 | 2026-01-01 | 1 | 0 | 0 |\n| 2.15.0 | 3.11 | 2026-01-01 | 2 | 1 | 0 |\n"
    for page in try_versions.READMES:
        assert page.read_text().count(try_versions.START) == 1
    page = tmp_path / "README.md"
    page.write_text(f"before\n{try_versions.START}{try_versions.HEAD}{old}{try_versions.END}\nafter\n")
    monkeypatch.setattr(try_versions, "READMES", (page,))
    counts = try_versions.Counts(10, 1, 1, 3)
    try_versions.write_table([("2.9.0", "3.11", counts), ("2.10.1", "3.12", counts)])
    rows = page.read_text().splitlines()[4:-2]
    assert [row.split("|")[1].strip() for row in rows] == ["2.15.0", "2.10.1", "2.9.0"]
    assert rows[2].endswith("| 10 | 2 | 3 |")
    assert page.read_text().endswith(f"{try_versions.END}\nafter\n")


def test_an_environment_with_another_torch_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_versions

    own = try_versions.release_of(Path(sys.executable), metadata.version("torch").partition("+")[0])
    assert own == f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(SystemExit, match=r"expected torch 0\.0\.1, got"):
        try_versions.release_of(Path(sys.executable), "0.0.1")


@pytest.mark.parametrize(
    ("package", "hole"),
    [
        ("jinja2", "3.1.5"),
        ("onnx", "1.20.1"),
        ("pillow", "10.2.0"),
        ("pillow", "12.1.0"),
        ("protobuf", "4.25.7"),
        ("protobuf", "5.29.4"),
        ("protobuf", "6.31.0"),
        ("torch", "2.5.1"),
        ("h5py", "3.11.0"),
    ],
)
def test_versions_with_known_holes_are_excluded(package, hole):
    text = (ROOT / "pyproject.toml").read_text()
    (found,) = set(re.findall(rf'"{package}([<>=!~][^"]*)"', text))
    assert hole not in SpecifierSet(found)
    pinned = re.findall(rf"^{package}==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE | re.IGNORECASE)
    assert pinned
    assert all(version in SpecifierSet(found) for version in pinned)
