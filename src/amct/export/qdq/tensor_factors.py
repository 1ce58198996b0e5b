"""``<record>.qdq.json``: quantization parameters of the tensors between layers, which the record cannot hold.

::

    {"version": 1, "tensors": {"relu_3": {"scale": 0.0187, "zero_point": -128, "bits": 8}}}

Names are those of the tensors in the float ONNX model; zero points are signed, as ``offset_d`` in the record. An entry
with ``mean`` (per channel) is the input of a layer: its parameters are in the record, unless it has ``balance`` (a
factor per channel), by which linear layers first divide it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from amct.atomic import read_bytes
from amct.errors import AmctError, ParseError, RecordValueError
from amct.numerics.qparams import Observed
from amct.record.conversion import data_qparams, positive

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    scale: float
    zero_point: int
    bits: int = 8
    balance: list[float] | None = None
    mean: list[float] | None = None

    @classmethod
    def of(cls, tensor: Observed) -> _Entry:
        """The entry of a tensor; scales keep the exact float32 value, means have six digits."""
        mean = None if tensor.mean is None else [float(f"{value:.6g}") for value in tensor.mean.tolist()]
        balance = None if tensor.balance is None else tensor.balance.tolist()
        return cls(scale=tensor.step, zero_point=tensor.zero_point, bits=tensor.bits, balance=balance, mean=mean)

    def checked(self) -> Observed:
        """The parameters of the tensor.

        Raises:
            RecordValueError: A number is not legal.
        """
        found = data_qparams(self.scale, self.zero_point, self.bits)
        mean = None if self.mean is None else torch.tensor(self.mean, dtype=torch.float32)
        if mean is not None and not bool(torch.isfinite(mean).all()):
            raise RecordValueError("mean: expected finite numbers")
        balance = None if self.balance is None else torch.tensor(positive("balance", self.balance))
        return Observed(scale=found.scale, offset=found.offset, bits=found.bits, balance=balance, mean=mean)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    tensors: dict[str, _Entry]


def tensor_factors_path(record: str | os.PathLike[str]) -> Path:
    """The path of the parameters of the tensors between layers: ``<record>.qdq.json``."""
    return Path(f"{os.fspath(record)}.qdq.json")


def tensor_factors_text(tensors: Mapping[str, Observed]) -> str:
    """The content of the file."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        lines.append(f"    {json.dumps(name)}: {json.dumps(_Entry.of(tensor).model_dump(exclude_none=True))}")
    return '{\n  "version": 1,\n  "tensors": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def read_tensor_factors(path: str | os.PathLike[str]) -> dict[str, Observed]:
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


def _checked(path: str | os.PathLike[str], name: str, entry: _Entry) -> Observed:
    try:
        return entry.checked()
    except AmctError as error:
        raise ParseError(f'"{os.fspath(path)}": tensor "{name}": {error}') from error
