"""Rules of operations that change the shape, the order of axes or the type, not the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import Size, static
from amct.pytorch.onnx.lowering.writer import Value, Writer, same_shape

if TYPE_CHECKING:
    from collections.abc import Sequence


@rule("contiguous", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "positive", "resolve_conj",
      "resolve_neg")  # fmt: skip
def same(to: Writer, x: Value) -> Value:
    """The tensor itself."""
    del to
    return x


@rule("dropout", "feature_dropout", "alpha_dropout")
def dropout(to: Writer, x: Value, p: float, train: bool) -> Value:
    """The tensor itself, in eval mode."""
    del to, p
    if train:
        raise NotLoweredError("dropout in training mode")
    return x


@rule("to", "_to_copy", "type_as", "float", "half", "double", "int", "long", "bool")
def converted(to: Writer, x: Value, other: Value | None = None, dtype: torch.dtype | None = None) -> Value:
    """The tensor in the type of the result."""
    del other, dtype
    return to.cast(x, to.dtype)


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "ravel")
def reshaped(
    to: Writer,
    x: Value,
    size: Sequence[Size] | None = None,
    shape: Sequence[Size] | None = None,
    other: Value | None = None,
    sizes: Sequence[Size] | None = None,
    start_dim: int = 0,
    end_dim: int = -1,
    dim: int = 0,
    dtype: torch.dtype | None = None,
) -> Value:
    """The shape of the result says it all."""
    del size, shape, other, sizes, start_dim, end_dim, dim
    if dtype is not None:
        raise NotLoweredError("a view as another type")
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


@rule("permute", "movedim")
def permuted(
    to: Writer,
    x: Value,
    dims: Sequence[int] | None = None,
    source: int | Sequence[int] = (),
    destination: int | Sequence[int] = (),
) -> Value:
    """The axes in another order."""
    if dims is not None:
        return to.transpose(x, [x.axis(axis) for axis in dims])
    moved = [x.axis(axis) for axis in ([source] if isinstance(source, int) else source)]
    places = [x.axis(axis) for axis in ([destination] if isinstance(destination, int) else destination)]
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


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expanded(to: Writer, x: Value, size: Sequence[Size] | None = None, other: Value | None = None) -> Value:
    """Axes of size 1 repeated, without copying in torch."""
    del size, other
    return expanded_to(to, x, to.shape)


def expanded_to(to: Writer, x: Value, shape: Sequence[Size]) -> Value:
    """The tensor with its axes of size 1 repeated up to a shape."""
    if same_shape(x.shape, shape):
        return x
    return to.add("Expand", x, to.sizes.shape(shape), dtype=x.dtype, shape=shape)


@rule("copy")
def copied(to: Writer, x: Value, src: Value) -> Value:
    """The source in type and shape of the destination."""
    del x
    return expanded_to(to, to.cast(src, to.dtype), to.shape)


@rule("fill", "zero")
def filled(to: Writer, x: Value, value: Value | float = 0.0) -> Value:
    """One value everywhere."""
    del x
    one = to.cast(value, to.dtype) if isinstance(value, Value) else to.constant(value)
    return expanded_to(to, one, to.shape)


@rule("repeat", "tile")
def repeated(to: Writer, x: Value, repeats: Sequence[Size] = (), dims: Sequence[Size] = ()) -> Value:
    """The tensor again and again along its axes."""
    times: list[Size] = list(repeats or dims)
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
