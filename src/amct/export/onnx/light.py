"""Copies of models without their large weights.

Checking, shape inference and opset conversion need small constants (shapes, axes) but no weights. In a light copy large
initializers are inputs of the same name and shape, so that models above protobuf's 2 GB limit work too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnx import ModelProto, helper

from amct.export.onnx.kept_weights import kept_values, whole_tensor
from amct.export.onnx.messages import copy_fields, tensor_array

if TYPE_CHECKING:
    from onnx import TensorProto

    from amct.export.onnx.kept_weights import KeptWeights

LARGEST_CONSTANT = 4096  # values; larger constants are weights, not shapes or indices


def light_copy(model: ModelProto) -> ModelProto:
    """A copy of the model with large initializers replaced by inputs; small ones are kept."""
    light = ModelProto()
    copy_fields(model, light, skip={"graph"})
    copy_fields(model.graph, light.graph, skip={"initializer"})
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if not is_large(tensor):
            light.graph.initializer.append(whole_tensor(tensor))
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def weights_as_inputs(model: ModelProto) -> ModelProto:
    """A copy of the model with inputs in place of the weights beside it."""
    light = ModelProto()
    copy_fields(model, light, skip={"graph"})
    copy_fields(model.graph, light.graph, skip={"initializer"})
    for tensor in model.graph.initializer:
        if kept_values(tensor) is None:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def with_weights_beside(model: ModelProto, kept: KeptWeights) -> ModelProto:
    """A copy of the model whose large weights are beside it, so that the model can be freed."""
    light = ModelProto()
    copy_fields(model, light, skip={"graph"})
    copy_fields(model.graph, light.graph, skip={"initializer"})
    for tensor in model.graph.initializer:
        plain = tensor.HasField("raw_data") and not tensor.doc_string and not tensor.metadata_props
        light.graph.initializer.append(kept.tensor(tensor.name, tensor_array(tensor)) if plain else tensor)
    return light


def is_large(tensor: TensorProto) -> bool:
    """Whether a stored tensor is a weight, which a light copy does not have."""
    return math.prod(tensor.dims) > LARGEST_CONSTANT
