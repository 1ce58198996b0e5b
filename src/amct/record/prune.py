"""The pruning part of a record: chains of layers pruned together, and 4:2 masks.

A ``PruneRecord`` is a chain (producers, whose output channels are removed, and consumers, whose input channels are) or
one layer with a 4:2 mask. Each node has named attributes of six types, like ONNX's. The attribute ``type`` is the node
type: files have ONNX, torch or TensorFlow names, which are converted to ONNX names.

A mask is stored as integers of 64 bits: flattened row by row, packed eight to a byte with the first in the highest bit,
padded with zero bytes to a multiple of eight, and each eight bytes are read as one little-endian int64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from amct.errors import RecordError, did_you_mean
from amct.record.records import float32, float32s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_BITS = 64


def pack_mask(mask: NDArray[np.generic]) -> tuple[int, ...]:
    """Pack a mask of zeros and ones, of any shape and number type, to integers of 64 bits.

    >>> pack_mask(np.array([[1, 0, 0, 1], [0, 1, 1, 0]]))
    (150,)
    """
    packed = np.packbits(np.asarray(mask).reshape(-1) != 0)
    padded = np.zeros(-(-packed.size // 8) * 8, dtype=np.uint8)
    padded[: packed.size] = packed
    return tuple(padded.view("<i8").tolist())


def unpack_mask(numbers: Sequence[int], shape: Sequence[int]) -> NDArray[np.bool_]:
    """Unpack a mask to a boolean array of ``shape``.

    Raises:
        RecordError: The shape is invalid or does not fit the number of integers.
    """
    size = math.prod(shape)
    if size < 0 or any(extent < 0 for extent in shape):
        raise RecordError(f"a mask cannot have the shape {list(shape)}")
    expected = -(-size // _BITS)
    if len(numbers) != expected:
        raise RecordError(
            f"a mask of shape {list(shape)} has {size} bits, that is {expected} numbers of 64; got {len(numbers)}"
        )
    try:
        bits = np.unpackbits(np.array(numbers, dtype="<i8").view(np.uint8), count=size)
    except OverflowError as error:
        raise RecordError("a number of the mask does not fit 64 bits") from error
    return bits.astype(np.bool_).reshape(tuple(shape))


AttributeType = Literal["UNDEFINED", "FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS"]
AttributeValue = float | int | str | tuple[float, ...] | tuple[int, ...] | tuple[str, ...] | None

_ONNX_NAMES = {
    "Conv": ("Conv1d", "Conv2d", "Conv3d", "Conv2D", "Conv3D", "DepthwiseConv2dNative"),
    "ConvTranspose": ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Conv2DBackpropInput"),
    "Gemm": ("Linear",),
    "MatMul": ("BatchMatMul", "BatchMatMulV2"),
    "BatchNormalization": (
        "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm",
        "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3",
    ),
    "Relu": ("ReLU",),
    "Clip": ("ReLU6", "Relu6"),
    "LeakyRelu": ("LeakyReLU",),
    "PRelu": ("PReLU",),
    "MaxPool": ("MaxPool1d", "MaxPool2d", "MaxPool3d"),
    "AveragePool": ("AvgPool1d", "AvgPool2d", "AvgPool3d", "AvgPool"),
    "Add": ("AddV2", "BiasAdd"),
    "Concat": ("ConcatV2",),
}  # fmt: skip
_TO_ONNX = {other: onnx for onnx, others in _ONNX_NAMES.items() for other in others}


def onnx_type(name: str) -> str:
    """Return the ONNX name of a node type with an ONNX, torch or TensorFlow name; unknown names are returned as given.

    >>> onnx_type("Conv2d"), onnx_type("FusedBatchNormV3"), onnx_type("Conv")
    ('Conv', 'BatchNormalization', 'Conv')
    """
    return _TO_ONNX.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """One named attribute; ``value`` is a number, a string, a tuple of one of them, or None when ``UNDEFINED``.

    Strings that are not UTF-8 hold their bytes as surrogate escapes.
    """

    name: str
    type: AttributeType
    value: AttributeValue

    def __post_init__(self) -> None:
        wanted = _PYTHON_TYPES[self.type]
        several = self.type.endswith("S")
        items = self.value if several and isinstance(self.value, tuple | list) else (self.value,)
        if several != isinstance(self.value, tuple | list) or not all(
            isinstance(item, wanted) and not isinstance(item, bool) for item in items
        ):
            raise RecordError(f'attribute "{self.name}": expected a value of type {self.type}, got {self.value!r}')
        if several:
            object.__setattr__(self, "value", float32s(items) if self.type == "FLOATS" else tuple(items))  # type: ignore[arg-type]  # checked above
        elif self.type == "FLOAT":
            object.__setattr__(self, "value", float32(self.value))  # type: ignore[arg-type]  # checked above

    @classmethod
    def of(cls, name: str, value: int | str | Sequence[int]) -> Attribute:
        """Create an attribute of type INT, STRING or INTS, the types that pruning uses."""
        if isinstance(value, str):
            return cls(name=name, type="STRING", value=value)
        if isinstance(value, int):
            return cls(name=name, type="INT", value=value)
        return cls(name=name, type="INTS", value=tuple(value))


_PYTHON_TYPES: dict[AttributeType, type | tuple[type, ...]] = {
    "UNDEFINED": type(None),
    "FLOAT": (float, int),
    "INT": int,
    "STRING": str,
    "FLOATS": (float, int),
    "INTS": int,
    "STRINGS": str,
}


@dataclass(frozen=True, kw_only=True)
class PruneNode:
    """A layer in a chain, or the layer of a 4:2 mask."""

    name: str
    attributes: tuple[Attribute, ...] = ()

    @classmethod
    def channels(
        cls, name: str, kind: str, begin: int, end: int, prune_index: Sequence[int] = (), **more: int
    ) -> PruneNode:
        """Create a node of a chain from its type (any framework's name), channel range and pruned channels.

        ``more`` may have ``group`` and ``prune_group``.
        """
        attributes = [Attribute.of("type", onnx_type(kind)), Attribute.of("begin", begin), Attribute.of("end", end)]
        attributes += [Attribute.of(key, value) for key, value in more.items()]
        if prune_index:
            attributes.append(Attribute.of("prune_index", prune_index))
        return cls(name=name, attributes=tuple(attributes))

    @classmethod
    def masked(cls, name: str, mask: NDArray[np.generic]) -> PruneNode:
        """Create a node of a layer with a 4:2 mask."""
        shape = Attribute.of("mask_shape", mask.shape)
        return cls(name=name, attributes=(shape, Attribute.of("selective_mask", pack_mask(mask))))

    def get(self, name: str) -> AttributeValue:
        """Return the value of an attribute (the last one if repeated), or None."""
        values = [attribute.value for attribute in self.attributes if attribute.name == name]
        return values[-1] if values else None

    @property
    def kind(self) -> str | None:
        """The ONNX type of the node, or None."""
        value = self.get("type")
        return value if isinstance(value, str) else None

    @property
    def begin(self) -> int | None:
        """The first channel of this node in its chain, or None."""
        return self.whole("begin")

    @property
    def end(self) -> int | None:
        """One past the last channel of this node in its chain, or None."""
        return self.whole("end")

    @property
    def prune_index(self) -> tuple[int, ...]:
        """The pruned channels."""
        return self._numbers("prune_index")

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The shape of the 4:2 mask."""
        return self._numbers("mask_shape")

    def mask(self) -> NDArray[np.bool_] | None:
        """Return the 4:2 mask; None if the record has only its shape, as before the first forward pass.

        Raises:
            RecordError: The numbers do not fit the shape.
        """
        if self.get("selective_mask") is None:
            return None
        try:
            return unpack_mask(self._numbers("selective_mask"), self.mask_shape)
        except RecordError as error:
            raise RecordError(f'layer "{self.name}": {error}') from error

    def whole(self, name: str) -> int | None:
        """The value of an attribute that is a whole number; None if the node has none."""
        value = self.get(name)
        return value if isinstance(value, int) else None

    def _numbers(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


@dataclass(frozen=True, kw_only=True)
class PruneRecord:
    """One chain of layers that are pruned together, or one layer with a 4:2 mask."""

    producers: tuple[PruneNode, ...] = ()
    consumers: tuple[PruneNode, ...] = ()
    selective: PruneNode | None = None

    @property
    def roles(self) -> dict[str, tuple[PruneNode, ...]]:
        """The nodes by the names of the file, in its order, without empty groups."""
        selective = (self.selective,) if self.selective else ()
        groups = {"producer": self.producers, "consumer": self.consumers, "selective_prune": selective}
        return {role: nodes for role, nodes in groups.items() if nodes}

    @property
    def nodes(self) -> tuple[PruneNode, ...]:
        """All nodes, in the order of the file."""
        return tuple(node for nodes in self.roles.values() for node in nodes)

    def node(self, name: str) -> PruneNode:
        """Return the node with a name.

        Raises:
            RecordError: This chain has no such node.
        """
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            raise RecordError(f'the chain has no node "{name}".{did_you_mean(name, [n.name for n in self.nodes])}')
        return found
