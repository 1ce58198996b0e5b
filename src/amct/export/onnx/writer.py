"""Writes an ONNX graph from nothing: nodes and stored constants, then the model of them.

The lowering of a torch program and the forms of Caffe's layers write with it; ``graph.py`` edits a graph that exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from amct.errors import ExportError
from amct.export.onnx.kept_weights import light_copy
from amct.export.onnx.messages import fresh_name, new_node

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from onnx import ValueInfoProto

    from amct.export.onnx.kept_weights import KeptWeights


class GraphWriter:
    """The nodes and initializers of one graph; names stay different from each other.

    Args:
        opset: Of the model.
        taken: Names of tensors that exist already.
        kept: Takes large arrays, to which the initializers then refer; None: they hold them.
    """

    def __init__(self, opset: int, taken: Iterable[str] = (), kept: KeptWeights | None = None) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.notes: list[str] = []
        """What the user should know of the model."""
        self._kept = kept
        self._node_names: set[str] = set()
        self._tensor_names: set[str] = set(taken)
        self._stored: dict[Hashable, str] = {}

    def node(
        self, operator: str, name: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: object
    ) -> str:
        """Add a node; returns its first output, which is named after the node unless given."""
        unique = fresh_name(name, self._node_names)
        results = list(outputs) or [self.tensor(f"{unique}.output0")]
        self.nodes.append(new_node(operator, inputs, results, attributes, unique))
        return results[0]

    def tensor(self, name: str) -> str:
        """Reserve the name of a tensor; another one when it is taken."""
        return fresh_name(name, self._tensor_names)

    def store(self, name: str, value: NDArray[Any], key: Hashable = None) -> str:
        """Store an array; returns the name of the tensor. Arrays of the same key are stored once."""
        if key in self._stored:
            return self._stored[key]
        unique = self.tensor(name)
        array = np.ascontiguousarray(value).reshape(value.shape)
        stored = numpy_helper.from_array(array, unique) if self._kept is None else self._kept.tensor(unique, array)
        self.initializers[unique] = stored
        if key is not None:
            self._stored[key] = unique
        return unique

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names; those that are not mentioned keep theirs."""
        for node in self.nodes:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        for old, tensor in self.initializers.items():
            tensor.name = names.get(old, old)

    def model(
        self,
        name: str,
        inputs: Iterable[ValueInfoProto],
        outputs: Iterable[ValueInfoProto],
        initializers: Iterable[TensorProto],
        between: Iterable[ValueInfoProto],
    ) -> ModelProto:
        """The model of the graph with these declarations."""
        opsets = [helper.make_opsetid("", self.opset)]
        version = helper.find_min_ir_version_for(opsets)
        model = ModelProto(producer_name="amct", ir_version=version, opset_import=opsets)
        graph = model.graph
        graph.name = name
        graph.node.extend(self.nodes)
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        graph.initializer.extend(initializers)
        graph.value_info.extend(between)
        return model


def check_valid(model: ModelProto, problem: str) -> None:
    """Check a written model.

    Raises:
        ExportError: ONNX says that it is not valid; the message begins with ``problem``.
    """
    try:
        onnx.checker.check_model(light_copy(model))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{problem}: {error}") from error
