"""Validation of a record against a model. All problems are reported together.

A record that does not fit or is incomplete raises ``RecordError`` (a RuntimeError); a factor outside its range raises
``RecordValueError`` (a ValueError too, which scripts written for AMCT catch), also if there are other problems.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from amct.errors import Problem
from amct.record import validate_caffe, validate_pytorch
from amct.record.checks import Findings, Progress, RecordLayer
from amct.record.records import AnyRecord, CaffeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def validate_record(
    record: AnyRecord, layers: Sequence[RecordLayer], *, progress: Mapping[str, Progress] | None = None
) -> tuple[Problem, ...]:
    """Check a record against the layers of a model, and return notes about unusual but harmless content.

    Args:
        record: The record, in either dialect.
        layers: Every layer of the model, including those that cannot be quantized.
        progress: The calibration progress of each layer, if known.

    Raises:
        RecordError: The record does not fit the model, or is not complete.
        RecordValueError: A factor is outside its legal range.
    """
    findings = Findings(record, progress or {})
    by_name = {layer.name: layer for layer in layers}
    if record.is_empty:
        findings.problems.append(
            Problem(
                f"the record{f' {record.source}' if record.source else ''} is empty, so there is no layer to quantize; "
                "run calibration (or, after training, one forward pass in eval mode) first"
            )
        )
    elif isinstance(record, CaffeRecord):
        validate_caffe.check(record, by_name, findings)
    else:
        validate_pytorch.check(record, by_name, findings)
    findings.raise_if_any()
    return tuple(findings.notes)


def normalize_record(record: CaffeRecord, layers: Sequence[RecordLayer]) -> CaffeRecord:
    """Return a Caffe record without the weight factors that some files have for layers without weights."""
    weightless = {layer.name for layer in layers if layer.type not in validate_caffe.WEIGHTED_TYPES}
    return record.with_layers(
        {name: replace(entry, scale_w=(), offset_w=()) for name, entry in record.items() if name in weightless}
    )
