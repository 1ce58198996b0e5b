"""The place in an ONNX graph where a layer writes its nodes by its method ``to_onnx``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from amct.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from amct.caffe.engine.layer import Layer
    from amct.export.onnx.messages import GraphWriter


Dims: TypeAlias = tuple[int | None, ...]
"""A shape; None is a size that depends on the batch size."""

FLOAT, INT64, BOOL = 1, 7, 9
"""Element types, as numbered by ONNX."""
REDUCE_AXES_ARE_INPUTS = 18
"""From this opset on; for ReduceSum already from opset 13."""


class FollowsBatchError(Exception):
    """A form needs a size that depends on the batch size; the file then gets a fixed batch size."""


@dataclass(eq=False)
class Place:
    """One layer in the ONNX graph: the tensors it reads, the tensors it must write, their shapes.

    Each top must be written by ``top`` (or ``node`` with its name among the outputs), or declared by ``alias`` as an
    existing tensor.
    """

    layer: Layer
    bottoms: list[str]
    tops: list[str]
    bottom_dims: list[Dims]
    top_dims: list[Dims]
    writer: GraphWriter

    def __post_init__(self) -> None:
        self.aliases: dict[int, str] = {}

    @property
    def bottom(self) -> str:
        """The first bottom."""
        return self.bottoms[0]

    def top(self, operator: str, *inputs: str, index: int = 0, **attributes: object) -> None:
        """Write a top by one node with the layer's name."""
        self.writer.node(operator, self._name(index), inputs, [self.tops[index]], **attributes)

    def step(self, part: str, operator: str, *inputs: str, **attributes: object) -> str:
        """Add an intermediate node called ``<layer>.<part>``; returns its output."""
        return self.writer.node(operator, f"{self.layer.name}.{part}", inputs, (), **attributes)

    def main(self, operator: str, *inputs: str, index: int = 0, **attributes: object) -> str:
        """Add the node with the layer's name where its output is not yet the top; returns its output."""
        return self.writer.node(operator, self._name(index), inputs, (), **attributes)

    def _name(self, index: int) -> str:
        return self.layer.name if index == 0 else f"{self.layer.name}.{index}"

    def node(
        self, operator: str, part: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object
    ) -> None:
        """Add a node with several outputs; an empty ``part`` gives it the layer's name."""
        name = f"{self.layer.name}.{part}" if part else self.layer.name
        self.writer.node(operator, name, inputs, outputs, **attributes)

    def alias(self, tensor: str, index: int = 0) -> None:
        """Declare a top as an existing tensor."""
        self.aliases[index] = tensor

    def value(self, part: str, value: NDArray[Any] | Sequence[int] | float) -> str:
        """A constant: a float becomes float32, a sequence of integers int64."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(np.float32)
        return self.writer.store(f"{self.layer.name}.{part}", array)

    def parameter(self, index: int, part: str, shape: Sequence[int] | None = None, *, transposed: bool = False) -> str:
        """A parameter of the layer as a constant, reshaped or transposed on request; layers may share one."""
        blob = self.layer.blobs[index]
        own = blob.shape[::-1] if transposed else blob.shape
        wanted = tuple(own if shape is None else shape)
        value = blob.tensor.detach().cpu().numpy().astype(np.float32, copy=False)
        value = (value.T if transposed else value).reshape(wanted)
        return self.writer.store(f"{self.layer.name}.{part}", value, (id(blob.values), transposed, wanted))

    def arithmetic(self, tensor: str, steps: Sequence[tuple[str, str, float]]) -> None:
        """Apply operators with a constant second operand in sequence, ``(part, operator, operand)``."""
        for part, operator, operand in steps[:-1]:
            tensor = self.step(part, operator, tensor, self.value(f"{part}_operand", operand))
        if not steps:
            self.alias(tensor)
            return
        part, operator, operand = steps[-1]
        self.top(operator, tensor, self.value(f"{part}_operand", operand))

    def reshaped(self, tensor: str, dims: Dims, part: str) -> str:
        """Reshape a tensor."""
        return self.step(part, "Reshape", tensor, self.target(dims, f"{part}_shape"))

    def top_reshaped(self, tensor: str, index: int = 0) -> None:
        """Reshape a tensor to the shape of a top and write it, by a node called ``<layer>.shaped``."""
        target = self.target(self.top_dims[index], f"shape{index}")
        suffix = "" if index == 0 else f".{index}"
        self.writer.node("Reshape", f"{self.layer.name}.shaped{suffix}", [tensor, target], [self.tops[index]])

    def target(self, dims: Dims, part: str) -> str:
        """The shape input of a Reshape.

        Raises:
            FollowsBatchError: More than one size depends on the batch size.
        """
        if dims.count(None) > 1:
            raise FollowsBatchError(f'layer "{self.layer.name}" has a shape of which two sizes depend on it')
        return self.value(part, np.array([-1 if size is None else size for size in dims], dtype=np.int64))

    def reduced(self, part: str, operator: str, tensor: str, axes: Sequence[int], *, keep: bool = True) -> str:
        """A reduction over axes."""
        if operator == "ReduceSum" or self.writer.opset >= REDUCE_AXES_ARE_INPUTS:
            return self.step(part, operator, tensor, self.value(f"{part}_axes", list(axes)), keepdims=int(keep))
        return self.step(part, operator, tensor, axes=list(axes), keepdims=int(keep))

    def centred(self, tensor: str, axes: list[int]) -> tuple[str, str]:
        """Return x - mean over the axes, and the variance."""
        centred = self.step("centred", "Sub", tensor, self.reduced("mean", "ReduceMean", tensor, axes))
        squares = self.step("squares", "Mul", centred, centred)
        return centred, self.reduced("variance", "ReduceMean", squares, axes)

    def centred_and_deviation(self, tensor: str, axes: list[int], eps: float) -> tuple[str, str]:
        """Return x - mean over the axes, and sqrt(variance + eps)."""
        centred, variance = self.centred(tensor, axes)
        shifted = self.step("shifted", "Add", variance, self.value("eps", eps))
        return centred, self.step("deviation", "Sqrt", shifted)

    def error(self, message: str) -> ExportError:
        """An error that names the layer."""
        return ExportError(f'layer "{self.layer.name}" ({self.layer.type}): {message}')


def fixed(dims: Sequence[int | None]) -> tuple[int, ...]:
    """Return sizes that must be known as numbers.

    Raises:
        FollowsBatchError: One depends on the batch size.
    """
    known = tuple(size for size in dims if size is not None)
    if len(known) != len(dims):
        raise FollowsBatchError("a layer needs a size that depends on it")
    return known


def product(dims: Sequence[int | None]) -> int | None:
    """The number of values; None if it depends on the batch size."""
    known = [size for size in dims if size is not None]
    return math.prod(known) if len(known) == len(dims) else None


_COMPUTING = frozenset({"run", "forward", "function", "convolve", "step"})
"""Methods that define what a layer computes."""


def onnx_form_of(layer_class: type[Layer]) -> Callable[[Any, Place], None] | None:
    """The method ``to_onnx`` of a layer class; None if it has none.

    A subclass that computes something of its own does not have that of its base.
    """
    for base in layer_class.__mro__:
        form: Callable[[Any, Place], None] | None = vars(base).get("to_onnx")
        if form is not None or _COMPUTING.intersection(vars(base)):
            return form
    return None
