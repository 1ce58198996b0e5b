"""Comparison and merging of two records."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from amct.errors import ArgumentError, Problem, RecordError
from amct.record.layers import CaffeLayerRecord, DataFactors
from amct.record.prune import PruneRecord
from amct.record.records import AnyLayer, AnyRecord, CaffeRecord, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

_RecordT = TypeVar("_RecordT", Record, CaffeRecord)
_PartT = TypeVar("_PartT")


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


def merge_records(first: _RecordT, second: _RecordT) -> _RecordT:
    """Merge two records; where both have an entry, its fields are merged and must not contradict each other.

    Raises:
        ArgumentError: The records are of different dialects.
        RecordError: The records contradict each other; the message lists every contradiction.
    """
    if type(first) is not type(second):
        raise ArgumentError("the two records are of different dialects; read both as pytorch or both as caffe")
    conflicts: list[Problem] = []
    sources = (first.source or "the first record", second.source or "the second record")
    merging = _Merging(conflicts, sources)
    layers = merging.mappings("", first.layers, second.layers)
    if isinstance(first, CaffeRecord):
        merged: Any = replace(first, layers=layers)
    else:
        merged = replace(
            first,
            layers=layers,
            kv_cache=merging.mappings("kv_cache ", first.kv_cache, second.kv_cache),
            prune=tuple(merging.mappings("", _chains(first), _chains(second)).values()),
            order=tuple(dict.fromkeys([*first.names, *second.names])),
        )
    if conflicts:
        raise RecordError.from_problems(conflicts)
    return merged  # type: ignore[no-any-return]  # of the type of the first


def plain_fields(entry: AnyLayer | PruneRecord) -> dict[str, object]:
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
    nodes = {"producer": chain.producers, "consumer": chain.consumers}
    nodes["selective_prune"] = (chain.selective,) if chain.selective else ()
    content: dict[str, object] = {role: tuple(node.name for node in group) for role, group in nodes.items() if group}
    for role, group in nodes.items():
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
    ours, theirs = plain_fields(left), plain_fields(right)
    differences = [
        Difference(entry=name, field=field, kind="changed", left=ours.get(field), right=theirs.get(field))
        for field in dict.fromkeys([*ours, *theirs])
        if ours.get(field) != theirs.get(field)
    ]
    if differences:
        return differences
    # Attributes that are repeated or differ in type or order are compared as a whole; this is rare.
    return [Difference(entry=name, field="as a whole", kind="changed", left=str(left), right=str(right))]


@dataclass(frozen=True)
class _Merging:
    conflicts: list[Problem]
    sources: tuple[str, str]

    def mappings(self, prefix: str, first: Mapping[str, _PartT], second: Mapping[str, _PartT]) -> dict[str, _PartT]:
        merged = dict(first)
        for name, entry in second.items():
            merged[name] = self._entry(f"{prefix}{name}", first[name], entry) if name in first else entry
        return merged

    def _entry(self, name: str, first: Any, second: Any) -> Any:  # noqa: ANN401 - one of the entry types
        if first == second:
            return first
        if isinstance(first, PruneRecord):
            self._conflict(name, "", "one chain", "another")
            return first
        values: dict[str, Any] = {}
        for field in fields(first):
            ours, theirs = getattr(first, field.name), getattr(second, field.name)
            if field.name == "record_d":
                values["record_d"] = self._inputs(name, ours, theirs)
            elif not _is_set(ours) or ours == theirs:
                values[field.name] = theirs
            elif _is_set(theirs):
                self._conflict(name, field.name, ours, theirs)
        try:
            return replace(first, **values)
        except RecordError as error:  # the merged fields contradict each other
            self.conflicts.append(Problem(f'layer "{name}": {error}'))
            return first

    def _inputs(
        self, name: str, ours: tuple[DataFactors, ...], theirs: tuple[DataFactors, ...]
    ) -> tuple[DataFactors, ...]:
        merged = {factors.index: factors for factors in ours}
        for factors in theirs:
            known = merged.get(factors.index)
            merged[factors.index] = (
                factors if known is None else self._entry(f"{name} record_d[{factors.index}]", known, factors)
            )
        return tuple(merged[index] for index in sorted(merged))

    def _conflict(self, name: str, field: str, ours: object, theirs: object) -> None:
        what = f'layer "{name}": {field}' if field else f'"{name}"'
        self.conflicts.append(
            Problem(f"{what} is {_short(ours)} in {self.sources[0]} and {_short(theirs)} in {self.sources[1]}")
        )


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"({', '.join(f'{item}' for item in value[:3])}, … {len(value)} values)"
    return str(value)
