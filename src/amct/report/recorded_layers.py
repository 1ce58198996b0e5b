"""A layer's part of a report, from its entry in a record of the PyTorch dialect and what was measured of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.report.activations import InputStatistics
from amct.report.content import LayerContent
from amct.report.filling import weight_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from amct.config.plan import LayerPlan
    from amct.record import LayerRecord
    from amct.report.measuring import Measured


def recorded_statistics(entry: LayerRecord) -> InputStatistics:
    """What watches a layer's input against the grid that a complete record has for it."""
    assert entry.scale_d is not None
    assert entry.offset_d is not None
    return InputStatistics(entry.scale_d, entry.offset_d, _bits(entry.activation_type))


def recorded_layer(
    plan: LayerPlan, entry: LayerRecord, measured: Measured, *, weight_bits: int | None, rows: Iterable[Tensor]
) -> LayerContent:
    """What the report shows of a layer.

    Args:
        plan: the layer.
        entry: its factors.
        measured: what was measured of all layers.
        weight_bits: bits of its weights; None without weights.
        rows: its weights as matrices whose rows are the output channels.
    """
    compared = measured.layers.get(plan.name)
    return LayerContent(
        name=plan.name,
        type=plan.type,
        activation_bits=_bits(entry.activation_type),
        weight_bits=weight_bits,
        scale=entry.scale_d,
        offset=entry.offset_d,
        sqnr=compared.sqnr if compared is not None else None,
        cosine=compared.cosine if compared is not None else None,
        activation=measured.inputs[plan.name],
        weights=weight_ranges(rows),
    )


def _bits(type_name: str) -> int:
    return int(type_name.removeprefix("INT"))
