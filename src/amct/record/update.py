"""Updates single layers in a record file, safely with concurrent threads and processes.

The file is locked, read, changed and replaced as a whole, so no update is lost and no file is incomplete. Many layers
finish calibration at about the same time, so an update must be cheap: in a file with exactly the layout written here
only the block of the layer is replaced; any other file is parsed completely and rewritten in this layout.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from amct import atomic
from amct.errors import ArgumentTypeError
from amct.record.files import AnyPath, format_record, parse_caffe_record, parse_record
from amct.record.layers import CaffeLayerRecord, DataFactors, KvCacheRecord, LayerRecord
from amct.record.records import AnyLayer, AnyRecord, CaffeRecord, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_EntryT = TypeVar("_EntryT", bound=AnyLayer)

_RECORD = b'record {\n  key: "'
_CHAIN = b"prune_record {\n"
_END = b"\n}\n"
_OPENING = re.compile(rb"record\s*[:{<]")
_KEY = re.compile(rb"key\s*:")
_VALUE = b"\n  value {\n"
_VALUE_END = b"\n  }"
_DATA = re.compile(rb"\n    (?:record_d|scale_d|offset_d|channels|height|width)\b")


def update(path: AnyPath, layer: str, entry: AnyLayer) -> None:
    """Replace the entry of one layer in a record file, or append it.

    A missing file is created. Entries of other layers are unchanged, and so is the other entry of this layer (factors
    and KV cache are separate entries).

    Raises:
        FileError: The file cannot be read or written.
        RecordParseError: The file is not a record.
        RecordValueError: A number of the entry does not fit its field.
    """
    update_with(path, layer, type(entry), lambda _: entry)


def update_with(path: AnyPath, layer: str, kind: type[_EntryT], change: Callable[[_EntryT | None], _EntryT]) -> None:
    """Replace the entry of one layer by ``change(entry)``, with the file locked; ``entry`` is None when there is none.

    ``kind`` (``LayerRecord``, ``KvCacheRecord`` or ``CaffeLayerRecord``) selects the entry and the dialect.
    For example, the factors of the second input of a Caffe layer::

        update_with(path, "eltwise", CaffeLayerRecord, lambda entry: (entry or CaffeLayerRecord()).with_input(factors))
    """
    if kind not in (LayerRecord, KvCacheRecord, CaffeLayerRecord):
        raise ArgumentTypeError(f"expected a LayerRecord, KvCacheRecord or CaffeLayerRecord, got {kind.__name__}")
    _check_name(layer)
    source = os.fspath(path)

    atomic.modify(path, lambda content: _changed_entry(content, source, layer, kind, change))


def _check_name(layer: object) -> None:
    if not isinstance(layer, str) or not layer:
        raise ArgumentTypeError(f"the name of a layer: expected a non-empty string, got {layer!r}")


def update_input(path: AnyPath, layer: str, factors: DataFactors) -> None:
    """Write the factors of one input of a Caffe layer to a record file, as ``update_inputs`` does."""
    update_inputs(path, {layer: [factors]})


def update_inputs(path: AnyPath, inputs: Mapping[str, Sequence[DataFactors]]) -> None:
    """Write the factors of inputs of several Caffe layers to a record file at once; other fields are unchanged.

    A layer may have thousands of weight scales, so these are not parsed: factors of inputs are the last lines of an
    entry and are appended there.

    Raises:
        FileError: The file cannot be read or written.
        RecordParseError: The file is not a record.
    """
    for layer in inputs:
        _check_name(layer)
    source = os.fspath(path)

    def changed(content: bytes | None) -> bytes:
        after, left = _with_first_inputs(content or b"", inputs)
        for layer, factors in left.items():
            after = _changed_entry(after, source, layer, CaffeLayerRecord, partial(_with, factors=factors))
        return after

    atomic.modify(path, changed)


def _with_first_inputs(
    content: bytes, inputs: Mapping[str, Sequence[DataFactors]]
) -> tuple[bytes, dict[str, Sequence[DataFactors]]]:
    """Append the factors to the entries of layers; return the content and the layers whose entry must be parsed."""
    left = dict(inputs)
    blocks = _blocks(content)
    if blocks is None:
        return content, left
    places = {layer: place for layer, place in _places_of(inputs, blocks).items() if place is not None}
    written = format_record(CaffeRecord({layer: _with(None, inputs[layer]) for layer in places})).encode().split(_END)
    new: list[bytes] = []
    for (layer, place), own in zip(places.items(), written, strict=False):  # the last part is empty
        if place.start == place.stop:
            new.append(own)
        else:
            block = blocks[place.start]
            if block.count(_VALUE) != 1 or not block.endswith(_VALUE_END) or _DATA.search(block):
                continue
            lines = own[own.index(_VALUE) + len(_VALUE) :]
            blocks[place.start] = block.removesuffix(_VALUE_END) + b"\n" + lines
        del left[layer]
    end = _end_of_records(blocks)
    return _END.join([*blocks[:end], *new, *blocks[end:], b""]), left


def _with(entry: CaffeLayerRecord | None, factors: Sequence[DataFactors]) -> CaffeLayerRecord:
    known = () if entry is None else entry.record_d
    inputs = {each.index: each for each in (*known, *factors)}
    return replace(entry or CaffeLayerRecord(), record_d=tuple(inputs[index] for index in sorted(inputs)))


def _changed_entry(
    content: bytes | None, source: str, layer: str, kind: type[_EntryT], change: Callable[[_EntryT | None], _EntryT]
) -> bytes:
    """Return the content with one entry changed."""
    before = content or b""
    blocks = _blocks(before)
    place = _place_of(layer, blocks) if blocks is not None else None
    if blocks is None or place is None:
        return format_record(_change(before, source, layer, kind, change)).encode()
    old = b"".join(block + _END for block in blocks[place])
    new = format_record(_change(old, source, layer, kind, change)).encode()
    blocks[place] = [new.removesuffix(_END)]
    return _END.join([*blocks, b""])


def _change(
    content: str | bytes, source: str, layer: str, kind: type[_EntryT], change: Callable[[_EntryT | None], _EntryT]
) -> AnyRecord:
    """Parse a whole file or one block of it, and change one entry."""
    record: Any = Record() if kind is not CaffeLayerRecord else CaffeRecord()
    if content:
        record = parse_caffe_record(content, source) if kind is CaffeLayerRecord else parse_record(content, source)
    changed: AnyRecord
    if kind is KvCacheRecord:
        changed = record.with_kv_cache({layer: change(record.kv_cache.get(layer))})
    else:
        changed = record.with_layers({layer: change(record.layers.get(layer))})
    return changed


def _blocks(data: bytes) -> list[bytes] | None:
    """Return the blocks of a file in exactly our layout, each without its closing line; None for any other file.

    In our layout every ``record {`` and ``prune_record {`` starts a line, its ``}`` is the next one alone on a line,
    the next block follows directly, and the second line of each record is its key. Splitting at the closing lines and
    counting verifies this without parsing the file.
    """
    *blocks, rest = data.split(_END)
    records = sum(block.startswith(_RECORD) for block in blocks)
    chains = sum(block.startswith(_CHAIN) for block in blocks)
    in_our_layout = (
        not rest
        and records + chains == len(blocks) == len(_OPENING.findall(data))
        and records == len(_KEY.findall(data))
        and not any(odd in data for odd in (b"#", b"\\", b"\r", b"'"))
    )
    return blocks if in_our_layout else None


def _place_of(layer: str, blocks: list[bytes]) -> slice | None:
    """Return the slice of the layer's block, or an empty slice where to insert it; None if the file must be parsed."""
    return _places_of([layer], blocks)[layer]


def _places_of(layers: Iterable[str], blocks: list[bytes]) -> dict[str, slice | None]:
    """Return ``_place_of`` each layer."""
    found: dict[bytes, list[int]] = {}
    for index, block in enumerate(blocks):
        if block.startswith(_RECORD):
            found.setdefault(block[len(_RECORD) : block.find(b'"\n', len(_RECORD))], []).append(index)
    end = _end_of_records(blocks)
    places: dict[str, slice | None] = {}
    for layer in layers:
        own = found.get(layer.encode(), [])
        is_escaped = not layer.isprintable() or any(odd in layer for odd in "\"\\'")
        if is_escaped or len(own) > 1:  # repeated: only the last entry is used and written
            places[layer] = None
        else:
            places[layer] = slice(own[0], own[0] + 1) if own else slice(end, end)
    return places


def _end_of_records(blocks: list[bytes]) -> int:
    return next((index for index, block in enumerate(blocks) if block.startswith(_CHAIN)), len(blocks))
