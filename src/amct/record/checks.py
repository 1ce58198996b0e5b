"""Validation checks shared by both dialects: the layer properties to check against, and the list of problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.errors import Problem, RecordError, RecordValueError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.record.records import AnyRecord

#: FLT_EPSILON, the smallest legal scale; its reciprocal is the largest.
EPSILON = 2.0**-23

Progress = tuple[int, int]
"""The number of batches that calibration has observed, and the number it needs."""


@dataclass(frozen=True, kw_only=True)
class RecordLayer:
    """The properties of a model's layer that its entry in a record is checked against.

    Attributes:
        name: The layer's name, the key of its entry.
        type: Its type name in its framework, for messages and for type-specific rules.
        quantizable: Whether the layer can be quantized.
        reason: Why it cannot be quantized.
        expected: Whether the flow quantizes this layer, so that an entry is required.
        cout: The number of output channels, for an LSTM or GRU gates times hidden size; None if unknown.
        cin: The number of input channels; None if unknown.
        gates: The number of gates of a recurrent layer (LSTM 4, GRU 3); 0 for all others.
        inputs: The number of quantized inputs of a Caffe layer.
        weight_blobs: The number of weight blobs of a recurrent Caffe layer, each with one scale.
    """

    name: str
    type: str
    quantizable: bool = True
    reason: str = ""
    expected: bool = False
    cout: int | None = None
    cin: int | None = None
    gates: int = 0
    inputs: int = 1
    weight_blobs: int = 1


@dataclass(frozen=True)
class Findings:
    """Collects the problems of one record, each with its position in the file."""

    record: AnyRecord
    progress: Mapping[str, Progress] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    out_of_range: list[Problem] = field(default_factory=list)

    def problem(self, layer: str, message: str, name: str = "") -> None:
        """Add a problem: the record does not fit the model or is incomplete."""
        self.problems.append(Problem(f'layer "{layer}": {message}', self.record.where(layer, name)))

    def out_of_range_problem(self, layer: str, message: str, name: str = "") -> None:
        """Add a problem: a factor is outside its legal range."""
        self.problem(layer, message, name)
        self.out_of_range.append(self.problems[-1])

    def note(self, layer: str, message: str, name: str = "") -> None:
        """Add a note about unusual but harmless content."""
        self.notes.append(Problem(f'layer "{layer}": {message}', self.record.where(layer, name)))

    def missing_data_factors(self, layer: str, what: str = "scale_d", of: str = "") -> None:
        """Add a problem: calibration of a layer is incomplete; the message gives the progress if known."""
        message = f"Cannot find {what} of layer '{layer}' in record file{of}"
        seen, needed = self.progress.get(layer, (0, 0))
        if needed > seen:
            more = needed - seen
            message += (
                f": calibration has seen {seen} of {needed} batches; run {more} more forward "
                f"pass{'' if more == 1 else 'es'} (or lower batch_num)"
            )
        else:
            message += ": calibration was not completed; run at least batch_num forward passes before saving"
        self.problems.append(Problem(message, self.record.where(layer)))

    def raise_if_any(self) -> None:
        """Raise one error that lists every problem, if there are any.

        Raises:
            RecordValueError: A factor is outside its legal range.
            RecordError: There are only other problems.
        """
        if self.problems:
            kind = RecordValueError if self.out_of_range else RecordError
            raise kind.from_problems(self.problems)


def layer_of(
    name: str, by_name: Mapping[str, RecordLayer], findings: Findings, *, any_type: bool = False
) -> RecordLayer | None:
    """Return the model's layer of an entry; None, with a problem added, if it is missing or not quantizable.

    With ``any_type`` a layer that is not quantizable is returned too.
    """
    layer = by_name.get(name)
    if layer is None:
        findings.problem(name, f"the model has no such layer.{did_you_mean(name, by_name)}")
        return None
    if not layer.quantizable and not any_type:
        why = f": {layer.reason}" if layer.reason else ""
        findings.problem(name, f"a layer of type {layer.type} cannot be quantized here{why}; remove its entry")
        return None
    return layer


def check_expected(record: AnyRecord, by_name: Mapping[str, RecordLayer], findings: Findings) -> None:
    """Check that every layer that the flow quantizes has an entry."""
    for layer in by_name.values():
        if layer.expected and layer.name not in record.layers:
            findings.missing_data_factors(layer.name)


def check_weight_lengths(
    findings: Findings, layer: RecordLayer, names: tuple[str, str], values: tuple[Sequence[float], Sequence[int]]
) -> bool:
    """Check that weight scales and offsets exist and are equal in number; return whether the check succeeds."""
    for name, given in zip(names, values, strict=True):
        if not given:
            findings.problem(layer.name, f"{name} is missing; was the model's quantization step run on this record?")
    if not all(values):
        return False
    scales, offsets = map(len, values)
    if scales != offsets:
        findings.problem(
            layer.name, f"{scales} {names[0]} but {offsets} {names[1]}; there must be as many of each", names[1]
        )
        return False
    return True


def check_weight_offsets(findings: Findings, layer: str, name: str, offsets: Sequence[int]) -> None:
    """Check that all weight offsets are zero."""
    if any(offsets):
        bad = next(offset for offset in offsets if offset)
        findings.out_of_range_problem(
            layer, f"{name} must be 0, got {bad}: weights are quantized without an offset", name
        )


def check_range(findings: Findings, layer: str, name: str, factors: Sequence[float]) -> None:
    """Check that scales or balance factors lie between FLT_EPSILON and its reciprocal."""
    bad = next((factor for factor in factors if not EPSILON <= factor <= 1 / EPSILON), None)
    if bad is not None:
        message = f"{name} must lie in [{EPSILON:g}, {1 / EPSILON:g}], got {bad:g}"
        findings.out_of_range_problem(layer, message, name.split()[0])


def check_offset(findings: Findings, layer: str, name: str, offset: int, bits: int) -> None:
    """Check that a data offset lies in the integer range."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if not low <= offset <= high:
        findings.out_of_range_problem(layer, f"{name} must lie in [{low}, {high}] for {bits} bits, got {offset}", name)


def one_of(numbers: Sequence[int]) -> str:
    """Format distinct numbers as alternatives.

    >>> one_of([1, 64])
    '1 or 64'
    """
    return " or ".join(str(number) for number in dict.fromkeys(numbers))
