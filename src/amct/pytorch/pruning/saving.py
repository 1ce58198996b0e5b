"""Writes a pruned model as ONNX: float, batch norms folded, with masks applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from amct.errors import ExportError
from amct.export.check.losses import Reference
from amct.export.request import RECORD, SaveRequest
from amct.export.saving import OnnxFiles, save_files
from amct.pytorch.capture.trace import trace
from amct.pytorch.folding import fuse
from amct.pytorch.onnx.float_onnx import DEFAULT_OPSET, float_onnx
from amct.pytorch.onnx.modified_onnx import FileNotes
from amct.pytorch.pruning.sparse import make_plain
from amct.pytorch.user_model import as_array, copy_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from onnx import ModelProto
    from torch import nn

    from amct.export.request import SavePath
    from amct.pytorch.capture.trace import Traced
    from amct.pytorch.inputs import IoOptions
    from amct.record import Record


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode without masks: removed weights are zero."""
    plain = copy_model(model)
    make_plain(plain)
    return plain


def traced_plain(model: nn.Module, input_data: object, io: IoOptions) -> Traced:
    """The trace of a plain copy, with the names of an export."""
    return trace(plain_copy(model), input_data, io=io)


def float_model(traced: Traced, opset: int | None = None) -> tuple[ModelProto, FileNotes]:
    """The folded float model as ONNX.

    Raises:
        ExportError: It cannot be exported.
    """
    fused = fuse(traced)
    exported = float_onnx(traced, fused, opset=opset or DEFAULT_OPSET)
    notes = FileNotes(
        fusions={layer: [norm] for layer, norm in fused.fusions.items()},
        skipped=dict.fromkeys(traced.layers, "not quantized: the model was only made smaller"),
    )
    return exported.model, notes


@dataclass(frozen=True, kw_only=True, eq=False)
class FloatFiles:
    """What is written of a model that is not quantized.

    Attributes:
        record: Written beside the files, if given.
        formats: The formats of the ONNX files, which all have the same content.
        others: Further files to write: content by file name behind the prefix.
        opset: Of the ONNX files; None: the default.
    """

    record: Record | None = None
    formats: tuple[str, ...] = ("deploy", "fake_quant")
    others: Mapping[str, bytes] = field(default_factory=dict)
    opset: int | None = None


def save_float(
    model: nn.Module, where: SavePath, input_data: object, io: IoOptions, files: FloatFiles | None = None
) -> list[Path]:
    """Write a model that is not quantized; the files are first run and compared with the model.

    Args:
        model: The pruned model.
        where: The folder and the prefix.
        input_data: An example input.
        io: Names and dynamic axes.
        files: What is written; None: AMCT's two ONNX files.

    Raises:
        ExportError: The model cannot be exported, or a file cannot be used; nothing was saved.
        FileError: A file cannot be written; nothing was.
    """
    files = files or FloatFiles()
    _refuse_bfloat16(model)
    traced = traced_plain(model, input_data, io)
    onnx_model, notes = float_model(traced, files.opset)
    written = OnnxFiles(
        request=SaveRequest(
            where=where, formats=(*files.formats, *([RECORD] if files.record is not None or files.others else ()))
        ),
        model=onnx_model,
        layers={},
        record=files.record,
        reference=_reference(traced, onnx_model),
        folded=notes.fusions,
        skipped=notes.skips(),
        beside_record=files.others,
    )
    return save_files(written).paths


def _refuse_bfloat16(model: nn.Module) -> None:
    """Raise for a model whose ONNX file onnxruntime could not load: its kernels know no bfloat16."""
    found = next((name for name, value in model.named_parameters() if value.dtype == torch.bfloat16), None)
    if found is not None:
        raise ExportError(
            f'parameter "{found}": expected float32, float16 or float64, got bfloat16, which onnxruntime cannot run; '
            "convert the model with model.float() before saving"
        )


def onnx_feeds(traced: Traced, model: ModelProto) -> dict[str, np.ndarray]:
    """The example input by the input names of an ONNX file."""
    arrays = [as_array(tensor) for tensor in traced.inputs.tensors()]
    return {value.name: array for value, array in zip(model.graph.input, arrays, strict=False)}


def _reference(traced: Traced, model: ModelProto) -> Reference:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        result = copy_model(traced.model, share_tensors=True)(*traced.inputs.args, **traced.inputs.kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    names = [value.name for value in model.graph.output]
    outputs = [(name, as_array(tensor)) for name, tensor in zip(names, tensors, strict=False)]
    outputs = [(name, array) for name, array in outputs if array.dtype.kind == "f"]
    return Reference(inputs=onnx_feeds(traced, model), origin="the example input", expected=outputs, simulated=outputs)
