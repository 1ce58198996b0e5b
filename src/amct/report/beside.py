"""What quantization left beside a model that it wrote: ``<prefix>_quant.json`` and other files of the same prefix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.atomic import read_bytes
from amct.errors import ParseError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QUANT_JSON = "quant.json"
_ENDINGS = tuple(
    f"{kind}_model{ending}" for kind in ("fake_quant", "deploy", "qdq") for ending in (".prototxt", ".onnx")
)


@dataclass(frozen=True, kw_only=True)
class QuantNotes:
    """A ``quant.json``.

    Attributes:
        file: Its name, also if there is none.
        content: What it says; None if there is none.
    """

    file: str
    content: Mapping[str, Any] | None

    @property
    def layers(self) -> Mapping[str, Any]:
        """Its entries of quantized layers, by name."""
        return {} if self.content is None else self.content["layers"]

    def listed(self, key: str) -> list[Mapping[str, Any]]:
        """One of its lists, empty if there is none."""
        return [] if self.content is None else self.content.get(key, [])

    @property
    def config(self) -> str:
        """The config as text, or where it is not told."""
        if self.content is None:
            return f"not known: there is no {self.file} beside the model"
        return str(self.content.get("config", f"not told by {self.file}"))


def file_beside(model_file: Path, name: str) -> Path:
    """The path of another file of the same prefix."""
    ending = next((ending for ending in _ENDINGS if model_file.name.endswith(ending)), None)
    prefix = "" if ending is None else model_file.name.removesuffix(ending)
    return model_file.with_name(f"{prefix}{name}")


def read_notes(model_file: Path) -> QuantNotes:
    """The notes beside a model.

    Raises:
        FileError: the file cannot be read.
        ParseError: it is not what quantization writes.
    """
    path = file_beside(model_file, QUANT_JSON)
    if not path.is_file():
        return QuantNotes(file=path.name, content=None)
    try:
        content = json.loads(read_bytes(path))
        if not all(isinstance(entry, dict) for entry in content["layers"].values()):
            raise TypeError("a layer is no object")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError(f"{path}: expected what quantization wrote beside the model: {error}") from error
    return QuantNotes(file=path.name, content=content)
