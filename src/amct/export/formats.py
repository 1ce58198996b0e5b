"""The export formats ``qdq``, ``deploy``, ``fake_quant`` and user-registered ones: what an exporter gets and returns.

An exporter is a function of an ``ExportRequest`` that returns an ONNX model, an ``ExportedModel`` (a model with a
report), the bytes of any other file, or ``ExportedFiles`` (several such files). ``save(formats=…)`` and
``amct quantize --formats`` offer every format. The exporters are imported when they run, so that the names of formats
can be checked at once.

ONNX files that can be compared with the float model store in their metadata which tensor holds the output of each layer
(``amct.layer_outputs``) and which layers have rescaled outputs (``amct.rescaled``), both as JSON.

=====================================  =================================================================================
``save_path`` "out/net"                out/net_deploy_model.onnx, out/net_fake_quant_model.onnx,
                                       out/net_qdq_model.onnx, out/net_quant.json, out/net_record.txt
"out/" or ""                           out/deploy_model.onnx, …; deploy_model.onnx, … in the current folder
a model of 2 000 000 000 bytes or      its largest tensors in files of their own, ``<tensor>_deploy.external``,
more                                   ``<tensor>_fakequant.external``, ``<tensor>_qdq.external``
=====================================  =================================================================================
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto

from amct.arguments import LONGEST_NAME
from amct.atomic import FileGroup
from amct.errors import ArgumentError, ExportError, did_you_mean
from amct.export.onnx.kept_weights import (
    KeptWeights,
    initializer_bytes,
    model_parts,
    tensor_array,
    with_values,
    without_initializers,
)
from amct.export.request import FLOAT, RECORD, ExportOptions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from amct.export.onnx.layer_lookup import LayerBinding
    from amct.export.request import SavePath
    from amct.model import Skip
    from amct.model.kinds import LayerKind
    from amct.numerics.qparams import LayerQParams, Observed

logger = logging.getLogger(__name__)

LAYER_OUTPUTS, RESCALED = "amct.layer_outputs", "amct.rescaled"


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The changes that an exporter made to one node of a layer."""

    layer: str
    node: str
    type: str
    kind: LayerKind
    operator: str
    """The ONNX operator that computes the layer in the exported file."""
    output: str
    """The tensor that holds the layer's output in the float model."""
    activation_bits: int
    weight_bits: int | None
    inserted: tuple[str, ...]
    """Names of the nodes added for the layer."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an exporter did: all that is kept of an exported file once it is written."""

    layers: tuple[LayerReport, ...] = ()
    skipped: tuple[Skip, ...] = ()
    tensors: tuple[str, ...] = ()
    """Tensors quantized in addition to, or instead of, the inputs of single layers (QDQ, placement ``fast``)."""
    rescaled: tuple[str, ...] = ()
    """Layers whose output channels are divided by the balance factors of the next layer (QDQ, placement ``fast``)."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: a type that the opset lacks, a rounding that was replaced."""

    @property
    def report(self) -> ExportReport:
        """The report alone."""
        return ExportReport(**{each.name: getattr(self, each.name) for each in fields(ExportReport)})


@dataclass(frozen=True, kw_only=True)
class ExportedModel(ExportReport):
    """An exported ONNX model with a report."""

    model: ModelProto
    kept: KeptWeights | None = None
    """The weights to which the model refers; they exist as long as this object."""


@dataclass(frozen=True, kw_only=True)
class ExportedFiles(ExportReport):
    """Exported files that are no ONNX model, such as the prototxt and the caffemodel of a Caffe net."""

    files: Mapping[str, Sequence[bytes | memoryview]]
    """By the file name behind the prefix: the content in parts, which are written one after the other."""


Exported = ExportedModel | ExportedFiles


def write_metadata(
    model: ModelProto, *, outputs: Mapping[str, str] | None = None, rescaled: Iterable[str] = ()
) -> None:
    """Store in a model's metadata which tensor holds the output of each layer, and which layers are rescaled."""
    for key, value in ((LAYER_OUTPUTS, outputs), (RESCALED, list(rescaled))):
        if value:
            model.metadata_props.add(key=key, value=json.dumps(value))


def layer_outputs(model: ModelProto) -> dict[str, str]:
    """By layer: the tensor with its output, if its name differs from that in the float model."""
    found = _metadata(model, LAYER_OUTPUTS)
    return {str(layer): str(tensor) for layer, tensor in found.items()} if isinstance(found, dict) else {}


