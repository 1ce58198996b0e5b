"""Parses the arguments FLOAT and QUANT: pairs of Caffe files, ONNX files, Python references, or file prefixes.

``amct quantize … -o out/net`` writes files that begin with ``out/net``; QUANT may be this prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from amct.atomic import is_file, is_folder
from amct.errors import ArgumentError, FileError

FORMS = (
    "net.prototxt net.caffemodel OUT, net.onnx OUT or package.module:factory OUT, where OUT is what amct quantize was "
    "given with -o, or the files themselves"
)
_WEIGHTS = (".caffemodel", ".h5")
_MODEL, _WEIGHTS_BESIDE = "_model.prototxt", "_weights.caffemodel"


class ModelKind(Enum):
    """The format of the float model."""

    CAFFE = "Caffe"
    ONNX = "ONNX"
    TORCH = "PyTorch"


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """A float model and its quantized one.

    Attributes:
        kind: The format of the float model.
        float_model: A prototxt and a caffemodel, an ONNX file, or a Python reference.
        quantized_model: A prototxt and a caffemodel, or an ONNX file.
    """

    kind: ModelKind
    float_model: tuple[str, ...]
    quantized_model: tuple[str, ...]


def parse_models(words: list[str]) -> ModelPair:
    """Parse the command-line arguments that name the two models.

    Raises:
        ArgumentError: They do not name a float model and a quantized model.
        FileError: A file does not exist.
    """
    kind, float_model, rest = _float_model(words)
    if not rest:
        raise ArgumentError(f'expected a float and a quantized model, got only "{" ".join(words)}"; write {FORMS}')
    quantized, left = _quantized_model(kind, rest)
    if left:
        raise ArgumentError(f'expected two models, and got "{left[0]}" behind them; write {FORMS}')
    for path in (*(() if kind is ModelKind.TORCH else float_model), *quantized):
        check_file(path)
    return ModelPair(kind=kind, float_model=float_model, quantized_model=quantized)


def _float_model(words: list[str]) -> tuple[ModelKind, tuple[str, ...], list[str]]:
    first, rest = words[0], words[1:]
    if first.endswith(".onnx"):
        return ModelKind.ONNX, (first,), rest
    if ".prototxt" in Path(first).name or (rest and rest[0].endswith(_WEIGHTS)):
        files, rest = _caffe_files(first, rest)
        return ModelKind.CAFFE, files, rest
    if ":" in first:
        return ModelKind.TORCH, (first,), rest
    raise ArgumentError(
        f'"{first}": expected a float model: a .prototxt with its .caffemodel, an .onnx file or a Python reference '
        '"package.module:factory"'
    )


def _quantized_model(kind: ModelKind, words: list[str]) -> tuple[tuple[str, ...], list[str]]:
    first, rest = words[0], words[1:]
    if kind is ModelKind.CAFFE:
        if first.endswith(".onnx"):
            raise ArgumentError(
                f'"{first}": a Caffe model is compared with the fake-quant or deploy pair of the same quantization; '
                "give its prototxt, or the prefix of its files"
            )
        if ".prototxt" in Path(first).name or (rest and rest[0].endswith(_WEIGHTS)):
            return _caffe_files(first, rest)
        model = _existing(first, [f"fake_quant{_MODEL}", f"deploy{_MODEL}"])
        return _caffe_files(model, rest)
    if first.endswith(".onnx"):
        return (first,), rest
    return (_existing(first, ["qdq_model.onnx", "fake_quant_model.onnx"]),), rest


def _caffe_files(model: str, rest: list[str]) -> tuple[tuple[str, str], list[str]]:
    """Return a prototxt with its weights, and the remaining words; without a weights word, a file beside it is used."""
    if rest and rest[0].endswith(_WEIGHTS):
        return (model, rest[0]), rest[1:]
    check_file(model)
    stem = model.removesuffix(_MODEL) if model.endswith(_MODEL) else None
    beside = f"{stem}{_WEIGHTS_BESIDE}" if stem is not None else str(Path(model).with_suffix(".caffemodel"))
    if not is_file(beside):
        raise FileError(f'"{model}": no caffemodel follows it, and there is no "{beside}"')
    return (model, beside), rest


def _existing(prefix: str, endings: list[str]) -> str:
    """Return the first existing file ``<prefix>_<ending>``, or ``<prefix>/<ending>`` if the prefix is a folder."""
    start = f"{prefix.rstrip('/')}/" if is_folder(prefix) else f"{prefix}_"
    for ending in endings:
        if is_file(start + ending):
            return start + ending
    expected = " or ".join(start + ending for ending in endings)
    raise FileError(f'"{prefix}": expected a quantized model, or the prefix of its files; there is no {expected}')


def check_file(path: str) -> None:
    """Check that a file of a model exists.

    Raises:
        FileError: There is none, or it is a folder.
    """
    if not is_file(path):
        raise FileError(f'"{path}" {"is a folder" if is_folder(path) else "does not exist"}')
