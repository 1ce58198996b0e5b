"""Which tensors have no negative values because a ReLU made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amct.model import Graph, Node

_RECTIFIERS = frozenset({"relu", "relu6"})
_KEEP_SIGN = frozenset(
    {
        "AvgPool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "alpha_dropout", "avg_pool1d", "avg_pool2d", "avg_pool3d", "cat",
        "channel_shuffle", "chunk", "clone", "constant_pad_nd", "contiguous", "dropout", "expand", "feature_dropout",
        "flatten", "identity", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "pad", "permute", "pixel_shuffle",
        "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "transpose", "unflatten",
        "unsqueeze", "upsample_nearest2d", "view",
    }
)  # fmt: skip
"""Operations whose results are not negative where their inputs are not."""


def not_negative(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is made by a ReLU, through operations that keep the sign."""
    known: dict[str, bool] = {}
    pending = [tensor]
    while pending:
        current = pending.pop()
        if current in known:
            continue
        node = graph.producer(current)
        known[current] = node is not None and (_rectifies(node) or node.op in _KEEP_SIGN)
        if not known[current]:
            return False
        if node is not None and not _rectifies(node):
            pending.extend(node.inputs)
    return True


def _rectifies(node: Node) -> bool:
    settings: Any = node.attributes.get("settings", ())
    return node.op in _RECTIFIERS or (node.op == "hardtanh" and bool(settings) and settings[0] == 0)
