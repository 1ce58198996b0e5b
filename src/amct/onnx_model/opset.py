"""Brings a model to an opset that the exporters write, with ONNX's own version converter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnx import ModelProto, helper, version_converter

from amct.errors import ModelError
from amct.export.onnx.messages import copy_fields, model_opset
from amct.export.writer import OPSETS, check_opset

if TYPE_CHECKING:
    from onnx import TensorProto

NEWEST_FILE_VERSION = 10
"""The IR version of the newest opset written; runtimes refuse files that claim a newer one."""


def usual_opset(model: ModelProto) -> int:
    """The opset in which a model is exported when the user asks for none: its own, or the nearest one possible."""
    return min(max(model_opset(model), OPSETS[0]), OPSETS[-1])


def with_opset(model: ModelProto, opset: int) -> ModelProto:
    """The model with another opset; the model itself when it has this one already. Names of nodes and tensors stay.

    Raises:
        ArgumentError: the opset is outside 16..21.
        ModelError: an operator of the model has no form there.
    """
    check_opset(opset)
    if model_opset(model) == opset:
        return model
    try:
        converted = version_converter.convert_version(light_copy(model), opset)
    except Exception as error:
        raise ModelError(
            f"the model has opset {model_opset(model)} and cannot be converted to {opset}: {first_line(error)}; "
            f"export it again with an opset of {OPSETS[0]}..{OPSETS[-1]}"
        ) from error
    result = with_weights(converted, model)
    set_file_version(result)
    return result


def set_file_version(model: ModelProto) -> None:
    """Let a model have an IR version that fits its opset and that runtimes know."""
    needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(needed, min(model.ir_version, NEWEST_FILE_VERSION))


def first_line(error: BaseException) -> str:
    """What an error of ONNX or onnxruntime says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- models without their large weights --------------------------------------------------------------------------------
# Checking, shape inference and opset conversion need the small constants (shapes, axes) but no weights. In a light copy
# large initializers are inputs of the same name and shape, so that models beyond protobuf's 2 GB pass too.


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
    """A changed light copy with the large initializers of its model; the light copy itself is completed."""
    light.graph.initializer.extend(tensor for tensor in model.graph.initializer if _is_large(tensor))
    drop_stored_inputs(light)
    return light


def drop_stored_inputs(model: ModelProto) -> None:
    """Remove the inputs that are initializers too; old files list weights as inputs that a caller might replace."""
    stored = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _is_large(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) > LARGEST_CONSTANT
