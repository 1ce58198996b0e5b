"""The shapes of all blobs of a net, and the dimensions that depend on the batch size.

Each layer computes its shapes twice, the second time with one more sample: dimensions that grow depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.caffe.engine.layers.input import DummyData, Parameter
from amct.errors import AmctError

if TYPE_CHECKING:
    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.net import Net
    from amct.caffe.onnx.forms.place import Dims


@dataclass(frozen=True, kw_only=True)
class NetShapes:
    """The shapes of each layer's bottoms and tops, by layer index; batch-dependent dimensions are None."""

    bottoms: tuple[tuple[Dims, ...], ...]
    tops: tuple[tuple[Dims, ...], ...]
    per_sample: frozenset[tuple[int, int]]
    """Tops, by layer index and position, whose first dimension is the batch size itself, not a multiple of it."""


def fixed_shapes(net: Net) -> NetShapes:
    """The current shapes."""
    bottoms, tops = _walk(net, 0)
    return NetShapes(bottoms=tuple(map(tuple, bottoms)), tops=tuple(map(tuple, tops)), per_sample=frozenset())


def batch_shapes(net: Net) -> NetShapes | None:
    """The shapes with a dynamic batch size; None if it must be fixed."""
    batch = _common_batch(net)
    if batch is None:
        return None
    try:
        more = _walk(net, 1)
    except (AmctError, ValueError, IndexError, ArithmeticError, RuntimeError):
        return None  # a layer only supports this batch size
    finally:
        now = _walk(net, 0)  # restores the shapes cached in layers
    bottoms, tops = _merged(now[0], more[0]), _merged(now[1], more[1])
    if bottoms is None or tops is None:
        return None
    per_sample = {
        (index, position)
        for index, (ours, theirs) in enumerate(zip(now[1], more[1], strict=True))
        for position, (first, second) in enumerate(zip(ours, theirs, strict=True))
        if first and (first[0], second[0]) == (batch, batch + 1)
    }
    return NetShapes(bottoms=bottoms, tops=tops, per_sample=frozenset(per_sample))


def _common_batch(net: Net) -> int | None:
    """The first dimension of all inputs, if it is the same; else None."""
    lengths = {shape[0] if shape else None for shape in _input_shapes(net)}
    return lengths.pop() if len(lengths) == 1 else None


def _input_shapes(net: Net) -> list[Shape]:
    return [
        net.graph.blobs[index].shape
        for node in net.graph.nodes
        if not node.bottoms and not isinstance(node.layer, Parameter | DummyData)
        for index in node.tops
    ]


def _walk(net: Net, extra: int) -> tuple[list[list[Shape]], list[list[Shape]]]:
    """The bottom and top shapes of all layers with ``extra`` more samples in each input."""
    graph = net.graph
    shapes: dict[int, Shape] = {}
    bottoms: list[list[Shape]] = []
    tops: list[list[Shape]] = []
    for node in graph.nodes:
        own = [shapes[index] for index in node.bottoms]
        if node.bottoms or isinstance(node.layer, Parameter | DummyData):
            made = [tuple(shape) for shape in node.layer.reshape(own)]
        else:
            made = [graph.blobs[index].shape for index in node.tops]
            made = [(shape[0] + extra, *shape[1:]) if shape else shape for shape in made]
        shapes.update(zip(node.tops, made, strict=True))
        bottoms.append(own)
        tops.append(made)
    return bottoms, tops


def _merged(now: list[list[Shape]], more: list[list[Shape]]) -> tuple[tuple[Dims, ...], ...] | None:
    merged = []
    for ours, theirs in zip(now, more, strict=True):
        if any(len(first) != len(second) for first, second in zip(ours, theirs, strict=True)):
            return None
        merged.append(tuple(_dims(first, second) for first, second in zip(ours, theirs, strict=True)))
    return tuple(merged)


def _dims(first: Shape, second: Shape) -> Dims:
    return tuple(size if size == other else None for size, other in zip(first, second, strict=True))
