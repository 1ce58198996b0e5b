"""Output of records as a table, as plain data for JSON, and in the other file form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from amct import atomic
from amct.record.compare import Difference, plain_fields
from amct.record.files import AnyPath, Form, encode_record, form_of, read_any_record
from amct.record.records import AnyRecord, CaffeRecord, Dialect, Record
from amct.schema import shortest_float

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.record.layers import CaffeLayerRecord, KvCacheRecord, LayerRecord
    from amct.record.prune import PruneRecord

_SHOWN_VALUES = 4


def plain_record(record: AnyRecord) -> dict[str, Any]:
    """Return a record as plain data for JSON; numbers in their shortest form."""
    plain: dict[str, Any] = {"dialect": "caffe" if isinstance(record, CaffeRecord) else "pytorch"}
    plain["layers"] = {name: _plain(plain_fields(entry)) for name, entry in record.items()}
    if isinstance(record, Record):
        plain["kv_cache"] = {name: _plain(plain_fields(entry)) for name, entry in record.kv_cache.items()}
        plain["prune"] = [_plain_chain(chain) for chain in record.prune]
    return plain


def describe_record(record: AnyRecord) -> str:
    """Format a record as a table with one line per layer."""
    parts = []
    if isinstance(record, CaffeRecord):
        parts.append(_table(_CAFFE_HEAD, (_caffe_row(name, entry) for name, entry in record.items())))
    else:
        if record.layers:
            parts.append(_table(_PYTORCH_HEAD, (_pytorch_row(name, entry) for name, entry in record.items())))
        if record.kv_cache:
            parts.append(_table(_KV_HEAD, (_kv_row(name, entry) for name, entry in record.kv_cache.items())))
        parts += [_describe_chain(chain) for chain in record.prune]
    notes = [f"note: {warning}" for warning in record.warnings]
    return "\n".join([*(parts if not record.is_empty else ["the record is empty"]), *notes]) + "\n"


def describe_difference(difference: Difference) -> str:
    """Format a difference as one line."""
    if difference.kind != "changed":
        return f"{difference.entry}: {difference.kind}"
    left, right = _values(difference.left), _values(difference.right)
    if isinstance(difference.left, tuple) and isinstance(difference.right, tuple):
        left, right = _first_difference(difference.left, difference.right)
    return f"{difference.entry}: {difference.field}: {left} -> {right}"


def plain_difference(difference: Difference) -> dict[str, Any]:
    """Return a difference as plain data for JSON."""
    return {
        "entry": difference.entry,
        "field": difference.field,
        "kind": difference.kind,
        "left": _plain_value(difference.left),
        "right": _plain_value(difference.right),
    }


def convert_record_file(
    source: AnyPath, target: AnyPath, *, dialect: Dialect | None = None, form: Form | None = None
) -> Form:
    """Rewrite a record file as text or binary; return the form.

    Without ``form`` it follows from the target's suffix: ``.bin`` is binary, anything else is text.

    Raises:
        FileError: The source cannot be read, or the target cannot be written.
        RecordParseError: The source is not a record.
    """
    form = form or form_of(target) or "text"
    atomic.write_bytes(target, encode_record(read_any_record(source, dialect=dialect), form))
    return form


_PYTORCH_HEAD = ("layer", "act", "scale_d", "offset_d", "wts", "scale_w", "more")
_CAFFE_HEAD = ("layer", "data bits", "scale_d", "offset_d", "weight bits", "scale_w", "more")
_KV_HEAD = ("kv cache of layer", "scale", "offset")


def _pytorch_row(name: str, entry: LayerRecord) -> Sequence[str]:
    more = []
    if entry.scale_h is not None:
        more.append(f"hidden state {_number(entry.scale_h)}, {entry.offset_h}")
    if entry.scale_r:
        more.append(f"scale_r {_values(entry.scale_r)}")
    if entry.tensor_balance_factor:
        more.append(f"balance {_values(entry.tensor_balance_factor)}")
    if entry.skip_fusion:
        more.append("skip_fusion")
    factors = (_number(entry.scale_d), _number(entry.offset_d))
    return name, entry.activation_type, *factors, entry.weight_type, _values(entry.scale_w), "; ".join(more)


def _caffe_row(name: str, entry: CaffeLayerRecord) -> Sequence[str]:
    inputs = entry.record_d
    more = [f"of {entry.object_layer}"] if entry.object_layer else []
    if entry.skip_fusion:
        more.append("skip_fusion")
    return (
        name,
        ", ".join(str(factors.bits) for factors in inputs) or "-",
        ", ".join(_number(factors.scale) for factors in inputs) or "-",
        ", ".join(_number(factors.offset) for factors in inputs) or "-",
        str(entry.weight_bits) if entry.scale_w else "-",
        _values(entry.scale_w),
        "; ".join(more),
    )


def _kv_row(name: str, entry: KvCacheRecord) -> Sequence[str]:
    return name, _values(entry.scale), _values(entry.offset)


def _describe_chain(chain: PruneRecord) -> str:
    if chain.selective is not None:
        return f"4:2 mask: {chain.selective.name} {list(chain.selective.mask_shape)}"
    ends = [
        ", ".join(f"{node.name} ({node.kind or '?'}, {_removed(len(node.prune_index))})" for node in nodes) or "-"
        for nodes in (chain.producers, chain.consumers)
    ]
    return f"pruned: {ends[0]} -> {ends[1]}"


def _removed(count: int) -> str:
    return f"{count} channel{'' if count == 1 else 's'} removed"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _number(value: object) -> str:
    if value is None:
        return "-"
    return str(shortest_float(value)) if isinstance(value, float) else str(value)


def _values(value: object) -> str:
    """Format one or a few values; more are shown as their number and range."""
    if not isinstance(value, tuple):
        return _number(value)
    if len(value) <= _SHOWN_VALUES or not all(isinstance(item, int | float) for item in value):
        return ", ".join(_number(item) for item in value) or "-"
    return f"{len(value)} values {_number(min(value))} .. {_number(max(value))}"


def _first_difference(left: tuple[object, ...], right: tuple[object, ...]) -> tuple[str, str]:
    if len(left) != len(right):
        return f"{len(left)} values", f"{len(right)} values"
    differing = [index for index, (ours, theirs) in enumerate(zip(left, right, strict=True)) if ours != theirs]
    first = differing[0]
    more = f" (and {len(differing) - 1} more of {len(left)})" if len(differing) > 1 else ""
    return f"[{first}] {_number(left[first])}", f"{_number(right[first])}{more}"


def _plain(fields: dict[str, object]) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in fields.items()}


def _plain_value(value: object) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, float):
        return shortest_float(value) if math.isfinite(value) else str(value)  # JSON has no infinity and no NaN
    return value


def _plain_chain(chain: PruneRecord) -> dict[str, Any]:
    roles = {"producer": chain.producers, "consumer": chain.consumers}
    plain: dict[str, Any] = {
        role: [{"name": node.name, **_attributes(node.attributes)} for node in nodes] for role, nodes in roles.items()
    }
    if chain.selective is not None:
        plain["selective_prune"] = {"name": chain.selective.name, **_attributes(chain.selective.attributes)}
    return {role: nodes for role, nodes in plain.items() if nodes}


def _attributes(attributes: Iterable[Any]) -> dict[str, Any]:
    return _plain({attribute.name: attribute.value for attribute in attributes})
