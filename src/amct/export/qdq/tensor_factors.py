"""``<record>.qdq.json``: factors of the tensors between layers, which the record cannot hold.

::

    {"version": 1, "tensors": {"relu_3": {"scale": 0.0187, "zero_point": -128, "bits": 8}}}

Names are those of the tensors in the float ONNX model; zero points are signed, as ``offset_d`` in the record. An entry
with ``mean`` (per channel) is the input of a layer: its factors are in the record, unless it has ``balance`` (a factor
per channel), by which linear layers first divide it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from amct.atomic import read_bytes
from amct.errors import AmctError, ParseError
from amct.export.binding import TensorFactors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from amct.numerics.observer import ActivationFactors


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    scale: float
    zero_point: int
    bits: int = 8
    balance: list[float] | None = None
    mean: list[float] | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    tensors: dict[str, _Entry]


def tensor_factors_path(record: str | os.PathLike[str]) -> Path:
    """The path of the factors of the tensors between layers: ``<record>.qdq.json``."""
    return Path(f"{os.fspath(record)}.qdq.json")


def observed_factors(found: Mapping[str, ActivationFactors]) -> dict[str, TensorFactors]:
    """Convert the results of observers of tensors between layers to the form for exporters."""
    return {
        name: TensorFactors(
            scale=float(factors.scale),
            zero_point=int(factors.offset),
            bits=factors.bits,
            balance=_as_tuple(factors.balance),
            mean=_as_tuple(factors.mean),
        )
        for name, factors in found.items()
    }


def _as_tuple(values: Tensor | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(f"{value:.6g}") for value in values.tolist())


def tensor_factors_text(tensors: Mapping[str, TensorFactors]) -> str:
    """The content of the file; scales keep the exact float32 value."""
    lines = []
    for name, factors in sorted(tensors.items()):
        entry = {key: value for key, value in asdict(replace(factors, layer=None)).items() if value is not None}
        lines.append(f"    {json.dumps(name)}: {json.dumps(entry)}")
    return '{\n  "version": 1,\n  "tensors": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def read_tensor_factors(path: str | os.PathLike[str]) -> dict[str, TensorFactors]:
    """Read the file.

    Raises:
        FileError: it does not exist or cannot be read.
        ParseError: it has another format; the message names the entry.
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
        balance = None if entry.balance is None else tuple(entry.balance)
        mean = None if entry.mean is None else tuple(entry.mean)
        return TensorFactors(
            scale=entry.scale, zero_point=entry.zero_point, bits=entry.bits, balance=balance, mean=mean
        )
    except AmctError as error:
        raise ParseError(f'"{os.fspath(path)}": tensor "{name}": {error}') from error
