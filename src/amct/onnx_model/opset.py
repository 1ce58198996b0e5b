"""Converts a model to an opset that the exporters support, with ONNX's version converter."""

from __future__ import annotations

import re

from onnx import ModelProto, helper, version_converter

from amct.errors import ModelError
from amct.export.onnx.light import is_large, light_copy
from amct.export.onnx.messages import first_line, model_opset
from amct.export.request import OPSETS, check_opset

NEWEST_FILE_VERSION = 10
"""The IR version of the newest supported opset; runtimes reject files with a newer one."""
STORED_ALONE = 4
"""The first IR version in which stored tensors need not be listed as inputs; files of opset 7 and 8 are older."""


def usual_opset(model: ModelProto) -> int:
    """The default opset for exporting a model: its own, or the nearest supported one."""
    return min(max(model_opset(model), OPSETS[0]), OPSETS[-1])


def with_opset(model: ModelProto, opset: int) -> ModelProto:
    """Convert a model to another opset; returns the model itself if it has this opset. Node and tensor names are kept.

    Raises:
        ArgumentError: the opset is outside 16..21.
        ModelError: an operator of the model does not exist in that opset.
    """
    check_opset(opset)
    if model_opset(model) == opset:
        return model
    try:
        converted = version_converter.convert_version(light_copy(model), opset)
    except Exception as error:
        raise ModelError(
            f"the model has opset {model_opset(model)} and cannot be converted to {opset}: {_reason(error)}; "
            f"export it again with an opset of {OPSETS[0]}..{OPSETS[-1]}"
        ) from error
    result = with_weights(converted, model)
    set_file_version(result)
    return result


def _reason(error: Exception) -> str:
    """What the converter says, without the place in its own source and the condition that failed there."""
    return re.sub(r"^\S+:\d+: \w+: Assertion `.*?` failed: ", "", first_line(error))


def set_file_version(model: ModelProto) -> None:
    """Set an IR version that fits the model's opset, that runtimes support, and without stored tensors as inputs."""
    needed = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(needed, STORED_ALONE, min(model.ir_version, NEWEST_FILE_VERSION))


def with_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """Add the large initializers of the model to its (possibly changed) light copy, in place, and return it."""
    light.graph.initializer.extend(tensor for tensor in model.graph.initializer if is_large(tensor))
    drop_stored_inputs(light)
    return light


def drop_stored_inputs(model: ModelProto) -> None:
    """Remove inputs that are also initializers; old files list weights as optional inputs."""
    stored = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(kept)
