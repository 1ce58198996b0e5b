"""Rows of channels that must lose as many each: the groups of a convolution or a norm, the parts of a split.

Which channels of the rows go together is open as long as nothing else couples them: then the channels of each row are
ordered by their filters, and the weakest of every row go together. So each group may lose other channels.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from amct.numerics.pruning import filter_norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from amct.pytorch.pruning.channels import ChannelMap, LayerChannels

    Rows = NDArray[np.int64]


def balance(channels: ChannelMap) -> None:
    """Couple all rows that were noted, so that whatever sets are removed, each row loses as many channels."""
    sets, rows = channels.sets, sorted(channels.rows, key=lambda each: -len(each[0]))
    coupled = True
    while coupled:  # by position where channels are coupled already, which may couple those of other rows
        coupled = False
        for each, reason in rows:
            if not _is_even(channels, each) and not _is_free(channels, each, [other for other, _ in rows]):
                sets.join_rows(each, reason)
                coupled = True
    if all(_is_even(channels, each) for each, _ in rows):
        return
    strengths = _strengths(channels)
    for each, reason in rows:
        if not _is_even(channels, each):
            order = np.argsort(strengths[sets.roots(each)], axis=1, kind="stable")
            sets.join_rows(np.take_along_axis(each, order, axis=1), reason)


def _is_even(channels: ChannelMap, rows: Rows) -> bool:
    """Whether every set that may be removed has as many channels in each row."""
    roots = channels.sets.roots(rows)
    counts = [Counter(row[~channels.sets.is_kept(row)].tolist()) for row in roots]
    return all(each == counts[0] for each in counts)


def _is_free(channels: ChannelMap, rows: Rows, all_rows: Sequence[Rows]) -> bool:
    """Whether the rows may be coupled in any order: each channel is a set, which only finer or coarser rows have."""
    roots = channels.sets.roots(rows)
    own = set(roots.reshape(-1).tolist())
    if len(own) < rows.size or channels.sets.is_kept(rows).any():
        return False
    for other in all_rows:
        theirs = set(channels.sets.roots(other).reshape(-1).tolist())
        nested = len(rows) % len(other) == 0 or len(other) % len(rows) == 0
        if own & theirs and (own != theirs or not nested):
            return False
    return True


def _strengths(channels: ChannelMap) -> NDArray[np.float64]:
    """The power of the filters that make each set, by its root: as a share of that of their layer."""
    found = np.zeros(channels.sets.count)
    for maker in channels.producers:
        norms = maker_norms(channels, maker)
        np.add.at(found, channels.sets.roots(maker.outputs), norms**2 / max(float((norms**2).mean()), 1e-30))
    return found


def maker_norms(channel_map: ChannelMap, maker: LayerChannels) -> NDArray[np.float64]:
    """The norm of each filter of a layer."""
    assert maker.weight is not None
    weight = channel_map.tensors[maker.weight].detach()
    norms = np.asarray(filter_norms(weight.movedim(maker.axes[1], 0)), np.float64)
    # Of a grouped transposed convolution each column is in every group.
    return np.tile(norms, len(maker.outputs) // len(norms))
