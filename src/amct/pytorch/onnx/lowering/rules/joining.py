"""Rules of operations that join tensors or take them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import Size, static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Value, Writer


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


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def taken_apart(
    to: Writer,
    x: Value,
    split_size: Size | Sequence[Size] = 0,
    split_sizes: Sequence[Size] = (),
    chunks: int = 0,
    sections: int = 0,
    indices: Sequence[int] = (),
    dim: int = 0,
) -> list[Value]:
    """Parts one behind the other; what the program makes of them says their sizes."""
    del split_size, split_sizes, chunks, sections, indices
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
