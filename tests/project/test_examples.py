"""The examples of training and pruning run as a user starts them, and write their files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["qat", "prune", "sparse", "combined"])
def test_an_example_runs(name, tmp_path):
    example = ROOT / "examples" / "pytorch" / f"{name}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "AMCT_LOG_LEVEL": "ERROR"}
    program = [sys.executable, str(example), "out"]
    found = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert list((tmp_path / "out").iterdir())
    accuracies = [float(number) for number in re.findall(r": ([\d.]+) ?%$", found.stdout, re.MULTILINE)]
    assert accuracies[-1] > accuracies[0] - 3
    assert accuracies[0] > 90
