"""``<prefix>_quant.json``: what became of each layer, and the files of one save. One schema for all front doors.

::

    {
      "version": 2,
      "model": "net",
      "layers": {                                   quantized layers (Caffe: also those with folded layers), in order
        "conv1": {
          "type": "Conv2d",                         the type in configs, or Caffe's layer type
          "kind": "conv",                           a LayerKind; absent for layers of which only the data is quantized
          "quantized": true,
          "original_layers": ["conv1", "bn1"],      the layer and the layers folded into it
          "output": ["relu1"],                      the tensors (blobs) that hold its result in the written models
          "data_bits": [8],                         one number per quantized input
          "weight_bits": 8,                         absent without quantized weights
          "files": {                                by format: the node that computes the layer, and the nodes added
            "qdq": {"node": "conv1", "operator": "Conv", "weight_bits": 7, "inserted": ["conv1.quant"]}
          }
        }
      },
      "skipped": [{"layer": "norm", "reason": "LayerNorm is not quantizable"}],      left float, or not folded
      "config": "source: quant.cfg …",              the config used, in a few lines
      "calibration": {"used": 50, "of": 200, "unit": "pictures", "preparation": "RGB, resized to 224 x 224"},
      "equalized": ["conv1"],                       Caffe: layers whose channels were equalized
      "accelerated": ["dw"],                        Caffe: convolutions replaced by DepthwiseConv
      "files": {                                    every other file of the save, by name
        "net_qdq_model.onnx": {"format": "qdq", "sha256": "…", "size": 1234, "tensors": ["relu_3"],
                               "rescaled": ["conv1"], "skipped": [], "notes": [],
                               "check": {                 measured on the written file; see ``FileCheck``
                                 "batch": "a calibration batch", "output": "scores", "cosine": 0.9997, "sqnr": 34.2,
                                 "simulation_sqnr": 34.5, "verdict": "good", "speed": 1.6,
                                 "costliest": ["conv1 (QLinearConv) 31 %"]}}
      },
      "verdict": {"level": "good", "reasons": ["the output's SQNR is 34.2 dB"], "of": "net_qdq_model.onnx"},
      "proposals": ["equalize=True (--equalize): SQNR 23.9 instead of 15.3 dB …"],   what was tried and would help
      "not_written": {"qdq": "layer … has no ONNX form"},
      "measured": {                                 the latest comparison with the float model; see ``Measurement``
        "of": "net_qdq_model.onnx", "on": "8 batches", "layers": {"conv1": 31.2}, "outputs": {"scores": 34.2},
        "metric": {"name": "top1 accuracy", "float_model": 99.16, "quantized": 98.99}},
      "certificate": {"goal": "a drop of at most 0.5 points", "loss": 0.0031, "bound": 0.0062, …},   see ``Certificate``
      "curve": [{"number": 1, "choices": {"conv1": "int4"}, "cost": 1234, "loss": 0.004, …}],        see ``Point``
      "related": {                                  files written on their own, by what they are; paths from this folder
        "record": {"path": "../record.txt", "sha256": "…"}, "report": {"path": "net_report.html", "sha256": "…"}
      }
    }

``inserted`` names a node once, under the first layer that needed it. A layer that is computed several times has several
outputs; ``node`` is the first of its nodes, the others are named ``conv1@1`` and so on. ``tensors`` are quantized for
all their readers together. ``rescaled`` layers have output channels divided by the balance factors of the next layer,
so their results differ from the float model. Empty entries are left out.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping  # noqa: TC003  pydantic reads the annotations
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import TypeAdapter, ValidationError

from amct.atomic import is_file, modify, read_bytes
from amct.errors import FileError, ParseError
from amct.model.calibration_data import CalibrationData  # noqa: TC001  pydantic reads the annotations
from amct.model.certificate import (
    Certificate,  # noqa: TC001  pydantic reads the annotations
    Point,  # noqa: TC001  pydantic reads the annotations
)
from amct.model.kinds import (
    LayerKind,  # noqa: TC001  pydantic reads the annotations
    Skip,  # noqa: TC001  pydantic reads the annotations
)
from amct.model.verdict import HANDED_IN, Closed, Level, Verdict, worst_of
from amct.numerics.similarity import BoxComparison  # noqa: TC001  pydantic reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from amct.atomic import FileGroup

logger = logging.getLogger(__name__)

VERSION: Final = 2
QUANT_JSON = "quant.json"
_MODEL_NAME = re.compile(r"(?P<prefix>.*?)(?:fake_quant|[^_]+)_model\.(?:onnx|prototxt)")


@dataclass(frozen=True, kw_only=True)
class LayerInFile(Closed):
    """A layer in one format: the node that computes it, and the nodes that were added for it."""

    node: str
    operator: str
    weight_bits: int | None = None
    inserted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerEntry(Closed):
    """One layer; the fields are described above."""

    type: str
    kind: LayerKind | None = None
    quantized: bool
    original_layers: tuple[str, ...]
    output: tuple[str, ...] = ()
    data_bits: tuple[int, ...] = ()
    weight_bits: int | None = None
    files: Mapping[str, LayerInFile] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileCheck(Closed):
    """What was measured when a written file was run and compared with the float model.

    Attributes:
        batch: The inputs it was run on.
        output: The compared output; of several, the one with the lowest SQNR.
        cosine: The cosine similarity of this output in the float model and in the file.
        sqnr: Its signal-to-quantization-noise ratio in dB; absent, with a cosine, if both are equal.
        boxes: For outputs of a detector: which boxes of the float model the file finds again.
        simulation_sqnr: The SQNR of the simulation on the same inputs.
        handed_in_sqnr: After training: the SQNR to the outputs of the float model that was handed in, which the verdict
            rests on; the others are those to the trained weights without quantizers.
        verdict: The judgement of this output; None for random inputs, which say nothing about accuracy.
        likely_loss: Decibels by which it may be lower than that of the simulation on data like these inputs.
        speed: The time of the float ONNX file divided by that of this file, in onnxruntime on the machine of the save.
        costliest: The nodes of the file that take most time, with their share.
        differs_at: If the file is worse than the simulation: the first tensor that is.
        left_float: Tensors that are not quantized here, because the file would be worse than the simulation.
        not_checked: Why the file was not run or not compared.
    """

    batch: str = ""
    output: str = ""
    cosine: float | None = None
    sqnr: float | None = None
    boxes: tuple[BoxComparison, ...] = ()
    simulation_sqnr: float | None = None
    handed_in_sqnr: float | None = None
    verdict: Level | None = None
    likely_loss: float | None = None
    speed: float | None = None
    costliest: tuple[str, ...] = ()
    differs_at: str = ""
    left_float: tuple[str, ...] = ()
    not_checked: str = ""

    @property
    def judged(self) -> str:
        """What the verdict rests on."""
        found = [str(each) for each in self.boxes]
        if self.handed_in_sqnr is not None:
            found.append(f"the output's SQNR to {HANDED_IN} is {self.handed_in_sqnr:.1f} dB")
        elif self.cosine is not None:
            found.append("the outputs are equal" if self.sqnr is None else f"the output's SQNR is {self.sqnr:.1f} dB")
        return "; ".join(found) or self.not_checked

    def text(self) -> str:
        """The numbers on one line: ``Good  cosine 0.9997  SQNR 34.2 dB  1.6x float``."""
        parts = [str(each) for each in self.boxes]
        if self.cosine is not None:
            sqnr = "no error" if self.sqnr is None else f"SQNR {self.sqnr:.1f} dB"
            parts += [f"cosine {self.cosine:.4f}", sqnr]
            parts += [] if self.handed_in_sqnr is None else [f"{self.handed_in_sqnr:.1f} dB to {HANDED_IN}"]
        elif not parts:
            parts = [f"not checked: {self.not_checked}"] if self.not_checked else ["runs"]
        if self.verdict is not None:
            parts.insert(0, self.verdict.capitalize())
        if self.speed is not None:
            parts.append(f"{self.speed:.1f}x float")
        return "  ".join(parts)


@dataclass(frozen=True, kw_only=True)
class FileEntry(Closed):
    """One written file; ``sha256`` and ``size`` are filled in by ``write_quant_json``."""

    format: str
    sha256: str = ""
    size: int = 0
    tensors: tuple[str, ...] = ()
    rescaled: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()
    notes: tuple[str, ...] = ()
    check: FileCheck | None = None


@dataclass(frozen=True, kw_only=True)
class MetricValues(Closed):
    """A metric of the float and of the quantized model."""

    name: str
    float_model: float
    quantized: float


@dataclass(frozen=True, kw_only=True)
class Measurement(Closed):
    """The quantized model compared with the float model, for ``amct report --compare``.

    Attributes:
        of: What the layers were measured of: the name of a file, or the simulation.
        on: The data.
        layers: The SQNR of each layer in dB; None if it has no error.
        outputs: The same for the outputs.
        boxes: For outputs of a detector: which boxes of the float model are found again.
        metric: The metric, if one was given.
    """

    of: str
    on: str
    layers: Mapping[str, float | None]
    outputs: Mapping[str, float | None] = field(default_factory=dict)
    boxes: tuple[BoxComparison, ...] = ()
    metric: MetricValues | None = None


@dataclass(frozen=True, kw_only=True)
class RelatedFile(Closed):
    """A file that is not part of the save: the record that was read, or the report on the saved files."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class QuantJson(Closed):
    """The content of the file; the fields are described above."""

    version: Literal[2]
    model: str
    layers: Mapping[str, LayerEntry]
    skipped: tuple[Skip, ...]
    files: Mapping[str, FileEntry]
    config: str = ""
    calibration: CalibrationData | None = None
    equalized: tuple[str, ...] = ()
    accelerated: tuple[str, ...] = ()
    not_written: Mapping[str, str] = field(default_factory=dict)
    related: Mapping[str, RelatedFile] = field(default_factory=dict)
    verdict: Verdict | None = None
    proposals: tuple[str, ...] = ()
    measured: Measurement | None = None
    certificate: Certificate | None = None
    curve: tuple[Point, ...] = ()

    @property
    def folded(self) -> dict[str, tuple[str, ...]]:
        """By layer: the layers of the original model that were folded into it."""
        pairs = ((name, entry.original_layers[1:]) for name, entry in self.layers.items())
        return {name: absorbed for name, absorbed in pairs if absorbed}

    def weight_bits(self, file_name: str) -> dict[str, int]:
        """The bits of each layer's weights in one of the files."""
        entry = self.files.get(file_name)
        found = {name: layer.files.get(entry.format if entry else "") for name, layer in self.layers.items()}
        return {name: each.weight_bits for name, each in found.items() if each and each.weight_bits}


