"""Validation rules of the Caffe dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.record.checks import (
    Findings,
    RecordLayer,
    check_expected,
    check_offset,
    check_range,
    check_weight_lengths,
    check_weight_offsets,
    layer_of,
    one_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.record.layers import CaffeLayerRecord, DataFactors
    from amct.record.records import CaffeRecord

PER_CHANNEL_TYPES = frozenset({"Convolution", "DepthwiseConv", "Deconvolution"})
RECURRENT_TYPES = frozenset({"LSTM", "RNN", "GRU"})
WEIGHTED_TYPES = PER_CHANNEL_TYPES | RECURRENT_TYPES | {"InnerProduct"}
WEIGHT_BITS = (4, 8)
DATA_BITS = range(8, 17)


def check(record: CaffeRecord, by_name: Mapping[str, RecordLayer], findings: Findings) -> None:
    """Check every entry of a record, and that none is missing."""
    for name, entry in record.items():
        owner = entry.object_layer if entry.object_layer in by_name and name not in by_name else name
        layer = layer_of(owner or name, by_name, findings)
        if layer is not None:
            _check_inputs(name, layer, entry, findings)
            _check_weights(name, layer, entry, findings)
    check_expected(record, by_name, findings)


def _check_inputs(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: Findings) -> None:
    for index in range(layer.inputs):
        factors = entry.input(index)
        of = f" (input {index})" if layer.inputs > 1 else ""
        if factors is None or factors.scale is None:
            findings.missing_data_factors(name, "scale_d", of)
        elif factors.offset is None:
            findings.missing_data_factors(name, "offset_d", of)
    for factors in entry.record_d:
        if not 0 <= factors.index < layer.inputs:
            many = f"{layer.inputs} input{'s' if layer.inputs > 1 else ''}"
            findings.problem(name, f"record_d has index {factors.index}, but the layer has {many}", "record_d")
        _check_factors(name, factors, findings)


def _check_factors(name: str, factors: DataFactors, findings: Findings) -> None:
    of = f" of input {factors.index}"
    if factors.bits not in DATA_BITS:
        findings.problem(name, f"num_bits_d{of} must lie in 8..16, got {factors.bits}", "record_d")
    elif factors.offset is not None:
        check_offset(findings, name, f"offset_d{of}", factors.offset, factors.bits)
    if factors.scale is not None:
        check_range(findings, name, f"scale_d{of}", (factors.scale,))


def _check_weights(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: Findings) -> None:
    if layer.type not in WEIGHTED_TYPES:
        _check_no_weights(name, layer, entry, findings)
        return
    if entry.weight_bits not in WEIGHT_BITS:
        findings.problem(name, f"num_bits_w must be {one_of(WEIGHT_BITS)}, got {entry.weight_bits}", "num_bits_w")
    if check_weight_lengths(findings, layer, ("scale_w", "offset_w"), (entry.scale_w, entry.offset_w)):
        _check_count(name, layer, len(entry.scale_w), findings)
    check_range(findings, name, "scale_w", entry.scale_w)
    check_weight_offsets(findings, name, "offset_w", entry.offset_w)


def _check_no_weights(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: Findings) -> None:
    """Check that there are no weight factors; scale 1 of a pooling layer, as in AMCT's sample, only adds a note."""
    if not entry.scale_w and not entry.offset_w:
        return
    if layer.type == "Pooling" and set(entry.scale_w) <= {1.0} and not any(entry.offset_w):
        findings.note(name, "type Pooling has no weights: scale_w and offset_w are ignored", "scale_w")
    else:
        findings.problem(name, f"type {layer.type} has no weights; remove scale_w and offset_w", "scale_w")


def _check_count(name: str, layer: RecordLayer, count: int, findings: Findings) -> None:
    if layer.type in PER_CHANNEL_TYPES:
        wrong = layer.cout is not None and count not in (1, layer.cout)
        expected = f"{one_of((1, layer.cout or 1))} values (one for all or one per output channel), got {count}"
    else:
        wrong = count not in (1, layer.weight_blobs)
        values = f"{one_of((1, layer.weight_blobs))} value{'s' if layer.weight_blobs > 1 else ''}"
        expected = f"{values}, got {count}: type {layer.type} is not quantized channel by channel"
    if wrong:
        findings.problem(name, f"scale_w must have {expected}", "scale_w")
