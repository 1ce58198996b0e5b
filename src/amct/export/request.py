"""What a user asks of a save: where it goes, which formats, and with which options; checked before any work is done."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from amct import atomic
from amct.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct.model.calibration_data import CalibrationData
    from amct.model.quant_json import RelatedFile

RECORD = "record"
"""The name under which ``save`` accepts the factors among the formats."""
FLOAT = "float"
"""The format of a model that is not quantized, such as a pruned one; a quantized model has no such file."""
DEFAULT_FORMATS = ("qdq", "deploy", "fake_quant", RECORD)
"""The default formats of ``QuantizedModel.save``."""
OPSETS = range(16, 22)
"""Opsets that users can choose."""
LONGEST_PREFIX = 241


@dataclass(frozen=True)
class SavePath:
    """A folder and a prefix, from ``dir/prefix``."""

    folder: Path
    prefix: str

    @classmethod
    def parse(cls, save_path: str | os.PathLike[str]) -> SavePath:
        """Read ``dir/prefix``; a trailing "/" or "" means no prefix.

        Raises:
            ArgumentTypeError: it is not a string or path.
            ArgumentError: the prefix is too long or not a file name.
        """
        if not isinstance(save_path, str | os.PathLike):
            raise ArgumentTypeError(f"save_path: expected text or a path, got {type(save_path).__name__}")
        text = os.fspath(save_path)
        folder, prefix = os.path.split(text)
        if prefix in (".", "..") or "\0" in text:
            raise ArgumentError(
                f'save_path: expected "folder/prefix", got "{text}"; end it with "/" to mean the folder'
            )
        if len(prefix) > LONGEST_PREFIX:
            raise ArgumentError(
                f"save_path: the prefix may have {LONGEST_PREFIX} characters, got {len(prefix)}: choose a shorter one"
            )
        return cls(Path(folder), prefix)

    def file(self, name: str) -> Path:
        """``<prefix>_<name>`` in the folder, or just ``<name>``."""
        return self.folder / (f"{self.prefix}_{name}" if self.prefix else name)

    @property
    def quant_json(self) -> Path:
        """The path of quant.json, the report on layers and files."""
        from amct.model.quant_json import QUANT_JSON  # needs pydantic, which a wrong argument should not wait for

        return self.file(QUANT_JSON)


class Placement(str, Enum):
    """Which tensors are quantized."""

    FAST = "fast"
    EXACT = "exact"
    AUTO = "auto"


class Target(str, Enum):
    """The integer types, by target machine."""

    PORTABLE = "portable"
    VNNI = "vnni"
    EXACT8 = "exact8"


_Choice = TypeVar("_Choice", Placement, Target)


def choice(kind: type[_Choice], value: _Choice | str, argument: str) -> _Choice:
    """Convert a name to a placement or target.

    Raises:
        ArgumentError: the name is unknown; the message lists the known ones.
    """
    try:
        return kind(value)
    except ValueError as error:
        choices = ", ".join(member.value for member in kind)
        raise ArgumentError(f"{argument}: expected one of {choices}, got {value!r}") from error


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of the QDQ file.

    Attributes:
        placement: "fast" also quantizes the tensors between layers, "exact" only those of the record, "auto" times both
            and float for each part of the model.
        target: The integer types: "portable", "vnni" or "exact8".
        float_tensors: Tensors between layers that "fast" leaves float, by ONNX name; layers still read them quantized.
    """

    placement: str = Placement.FAST.value
    target: str = Target.PORTABLE.value
    float_tensors: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        choice(Placement, self.placement, "placement")
        choice(Target, self.target, "target")

    def __str__(self) -> str:
        return f"placement {self.placement}, target {self.target}"

    def without(self, tensors: Iterable[str]) -> ExportOptions:
        """The same options with further tensors left float."""
        return replace(self, float_tensors=self.float_tensors.union(tensors))


def check_opset(opset: int) -> None:
    """Check a user-chosen opset.

    Raises:
        ArgumentError: it is not one of 16..21.
    """
    if opset not in OPSETS:
        raise ArgumentError(f"opset: expected {OPSETS[0]}..{OPSETS[-1]}, got {opset}")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of a save, checked.

    Attributes:
        where: The folder, which is writable, and the prefix.
        formats: The names of the formats, and of the record.
        options: Options of the QDQ file.
        opset: The opset of the ONNX files; None: the default of the front door.
        record_file: The file that the factors were read from, which ``quant.json`` names.
        calibration: The data of the calibration, for ``quant.json``.
        batch_size: The only one that the ONNX files take; None: any that the model can take.
        is_judged: Whether a search has judged the QDQ file as it is, so that nothing in it is repaired.
    """

    where: SavePath
    formats: tuple[str, ...] = ("deploy", "fake_quant", "qdq")
    opset: int | None = None
    options: ExportOptions = field(default_factory=ExportOptions)
    record_file: Path | None = None
    calibration: CalibrationData | None = None
    batch_size: int | None = None
    is_judged: bool = False

    @property
    def models(self) -> tuple[str, ...]:
        """The formats without the record."""
        return tuple(name for name in self.formats if name != RECORD)

    def related(self) -> dict[str, RelatedFile]:
        """The files that belong to the save without being part of it.

        Raises:
            FileError: the record file cannot be read.
        """
        from amct.model.quant_json import related_file

        return {} if self.record_file is None else {"record": related_file(self.record_file, self.where.folder)}

    @classmethod
    def checked(
        cls, path: str | os.PathLike[str], formats: Iterable[str], *, options: ExportOptions, opset: int | None
    ) -> SaveRequest:
        """Check all arguments before any work is done.

        Raises:
            ArgumentError: an unknown format or opset, or an invalid path.
            FileError: the folder cannot be written to.
        """
        from amct.export.formats import check_formats  # imports ONNX, for which a wrong path should not wait

        if opset is not None:
            check_opset(opset)
        where = SavePath.parse(path)
        atomic.check_writable(where.folder)
        names = (formats,) if isinstance(formats, str) else tuple(formats)
        check_formats(names)
        return cls(
            where=where,
            formats=tuple(sorted(dict.fromkeys(names), key=lambda name: name == RECORD)),
            options=options,
            opset=opset,
        )
