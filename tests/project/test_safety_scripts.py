"""The release checks, shortened: jobs that are killed, and damaged files for every reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("arguments", "summary"),
    [
        (["torture.py", "--kills", "30", "--seed", "0"], "30 kills, 0 defects"),
        (["fuzz.py", "--inputs", "2000", "--seed", "0"], "2000 inputs, 0 failures"),
    ],
    ids=["kills", "damaged files"],
)
def test_shortened_release_check(arguments, summary, tmp_path):
    script, *options = arguments
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == summary
