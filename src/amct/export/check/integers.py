"""Runs a deploy file: Ascend's operators are replaced by standard ones that compute the same integers.

=====================  =================================================================================================
AscendQuant            ``round(x · scale) + offset``, limited to the bits, as uint8: 128 stands for the integer 0
Conv, MatMul, Gemm     ConvInteger, MatMulInteger; weights are uint8 too, because onnxruntime's kernel for uint8 × int8
                       saturates on some CPUs
ConvTranspose          has no integer operator: float32 on both halves of the weights' bits, which is exact while sums
                       stay below 2^24; joined as int32
AveragePool            float32 on the integers, as the chip does
AscendDequant          ``int32 · scale``, one scale for all channels or one per channel
=====================  =================================================================================================

All other operators are those of the file. Recurrent layers and 16-bit activations have no such form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amct.errors import ExportError, ModelError
from amct.export.onnx.kept_weights import copy_fields, tensor_array
from amct.export.onnx.messages import any_value, attribute_value, reads
from amct.model.operators import ARRANGING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray
    from onnx import NodeProto

    from amct.export.onnx.kept_weights import KeptWeights

_ZERO = 128
_EXACT_IN_FLOAT32 = 1 << 24
_NARROW_BITS = (4, 8)
_LARGEST_NIBBLE = 15


def standard_model(deploy: ModelProto, *, packed: Collection[str] = (), kept: KeptWeights | None = None) -> ModelProto:
    """A model of standard operators that computes what a deploy file computes; tensors keep their names.

    Args:
        deploy: The content of the file; it is not changed.
        packed: The nodes whose weights hold two 4-bit values per byte.
        kept: Takes the large weights of the result, which then refers to them; None: they are in its message.

    Raises:
        ExportError: an operator on integers has no such form; the message names the node.
        ModelError: a node reads a tensor that does not exist.
    """
    return _Translation(deploy, packed, kept).run()


@dataclass(frozen=True)
class _Integers:
    """A tensor of uint8 values; ``offset`` is the integer that stands for the number 0."""

    offset: int

    @property
    def zero(self) -> int:
        return self.offset + _ZERO


@dataclass(frozen=True)
class _Sums:
    """The result of a layer on integers; ``axis`` counts its channels, ``rank`` is its number of axes if known."""

    axis: int
    rank: int


class _Translation:
    def __init__(self, deploy: ModelProto, packed: Collection[str], kept: KeptWeights | None) -> None:
        self._kept = kept
        self._deploy = deploy
        self._packed = packed
        self._stored = {tensor.name: tensor for tensor in deploy.graph.initializer}
        self._nodes: list[NodeProto] = []
        self._added: list[TensorProto] = []
        self._kinds: dict[str, _Integers | _Sums] = {}
        self._taken = {name for node in deploy.graph.node for name in node.output} | set(self._stored)

    def run(self) -> ModelProto:
        inputs = {value.name for value in self._deploy.graph.input}
        for node in self._deploy.graph.node:
            unknown = [name for name in node.input if name and name not in self._taken and name not in inputs]
            if unknown:
                raise ModelError(f'node "{node.name}" reads "{unknown[0]}", which nothing computes')
            self._translate(node)
        result = ModelProto()
        copy_fields(self._deploy, result, skip={"graph"})
        copy_fields(self._deploy.graph, result.graph, skip={"node", "initializer", "value_info", "output"})
        result.graph.node.extend(self._nodes)
        used = {name for node in self._nodes for name in reads(node)}
        used |= {value.name for value in self._deploy.graph.output}
        result.graph.initializer.extend(tensor for name, tensor in self._stored.items() if name in used)
        result.graph.initializer.extend(self._added)
        result.graph.output.extend(any_value(value.name) for value in self._deploy.graph.output)
        return result

    def _translate(self, node: NodeProto) -> None:
        kind = self._kinds.get(node.input[0]) if node.input else None
        if node.op_type == "AscendQuant":
            self._quantize(node)
        elif node.op_type == "AscendDequant":
            self._dequantize(node)
        elif isinstance(kind, _Integers):
            self._layer(node, kind)
        elif isinstance(kind, _Sums):
            self._add_bias(node, kind)
        elif any(name in self._kinds for name in node.input) or node.op_type.startswith("Basic"):
            raise _no_form(node)
        else:
            self._nodes.append(node)

    # -- between numbers and integers ----------------------------------------------------------------------------------

    def _quantize(self, node: NodeProto) -> None:
        bits = int(str(attribute_value(node, "dst_type", "INT8")).removeprefix("INT"))
        if bits not in _NARROW_BITS:
            raise ExportError(f'node "{node.name}": activations of {bits} bits have no integer operator in onnxruntime')
        integers = _Integers(int(attribute_value(node, "offset", 0.0)))
        half = 1 << (bits - 1)
        x = self._node("Cast", node, [node.input[0]], to=TensorProto.FLOAT)
        x = self._node("Mul", node, [x, self._constant(node, np.float32(attribute_value(node, "scale")))])
        x = self._node("Round", node, [x])
        x = self._node("Add", node, [x, self._constant(node, np.float32(integers.zero))])
        limits = [self._constant(node, np.float32(limit)) for limit in (_ZERO - half, _ZERO + half - 1)]
        x = self._node("Clip", node, [x, *limits])
        self._node("Cast", node, [x], output=node.output[0], to=TensorProto.UINT8)
        self._kinds[node.output[0]] = integers

    def _dequantize(self, node: NodeProto) -> None:
        sums = self._kinds.get(node.input[0])
        if not isinstance(sums, _Sums):
            raise _no_form(node)
        scale = self._array(node, 1).astype(np.uint32).view(np.float32)
        if scale.size > 1 and sums.axis > 0:
            scale = scale.reshape(-1, *[1] * (sums.rank - 1 - sums.axis))
        real = self._node("Cast", node, [node.input[0]], to=TensorProto.FLOAT)
        is_half = bool(attribute_value(node, "dtype", 0))
        real = self._node("Mul", node, [real, self._constant(node, scale)], output=None if is_half else node.output[0])
        if is_half:
            self._node("Cast", node, [real], output=node.output[0], to=TensorProto.FLOAT16)

    # -- on integers ---------------------------------------------------------------------------------------------------

    def _layer(self, node: NodeProto, x: _Integers) -> None:
        if node.op_type in ARRANGING:
            self._nodes.append(node)
            self._kinds[node.output[0]] = x
        elif node.op_type == "Pad":
            value = self._constant(node, np.uint8(int(self._array(node, 2)) + _ZERO))
            self._copy(node, [node.input[0], node.input[1], value, *node.input[3:]], node.output[0])
            self._kinds[node.output[0]] = x
        else:
            translate: dict[str, Callable[[NodeProto, _Integers], _Sums]] = {
                "AveragePool": self._pool,
                "Conv": self._convolution,
                "ConvTranspose": self._transposed,
                "Gemm": self._product,
                "MatMul": self._product,
            }
            if node.op_type not in translate:
                raise _no_form(node)
            self._kinds[node.output[0]] = translate[node.op_type](node, x)

    def _pool(self, node: NodeProto, x: _Integers) -> _Sums:
        self._copy(node, [self._centred(node, x)], node.output[0])
        return _Sums(1, len(attribute_value(node, "kernel_shape")) + 2)

    def _convolution(self, node: NodeProto, x: _Integers) -> _Sums:
        weight = self._weight(node, axis=1)
        inputs = [node.input[0], *self._unsigned(node, weight, x)]
        integer = helper.make_node("ConvInteger", inputs, [self._sums_name(node)], name=f"{node.name}.integer")
        integer.attribute.extend(node.attribute)
        self._nodes.append(integer)
        self._join_bias(node, weight.ndim)
        return _Sums(1, weight.ndim)

    def _product(self, node: NodeProto, x: _Integers) -> _Sums:
        weight = self._weight(node, axis=0)
        inputs = [node.input[0], *self._unsigned(node, weight, x)]
        self._node("MatMulInteger", node, inputs, output=self._sums_name(node))
        self._join_bias(node, 2)
        return _Sums(-1, 2)

    def _transposed(self, node: NodeProto, x: _Integers) -> _Sums:
        weight = self._weight(node, axis=0).astype(np.int32)
        terms = weight.size // weight.shape[1]  # at most so many products meet in one sum
        if terms * _LARGEST_NIBBLE * 2 * _ZERO >= _EXACT_IN_FLOAT32:
            raise ExportError(f'node "{node.name}": sums of {terms} products are not exact in float32')
        centred = self._centred(node, x)
        halves = []
        for half in (weight >> 4, weight & _LARGEST_NIBBLE):
            values = self._constant(node, half.astype(np.float32))
            result = self._copy(node, [centred, values], self._fresh(f"{node.name}.half"))
            halves.append(self._node("Cast", node, [result], to=TensorProto.INT32))
        high = self._node("Mul", node, [halves[0], self._constant(node, np.int32(16))])
        self._node("Add", node, [high, halves[1]], output=self._sums_name(node))
        self._join_bias(node, weight.ndim)
        return _Sums(1, weight.ndim)

    def _add_bias(self, node: NodeProto, sums: _Sums) -> None:
        if node.op_type != "Add":
            raise _no_form(node)
        bias = self._node("Cast", node, [node.input[1]], to=TensorProto.INT32)
        self._copy(node, [node.input[0], bias], node.output[0])
        self._kinds[node.output[0]] = sums

    def _sums_name(self, node: NodeProto) -> str:
        """The tensor for the sums of a layer before its bias."""
        return self._fresh(f"{node.name}.sums") if len(node.input) > 2 and node.input[2] else node.output[0]

    def _join_bias(self, node: NodeProto, rank: int) -> None:
        if len(node.input) < 3 or not node.input[2]:
            return
        sums = self._nodes[-1].output[0]
        shape = self._constant(node, np.array([-1, *[1] * (rank - 2)], np.int64))
        bias = self._node("Cast", node, [node.input[2]], to=TensorProto.INT32)
        bias = self._node("Reshape", node, [bias, shape])
        self._node("Add", node, [sums, bias], output=node.output[0])

    # -- weights -------------------------------------------------------------------------------------------------------

    def _weight(self, node: NodeProto, axis: int) -> NDArray[Any]:
        """The integers of a weight; two 4-bit values in one byte are separated along ``axis``."""
        weight = self._array(node, 1)
        if weight.dtype != np.int8:
            raise _no_form(node)
        if node.name not in self._packed:
            return weight
        low, high = ((weight.astype(np.int16) & _LARGEST_NIBBLE) ^ 8) - 8, weight >> 4
        shape = [2 * size if place == axis else size for place, size in enumerate(weight.shape)]
        return np.stack([low, high], axis + 1).reshape(shape)

    def _unsigned(self, node: NodeProto, weight: NDArray[Any], x: _Integers) -> list[str]:
        """The weight as uint8, and the values that stand for 0 in the input and in the weight."""
        moved = np.ascontiguousarray(weight, np.int8).view(np.uint8) ^ np.uint8(_ZERO)
        return [self._constant(node, value) for value in (moved, np.uint8(x.zero), np.uint8(_ZERO))]

    def _centred(self, node: NodeProto, x: _Integers) -> str:
        """The integers minus their offset, as floats."""
        real = self._node("Cast", node, [node.input[0]], to=TensorProto.FLOAT)
        return self._node("Sub", node, [real, self._constant(node, np.float32(x.zero))])

    def _array(self, node: NodeProto, index: int) -> NDArray[Any]:
        if len(node.input) <= index or node.input[index] not in self._stored:
            raise _no_form(node)
        return tensor_array(self._stored[node.input[index]])

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _node(
        self,
        op_type: str,
        source: NodeProto,
        inputs: list[str],
        *,
        output: str | None = None,
        **attributes: Any,  # noqa: ANN401  attributes have any type
    ) -> str:
        result = output or self._fresh(f"{source.name}.{op_type}")
        name = self._fresh(f"{source.name}.{op_type}.node")
        self._nodes.append(helper.make_node(op_type, inputs, [result], name=name, **attributes))
        return result

    def _copy(self, node: NodeProto, inputs: list[str], output: str) -> str:
        """A node with the operator and the attributes of another."""
        copy = helper.make_node(node.op_type, inputs, [output], name=self._fresh(f"{node.name}.copy"))
        copy.attribute.extend(node.attribute)
        self._nodes.append(copy)
        return output

    def _constant(self, source: NodeProto, value: Any) -> str:  # noqa: ANN401  an array or a NumPy scalar
        name = self._fresh(f"{source.name}.constant")
        array = np.asarray(value)
        stored = numpy_helper.from_array(array, name) if self._kept is None else self._kept.tensor(name, array)
        self._added.append(stored)
        return name

    def _fresh(self, name: str) -> str:
        number, found = 0, name
        while found in self._taken:
            number += 1
            found = f"{name}.{number}"
        self._taken.add(found)
        return found


def _no_form(node: NodeProto) -> ExportError:
    return ExportError(f'node "{node.name}": {node.op_type} on integers cannot be computed on this machine')
