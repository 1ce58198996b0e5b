"""The small network of the tests of the flow is searched too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "pipeline"))