def verdict_of_files(checks: Mapping[str, FileCheck | None]) -> Verdict | None:
    """The judgement of a save: that of its worst file; None if no file could be compared with the float model."""
    known = ((name, check) for name, check in checks.items() if check is not None)
    noisiest_first = sorted(known, key=lambda each: math.inf if each[1].sqnr is None else each[1].sqnr)
    return worst_of(
        Verdict(level=check.verdict, reasons=(check.judged,), of=name)
        for name, check in noisiest_first
        if check.verdict is not None
    )


_ADAPTER = TypeAdapter(QuantJson)


def quant_json_text(document: QuantJson) -> str:
    """The text of the file."""
    return _ADAPTER.dump_json(document, indent=2, exclude_defaults=True).decode() + "\n"


def write_quant_json(group: FileGroup, path: Path, document: QuantJson) -> None:
    """Write the file as the last one of a group: all other files of the group are listed with size and SHA-256.

    ``document.files`` describes files of the group by name; files without a description have their suffix as format.
    """
    files = {}
    for target, temporary in group.written().items():
        entry = document.files.get(target.name) or FileEntry(format=target.suffix.lstrip("."))
        files[target.name] = replace(entry, sha256=_sha256(temporary), size=temporary.stat().st_size)
    written = {target.resolve() for target in group.written()}
    # A file that was read and is replaced by this save is part of it.
    related = {role: file for role, file in document.related.items() if _place(path, file) not in written}
    group.write_text(path, quant_json_text(replace(document, files=files, related=related)))


