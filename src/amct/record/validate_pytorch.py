"""Validation rules of the PyTorch dialect."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amct.errors import Problem, RecordError, did_you_mean
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
    from collections.abc import Mapping, Sequence

    from amct.record.layers import KvCacheRecord, LayerRecord
    from amct.record.prune import PruneNode
    from amct.record.records import Record

ACTIVATION_BITS = {"INT4": 4, "INT8": 8, "INT16": 16}
WEIGHT_TYPES = ("INT4", "INT6", "INT7", "INT8")
BOTH_TYPES = ("INT4", "INT8")
PRECISION_MODES = ("DEFAULT", "FORCE_FP16_QUANT")
POOLING_TYPES = frozenset({"AvgPool1d", "AvgPool2d", "AvgPool3d", "AveragePool", "GlobalAveragePool"})


def check(record: Record, by_name: Mapping[str, RecordLayer], findings: Findings) -> None:
    """Check every entry of a record, and that none is missing."""
    for name, entry in record.items():
        layer = layer_of(name, by_name, findings)
        if layer is not None:
            _check_layer(layer, entry, findings)
    for name, cache in record.kv_cache.items():
        layer = layer_of(name, by_name, findings, any_type=True)
        if layer is not None:
            _check_kv_cache(layer, cache, findings)
    for chain in record.prune:
        for node in chain.nodes:
            _check_node(node, by_name, findings)
    check_expected(record, by_name, findings)


def _check_layer(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    _check_types(layer, entry, findings)
    if entry.shift_bit:
        findings.problem(layer.name, "shift_bit is not supported; remove it", "shift_bit")
    _check_data(layer, entry, findings)
    if layer.type in POOLING_TYPES:
        _check_pooling(layer, entry, findings)
    else:
        _check_weights(layer, entry, findings)
        _check_balance(layer, entry, findings)


def _check_types(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    legal = {
        "dst_type": BOTH_TYPES,
        "act_type": tuple(ACTIVATION_BITS),
        "wts_type": WEIGHT_TYPES,
        "fakequant_precision_mode": PRECISION_MODES,
    }
    for name, choices in legal.items():
        given = getattr(entry, name)
        if given is not None and given not in choices:
            findings.problem(
                layer.name,
                f"{name} must be one of {', '.join(choices)}, got {given}.{did_you_mean(given, choices)}",
                name,
            )


def _check_data(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    bits = ACTIVATION_BITS.get(entry.activation_type, 8)
    pairs = [("scale_d", "offset_d"), *((("scale_h", "offset_h"),) if layer.gates else ())]
    for scale_name, offset_name in pairs:
        scale, offset = getattr(entry, scale_name), getattr(entry, offset_name)
        if scale is None:
            findings.missing_data_factors(layer.name, scale_name)
        else:
            _check_scales(findings, layer.name, scale_name, (scale,))
        if offset is not None:
            check_offset(findings, layer.name, offset_name, offset, bits)
        elif scale is not None:
            findings.missing_data_factors(layer.name, offset_name)


def _check_pooling(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    """Check an average pooling, which has no weights; AMCT records scale 1 for it."""
    if entry.tensor_balance_factor:
        findings.problem(
            layer.name,
            f"type {layer.type} has no weights to balance; remove tensor_balance_factor",
            "tensor_balance_factor",
        )
    if len(entry.scale_w) > 1 or len(entry.offset_w) > 1:
        findings.problem(layer.name, f"type {layer.type} has no weights; it takes one scale_w of 1 or none", "scale_w")
    _check_scales(findings, layer.name, "scale_w", entry.scale_w)
    check_weight_offsets(findings, layer.name, "offset_w", entry.offset_w)


def _check_weights(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    groups = [(("scale_w", "offset_w"), (entry.scale_w, entry.offset_w))]
    if layer.gates:
        groups.append((("scale_r", "offset_r"), (entry.scale_r, entry.offset_r)))
    for names, values in groups:
        if check_weight_lengths(findings, layer, names, values):
            _check_count(layer, names[0], len(values[0]), findings)
        _check_scales(findings, layer.name, names[0], values[0])
        check_weight_offsets(findings, layer.name, names[1], values[1])


def _check_count(layer: RecordLayer, name: str, count: int, findings: Findings) -> None:
    first = layer.gates or 1
    legal = (first,) if layer.cout is None else (first, layer.cout)
    if count not in legal and (layer.cout is not None or count < first):
        what = "one per gate or per row" if layer.gates else "one for all or one per output channel"
        findings.problem(layer.name, f"{name} must have {one_of(legal)} values ({what}), got {count}", name)


def _check_balance(layer: RecordLayer, entry: LayerRecord, findings: Findings) -> None:
    name, factors = "tensor_balance_factor", entry.tensor_balance_factor
    if not factors:
        return
    if layer.cin is not None and len(factors) != layer.cin:
        findings.out_of_range_problem(
            layer.name, f"{name} must have one value per input channel, that is {layer.cin}, got {len(factors)}", name
        )
    check_range(findings, layer.name, name, factors)


def _check_scales(findings: Findings, layer: str, name: str, scales: Sequence[float]) -> None:
    bad = next((scale for scale in scales if not 0 < scale < math.inf), None)
    if bad is not None:
        findings.out_of_range_problem(layer, f"{name} must be greater than 0 and finite, got {bad:g}", name)


def _check_kv_cache(layer: RecordLayer, entry: KvCacheRecord, findings: Findings) -> None:
    if not entry.scale:
        findings.missing_data_factors(layer.name, "scale")
    if len(entry.scale) != len(entry.offset):
        findings.problem(
            layer.name, f"{len(entry.scale)} scale but {len(entry.offset)} offset in kv_cache_value", "offset"
        )
    elif layer.cout is not None and len(entry.scale) not in (0, 1, layer.cout):
        findings.problem(
            layer.name, f"kv_cache_value must have {one_of((1, layer.cout))} scale, got {len(entry.scale)}", "scale"
        )
    _check_scales(findings, layer.name, "scale", entry.scale)
    for offset in dict.fromkeys((min(entry.offset, default=0), max(entry.offset, default=0))):
        check_offset(findings, layer.name, "offset", offset, 8)


def _check_node(node: PruneNode, by_name: Mapping[str, RecordLayer], findings: Findings) -> None:
    """Check that a pruned node is in the model, its channels are in range and its mask fits its shape."""
    if node.name not in by_name:
        findings.problems.append(
            Problem(f'prune_record: the model has no layer "{node.name}".{did_you_mean(node.name, by_name)}')
        )
    begin, end = node.begin or 0, node.end
    if end is not None and not 0 <= begin < end:
        findings.problem(node.name, f"prune_record: begin {begin} must be below end {end}, and not negative")
    elif end is not None and any(not begin <= index < end for index in node.prune_index):
        bad = next(index for index in node.prune_index if not begin <= index < end)
        findings.problem(
            node.name, f"prune_record: prune_index {bad} is not in the layer's channels {begin}..{end - 1}"
        )
    try:
        node.mask()
    except RecordError as error:
        findings.problems.append(Problem(f"prune_record: {error}"))
