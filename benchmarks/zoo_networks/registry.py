"""All networks of the zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo_networks import language, onnx_files, own, own_more, prototxts, vision

if TYPE_CHECKING:
    from zoo_networks.network import Network


def all_networks() -> list[Network]:
    """In the order of the table."""
    groups = (own, own_more, vision, language, onnx_files, prototxts)
    return [network for group in groups for network in group.networks()]