def rescaled_layers(model: ModelProto) -> frozenset[str]:
    """The layers whose outputs differ from the float model by the balance factors of the next layer."""
    found = _metadata(model, RESCALED)
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()


def _metadata(model: ModelProto, key: str) -> object:
    text = next((entry.value for entry in model.metadata_props if entry.key == key), "null")
    try:
        return json.loads(text)
    except ValueError:  # metadata of another tool: tensors are compared by name
        return None


# -- the registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportRequest:
    """The input of an exporter.

    Attributes:
        model: The float ONNX model, batch norms folded; exporters must not change it.
        bindings: The node of each quantized layer.
        qparams: The quantization parameters of each layer.
        tensors: Those of the tensors between layers, by ONNX name; None if nothing was observed.
        options: The user's options.
        kept: Takes the large weights of the exported model; None: they are in its message.
    """

    model: ModelProto
    bindings: Sequence[LayerBinding]
    qparams: Mapping[str, LayerQParams]
    tensors: Mapping[str, Observed] | None = None
    options: ExportOptions = field(default_factory=ExportOptions)
    kept: KeptWeights | None = None

    @property
    def factors(self) -> Mapping[str, LayerQParams]:
        """``qparams`` by the name that exporters of other packages may know."""
        return self.qparams


Exporter = Callable[[ExportRequest], "ModelProto | Exported | bytes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A registered format; its file is ``<prefix>_<file_name>``.

    Attributes:
        exporter: Exports a model.
        file_name: The file name after the prefix.
        is_own: Whether the exporter is one of this package, which reads weights beside the model.
        is_choice: Whether a user can ask for it by name.
    """

    exporter: Exporter
    file_name: str
    is_own: bool = False
    is_choice: bool = True


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
    known = (*(name for name, format_ in _FORMATS.items() if format_.is_choice), RECORD)
    for name in names:
        if name not in known:
            raise ArgumentError(
                f'formats: "{name}" is unknown.{did_you_mean(str(name), known)} Choose from {", ".join(known)}'
            )


def export(name: str, request: ExportRequest, *, keep_weights: bool = False) -> Exported:
    """Export a model in one format, in memory.

    Args:
        name: The name of a registered format.
        request: The model and its quantization parameters.
        keep_weights: Whether the exported model may refer to its large weights (``kept_weights.py``).

    Raises:
        ArgumentError: the format is unknown.
        ExportError: the model cannot be exported.
    """
    if name != FLOAT:
        check_formats([name])
    chosen = _FORMATS[name]
    if chosen.is_own:
        request = replace(request, kept=KeptWeights() if keep_weights else None)
    else:
        request = replace(request, model=with_values(request.model), kept=None)
    result = chosen.exporter(request)
    if isinstance(result, bytes):
        return ExportedFiles(files={chosen.file_name: [result]})
    exported = result if isinstance(result, ExportedModel | ExportedFiles) else ExportedModel(model=result)
    for note in exported.notes:
        logger.info("%s: %s", chosen.file_name, note)
    return exported


def _export_deploy(request: ExportRequest) -> ExportedModel:
    from amct.export.deploy import ascend_model

    return ascend_model(request.model, request.bindings, request.qparams, kept=request.kept)


def _export_fake_quant(request: ExportRequest) -> ExportedModel:
    from amct.export.deploy import fake_quant_model

    return fake_quant_model(request.model, request.bindings, request.qparams, kept=request.kept)


def _export_qdq(request: ExportRequest) -> ExportedModel:
    from amct.export.qdq.exporter import qdq_model

    return qdq_model(
        request.model,
        request.bindings,
        request.qparams,
        tensors=request.tensors,
        placement=request.options.placement,
        target=request.options.target,
        float_tensors=request.options.float_tensors,
        kept=request.kept,
    )


for _name, _exporter in (("deploy", _export_deploy), ("fake_quant", _export_fake_quant), ("qdq", _export_qdq)):
    _FORMATS[_name] = Format(exporter=_exporter, file_name=f"{_name}_model.onnx", is_own=True)
_FORMATS[FLOAT] = Format(exporter=_export_fake_quant, file_name=f"{FLOAT}_model.onnx", is_own=True, is_choice=False)


# -- their files -------------------------------------------------------------------------------------------------------


EXTERNAL_THRESHOLD = 2_000_000_000
"""A serialized model of at least this size is split; protobuf's own limit is 2^31 bytes."""
_NAMES_SHOWN = 3


def save_model(
    path: Path, model: ModelProto, *, external_suffix: str = ".external", external_threshold: int | None = None
) -> list[Path]:
    """Write one model and, if it is large, the files of its tensors; returns their paths.

    Args:
        path: the path of the model.
        model: the model; it is not changed.
        external_suffix: the end of the names of the files of tensors.
        external_threshold: the serialized size from which there are such files; None: that of all saves.

    Raises:
        ExportError: it cannot be made small enough.
        FileError: a file cannot be written; none was.
    """
    with FileGroup() as group:
        written = _write_model(group, path, model, external_suffix, external_threshold or EXTERNAL_THRESHOLD)
        warn_of_replaced(group.written())
    return written


def add_exported(group: FileGroup, where: SavePath, name: str, exported: Exported) -> list[Path]:
    """Write what an exporter made in one format as part of a group; returns the paths of its files.

    Raises:
        ExportError: a model cannot be made small enough.
    """
    if isinstance(exported, ExportedModel):
        file = file_name(name)
        suffix = f"_{Path(file).stem.removesuffix('_model').replace('_', '')}.external"
        return _write_model(group, where.file(file), exported.model, suffix, EXTERNAL_THRESHOLD)
    for file, parts in exported.files.items():
        with group.open(where.file(file)) as stream:
            stream.writelines(parts)
    return [where.file(file) for file in exported.files]


def _write_model(group: FileGroup, path: Path, model: ModelProto, suffix: str, threshold: int) -> list[Path]:
    bare = without_initializers(model).ByteSize()
    rest = bare + sum(initializer_bytes(tensor) for tensor in model.graph.initializer)
    moved: dict[int, str] = {}
    sizes = enumerate(model.graph.initializer) if rest >= threshold else ()
    for size, index in sorted(((_data_size(tensor), index) for index, tensor in sizes), reverse=True):
        if rest < threshold:
            break
        tensor = model.graph.initializer[index]
        moved[index] = _external_name(tensor.name, suffix, moved.values())
        rest -= size
    if rest >= threshold:
        raise ExportError(
            f'"{path}": {rest} bytes remain besides the tensors that can be stored apart; the limit is {threshold}'
        )
    with group.open(path) as stream:
        for part in model_parts(_with_external(model, moved)):
            stream.write(part)
    for index, name in moved.items():
        with group.open(path.parent / name) as stream:
            stream.write(_raw_bytes(model.graph.initializer[index]))
    return [path, *(path.parent / name for name in moved.values())]


def _with_external(model: ModelProto, moved: Mapping[int, str]) -> ModelProto:
    """The model with some tensors replaced by references to files; the model itself if there are none."""
    if not moved:
        return model
    slim = without_initializers(model)
    for index, tensor in enumerate(model.graph.initializer):
        kept = slim.graph.initializer.add()
        if index not in moved:
            kept.CopyFrom(tensor)
            continue
        kept.name, kept.data_type = tensor.name, tensor.data_type
        kept.dims.extend(tensor.dims)
        kept.data_location = TensorProto.EXTERNAL
        for key, value in (("location", moved[index]), ("offset", "0"), ("length", str(_data_size(tensor)))):
            kept.external_data.add(key=key, value=value)
    return slim


def _data_size(tensor: TensorProto) -> int:
    return len(tensor.raw_data) if tensor.HasField("raw_data") else int(tensor_array(tensor).nbytes)


def _raw_bytes(tensor: TensorProto) -> bytes | memoryview:
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    array = np.asarray(tensor_array(tensor), order="C")
    return array.reshape(-1).data.cast("B") if array.size else b""


def _external_name(tensor: str, suffix: str, taken: Collection[str]) -> str:
    """A unique file name for a tensor; characters that file systems do not allow become "_"."""
    base = re.sub(r"[^\w.\-]", "_", tensor).lstrip(".")[: LONGEST_NAME - len(suffix) - 8] or "tensor"
    name, number = f"{base}{suffix}", 1
    while name in taken:
        name, number = f"{base}_{number}{suffix}", number + 1
    return name


def warn_of_replaced(paths: Iterable[Path]) -> None:
    """Log one line that names the first few of the files that exist already."""
    existing = [path for path in paths if path.exists()]
    if not existing:
        return
    names = ", ".join(path.name for path in existing[:_NAMES_SHOWN])
    more = f" and {len(existing) - _NAMES_SHOWN} more" if len(existing) > _NAMES_SHOWN else ""
    verb = "exists and is replaced" if len(existing) == 1 else "exist and are replaced"
    logger.warning("%s: %s%s %s", existing[0].parent, names, more, verb)
