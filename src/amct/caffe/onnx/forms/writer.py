"""Collects the nodes and constants of an ONNX graph while layers write themselves into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from amct.caffe.engine.blob import Blob
    from amct.export.onnx.kept_weights import KeptWeights

Attribute: TypeAlias = Any
"""A number, text, a list of them or a graph: whatever an attribute of a node can be."""


class OnnxWriter:
    """Nodes and initializers of one graph; names stay different from each other.

    Args:
        opset: Of the model.
        taken: Names of tensors that exist already.
        kept: Takes large arrays, to which the initializers then refer; None: they hold them.
    """

    def __init__(self, opset: int, taken: Iterable[str] = (), kept: KeptWeights | None = None) -> None:
        self.opset = opset
        self._kept = kept
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.notes: list[str] = []
        self._node_names: set[str] = set()
        self._tensor_names: set[str] = set(taken)
        self._parameters: dict[tuple[int, str, tuple[int, ...]], str] = {}

    def node(
        self, operator: str, name: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Attribute
    ) -> str:
        """Add a node; returns its first output, which is named after the node unless given."""
        unique = _free(name, self._node_names)
        results = list(outputs) or [self.tensor(f"{unique}.output0")]
        node = helper.make_node(operator, list(inputs), results, name=unique)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return results[0]

    def tensor(self, name: str) -> str:
        """Reserve the name of a tensor; another one when it is taken."""
        return _free(name, self._tensor_names)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Store an array; returns the name of the tensor."""
        unique = self.tensor(name)
        array = np.ascontiguousarray(value).reshape(value.shape)
        stored = numpy_helper.from_array(array, unique) if self._kept is None else self._kept.tensor(unique, array)
        self.initializers[unique] = stored
        return unique

    def parameter(self, blob: Blob, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> str:
        """Store a parameter of a layer; one that several layers share is stored once."""
        key = (id(blob.values), "transposed" if transposed else "", shape)
        if key not in self._parameters:
            value = blob.tensor.detach().cpu().numpy().astype(np.float32, copy=False)
            value = value.T if transposed else value
            self._parameters[key] = self.constant(name, value.reshape(shape))
        return self._parameters[key]


def _free(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate
