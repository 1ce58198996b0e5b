"""Rules of operations that change shapes, join tensors or take them apart; values stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.writer import NotLoweredError, Size, Value, Writer, rule, same_shape, static

if TYPE_CHECKING:
    from collections.abc import Sequence


@rule("contiguous", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "positive", "resolve_conj",
      "resolve_neg")  # fmt: skip
def same(to: Writer, x: Value) -> Value:
    """The tensor itself."""
    del to
    return x


@rule("dropout", "feature_dropout", "alpha_dropout", implied=("p",))
def dropout(to: Writer, x: Value, train: bool) -> Value:
    """The tensor itself, in eval mode."""
    del to
    if train:
        raise NotLoweredError("dropout in training mode")
    return x


@rule("to", "_to_copy", "type_as", "float", "half", "double", "int", "long", "bool", implied=("other", "dtype"))
def converted(to: Writer, x: Value) -> Value:
    """The tensor in the type of the result."""
    return to.cast(x, to.dtype)


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "ravel",
      implied=("size", "shape", "other", "sizes", "start_dim", "end_dim", "dim"))  # fmt: skip
def reshaped(to: Writer, x: Value) -> Value:
    """The shape of the result says it all."""
    return to.reshape(x, to.shape)


@rule("squeeze")
def squeezed(to: Writer, x: Value, dim: int | Sequence[int] | None = None) -> Value:
    """Without axes of size 1."""
    axes = x.axes(dim) if dim != [] else []
    return to.squeeze(x, [axis for axis in axes if x.rank and isinstance(x.size(axis), int) and x.size(axis) == 1])


@rule("unsqueeze")
def unsqueezed(to: Writer, x: Value, dim: int) -> Value:
    """With a new axis of size 1."""
    return to.unsqueeze(x, [dim % (x.rank + 1)])


@rule("permute")
def permuted(to: Writer, x: Value, dims: Sequence[int]) -> Value:
    """The axes in another order."""
    return to.transpose(x, [x.axis(axis) for axis in dims])


@rule("movedim")
def with_axes_moved(to: Writer, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    """Some axes at other places; the others keep their order."""
    moved, places = (
        [x.axis(axis) for axis in ([each] if isinstance(each, int) else each)] for each in (source, destination)
    )
    rest = iter(axis for axis in range(x.rank) if axis not in moved)
    return to.transpose(x, [moved[places.index(axis)] if axis in places else next(rest) for axis in range(x.rank)])


@rule("transpose", "swapaxes", "t", "numpy_T", "mT")
def exchanged(to: Writer, x: Value, operator: str, dim0: int = -1, dim1: int = -2) -> Value:
    """Two axes exchanged, or all of them reversed."""
    order = list(range(x.rank))
    if operator == "numpy_T":
        return to.transpose(x, order[::-1])
    if x.rank >= 2:
        one, two = x.axis(dim0), x.axis(dim1)
        order[one], order[two] = order[two], order[one]
    return to.transpose(x, order)


@rule("expand", "expand_as", "broadcast_to", "expand_copy", implied=("size", "other"))
def expanded(to: Writer, x: Value) -> Value:
    """Axes of size 1 repeated, without copying in torch."""
    return expanded_to(to, x, to.shape)


def expanded_to(to: Writer, x: Value, shape: Sequence[Size]) -> Value:
    """The tensor with its axes of size 1 repeated up to a shape."""
    if same_shape(x.shape, shape):
        return x
    return to.add("Expand", x, to.sizes.shape(shape), dtype=x.dtype, shape=shape)


@rule("copy", implied=("x",))
def copied(to: Writer, src: Value) -> Value:
    """The source in type and shape of the destination."""
    return expanded_to(to, to.cast(src, to.dtype), to.shape)


@rule("fill", "zero", implied=("x",))
def filled(to: Writer, value: Value | float = 0.0) -> Value:
    """One value everywhere."""
    one = to.cast(value, to.dtype) if isinstance(value, Value) else to.constant(value)
    return expanded_to(to, one, to.shape)


@rule("repeat")
@rule("tile", dims="repeats")
def repeated(to: Writer, x: Value, repeats: Sequence[Size]) -> Value:
    """The tensor again and again along its axes."""
    times = list(repeats)
    times[:0] = [1] * (x.rank - len(times))
    given = to.unsqueeze(x, list(range(len(times) - x.rank)))
    if all(isinstance(count, int) and count == 1 for count in times):
        return given
    return to.add("Tile", given, to.sizes.shape(times))


@rule("repeat_interleave")
def repeated_positions(to: Writer, x: Value, repeats: int | Value, dim: int | None = None) -> Value:
    """Each position several times."""
    if not isinstance(repeats, int):
        raise NotLoweredError("repeat_interleave with a tensor of counts")
    if dim is None:
        x, dim = to.reshape(x, [torch.Size(static(x.shape, "repeat_interleave")).numel()]), 0
    axis = x.axis(dim)
    wide = to.unsqueeze(x, [axis + 1])
    shape = [*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]]
    return to.reshape(expanded_to(to, wide, shape), to.shape)


@rule("unfold")
def windows(to: Writer, x: Value, dimension: int, size: int, step: int) -> Value:
    """The windows of an axis, with their positions as the last axis."""
    axis = x.axis(dimension)
    (count,) = static([to.shape[axis]], "unfold")
    places = torch.arange(size)[None] + step * torch.arange(count)[:, None]
    shape = [*x.shape[:axis], count, size, *x.shape[axis + 1 :]]
    found = to.add("Gather", x, to.constant(places), axis=axis, shape=shape)
    return to.transpose(found, [other for other in range(found.rank) if other != axis + 1] + [axis + 1])


@rule("pixel_shuffle")
def pixel_shuffle(to: Writer, x: Value, upscale_factor: int) -> Value:
    """Channels become positions."""
    if x.rank != 4:
        raise NotLoweredError("pixel_shuffle of a tensor without four axes")
    return to.add("DepthToSpace", x, blocksize=upscale_factor, mode="CRD")


@rule("pixel_unshuffle")
def pixel_unshuffle(to: Writer, x: Value, downscale_factor: int) -> Value:
    """Positions become channels."""
    if x.rank != 4:
        raise NotLoweredError("pixel_unshuffle of a tensor without four axes")
    batch, channels, rows, columns = x.shape
    factor = downscale_factor
    split = to.reshape(x, [batch, channels, rows // factor, factor, columns // factor, factor])
    return to.reshape(to.transpose(split, [0, 1, 3, 5, 2, 4]), to.shape)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(to: Writer, x: Value, groups: int) -> Value:
    """The channels of the groups in turn."""
    batch, channels, *rest = x.shape
    split = to.reshape(x, [batch, groups, channels // groups, *rest])
    return to.reshape(to.transpose(split, [0, 2, 1, *range(3, x.rank + 1)]), to.shape)


@rule("cat", "concat", "concatenate")
def joined(to: Writer, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors one behind the other; empty vectors are left out, as torch does for old programs."""
    parts = [to.cast(each, to.dtype) for each in tensors if not (each.rank == 1 and each.size(0) == 0)]
    return parts[0] if len(parts) == 1 else to.add("Concat", *parts, axis=dim % len(to.shape))


