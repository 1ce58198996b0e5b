"""Between files and quantization parameters: the entries of a record in both dialects, and ``<record>.qdq.json``.

The latter has the tensors between layers, which a record cannot hold::

    {"version": 1, "tensors": {"relu_3": {"scale": 0.0187, "zero_point": -128, "bits": 8}}}

Names are those of the tensors in the float ONNX model; zero points are signed, as ``offset_d``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from amct.atomic import read_bytes
from amct.errors import AmctError, ParseError, RecordValueError
from amct.numerics.qparams import LayerQParams, Observed, QParams, float32_tensor
from amct.record.records import CaffeLayerRecord, DataFactors, KvCacheRecord, LayerRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ACTIVATION_BITS = (4, 8, 16)
WEIGHT_BITS = (4, 6, 7, 8)


def layer_qparams(entry: LayerRecord) -> LayerQParams:
    """The parameters of a calibrated layer of the PyTorch dialect.

    Raises:
        RecordValueError: A number is not legal; the message has the name of its field.
    """
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    act_bits, wts_bits = (int(text.removeprefix("INT")) for text in (entry.activation_type, entry.weight_type))
    _check_bits("wts_bits", wts_bits, WEIGHT_BITS)
    hidden = None
    if entry.scale_h is not None and entry.offset_h is not None:
        hidden = data_qparams(entry.scale_h, entry.offset_h, act_bits, names=("scale_h", "offset_h", "act_bits"))
    weights = [("scale_w", entry.scale_w), ("scale_r", entry.scale_r)]
    balance = entry.tensor_balance_factor
    return LayerQParams(
        inputs={0: data_qparams(entry.scale_d, entry.offset_d, act_bits, names=("scale_d", "offset_d", "act_bits"))},
        weights=tuple(QParams.of(positive(name, scales), bits=wts_bits) for name, scales in weights if scales),
        hidden=hidden,
        balance=float32_tensor(positive("balance", balance)) if balance else None,
    )


def layer_record(qparams: LayerQParams) -> LayerRecord:
    """The entry of a layer of the PyTorch dialect; without inputs that of its weights alone."""
    scales = [tuple(each.scale.reshape(-1).tolist()) for each in qparams.weights] or [(1.0,)]
    state = scales[1] if len(scales) > 1 else ()
    data, hidden = qparams.inputs.get(0), qparams.hidden
    return LayerRecord(
        scale_d=None if data is None else data.step,
        offset_d=None if data is None else data.zero_point,
        act_type=None if data is None else f"INT{data.bits}",
        scale_w=scales[0],
        offset_w=(0,) * len(scales[0]),
        wts_type=f"INT{qparams.weight.bits}" if qparams.weights else None,
        scale_h=None if hidden is None else hidden.step,
        offset_h=None if hidden is None else hidden.zero_point,
        scale_r=state,
        offset_r=(0,) * len(state),
        tensor_balance_factor=() if qparams.balance is None else tuple(qparams.balance.tolist()),
    )


def caffe_layer_qparams(entry: CaffeLayerRecord) -> LayerQParams:
    """The parameters of a layer of the Caffe dialect, of a checked record."""
    inputs = {data.index: QParams.of(data.scale or 1.0, data.offset or 0, data.bits) for data in entry.record_d}
    sizes = {data.index: (data.channels, data.height, data.width) for data in entry.record_d}
    return LayerQParams(
        inputs=inputs,
        weights=(QParams.of(entry.scale_w, bits=entry.weight_bits),) if entry.scale_w else (),
        sizes={
            index: (c, h, w) for index, (c, h, w) in sizes.items() if c is not None and h is not None and w is not None
        },
    )


def caffe_layer_record(layer: str, qparams: LayerQParams) -> CaffeLayerRecord:
    """The entry of a layer of the Caffe dialect; without inputs that of its weights alone."""
    scales = [scale for each in qparams.weights for scale in each.scale.reshape(-1).tolist()]
    return CaffeLayerRecord(
        scale_w=tuple(scales),
        offset_w=(0,) * len(scales),
        num_bits_w=qparams.weight.bits if qparams.weights else None,
        object_layer=layer,
        record_d=tuple(data_record(index, each, qparams.sizes.get(index)) for index, each in qparams.inputs.items()),
    )


def data_record(index: int, qparams: QParams, size: Sequence[int] | None = None) -> DataFactors:
    """The entry of one input in the Caffe dialect, with channels, height and width of an image."""
    sizes = {} if size is None else dict(zip(("channels", "height", "width"), size, strict=True))
    return DataFactors(index=index, scale=qparams.step, offset=qparams.zero_point, num_bits=qparams.bits, **sizes)


def kv_cache_record(qparams: QParams) -> KvCacheRecord:
    """The entry of an output for a key/value cache: one pair, or one per element of the last dimension."""
    scale, offset = (numbers.reshape(-1).tolist() for numbers in (qparams.scale, qparams.offset))
    return KvCacheRecord(scale=tuple(scale), offset=tuple(offset))


def data_qparams(
    scale: float, offset: int, bits: int, *, names: tuple[str, str, str] = ("scale", "zero_point", "bits")
) -> QParams:
    """Checked parameters of one tensor.

    Raises:
        RecordValueError: A number is not legal; the message has its name.
    """
    _check_bits(names[2], bits, ACTIVATION_BITS)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    (step,) = positive(names[0], (scale,))
    if not lowest <= offset <= highest:
        raise RecordValueError(f"{names[1]}: expected {lowest}..{highest} for {bits} bits, got {offset}")
    return QParams.of(step, offset, bits)


def positive(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """The float32 nearest to each value.

    Raises:
        RecordValueError: One is not a finite number above 0.
    """
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
        numbers = tuple(np.asarray(values, dtype=np.float32).tolist())
    wrong = [index for index, number in enumerate(numbers) if not 0 < number < float("inf")]
    if wrong:
        raise RecordValueError(
            f"{name}: expected finite numbers above 0, got {numbers[wrong[0]]:g} at index {wrong[0]}"
        )
    return numbers


def _check_bits(name: str, bits: int, legal: Iterable[int]) -> None:
    if bits not in legal:
        raise RecordValueError(f"{name}: expected one of {', '.join(map(str, legal))}, got {bits}")


# -- <record>.qdq.json -------------------------------------------------------------------------------------------------


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
        mean = None if self.mean is None else float32_tensor(self.mean)
        if mean is not None and not bool(mean.isfinite().all()):
            raise RecordValueError("mean: expected finite numbers")
        balance = None if self.balance is None else float32_tensor(positive("balance", self.balance))
        return Observed(scale=found.scale, offset=found.offset, bits=found.bits, balance=balance, mean=mean)


class _TensorsDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    tensors: dict[str, _Entry]


def tensor_qparams_path(record: str | os.PathLike[str]) -> Path:
    """The path of the parameters of the tensors between layers: ``<record>.qdq.json``."""
    return Path(f"{os.fspath(record)}.qdq.json")


def tensor_qparams_text(tensors: Mapping[str, Observed]) -> str:
    """The content of the file."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        lines.append(f"    {json.dumps(name)}: {json.dumps(_Entry.of(tensor).model_dump(exclude_none=True))}")
    return '{\n  "version": 1,\n  "tensors": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def read_tensor_qparams(path: str | os.PathLike[str]) -> dict[str, Observed]:
    """Read the file.

    Raises:
        FileError: it does not exist or cannot be read.
        ParseError: it has another format; the message names the entry.
    """
    content = read_bytes(path)
    try:
        document = _TensorsDocument.model_validate_json(content)
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
