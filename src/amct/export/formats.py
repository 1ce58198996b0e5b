"""The registry of export formats: ``qdq``, ``deploy``, ``fake_quant`` and user-registered ones.

An exporter is a function of an ``ExportRequest`` that returns an ONNX model, an ``ExportedModel`` (a model with a
report) or the bytes of any other file. ``save(formats=…)`` and ``amct quantize --formats`` offer every format. The
exporters are imported when they run, so that the names of formats can be checked at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from amct.errors import ArgumentError, did_you_mean
from amct.export.exported import ExportedModel
from amct.export.onnx.kept_weights import KeptWeights, with_values
from amct.export.options import ExportOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from onnx import ModelProto

    from amct.export.binding import LayerBinding, LayerFactors, TensorFactors

logger = logging.getLogger(__name__)

RECORD = "record"
"""The name under which ``save`` accepts the factors among the formats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportRequest:
    """The input of an exporter.

    Attributes:
        model: The float ONNX model, batch norms folded; exporters must not change it.
        bindings: The node of each quantized layer.
        factors: The quantization factors of each layer.
        tensors: Factors of the tensors between layers, by ONNX name; None if nothing was observed.
        options: The user's options.
        kept: Takes the large weights of the exported model; None: they are in its message.
    """

    model: ModelProto
    bindings: Sequence[LayerBinding]
    factors: Mapping[str, LayerFactors]
    tensors: Mapping[str, TensorFactors] | None = None
    options: ExportOptions = field(default_factory=ExportOptions)
    kept: KeptWeights | None = None


Exported = ExportedModel | bytes
Exporter = Callable[[ExportRequest], "ModelProto | ExportedModel | bytes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A registered format; its file is ``<prefix>_<file_name>``.

    Attributes:
        exporter: Exports a model.
        file_name: The file name after the prefix.
        is_own: Whether the exporter is one of this package, which reads weights beside the model.
    """

    exporter: Exporter
    file_name: str
    is_own: bool = False


_FORMATS: dict[str, Format] = {}


def register_exporter(*, name: str, exporter: Exporter, file_name: str | None = None) -> None:
    """Register a format.

    Args:
        name: The name for ``save(formats=…)``: letters, digits and "_".
        exporter: Called with an ``ExportRequest``; returns an ONNX ModelProto, an ``ExportedModel`` or bytes.
        file_name: The file name after the prefix; by default ``<name>_model.onnx``.

    Raises:
        ArgumentError: the name is taken or invalid.
    """
    if not re.fullmatch(r"\w+", name) or name == RECORD:
        raise ArgumentError(f'name: expected letters, digits and "_" other than "{RECORD}", got {name!r}')
    if name in _FORMATS:
        raise ArgumentError(f'name: an exporter "{name}" is registered already; choose another name')
    _FORMATS[name] = Format(exporter=exporter, file_name=file_name or f"{name}_model.onnx")


def file_name(name: str) -> str:
    """The file name of a format, after the prefix."""
    return _FORMATS[name].file_name


def check_formats(names: Iterable[str]) -> None:
    """Check the names of formats.

    Raises:
        ArgumentError: a name is unknown.
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
    *,
    keep_weights: bool = False,
) -> dict[str, Exported]:
    """Export a model in each format, in memory.

    Args:
        formats: Names of registered formats; each is exported once.
        float_model: The float ONNX model, batch norms folded.
        bindings: The node of each layer.
        factors: By layer; a bound layer without factors stays float.
        tensors: Factors of the tensors between layers; None if nothing was observed.
        options: Options of the QDQ file.
        keep_weights: Whether exported models may refer to their large weights (``kept_weights.py``).

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
        if _FORMATS[name].is_own:
            request = replace(request, kept=KeptWeights() if keep_weights else None)
        else:
            request = replace(request, model=with_values(float_model), kept=None)
        result = _FORMATS[name].exporter(request)
        exported[name] = result if isinstance(result, ExportedModel | bytes) else ExportedModel(model=result)
        for note in getattr(exported[name], "notes", ()):
            logger.info("%s: %s", _FORMATS[name].file_name, note)
    return exported


def _export_deploy(request: ExportRequest) -> ExportedModel:
    from amct.export.ascend import ascend_model

    return ascend_model(request.model, request.bindings, request.factors, kept=request.kept)


def _export_fake_quant(request: ExportRequest) -> ExportedModel:
    from amct.export.fake_quant import fake_quant_model

    return fake_quant_model(request.model, request.bindings, request.factors, kept=request.kept)


def _export_qdq(request: ExportRequest) -> ExportedModel:
    from amct.export.qdq.exporter import qdq_model

    return qdq_model(
        request.model,
        request.bindings,
        request.factors,
        tensors=request.tensors,
        placement=request.options.placement,
        target=request.options.target,
        float_tensors=request.options.float_tensors,
        kept=request.kept,
    )


for _name, _exporter in (("deploy", _export_deploy), ("fake_quant", _export_fake_quant), ("qdq", _export_qdq)):
    _FORMATS[_name] = Format(exporter=_exporter, file_name=f"{_name}_model.onnx", is_own=True)
