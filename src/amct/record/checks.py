"""What the rules of both dialects share: the model's side of a record, and the collecting of mistakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.errors import Problem, RecordError, RecordValueError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.record.records import AnyRecord

#: The smallest legal distance between two quantized values, and its reciprocal the largest (FLT_EPSILON).
EPSILON = 2.0**-23

Progress = tuple[int, int]
"""How many batches calibration has seen, and how many it needs."""


@dataclass(frozen=True, kw_only=True)
class RecordLayer:
    """What a layer of the model must be for its entry in a record to be right.

    Attributes:
        name: The layer's name, the key of its entry.
        type: Its type in the words of its framework, for messages and for the rules of pooling and Caffe's types.
        quantizable: Whether the layer can be quantized at all; ``reason`` says why not.
        expected: Whether the flow quantizes this layer, so that an entry must be there.
        cout: Output channels; None when unknown. Of an LSTM or GRU: gates times hidden size.
        cin: Input channels; None when unknown.
        gates: Gates of a recurrent layer (LSTM 4, GRU 3); 0 for all others.
        inputs: Quantized inputs of a Caffe layer.
        weight_blobs: Weights of a recurrent Caffe layer that have a scale each.
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
    """Collects the mistakes of one record, each with the place in the file where it stands."""

    record: AnyRecord
    progress: Mapping[str, Progress] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    out_of_range: list[Problem] = field(default_factory=list)

    def wrong(self, layer: str, message: str, name: str = "") -> None:
        """The record does not fit the model, or lacks something."""
        self.problems.append(Problem(f'layer "{layer}": {message}', self.record.where(layer, name)))

    def outside(self, layer: str, message: str, name: str = "") -> None:
        """A factor is outside its legal range."""
        problem = Problem(f'layer "{layer}": {message}', self.record.where(layer, name))
        self.problems.append(problem)
        self.out_of_range.append(problem)

    def note(self, layer: str, message: str, name: str = "") -> None:
        """Odd, but harmless."""
        self.notes.append(Problem(f'layer "{layer}": {message}', self.record.where(layer, name)))

    def missing_data_factors(self, layer: str, what: str = "scale_d", of: str = "") -> None:
        """Calibration of a layer did not come to its end; say how far it came, where that is known."""
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
        """Raise one error that lists every mistake."""
        if self.problems:
            kind = RecordValueError if self.out_of_range else RecordError
            raise kind.from_problems(self.problems)


def layer_of(name: str, by_name: Mapping[str, RecordLayer], findings: Findings) -> RecordLayer | None:
    """The layer of the model that an entry is about, if it is one that can be quantized."""
    layer = by_name.get(name)
    if layer is None:
        findings.wrong(name, f"the model has no such layer.{did_you_mean(name, by_name)}")
        return None
    if not layer.quantizable:
        why = f": {layer.reason}" if layer.reason else ""
        findings.wrong(name, f"a layer of type {layer.type} cannot be quantized here{why}; remove its entry")
        return None
    return layer


def check_expected(record: AnyRecord, by_name: Mapping[str, RecordLayer], findings: Findings) -> None:
    """Every layer that the flow quantizes has an entry."""
    for layer in by_name.values():
        if layer.expected and layer.name not in record.layers:
            findings.missing_data_factors(layer.name)


def check_weight_lengths(
    findings: Findings, layer: RecordLayer, names: tuple[str, str], values: tuple[Sequence[float], Sequence[int]]
) -> bool:
    """Weight scales and offsets are there, and equally many; false when there is nothing more to check."""
    for name, given in zip(names, values, strict=True):
        if not given:
            findings.wrong(layer.name, f"{name} is missing; was the model's quantization step run on this record?")
    if not all(values):
        return False
    scales, offsets = map(len, values)
    if scales != offsets:
        findings.wrong(
            layer.name, f"{scales} {names[0]} but {offsets} {names[1]}; there must be as many of each", names[1]
        )
        return False
    return True


def check_weight_offsets(findings: Findings, layer: str, name: str, offsets: Sequence[int]) -> None:
    """Weights are quantized without an offset."""
    if any(offsets):
        bad = next(offset for offset in offsets if offset)
        findings.outside(layer, f"{name} must be 0, got {bad}: weights are quantized without an offset", name)


def check_offset(findings: Findings, layer: str, name: str, offset: int, bits: int) -> None:
    """A data offset lies on the grid."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if not low <= offset <= high:
        findings.outside(layer, f"{name} must lie in [{low}, {high}] for {bits} bits, got {offset}", name)


def one_of(numbers: Sequence[int]) -> str:
    """Some numbers as a choice, each once.

    >>> one_of([1, 64])
    '1 or 64'
    """
    return " or ".join(str(number) for number in dict.fromkeys(numbers))
