"""Validation of a record against a model. All problems are reported together.

A record that does not fit or is incomplete raises ``RecordError`` (a RuntimeError); a factor outside its range raises
``RecordValueError`` (a ValueError too, which scripts written for AMCT catch), also if there are other problems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from amct.errors import Problem, RecordError, RecordValueError, did_you_mean
from amct.record.records import AnyRecord, CaffeRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amct.record.prune import PruneNode
    from amct.record.records import CaffeLayerRecord, DataFactors, KvCacheRecord, LayerRecord, Record

#: FLT_EPSILON, the smallest legal scale; its reciprocal is the largest.
EPSILON = 2.0**-23
ACTIVATION_BITS = {"INT4": 4, "INT8": 8, "INT16": 16}
WEIGHT_TYPES = ("INT4", "INT6", "INT7", "INT8")
BOTH_TYPES = ("INT4", "INT8")
PRECISION_MODES = ("DEFAULT", "FORCE_FP16_QUANT")
POOLING_TYPES = frozenset({"AvgPool1d", "AvgPool2d", "AvgPool3d", "AveragePool", "GlobalAveragePool"})
PER_CHANNEL_TYPES = frozenset({"Convolution", "DepthwiseConv", "Deconvolution"})
RECURRENT_TYPES = frozenset({"LSTM", "RNN", "GRU"})
WEIGHTED_TYPES = PER_CHANNEL_TYPES | RECURRENT_TYPES | {"InnerProduct"}
WEIGHT_BITS = (4, 8)
DATA_BITS = range(8, 17)

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
class _Findings:
    """Collects the problems of one record, each with its position in the file."""

    record: AnyRecord
    progress: Mapping[str, Progress] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    values_out_of_range: list[Problem] = field(default_factory=list)

    def problem(self, layer: str, message: str, name: str = "") -> None:
        """Add a problem: the record does not fit the model or is incomplete."""
        self.problems.append(Problem(f'layer "{layer}": {message}', self.record.where(layer, name)))

    def out_of_range(self, layer: str, message: str, name: str = "") -> None:
        """Add a problem: a factor is outside its legal range."""
        self.problem(layer, message, name)
        self.values_out_of_range.append(self.problems[-1])

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
            message += ": the entry is not complete; run calibration again, at least batch_num forward passes"
        self.problems.append(Problem(message, self.record.where(layer)))

    def raise_if_any(self) -> None:
        """Raise one error that lists every problem, if there are any.

        Raises:
            RecordValueError: A factor is outside its legal range.
            RecordError: There are only other problems.
        """
        if self.problems:
            kind = RecordValueError if self.values_out_of_range else RecordError
            raise kind.from_problems(self.problems)


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
    findings = _Findings(record, progress or {})
    by_name = {layer.name: layer for layer in layers}
    if record.is_empty:
        findings.problems.append(
            Problem(
                f"the record{f' {record.source}' if record.source else ''} is empty, so there is no layer to quantize; "
                "run calibration (or, after training, one forward pass in eval mode) first"
            )
        )
    elif isinstance(record, CaffeRecord):
        _check_caffe(record, by_name, findings)
    else:
        _check_pytorch(record, by_name, findings)
    findings.raise_if_any()
    return tuple(findings.notes)


def normalize_record(record: CaffeRecord, layers: Sequence[RecordLayer]) -> CaffeRecord:
    """Return a Caffe record without the weight factors that some files have for layers without weights."""
    weightless = {layer.name for layer in layers if layer.type not in WEIGHTED_TYPES}
    return record.with_layers(
        {name: replace(entry, scale_w=(), offset_w=()) for name, entry in record.items() if name in weightless}
    )


def _layer_of(
    name: str, by_name: Mapping[str, RecordLayer], findings: _Findings, *, any_type: bool = False
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


def _check_expected(record: AnyRecord, by_name: Mapping[str, RecordLayer], findings: _Findings) -> None:
    """Check that every layer that the flow quantizes has an entry; in PyTorch one without stays float, as in AMCT."""
    for layer in by_name.values():
        if layer.expected and layer.name not in record.layers:
            seen, needed = findings.progress.get(layer.name, (0, 0))
            if isinstance(record, CaffeRecord) or seen < needed:
                findings.missing_data_factors(layer.name)
            else:
                findings.note(layer.name, "the record has no entry for it, so it stays float")


def _check_weight_lengths(
    findings: _Findings, layer: RecordLayer, names: tuple[str, str], values: tuple[Sequence[float], Sequence[int]]
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


def _check_weight_offsets(findings: _Findings, layer: str, name: str, offsets: Sequence[int]) -> None:
    """Check that all weight offsets are zero."""
    if any(offsets):
        bad = next(offset for offset in offsets if offset)
        findings.out_of_range(layer, f"{name} must be 0, got {bad}: weights are quantized without an offset", name)


def _check_range(findings: _Findings, layer: str, name: str, factors: Sequence[float]) -> None:
    """Check that scales or balance factors lie between FLT_EPSILON and its reciprocal."""
    bad = next((factor for factor in factors if not EPSILON <= factor <= 1 / EPSILON), None)
    if bad is not None:
        message = f"{name} must lie in [{EPSILON:g}, {1 / EPSILON:g}], got {bad:g}"
        findings.out_of_range(layer, message, name.split()[0])


def _check_offset(findings: _Findings, layer: str, name: str, offset: int, bits: int) -> None:
    """Check that a data offset lies in the integer range."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if not low <= offset <= high:
        message = f"{name} must lie in [{low}, {high}] for {bits} bits, got {offset}"
        if (bits, offset) == (4, -128):
            message += ", as in the INT4 sample that AMCT's documents print; -128 is an offset of 8 bits"
        findings.out_of_range(layer, message, name)


