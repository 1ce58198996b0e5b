"""The short examples run, and stay short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "pytorch").glob("*.py"))
LINES = 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_short_example_runs(example, tmp_path):
    assert len(example.read_text().splitlines()) < LINES
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "AMCT_LOG_LEVEL": "ERROR"}
    program = [sys.executable, str(example), "out"]
    found = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert list((tmp_path / "out").iterdir())
