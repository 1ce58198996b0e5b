"""``<record>.qdq.json``: factors of the tensors between layers, which the record itself has no place for.

::

    {"version": 1, "tensors": {"relu_3": {"scale": 0.0187, "zero_point": -128, "bits": 8}}}

Names are those of the tensors in the float ONNX model; zero points are signed, as ``offset_d`` in the record.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from amct.atomic import read_bytes
from amct.errors import AmctError, ParseError
from amct.export.binding import TensorFactors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.numerics.observer import ActivationFactors


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    scale: float
    zero_point: int
    bits: int = 8


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    tensors: dict[str, _Entry]


def tensor_factors_path(record: str | os.PathLike[str]) -> Path:
    """Where the factors of the tensors between layers are kept: ``<record>.qdq.json``."""
    return Path(f"{os.fspath(record)}.qdq.json")


def observed_factors(found: Mapping[str, ActivationFactors]) -> dict[str, TensorFactors]:
    """What observers of tensors between layers found, as the exporter wants it."""
    return {
        name: TensorFactors(scale=float(factors.scale), zero_point=int(factors.offset), bits=factors.bits)
        for name, factors in found.items()
    }


def tensor_factors_text(tensors: Mapping[str, TensorFactors]) -> str:
    """The content of the file; scales are written so that the same float32 is read back."""
    entries = {
        name: {"scale": factors.scale, "zero_point": factors.zero_point, "bits": factors.bits}
        for name, factors in sorted(tensors.items())
    }
    return json.dumps({"version": 1, "tensors": entries}, indent=2) + "\n"


def read_tensor_factors(path: str | os.PathLike[str]) -> dict[str, TensorFactors]:
    """Read the file.

    Raises:
        FileError: it does not exist or cannot be read.
        ParseError: it is not what this module writes; names the entry.
    """
    content = read_bytes(path)
    try:
        document = _Document.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ParseError(
            f'"{os.fspath(path)}" is not a file of tensor factors: {place}: {first["msg"]}; '
            "calibrate again, or remove it to export without it"
        ) from error
    return {name: _checked(path, name, entry) for name, entry in document.tensors.items()}


def _checked(path: str | os.PathLike[str], name: str, entry: _Entry) -> TensorFactors:
    try:
        return TensorFactors(scale=entry.scale, zero_point=entry.zero_point, bits=entry.bits)
    except AmctError as error:
        raise ParseError(f'"{os.fspath(path)}": tensor "{name}": {error}') from error