def _one_of(numbers: Sequence[int]) -> str:
    """Format distinct numbers as alternatives.

    >>> _one_of([1, 64])
    '1 or 64'
    """
    return " or ".join(str(number) for number in dict.fromkeys(numbers))


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _check_pytorch(record: Record, by_name: Mapping[str, RecordLayer], findings: _Findings) -> None:
    """Check every entry of a record, and that none is missing."""
    for name, entry in record.items():
        layer = _layer_of(name, by_name, findings)
        if layer is not None:
            _check_layer(layer, entry, findings)
    for name, cache in record.kv_cache.items():
        layer = _layer_of(name, by_name, findings, any_type=True)
        if layer is not None:
            _check_kv_cache(layer, cache, findings)
    for chain in record.prune:
        for node in chain.nodes:
            _check_node(node, by_name, findings)
    _check_expected(record, by_name, findings)


def _check_layer(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
    _check_types(layer, entry, findings)
    if entry.shift_bit:
        findings.problem(layer.name, "shift_bit is not supported; remove it", "shift_bit")
    _check_data(layer, entry, findings)
    if layer.type in POOLING_TYPES:
        _check_pooling(layer, entry, findings)
    else:
        _check_weights(layer, entry, findings)
        _check_balance(layer, entry, findings)


def _check_types(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
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


def _check_data(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
    bits = ACTIVATION_BITS.get(entry.activation_type, 8)
    pairs = [("scale_d", "offset_d"), *((("scale_h", "offset_h"),) if layer.gates else ())]
    for scale_name, offset_name in pairs:
        scale, offset = getattr(entry, scale_name), getattr(entry, offset_name)
        if scale is None:
            findings.missing_data_factors(layer.name, scale_name)
        else:
            _check_scales(findings, layer.name, scale_name, (scale,))
        if offset is not None:
            _check_offset(findings, layer.name, offset_name, offset, bits)
        elif scale is not None:
            findings.missing_data_factors(layer.name, offset_name)


def _check_pooling(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
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
    _check_weight_offsets(findings, layer.name, "offset_w", entry.offset_w)


def _check_weights(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
    groups = [(("scale_w", "offset_w"), (entry.scale_w, entry.offset_w))]
    if layer.gates:
        groups.append((("scale_r", "offset_r"), (entry.scale_r, entry.offset_r)))
    for names, values in groups:
        if _check_weight_lengths(findings, layer, names, values):
            _check_count(layer, names[0], len(values[0]), findings)
        _check_scales(findings, layer.name, names[0], values[0])
        _check_weight_offsets(findings, layer.name, names[1], values[1])


def _check_count(layer: RecordLayer, name: str, count: int, findings: _Findings) -> None:
    first = layer.gates or 1
    legal = (first,) if layer.cout is None else (first, layer.cout)
    if count not in legal and (layer.cout is not None or count < first):
        what = "one per gate or per row" if layer.gates else "one for all or one per output channel"
        findings.problem(layer.name, f"{name} must have {_one_of(legal)} values ({what}), got {count}", name)


def _check_balance(layer: RecordLayer, entry: LayerRecord, findings: _Findings) -> None:
    name, factors = "tensor_balance_factor", entry.tensor_balance_factor
    if not factors:
        return
    if layer.cin is not None and len(factors) != layer.cin:
        findings.out_of_range(
            layer.name, f"{name} must have one value per input channel, that is {layer.cin}, got {len(factors)}", name
        )
    _check_range(findings, layer.name, name, factors)


def _check_scales(findings: _Findings, layer: str, name: str, scales: Sequence[float]) -> None:
    bad = next((scale for scale in scales if not 0 < scale < math.inf), None)
    if bad is not None:
        findings.out_of_range(layer, f"{name} must be greater than 0 and finite, got {bad:g}", name)


def _check_kv_cache(layer: RecordLayer, entry: KvCacheRecord, findings: _Findings) -> None:
    if not entry.scale:
        findings.missing_data_factors(layer.name, "scale")
    if len(entry.scale) != len(entry.offset):
        findings.problem(
            layer.name, f"{len(entry.scale)} scale but {len(entry.offset)} offset in kv_cache_value", "offset"
        )
    elif layer.cout is not None and len(entry.scale) not in (0, 1, layer.cout):
        findings.problem(
            layer.name, f"kv_cache_value must have {_one_of((1, layer.cout))} scale, got {len(entry.scale)}", "scale"
        )
    _check_scales(findings, layer.name, "scale", entry.scale)
    for offset in dict.fromkeys((min(entry.offset, default=0), max(entry.offset, default=0))):
        _check_offset(findings, layer.name, "offset", offset, 8)


def _check_node(node: PruneNode, by_name: Mapping[str, RecordLayer], findings: _Findings) -> None:
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


# -- Caffe -------------------------------------------------------------------------------------------------------------


def _check_caffe(record: CaffeRecord, by_name: Mapping[str, RecordLayer], findings: _Findings) -> None:
    """Check every entry of a record, and that none is missing."""
    for name, entry in record.items():
        owner = entry.object_layer if entry.object_layer in by_name and name not in by_name else name
        layer = _layer_of(owner or name, by_name, findings)
        if layer is not None:
            _check_inputs(name, layer, entry, findings)
            _check_caffe_weights(name, layer, entry, findings)
    _check_expected(record, by_name, findings)


def _check_inputs(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: _Findings) -> None:
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


def _check_factors(name: str, factors: DataFactors, findings: _Findings) -> None:
    of = f" of input {factors.index}"
    if factors.bits not in DATA_BITS:
        findings.problem(name, f"num_bits_d{of} must lie in 8..16, got {factors.bits}", "record_d")
    elif factors.offset is not None:
        _check_offset(findings, name, f"offset_d{of}", factors.offset, factors.bits)
    if factors.scale is not None:
        _check_range(findings, name, f"scale_d{of}", (factors.scale,))


def _check_caffe_weights(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: _Findings) -> None:
    if layer.type not in WEIGHTED_TYPES:
        _check_no_weights(name, layer, entry, findings)
        return
    if entry.weight_bits not in WEIGHT_BITS:
        findings.problem(name, f"num_bits_w must be {_one_of(WEIGHT_BITS)}, got {entry.weight_bits}", "num_bits_w")
    if _check_weight_lengths(findings, layer, ("scale_w", "offset_w"), (entry.scale_w, entry.offset_w)):
        _check_caffe_count(name, layer, len(entry.scale_w), findings)
    _check_range(findings, name, "scale_w", entry.scale_w)
    _check_weight_offsets(findings, name, "offset_w", entry.offset_w)


def _check_no_weights(name: str, layer: RecordLayer, entry: CaffeLayerRecord, findings: _Findings) -> None:
    """Check that there are no weight factors; scale 1 of a pooling layer, as in AMCT's sample, only adds a note."""
    if not entry.scale_w and not entry.offset_w:
        return
    if layer.type == "Pooling" and set(entry.scale_w) <= {1.0} and not any(entry.offset_w):
        findings.note(name, "type Pooling has no weights: scale_w and offset_w are ignored", "scale_w")
    else:
        findings.problem(name, f"type {layer.type} has no weights; remove scale_w and offset_w", "scale_w")


def _check_caffe_count(name: str, layer: RecordLayer, count: int, findings: _Findings) -> None:
    if layer.type in PER_CHANNEL_TYPES:
        wrong = layer.cout is not None and count not in (1, layer.cout)
        expected = f"{_one_of((1, layer.cout or 1))} values (one for all or one per output channel), got {count}"
    else:
        wrong = count not in (1, layer.weight_blobs)
        values = f"{_one_of((1, layer.weight_blobs))} value{'s' if layer.weight_blobs > 1 else ''}"
        expected = f"{values}, got {count}: type {layer.type} is not quantized channel by channel"
    if wrong:
        findings.problem(name, f"scale_w must have {expected}", "scale_w")
