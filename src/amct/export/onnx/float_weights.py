"""The large weights that a model keeps in float, found on the model itself: whatever else is said of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import TensorProto

from amct.export.onnx.messages import reads
from amct.model import Skip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from onnx import ModelProto, NodeProto

LARGE = 0.01
"""The share of all stored numbers from which on a weight is large."""
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


@dataclass(frozen=True, kw_only=True)
class LargeFloatWeight:
    """A large weight in float: its name, its share of all stored numbers, and the nodes that read it."""

    name: str
    share: float
    readers: Sequence[NodeProto]

    def is_said_by(self, skip: Skip) -> bool:
        """Whether a line about a layer is about this weight."""
        names = (self.name, *(reader.name for reader in self.readers))
        return any(name == skip.layer or name.startswith((f"{skip.layer}.", f"{skip.layer}/")) for name in names)

    def skip(self) -> Skip:
        """The line that says why it is float."""
        reader = self.readers[0]
        said = f'{self.share:.0%} of all stored numbers, read by {reader.op_type} "{reader.name}"'
        if reader.op_type == "Gather":
            return Skip(self.name, f"{said}: its rows are looked up, which is no product")
        return Skip(self.name, f"{said}, which is no layer that can be quantized")


def large_float_weights(model: ModelProto, quantized: Collection[str] = ()) -> list[LargeFloatWeight]:
    """The large float weights of a model, in the order of the file.

    Args:
        model: A written model; or a float one, whose nodes ``quantized`` will have their weights in integers.
        quantized: The names of these nodes.
    """
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    total = sum(sizes.values())
    floats = (tensor.name for tensor in model.graph.initializer if tensor.data_type in _FLOATS and _has_rows(tensor))
    large = {name: sizes[name] for name in floats if sizes[name] > LARGE * total}
    readers: dict[str, list[NodeProto]] = {name: [] for name in large}
    for node in model.graph.node:
        for name in large.keys() & reads(node) if node.name not in quantized else ():
            readers[name].append(node)
    return [
        LargeFloatWeight(name=name, share=size / total, readers=readers[name])
        for name, size in large.items()
        if readers[name]
    ]


def not_said(weights: Iterable[LargeFloatWeight], said: Collection[Skip]) -> list[Skip]:
    """A line for each weight of which no line tells yet."""
    return [weight.skip() for weight in weights if not any(map(weight.is_said_by, said))]


def _has_rows(tensor: TensorProto) -> bool:
    """Whether it is more than a bias or a factor for each channel."""
    return sum(size > 1 for size in tensor.dims) > 1