def _place(path: Path, related: RelatedFile) -> Path:
    return (path.parent / related.path).resolve()


def related_file(file: Path, folder: Path) -> RelatedFile:
    """The entry of a file for the quant.json of a folder.

    Raises:
        FileError: it cannot be read.
    """
    # Resolved, because ".." behind a link is another folder than the text suggests.
    path = os.path.relpath(file.parent.resolve() / file.name, folder.resolve())
    return RelatedFile(path=path, sha256=hashlib.sha256(read_bytes(file)).hexdigest())


def add_related(path: Path, role: str, file: Path) -> None:
    """Add a file that was written after the save to a quant.json.

    Raises:
        FileError, ParseError: quant.json cannot be read or written, or the file cannot be read.
    """
    entry = related_file(file, path.parent)
    _change(path, lambda document: replace(document, related={**document.related, role: entry}))


def documents_among(files: Iterable[Path]) -> dict[Path, QuantJson]:
    """Every quant.json among the files of a save, by its path.

    Raises:
        FileError, ParseError: One cannot be read.
    """
    return {file: read_quant_json(file) for file in files if file.name.endswith(QUANT_JSON) and file.is_file()}


def integer_tensors(files: Iterable[Path]) -> frozenset[str]:
    """The tensors between layers that the QDQ file of a save quantizes, from its quant.json."""
    entries = (entry for document in documents_among(files).values() for entry in document.files.values())
    return frozenset(tensor for entry in entries for tensor in entry.tensors)


