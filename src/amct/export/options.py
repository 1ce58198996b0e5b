"""The options of a QDQ file, checked without importing an exporter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from amct.errors import ArgumentError


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
