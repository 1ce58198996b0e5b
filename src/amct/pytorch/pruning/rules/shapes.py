"""Rules of operations that move channels: concatenation, splitting, slices, reshaping, padding, transposition."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from amct.pytorch.pruning.channels import ChannelMap, argument, concatenated, positive, rule
from amct.pytorch.pruning.rules.computing import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.pruning.channels import Axes, Axis, Labels


@rule("cat", "concat", "concatenate")
def concatenation(channels: ChannelMap, operation: Operation) -> Axes:
    """Tensors one behind the other; their other axes are coupled."""
    values = operation.arguments[0]
    inputs = [channels.of(value) for value in values]
    axis = positive(argument(operation, 1, 0), len(inputs[0]))
    found: list[Axis] = []
    for place in range(len(inputs[0])):
        if place == axis:
            found.append(concatenated([(axes[axis], v.shape[axis]) for axes, v in zip(inputs, values, strict=True)]))
        else:
            found.append(channels.join([axes[place] for axes in inputs], operation))
    return tuple(found)


@rule("stack")
def stack(channels: ChannelMap, operation: Operation) -> Axes:
    """Tensors side by side along a new axis."""
    inputs = [channels.of(value) for value in operation.arguments[0]]
    axis = positive(argument(operation, 1, 0), len(inputs[0]) + 1)
    axes = [channels.join([each[place] for each in inputs], operation) for place in range(len(inputs[0]))]
    return (*axes[:axis], None, *axes[axis:])


@rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def split(channels: ChannelMap, operation: Operation) -> list[Axes]:
    """Parts along an axis; sizes must follow the channels."""
    value, how = operation.arguments[:2]
    axes = channels.of(value)
    axis = positive(argument(operation, 2, 0), len(axes))
    labels = axes[axis]
    total = value.shape[axis]
    if operation.kind in ("chunk", "unsafe_chunk"):
        each = math.ceil(total / how)
        sizes = [min(each, total - start) for start in range(0, total, each)]
    elif isinstance(how, int):
        sizes = [min(how, total - start) for start in range(0, total, how)]
    else:
        sizes = list(how)
    if labels is not None:
        _split_evenly(channels, operation, labels, sizes)
    borders = np.cumsum([0, *sizes])
    parts = [None if labels is None else labels[a:b] for a, b in pairwise(borders)]
    return [(*axes[:axis], part, *axes[axis + 1 :]) for part in parts]


def _split_evenly(channels: ChannelMap, operation: Operation, labels: Labels, sizes: Sequence[int]) -> None:
    """Let equal parts lose as many channels, as a computed size does; other sizes must follow by themselves."""
    if len(set(sizes)) == 1:
        channels.lose_alike(labels.reshape(len(sizes), sizes[0]), "every part of a split must keep as many channels")
    elif operation.kind in ("chunk", "unsafe_chunk", "tensor_split"):
        channels.keep([labels], operation, "makes parts of unequal size")
    if operation.kind not in ("chunk", "unsafe_chunk"):
        channels.follows_sizes(labels, operation)


@rule("unbind")
def unbind(channels: ChannelMap, operation: Operation) -> list[Axes]:
    """One tensor for each position of an axis."""
    value = operation.arguments[0]
    axes = channels.of(value)
    axis = positive(argument(operation, 1, 0), len(axes))
    channels.keep([axes[axis]], operation, "takes its positions apart")
    return [(*axes[:axis], *axes[axis + 1 :])] * int(value.shape[axis])


@rule("slice")
def sliced(channels: ChannelMap, operation: Operation) -> Axes:
    """A run of positions; on channels its borders must follow them."""
    value = operation.arguments[0]
    axes = list(channels.of(value))
    axis = positive(argument(operation, 1, 0), len(axes))
    start, end, step = argument(operation, 2, 0) or 0, argument(operation, 3), argument(operation, 4, 1)
    labels = axes[axis]
    if labels is None:
        return tuple(axes)
    chosen = slice(start, end, step)
    if chosen.indices(len(labels)) == (0, len(labels), 1):
        return tuple(axes)
    if step != 1:
        channels.keep([labels], operation, "takes every second channel or fewer")
    half = len(labels) // 2
    if len(labels) == 2 * half and half in chosen.indices(len(labels))[:2]:
        channels.lose_alike(labels.reshape(2, half), "both halves must keep as many channels")
    channels.follows_sizes(labels, operation)
    channels.starts[operation.name] = labels[: chosen.indices(len(labels))[0]]
    axes[axis] = labels[chosen]
    return tuple(axes)


@rule("select")
def select(channels: ChannelMap, operation: Operation) -> Axes:
    """One position of an axis."""
    axes = list(channels.of(operation.arguments[0]))
    axis = positive(argument(operation, 1, 0), len(axes))
    channels.keep([axes.pop(axis)], operation, "takes one of its channels by number")
    return tuple(axes)


@rule("roll", "flip")
def rolled(channels: ChannelMap, operation: Operation) -> Axes:
    """Positions moved along some axes, which are kept."""
    axes = list(channels.of(operation.arguments[0]))
    moved = argument(operation, 1 if operation.kind == "flip" else 2, None) or range(len(axes))
    for axis in moved if not isinstance(moved, int) else [moved]:
        place = positive(axis, len(axes))
        channels.keep([axes[place]], operation, "moves its channels")
    return tuple(axes)


@rule("pad", "constant_pad_nd")
def pad(channels: ChannelMap, operation: Operation) -> Axes:
    """Padding has a literal size: positions that it adds cannot be removed."""
    axes = list(channels.of(operation.arguments[0]))
    shape = operation.arguments[0].shape
    widths = operation.arguments[1]
    constant = argument(operation, 2, "constant") in ("constant", 0, None) or operation.kind == "constant_pad_nd"
    for number in range(len(widths) // 2):
        before, after = widths[2 * number], widths[2 * number + 1]
        place = len(axes) - 1 - number
        labels = axes[place]
        if labels is None or (before, after) == (0, 0):
            continue
        if before < 0 or after < 0 or not constant:
            channels.keep([labels], operation, "pads by other channels")
            axes[place] = None
        else:
            parts: list[tuple[Axis, int]] = [(None, before), (labels, shape[place]), (None, after)]
            axes[place] = concatenated(parts)
    return tuple(axes)


@rule("pixel_shuffle")
def pixel_shuffle(channels: ChannelMap, operation: Operation) -> Axes:
    """Runs of channels become pixels: a run can only be removed whole."""
    axes = list(channels.of(operation.arguments[0]))
    labels, run = axes[-3], int(operation.arguments[1]) ** 2
    if labels is not None:
        axes[-3] = channels.sets.join_rows(labels.reshape(-1, run).T, "pixel_shuffle needs whole runs of channels")
    return (*axes[:-2], None, None)


@rule("pixel_unshuffle")
def pixel_unshuffle(channels: ChannelMap, operation: Operation) -> Axes:
    """Pixels become runs of channels."""
    axes = list(channels.of(operation.arguments[0]))
    labels = axes[-3]
    axes[-3] = None if labels is None else np.repeat(labels, int(operation.arguments[1]) ** 2)
    return (*axes[:-2], None, None)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(channels: ChannelMap, operation: Operation) -> Axes:
    """Groups of channels interleaved: each group must lose the same channels."""
    axes = list(channels.of(operation.arguments[0]))
    labels, groups = axes[1], int(operation.arguments[1])
    if labels is not None:
        rows = labels.reshape(groups, -1)
        channels.sets.join_rows(rows, "every group of a shuffle must keep as many channels")
        axes[1] = rows.T.reshape(-1)
    return tuple(axes)


# -- axes --------------------------------------------------------------------------------------------------------------


@rule("permute")
def permute(channels: ChannelMap, operation: Operation) -> Axes:
    """Axes in another order."""
    axes = channels.of(operation.arguments[0])
    return tuple(axes[axis] for axis in operation.arguments[1])


@rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT")
def transpose(channels: ChannelMap, operation: Operation) -> Axes:
    """Two axes swapped."""
    axes = list(channels.of(operation.arguments[0]))
    if len(axes) < 2:
        return tuple(axes)
    one, other = (argument(operation, place, default) for place, default in ((1, -2), (2, -1)))
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


@rule("movedim", "moveaxis")
def movedim(channels: ChannelMap, operation: Operation) -> Axes:
    """Axes moved to other places."""
    axes = channels.of(operation.arguments[0])
    source, target = (
        [value] if isinstance(value, int) else list(value) for value in (operation.arguments[1], operation.arguments[2])
    )
    order = np.moveaxis(np.empty((1,) * len(axes)), source, target)  # checks the arguments
    places = list(range(order.ndim))
    moved = [positive(axis, len(axes)) for axis in source]
    rest = [axis for axis in places if axis not in moved]
    for place, axis in sorted((positive(place, len(axes)), axis) for place, axis in zip(target, moved, strict=True)):
        rest.insert(place, axis)
    return tuple(axes[axis] for axis in rest)


@rule("unsqueeze")
def unsqueeze(channels: ChannelMap, operation: Operation) -> Axes:
    """A new axis."""
    axes = list(channels.of(operation.arguments[0]))
    axes.insert(positive(operation.arguments[1], len(axes) + 1), None)
    return tuple(axes)


@rule("squeeze")
def squeeze(channels: ChannelMap, operation: Operation) -> Axes:
    """Axes of size 1 removed."""
    value = operation.arguments[0]
    axes = list(channels.of(value))
    given = argument(operation, 1)
    chosen = range(len(axes)) if given is None else [given] if isinstance(given, int) else given
    gone = {positive(axis, len(axes)) for axis in chosen}
    gone = {axis for axis in gone if value.shape[axis] == 1}
    channels.keep([axes[axis] for axis in gone], operation, "drops the axis")
    return tuple(labels for place, labels in enumerate(axes) if place not in gone)


@rule("expand", "expand_as", "broadcast_to")
def expand(channels: ChannelMap, operation: Operation) -> Axes:
    """Axes of size 1 repeated; a size that is not -1 must follow the channels."""
    value, result = operation.arguments[0], operation.results[0]
    axes = channels.of(value)
    new = len(result.shape or ()) - len(axes)
    found: list[Axis] = [None] * new
    sizes = argument(operation, 1)
    for place, labels in enumerate(axes):
        size = (result.shape or ())[new + place] or 0
        if value.shape[place] == 1 and size > 1:  # copies of one value may be any number
            labels = channels.sets.new(size)
        found.append(labels)
        if isinstance(sizes, (list, tuple)) and sizes[new + place] != -1 and size != 1:
            channels.follows_sizes(labels, operation)
    return tuple(found)


@rule("repeat", "tile")
def repeat(channels: ChannelMap, operation: Operation) -> Axes:
    """Copies of a tensor behind one another."""
    axes, counts = channels.of(operation.arguments[0]), list(operation.arguments[1])
    counts = [1] * (len(axes) - len(counts)) + counts
    padded: list[Axis] = [*(None for _ in range(len(counts) - len(axes))), *axes]
    return tuple(None if labels is None else np.tile(labels, n) for labels, n in zip(padded, counts, strict=True))


# -- reshaping ---------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as")
def reshape(channels: ChannelMap, operation: Operation) -> Axes:
    """Runs of axes merged or split; the sizes given must follow the channels."""
    value, result = operation.arguments[0], operation.results[0]
    old, new = tuple(value.shape), tuple(size or 0 for size in result.shape or ())
    axes = channels.of(value)
    if 0 in old or 0 in new:
        return unknown(channels, operation)
    given = _given_sizes(operation, len(new))
    found: list[Axis] = [None] * len(new)
    for old_run, new_run in runs(old, new):
        labels = _merged(channels, operation, [axes[place] for place in old_run], [old[place] for place in old_run])
        if labels is None:
            continue
        place = _carrier(new_run, new, given, channels.carriers.get(operation.where, 0))
        if place is None:
            channels.keep([labels], operation, "ends the chain: it reshapes the channels")
            continue
        found[place] = _split_labels(channels, labels, [new[axis] for axis in new_run], new_run.index(place))
        if operation.where and sum(new[axis] > 1 for axis in new_run) > 1:
            before, most = channels.splits.get(operation.where, (np.zeros(0, np.int64), 0))
            channels.splits[operation.where] = np.concatenate([before, found[place]]), max(most, len(new_run))
        if given[place] is not None or any(given[axis] is None for axis in new_run if axis != place):
            channels.follows_sizes(found[place], operation)
    return tuple(found)


def _given_sizes(operation: Operation, rank: int) -> list[int | None]:
    """The size of each axis as the program gives it; None where torch computes it."""
    if operation.kind in ("view", "reshape", "_unsafe_view"):
        return [None if not isinstance(size, int) or size == -1 else size for size in operation.arguments[1]]
    if operation.kind == "unflatten":
        sizes = operation.arguments[2]
        axis = positive(operation.arguments[1], rank - len(sizes) + 1)
        found: list[int | None] = [None] * rank
        for offset, size in enumerate(sizes):
            found[axis + offset] = None if size == -1 else size
        return found
    return [None] * rank


def runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of axes with the same number of elements in both shapes.

    >>> list(runs((2, 6, 4), (2, 3, 8)))
    [([0], [0]), ([1, 2], [1, 2])]
    """
    a = b = 0
    while a < len(old) or b < len(new):
        one, other = [a] if a < len(old) else [], [b] if b < len(new) else []
        a, b = a + len(one), b + len(other)
        while math.prod(old[i] for i in one) != math.prod(new[i] for i in other):
            if math.prod(old[i] for i in one) < math.prod(new[i] for i in other):
                one.append(a)
                a += 1
            else:
                other.append(b)
                b += 1
        yield one, other