def add_measurement(path: Path, measured: Measurement, verdict: Verdict | None) -> None:
    """Put a comparison that was made after the save into a quant.json, and its judgement, if there is one.

    Raises:
        FileError, ParseError: quant.json cannot be read or written.
    """
    _change(path, lambda document: replace(document, measured=measured, verdict=verdict or document.verdict))


def add_search(path: Path, certificate: Certificate | None, curve: tuple[Point, ...]) -> None:
    """Put what a search for settings found into a quant.json.

    Raises:
        FileError, ParseError: quant.json cannot be read or written.
    """
    _change(path, lambda document: replace(document, certificate=certificate, curve=curve))


def _change(path: Path, change: Callable[[QuantJson], QuantJson]) -> None:
    modify(path, lambda content: quant_json_text(change(_parsed(content or b"", path))).encode())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FileError(f'"{path}" cannot be read: {error.strerror or error}') from error
    return digest.hexdigest()


def read_quant_json(path: Path) -> QuantJson:
    """Read the file and check that the files beside it are those of the same save.

    Raises:
        FileError: it cannot be read, or a file beside it is of another save.
        ParseError: it has another shape or version; names the place.
    """
    document = _parsed(read_bytes(path), path)
    check_group(path, document)
    return document


def _parsed(content: bytes, path: Path) -> QuantJson:
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ParseError(
            f"{path}: expected what quantization wrote beside the model (version {VERSION}), got at {place}: "
            f"{first['msg']}; quantize and save the model again"
        ) from error


def check_group(path: Path, document: QuantJson) -> None:
    """Compare the files beside a quant.json with the SHA-256 that it lists; files that are missing are not checked.

    A related file in the same folder that has changed causes a warning. A path that leads out of the folder is not
    followed, because quant.json may come from elsewhere.

    Raises:
        FileError: a file differs, or cannot be read.
        ParseError: a file name is a path.
    """
    for name, entry in document.files.items():
        if Path(name).name != name or name in ("", ".."):
            raise ParseError(f'{path}: files: expected names of files in its folder, got "{name}"')
        file = path.with_name(name)
        if is_file(file) and entry.sha256 != _sha256(file):
            raise FileError(
                f'"{file}" is not the file that "{path.name}" was written with: a save was interrupted or the file was '
                "replaced; quantize and save the model again"
            )
    for role, related in document.related.items():
        file = path.parent / related.path
        if Path(related.path).name == related.path and is_file(file) and related.sha256 != _sha256(file):
            logger.warning('the %s "%s" has changed since "%s" was written', role, file, path.name)


def file_beside(model_file: Path, name: str) -> Path:
    """Another file of the same save: ``<prefix>_<name>`` beside ``<prefix>_<format>_model.onnx`` (or .prototxt)."""
    found = _MODEL_NAME.fullmatch(model_file.name)
    return model_file.with_name(f"{found['prefix'] if found else ''}{name}")


def notes_beside(model_file: Path) -> QuantJson:
    """The quant.json beside a model; without one an empty document, whose config says so.

    Raises:
        FileError, ParseError: as ``read_quant_json``.
    """
    path = file_beside(model_file, QUANT_JSON)
    if path.is_file():
        return read_quant_json(path)
    config = f"not known: there is no {path.name} beside the model"
    return QuantJson(version=VERSION, model="", layers={}, skipped=(), files={}, config=config)
