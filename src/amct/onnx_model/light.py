"""A model without its large weights, for tools of ONNX that copy and serialize what they are given.

Checking, shape inference and opset conversion need the small constants (shapes, axes) but no weights: in a light copy
large initializers are inputs of the same name and shape. Models beyond protobuf's 2 GB pass too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnx import ModelProto, helper

from amct.export.onnx.messages import copy_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnx import TensorProto

LARGEST_CONSTANT = 4096  # values; what is larger is a weight, not a shape or an index


def light_copy(model: ModelProto) -> ModelProto:
    """The model with large initializers as inputs; small ones are kept."""
    light = ModelProto()
    copy_fields(model, light, skip={"graph"})
    copy_fields(model.graph, light.graph, skip={"initializer"})
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if not _is_large(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def with_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """A changed light copy with the large initializers of its model put back; it takes over the light copy."""
    large = {tensor.name: tensor for tensor in model.graph.initializer if _is_large(tensor)}
    _drop_inputs(light, large)
    light.graph.initializer.extend(large.values())
    return light


def _drop_inputs(model: ModelProto, names: Mapping[str, TensorProto]) -> None:
    kept = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _is_large(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) > LARGEST_CONSTANT