def _merged(channels: ChannelMap, operation: Operation, axes: Sequence[Axis], sizes: Sequence[int]) -> Axis:
    """The labels of axes merged to one; at most one of them may have any."""
    places = [place for place, labels in enumerate(axes) if labels is not None and sizes[place] > 1]
    if not places:
        return None
    if len(places) > 1:
        movable = [place for place in places if not channels.sets.is_kept(axes[place]).all()]  # type: ignore[arg-type]  # not None
        if len(movable) != 1:
            channels.keep(
                [axes[place] for place in places], operation, "ends the chain: it merges two axes of channels"
            )
            return None
        places = movable
    place = places[0]
    shape = [1] * len(sizes)
    shape[place] = sizes[place]
    labels = axes[place]
    assert labels is not None
    return np.broadcast_to(labels.reshape(shape), sizes).reshape(-1)


def _carrier(run: Sequence[int], new: Sequence[int], given: Sequence[int | None], wanted: int) -> int | None:
    """The axis of a run that the channels lie along: the one that torch computes, or the largest.

    If another one is wanted, it is the first, second, … one from the end.
    """
    wide = [place for place in run if new[place] > 1]
    if not wide:
        return run[0] if run else None
    if 0 < wanted <= len(run) and run[-wanted] in wide:
        return run[-wanted]
    computed = [place for place in wide if given[place] is None]
    return computed[0] if len(computed) == 1 else max(wide, key=lambda place: new[place])


def _split_labels(channels: ChannelMap, labels: Labels, sizes: Sequence[int], place: int) -> Labels:
    """Labels split to several axes: what lies along the others is coupled."""
    rows = np.moveaxis(labels.reshape(sizes), place, -1).reshape(-1, sizes[place])
    same = (channels.sets.roots(rows.reshape(-1)).reshape(rows.shape) == channels.sets.roots(rows[0])).all()
    return rows[0] if same else channels.sets.join_rows(rows, "it is reshaped with channels that cannot be removed")
