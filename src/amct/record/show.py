"""Records as a table, as plain data for JSON and in the other file form, and the differences between two."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from amct import atomic
from amct.errors import ArgumentError
from amct.record.files import Form, encode_record, form_of, read_any_record
from amct.record.prune import PruneNode, PruneRecord
from amct.record.records import AnyLayer, AnyRecord, CaffeLayerRecord, CaffeRecord, DataFactors, Record, RecordDialect
from amct.schema import shortest_float

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from amct.atomic import AnyPath
    from amct.record.records import KvCacheRecord, LayerRecord


_SHOWN_VALUES = 4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between two records.

    ``entry`` is a layer, ``kv_cache <layer>`` or ``prune <layers>``; ``field`` is empty when only one record has the
    entry (see ``kind``). A missing value is None.
    """

    entry: str
    field: str
    kind: Literal["only left", "only right", "changed"]
    left: object = None
    right: object = None


def diff_records(left: AnyRecord, right: AnyRecord) -> tuple[Difference, ...]:
    """Return the differences between two records of one dialect, in the order of the left one, then of the right one.

    Raises:
        ArgumentError: The records are of different dialects.
    """
    if type(left) is not type(right):
        raise ArgumentError("the two records are of different dialects; read both as pytorch or both as caffe")
    ours, theirs = _entries(left), _entries(right)
    differences: list[Difference] = []
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in theirs:
            differences.append(Difference(entry=name, field="", kind="only left"))
        elif name not in ours:
            differences.append(Difference(entry=name, field="", kind="only right"))
        else:
            differences += _changed(name, ours[name], theirs[name])
    return tuple(differences)


def _plain_fields(entry: AnyLayer | PruneRecord) -> dict[str, object]:
    """Return the set fields of an entry by their file names; inputs of a Caffe layer as ``record_d[0].scale_d``."""
    if isinstance(entry, PruneRecord):
        return _chain_fields(entry)
    content = {field.name: getattr(entry, field.name) for field in fields(entry)}
    if isinstance(entry, CaffeLayerRecord):
        del content["record_d"]
        for factors in entry.record_d:
            content |= {f"record_d[{factors.index}].{name}": value for name, value in _data_fields(factors).items()}
    return {name: value for name, value in content.items() if _is_set(value)}


def _chain_fields(chain: PruneRecord) -> dict[str, object]:
    """Return the nodes of a chain, and their attributes as ``producer[conv1].begin``."""
    content: dict[str, object] = {role: tuple(node.name for node in nodes) for role, nodes in chain.roles.items()}
    for role, group in chain.roles.items():
        for node in group:
            content |= {f"{role}[{node.name}].{attribute.name}": attribute.value for attribute in node.attributes}
    return content


def _data_fields(factors: DataFactors) -> dict[str, object]:
    own = {"scale": "scale_d", "offset": "offset_d", "num_bits": "num_bits_d"}
    content = {own.get(field.name, field.name): getattr(factors, field.name) for field in fields(factors)}
    del content["index"]
    return content


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _entries(record: AnyRecord) -> dict[str, AnyLayer | PruneRecord]:
    entries: dict[str, AnyLayer | PruneRecord] = dict(record.layers)
    if isinstance(record, Record):
        entries |= {f"kv_cache {name}": entry for name, entry in record.kv_cache.items()}
        entries |= _chains(record)
    return entries


def _chains(record: Record) -> dict[str, PruneRecord]:
    """Return the chains of a record by the names of their producers."""
    chains: dict[str, PruneRecord] = {}
    for chain in record.prune:
        name = f"prune {', '.join(node.name for node in chain.producers or chain.nodes)}"
        while name in chains:
            name += "'"
        chains[name] = chain
    return chains


def _changed(name: str, left: AnyLayer | PruneRecord, right: AnyLayer | PruneRecord) -> list[Difference]:
    if left == right:
        return []
    ours, theirs = _plain_fields(left), _plain_fields(right)
    differences = [
        Difference(entry=name, field=field, kind="changed", left=ours.get(field), right=theirs.get(field))
        for field in dict.fromkeys([*ours, *theirs])
        if ours.get(field) != theirs.get(field)
    ]
    if differences:
        return differences
    # Attributes that are repeated or differ in type or order are compared as a whole; this is rare.
    return [Difference(entry=name, field="as a whole", kind="changed", left=str(left), right=str(right))]


def plain_record(record: AnyRecord) -> dict[str, Any]:
    """Return a record as plain data for JSON; numbers in their shortest form."""
    plain: dict[str, Any] = {"dialect": "caffe" if isinstance(record, CaffeRecord) else "pytorch"}
    plain["layers"] = {name: _plain(_plain_fields(entry)) for name, entry in record.items()}
    if isinstance(record, Record):
        plain["kv_cache"] = {name: _plain(_plain_fields(entry)) for name, entry in record.kv_cache.items()}
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
    return _plain(vars(difference))


def convert_record_file(
    source: AnyPath, target: AnyPath, *, dialect: RecordDialect | None = None, form: Form | None = None
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
    plain: dict[str, Any] = {role: [_plain_node(node) for node in nodes] for role, nodes in chain.roles.items()}
    if chain.selective is not None:
        plain["selective_prune"] = _plain_node(chain.selective)
    return plain


def _plain_node(node: PruneNode) -> dict[str, Any]:
    return {"name": node.name, **_plain({attribute.name: attribute.value for attribute in node.attributes})}
