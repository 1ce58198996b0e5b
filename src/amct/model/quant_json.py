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
      "equalized": ["conv1"],                       Caffe: layers whose channels were equalized
      "accelerated": ["dw"],                        Caffe: convolutions replaced by DepthwiseConv
      "files": {                                    every other file of the save, by name
        "net_qdq_model.onnx": {"format": "qdq", "sha256": "…", "size": 1234, "tensors": ["relu_3"],
                               "rescaled": ["conv1"], "skipped": [], "notes": [], "check": {"sqnr": 31.5}}
      },
      "not_written": {"qdq": "layer … has no ONNX form"}
    }

``inserted`` names a node once, under the first layer that needed it. ``tensors`` are quantized for all their readers
together. ``rescaled`` layers have output channels divided by the balance factors of the next layer, so their results
differ from the float model. ``check`` holds numbers measured on the written file. Empty entries are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping  # noqa: TC003  pydantic reads the annotations
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from amct.atomic import read_bytes
from amct.errors import FileError, ParseError
from amct.model.kinds import LayerKind  # noqa: TC001  pydantic reads the annotations
from amct.model.layers import Skip  # noqa: TC001  pydantic reads the annotations

if TYPE_CHECKING:
    from pathlib import Path

    from amct.atomic import FileGroup

VERSION: Final = 2
QUANT_JSON = "quant.json"
_MODEL_NAME = re.compile(r"(?P<prefix>.*?)(?:fake_quant|[^_]+)_model\.(?:onnx|prototxt)")
_CLOSED = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class LayerInFile:
    """A layer in one format: the node that computes it, and the nodes that were added for it."""

    __pydantic_config__ = _CLOSED
    node: str
    operator: str
    weight_bits: int | None = None
    inserted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """One layer; the fields are described above."""

    __pydantic_config__ = _CLOSED
    type: str
    kind: LayerKind | None = None
    quantized: bool
    original_layers: tuple[str, ...]
    output: tuple[str, ...] = ()
    data_bits: tuple[int, ...] = ()
    weight_bits: int | None = None
    files: Mapping[str, LayerInFile] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One written file; ``sha256`` and ``size`` are filled in by ``write_quant_json``."""

    __pydantic_config__ = _CLOSED
    format: str
    sha256: str = ""
    size: int = 0
    tensors: tuple[str, ...] = ()
    rescaled: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()
    notes: tuple[str, ...] = ()
    check: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class QuantJson:
    """The content of the file; the fields are described above."""

    __pydantic_config__ = _CLOSED
    version: Literal[2]
    model: str
    layers: Mapping[str, LayerEntry]
    skipped: tuple[Skip, ...]
    files: Mapping[str, FileEntry]
    config: str = ""
    equalized: tuple[str, ...] = ()
    accelerated: tuple[str, ...] = ()
    not_written: Mapping[str, str] = field(default_factory=dict)

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
    group.write_text(path, quant_json_text(replace(document, files=files)))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_quant_json(path: Path) -> QuantJson:
    """Read the file and check that the files beside it are those of the same save.

    Raises:
        FileError: it cannot be read, or a file beside it is of another save.
        ParseError: it has another shape or version; names the place.
    """
    try:
        document = _ADAPTER.validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ParseError(
            f"{path}: expected what quantization wrote beside the model (version {VERSION}), got at {place}: "
            f"{first['msg']}; quantize and save the model again"
        ) from error
    check_group(path, document)
    return document


def check_group(path: Path, document: QuantJson) -> None:
    """Compare the files beside a quant.json with the SHA-256 that it lists; files that are missing are not checked.

    Raises:
        FileError: a file differs.
    """
    for name, entry in document.files.items():
        file = path.with_name(name)
        if file.is_file() and entry.sha256 != _sha256(file):
            raise FileError(
                f'"{file}" is not the file that "{path.name}" was written with: a save was interrupted or the file was '
                "replaced; quantize and save the model again"
            )


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
