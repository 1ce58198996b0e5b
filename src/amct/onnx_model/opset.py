"""Brings a model to an opset that the exporters write, with ONNX's own version converter."""

from __future__ import annotations

from onnx import ModelProto, helper, version_converter

from amct.errors import ModelError
from amct.export.onnx.messages import model_opset
from amct.export.writer import OPSETS, check_opset
from amct.onnx_model.light import light_copy, with_weights

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
