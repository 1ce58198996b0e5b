"""Lets these tests use the published networks of the PyTorch tests, also when they run alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "pytorch"))
