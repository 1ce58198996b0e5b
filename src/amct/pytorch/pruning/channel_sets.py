"""Sets of channels that can only be removed together, over all tensors of a model.

Each position along an axis of a tensor has a label, the number of a channel. Channels that an operation couples (both
operands of an addition, a filter and its batch norm) are joined to one set. A set is *kept*, with a reason, if
removing it would change more than tensors that can be cut: an output of the model, an operation of unknown effect. An
axis without labels (None) is kept whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Labels = NDArray[np.int64]
    Axis = Labels | None
    Axes = tuple[Axis, ...]

KEPT = 0
"""The label of positions that cannot be removed, such as those of a literal padding."""


class ChannelSets:
    """Disjoint sets of channels (union-find), and why some of them are kept."""

    def __init__(self) -> None:
        self._parent = np.zeros(1024, np.int64)
        self._count = 1  # label 0 is KEPT
        self._reasons: dict[int, str] = {KEPT: "its positions are fixed"}

    @property
    def count(self) -> int:
        """The number of labels."""
        return self._count

    def new(self, size: int) -> Labels:
        """Labels of new channels, each a set of its own."""
        first, self._count = self._count, self._count + size
        if self._count > len(self._parent):
            self._parent = np.concatenate([self._parent, np.zeros(max(self._count, len(self._parent)), np.int64)])
        labels = np.arange(first, self._count, dtype=np.int64)
        self._parent[first : self._count] = labels
        return labels

    def roots(self, labels: Labels) -> Labels:
        """One label for each set: equal for channels of the same set."""
        found = self._parent[labels]
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                break
            found = above
        self._parent[labels] = found
        return found

    def join(self, first: Labels, second: Labels, reason: str) -> None:
        """Couple two arrays of channels position by position; ``reason`` says why, for sets that become kept by it."""
        for a, b in zip(self.roots(first).tolist(), self.roots(second).tolist(), strict=True):
            one, other = self._root(a), self._root(b)
            if one == other:
                continue
            upper, lower = min(one, other), max(one, other)
            if upper == KEPT:  # not joined, so that each set keeps its own reason
                self._reasons.setdefault(lower, reason)
                continue
            self._parent[lower] = upper
            if lower in self._reasons:
                self._reasons.setdefault(upper, self._reasons[lower])

    def _root(self, label: int) -> int:
        while self._parent[label] != label:
            label = int(self._parent[label])
        return label

    def join_rows(self, rows: NDArray[np.int64], reason: str) -> Labels:
        """Couple all rows of a matrix of labels; returns the labels of one."""
        for row in rows[1:]:
            self.join(rows[0], row, reason)
        first: Labels = rows[0]
        return first

    def keep(self, labels: Axis, reason: str) -> None:
        """Keep channels: the first reason of a set is the one that is told."""
        if labels is None:
            return
        for root in np.unique(self.roots(labels)).tolist():
            self._reasons.setdefault(root, reason)

    def is_kept(self, labels: Labels) -> NDArray[np.bool_]:
        """Whether each channel is kept."""
        kept = np.fromiter(self._reasons, np.int64, len(self._reasons))
        return np.isin(self.roots(labels), kept)

    def reason(self, labels: Labels) -> str | None:
        """Why the first kept channel among some is kept; None if none is."""
        found = (self._reasons.get(root) for root in self.roots(labels).tolist() if root != KEPT)
        return next((text for text in found if text is not None), None)


def concatenated(parts: Sequence[tuple[Axis, int]]) -> Axis:
    """The labels of axes one behind the other, each with its size; None if none has any."""
    if all(axis is None for axis, _ in parts):
        return None
    return np.concatenate([np.full(size, KEPT) if axis is None else axis for axis, size in parts])
