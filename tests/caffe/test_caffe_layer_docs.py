"""Every layer type has its row in docs/caffe-layers.md, and every row its layer type."""

from __future__ import annotations

import re
from pathlib import Path

from amct.caffe.engine.layer import layer_types

PAGE = Path(__file__).parent.parent.parent / "docs" / "caffe-layers.md"


def test_page_and_registry_agree():
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(layer_types())
