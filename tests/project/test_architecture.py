"""The rules that keep the house tidy: import layers, size budget, lean import, living links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# Longer than the budget on purpose, each with its reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_outgrows_the_budget():
    long = {relative(path): path.read_text().count("\n") for path in SOURCES}
    assert {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES and name not in LONG_FILES} == {}


def function_lengths(path: Path) -> dict[str, int]:
    lengths = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lengths[f"{relative(path)}:{node.name}"] = body[-1].end_lineno - body[0].lineno + 1 if body else 0
    return lengths


def test_no_function_outgrows_a_screen():
    lengths = {name: lines for path in SOURCES for name, lines in function_lengths(path).items()}
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES and name not in LONG_FUNCTIONS} == {}


def test_no_module_is_called_utils():
    assert [relative(path) for path in SOURCES if path.stem in {"utils", "util", "helpers", "misc", "common"}] == []


def test_every_module_says_what_it_is():
    bare = [relative(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert bare == []


LARGEST_ROOM = 20
LARGE_ROOMS: dict[str, str] = {}


def test_no_room_has_more_files_than_a_reader_can_hold():
    rooms = {}
    for path in SOURCES:
        rooms.setdefault(relative(path.parent), []).append(path.name)
    crowded = {room: len(files) for room, files in rooms.items() if len(files) > LARGEST_ROOM}
    assert set(crowded) <= set(LARGE_ROOMS), crowded


@pytest.mark.parametrize("job", ["PyTorch", "Caffe", "QAT"])
def test_the_walk_goes_as_the_job_does(job):
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index(f"### {job}\n") :].split("\n\n")[1]
    named = re.findall(r"^\d+\. `(src/amct/[\w/]+\.py)`", section, flags=re.MULTILINE)
    command = [sys.executable, str(ROOT / "scripts" / "house.py"), "--list", job]
    entered = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(named) > 5
    assert [file for file in map("src/{}".format, entered) if file in named] == named


def test_only_the_flow_quantizes():
    """Each door hands over to the one flow, and the result class exists once."""
    classes = [
        f"{relative(path)}:{node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and node.name in {"QuantizedModel", "QuantizedWeights", "Batches", "Skip", "QuantConfig"}
    ]
    assert sorted(name.rpartition(":")[2] for name in classes) == [
        "Batches",
        "QuantConfig",
        "QuantizedModel",
        "QuantizedWeights",
        "Skip",
    ]


LEAN_MODULES = ["amct", "amct.errors", "amct.cli", "amct.cli.app", "amct.schema", "amct.config", "amct.record"]


@pytest.mark.parametrize("module", LEAN_MODULES)
def test_importing_small_things_imports_no_torch_and_writes_nothing(module, tmp_path):
    code = f"import sys, {module}; print('torch' in sys.modules, 'onnxruntime' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["amct.pytorch", "amct.caffe", "amct.onnx_model", "amct_pytorch", "amct_caffe"])
def test_importing_a_front_door_writes_nothing(module, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", f"import {module}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_links_and_paths_in_documents_exist(document):
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks|scripts)/[\w./*-]+)`", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def test_nothing_names_this_machine():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    forbidden = re.compile("/" + r"(?:work|root|farm)/\w")
    suffixes = {".py", ".md", ".toml", ".cfg", ".txt", ".sh", ".yaml", ".yml", ""}
    named = []
    for name in filter(None, tracked):
        path = ROOT / name
        if path.suffix in suffixes and path.is_file() and path.stat().st_size < 400_000:
            named += [name] if forbidden.search(path.read_text(errors="ignore")) else []
    assert named == []
