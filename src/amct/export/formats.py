"""The registry of export formats: ``qdq``, ``deploy``, ``fake_quant`` and those that users register.

An exporter is a function of an ``ExportRequest`` that returns an ONNX model, an ``ExportedModel`` (a model with a
report) or the bytes of a file of another kind. ``save(formats=…)`` and ``amct quantize --formats`` offer every format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnx import ModelProto

from amct.errors import ArgumentError, did_you_mean
from amct.export.ascend import ascend_model
from amct.export.exported import ExportedModel
from amct.export.fake_quant import fake_quant_model
from amct.export.qdq.exporter import Placement, choice, qdq_model
from amct.export.qdq.nodes import Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.export.binding import LayerBinding, LayerFactors, TensorFactors

logger = logging.getLogger(__name__)

RECORD = "record"
"""The factors: what ``save`` takes among the formats beside the exported models."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How the QDQ file is made.

    Attributes:
        placement: "fast" also quantizes the tensors between layers, "exact" what the record says only.
        target: Which integer types: "portable", "vnni" or "exact8".
    """

    placement: str = Placement.FAST.value
    target: str = Target.PORTABLE.value

    def __post_init__(self) -> None:
        choice(Placement, self.placement, "placement")
        choice(Target, self.target, "target")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportRequest:
    """What an exporter works on.

    Attributes:
        model: The float ONNX model, batch norms folded; exporters must not change it.
        bindings: Which node computes which quantized layer.
        factors: The quantization factors of each layer.
        tensors: Factors of the tensors between layers, by ONNX name; None when nothing was observed.
        options: What the user chose.
    """

    model: ModelProto
    bindings: Sequence[LayerBinding]
    factors: Mapping[str, LayerFactors]
    tensors: Mapping[str, TensorFactors] | None = None
    options: ExportOptions = field(default_factory=ExportOptions)


Exported = ExportedModel | bytes
Exporter = Callable[[ExportRequest], ModelProto | ExportedModel | bytes]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A registered format; its file is ``<prefix>_<file_name>``."""

    exporter: Exporter
    file_name: str


_FORMATS: dict[str, Format] = {}


def register_exporter(*, name: str, exporter: Exporter, file_name: str | None = None) -> None:
    """Add a format.

    Args:
        name: What ``save(formats=…)`` takes: letters, digits and "_".
        exporter: Called with an ``ExportRequest``; returns an ONNX ModelProto, an ``ExportedModel`` or bytes.
        file_name: What the file is called behind the prefix; ``<name>_model.onnx`` unless given.

    Raises:
        ArgumentError: the name is taken or cannot be used.
    """
    if not re.fullmatch(r"\w+", name) or name == RECORD:
        raise ArgumentError(f'name: expected letters, digits and "_" other than "{RECORD}", got {name!r}')
    if name in _FORMATS:
        raise ArgumentError(f'name: an exporter "{name}" is registered already; choose another name')
    _FORMATS[name] = Format(exporter=exporter, file_name=file_name or f"{name}_model.onnx")


def file_name(name: str) -> str:
    """What the file of a format is called behind the prefix."""
    return _FORMATS[name].file_name


def check_formats(names: Iterable[str]) -> None:
    """Check names of formats.

    Raises:
        ArgumentError: one is unknown.
    """
    known = (*_FORMATS, RECORD)
    for name in names:
        if name not in known:
            raise ArgumentError(
                f'formats: "{name}" is unknown.{did_you_mean(str(name), known)} Choose from {", ".join(known)}'
            )


def export_formats(
    formats: Iterable[str],
    float_model: ModelProto,
    bindings: Sequence[LayerBinding],
    factors: Mapping[str, LayerFactors],
    tensors: Mapping[str, TensorFactors] | None = None,
    options: ExportOptions | None = None,
) -> dict[str, Exported]:
    """Export a model in each format, in memory.

    Args:
        formats: Names of registered formats; each is exported once.
        float_model: The float ONNX model, batch norms folded.
        bindings: Which node computes which layer.
        factors: By layer; a bound layer without factors stays float.
        tensors: Factors of the tensors between layers; None when nothing was observed.
        options: How the QDQ file is made.

    Raises:
        ArgumentError: a format is unknown.
        ExportError: the model cannot be exported.
    """
    names = tuple(dict.fromkeys(formats))
    check_formats(names)
    request = ExportRequest(
        model=float_model, bindings=bindings, factors=factors, tensors=tensors, options=options or ExportOptions()
    )
    exported: dict[str, Exported] = {}
    for name in names:
        result = _FORMATS[name].exporter(request)
        exported[name] = ExportedModel(model=result) if isinstance(result, ModelProto) else result
        for note in getattr(exported[name], "notes", ()):
            logger.info("%s: %s", _FORMATS[name].file_name, note)
    return exported


def _export_deploy(request: ExportRequest) -> ExportedModel:
    return ascend_model(request.model, request.bindings, request.factors)


def _export_fake_quant(request: ExportRequest) -> ExportedModel:
    return fake_quant_model(request.model, request.bindings, request.factors)


def _export_qdq(request: ExportRequest) -> ExportedModel:
    return qdq_model(
        request.model,
        request.bindings,
        request.factors,
        tensors=request.tensors,
        placement=request.options.placement,
        target=request.options.target,
    )


register_exporter(name="deploy", exporter=_export_deploy)
register_exporter(name="fake_quant", exporter=_export_fake_quant)
register_exporter(name="qdq", exporter=_export_qdq)
