"""The examples in ``examples/pytorch`` run as they are, and what they print is measured."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "examples" / "pytorch"
MOST_LINES = 60


@pytest.fixture(autouse=True)
def _as_started_in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "ERROR")
    monkeypatch.syspath_prepend(str(FOLDER))  # where python puts a script's own folder
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _modules_of_the_examples_are_forgotten():
    """They stay loaded between the examples, so that the network is trained once."""
    yield
    for name in ("shared", "pytorch_cnn", "digits", "measuring"):
        sys.modules.pop(name, None)


def percentages(capsys, name):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert printed.err == ""
    return [float(found) for found in re.findall(r"([\d.]+) %", printed.out)]


def test_post_training_quantization(capsys):
    before, after = percentages(capsys, "ptq")
    assert before > 98
    assert after > before - 1
    files = {path.name for path in Path("out/examples").iterdir()}
    assert {"ptq_qdq_model.onnx", "ptq_deploy_model.onnx", "ptq_record.txt", "ptq.json"} <= files


def test_learned_rounding(capsys):
    before, nearest, learned = percentages(capsys, "adaround")
    assert nearest < before - 2
    assert learned > before - 1


def test_balanced_channels(capsys):
    before, without, balanced = percentages(capsys, "dmq")
    assert without < before - 5
    assert balanced > before - 1


def test_cache_of_keys_and_values(capsys):
    before, after = percentages(capsys, "kv_cache")
    assert before > 90
    assert after > before - 1
    assert "kv_cache_value" in Path("out/examples/kv_cache_record.txt").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py") if path.name != "shared.py"))
def test_examples_are_short_and_say_how_they_are_started(name):
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) < MOST_LINES
    assert f"python examples/pytorch/{name}" in text
