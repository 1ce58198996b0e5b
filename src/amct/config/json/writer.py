"""Write JSON in the layout of AMCT's config files: four spaces, no space after a colon, no newline at the end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def format_json(data: Mapping[str, Any]) -> str:
    r"""The text of a config file; keys keep the order they have in ``data``.

    >>> format_json({"batch_num": 2, "skip_fusion_layers": []})
    '{\n    "batch_num":2,\n    "skip_fusion_layers":[]\n}'
    """
    return json.dumps(data, indent=4, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
