"""The Python code blocks of the documents run, in the order in which they stand on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [page for page in [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")] if "```python" in page.read_text()]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(page)))
    environment = {**os.environ, "AMCT_LOG_LEVEL": "WARNING"}
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_pages_with_code_are_found():
    assert {"README.md", "pytorch.md"} <= {page.name for page in PAGES}