@rule("stack")
def stacked(to: Writer, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors side by side along a new axis."""
    axis = dim % len(to.shape)
    parts = [to.unsqueeze(to.cast(each, to.dtype), [axis]) for each in tensors]
    return parts[0] if len(parts) == 1 else to.add("Concat", *parts, axis=axis)


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk",
      implied=("split_size", "split_sizes", "chunks", "sections", "indices"))  # fmt: skip
def taken_apart(to: Writer, x: Value, dim: int = 0) -> list[Value]:
    """Parts one behind the other; what the program makes of them says their sizes."""
    axis = x.axis(dim)
    if len(to.result) == 1:
        return [x]
    sizes = to.ints(static([part.shape[axis] for part in to.result], "the size of a part"))
    outputs = [(x.dtype, tuple(part.shape)) for part in to.result]
    return to.add_many("Split", x, sizes, outputs=outputs, axis=axis)


@rule("unbind")
def unbound(to: Writer, x: Value, dim: int = 0) -> list[Value]:
    """The positions of an axis as tensors."""
    return [chosen(to, x, dim, place) for place in range(len(to.result))]


@rule("select")
def chosen(to: Writer, x: Value, dim: int, index: Size) -> Value:
    """One position of an axis."""
    axis = x.axis(dim)
    place = to.constant(index, torch.int64) if isinstance(index, int) else to.squeeze(to.sizes.tensor(index), [0])
    shape = [size for other, size in enumerate(x.shape) if other != axis]
    return to.add("Gather", x, place, axis=axis, dtype=x.dtype, shape=shape)


@rule("slice", "narrow")
def part(
    to: Writer,
    x: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
    length: Size | None = None,
) -> Value:
    """Some positions of an axis."""
    axis = x.axis(dim)
    size = x.size(axis)
    first: Size = 0 if start is None else start
    if isinstance(first, int) and first < 0:
        first = max(first + size, 0) if isinstance(size, int) else first + size
    if length is not None:
        end = first + length
    if end is None or (isinstance(end, int) and end >= torch.iinfo(torch.int64).max // 2):
        end = torch.iinfo(torch.int64).max
    elif isinstance(end, int) and isinstance(size, int):
        end = min(end + size if end < 0 else end, size)
    result = to.shape[axis]
    if step == 1 and isinstance(first, int) and first == 0 and str(result) == str(size):
        return x
    if not isinstance(step, int):
        raise NotLoweredError("a slice with a step that is a size")
    return to.slice(x, axis, first, end, step, result)


@rule("slice_scatter", "select_scatter")
def replaced_part(
    to: Writer,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
    index: int | None = None,
) -> Value:
    """The tensor with some positions of an axis replaced."""
    axis = x.axis(dim)
    (size,) = static([x.size(axis)], "the size of an axis that is written to")
    if index is not None:
        start, end, src = index % size, index % size + 1, to.unsqueeze(src, [axis])
    first, last = static([0 if start is None else start, size if end is None else end], "a part that is written to")
    first, last = (min(max(place + size if place < 0 else place, 0), size) for place in (first, last))
    if step != 1:
        raise NotLoweredError("writing to every other position")
    parts = [to.cast(src, to.dtype)]
    if first > 0:
        parts.insert(0, to.slice(x, axis, 0, first))
    if last < size:
        parts.append(to.slice(x, axis, last, size))
    return parts[0] if len(parts) == 1 else to.add("Concat", *parts, axis=axis)


@rule("roll")
def rolled(to: Writer, x: Value, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Value:
    """The end of an axis in front of its beginning."""
    axes = [dims] if isinstance(dims, int) else list(dims)
    amounts = [shifts] if isinstance(shifts, int) else list(shifts)
    if not axes:
        raise NotLoweredError("roll without axes")
    for axis, shift in zip(map(x.axis, axes), amounts, strict=True):
        (size,) = static([x.size(axis)], "roll")
        place = (size - shift) % size
        if place:
            ends = [to.slice(x, axis, place, size), to.slice(x, axis, 0, place)]
            x = to.add("Concat", *ends, axis=axis)
    return x


@rule("flip")
def flipped(to: Writer, x: Value, dims: Sequence[int]) -> Value:
    """Axes from the end to the beginning."""
    axes = [x.axis(axis) for axis in dims]
    if not axes:
        return x
    limit = torch.iinfo(torch.int64)
    limits = (to.ints([value] * len(axes)) for value in (limit.max, limit.min + 1))
    return to.add("Slice", x, *limits, to.ints(axes), to.ints([-1] * len(axes)))
