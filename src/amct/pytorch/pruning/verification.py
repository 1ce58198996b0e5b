"""Checks a cut model: captured again, every tensor must have the shape that the channel map predicts.

A size that the user's code computes from its tensors (``x.shape[1] // 2``) looks in a captured program like a literal.
Both are told apart here: in the program of the cut model a computed size has changed and a literal one has not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.capture.program import CaptureFailure, capture
from amct.pytorch.capture.program_reader import read_program

if TYPE_CHECKING:
    from torch import nn

    from amct.pytorch.capture.program_reader import Operation
    from amct.pytorch.inputs import ExampleInputs
    from amct.pytorch.pruning.propagation import Removal


def find_fault(model: nn.Module, inputs: ExampleInputs, removal: Removal) -> Fault | None:
    """Capture a cut model and compare it with the prediction; None if it is as predicted."""
    program = capture(model, inputs)
    if isinstance(program, CaptureFailure):
        return Fault(str(program), program.where)
    expected = removal.channel_map.program.operations
    found = read_program(program).operations
    for before, after in zip(expected, found, strict=False):
        if before.kind != after.kind:
            return Fault(f"the cut model computes {after.kind} in place of {before.kind}", before.where)
        for one, other in zip(before.results, after.results, strict=False):
            if removal.shape(one) != other.shape:
                return Fault(
                    f"{before.kind} returns the shape {other.shape}, expected {removal.shape(one)}", before.where
                )
        if not _same_start(before, after, removal):
            return Fault(f"{before.kind} starts at a literal channel", before.where)
    if len(expected) != len(found):
        return Fault(f"the cut model has {len(found)} operations, expected {len(expected)}", "")
    return None


def _same_start(before: Operation, after: Operation, removal: Removal) -> bool:
    """Whether a slice of channels starts where the channels in front of it end."""
    front = removal.channel_map.starts.get(before.name)
    if front is None:
        return True
    start = int((after.arguments[2] if len(after.arguments) > 2 else 0) or 0)
    if start < 0:
        start += after.arguments[0].shape[after.arguments[1]]
    return start == removal.left(front, len(front))


class Fault:
    """What is wrong with a cut model, and the line of user code."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where

    def __str__(self) -> str:
        return f"{self.text}{f' ({self.where})' if self.where else ''}"

    def literal_places(self, removal: Removal) -> frozenset[str]:
        """The lines whose sizes are literal: that of the fault, or all that the removal depends on."""
        assumed = {place for place, labels in removal.channel_map.assumed.items() if len(removal.removed(labels))}
        return frozenset({self.where} if self.where in assumed else assumed)
