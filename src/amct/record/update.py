"""Updates single layers in a record file, safely with concurrent threads and processes.

The file is locked, read, changed and replaced as a whole, so no update is lost and no file is incomplete. Many layers
finish calibration at about the same time, so an update must be cheap: in a file with exactly the layout written here
only the block of the layer is replaced; any other file is parsed completely and rewritten in this layout.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from amct import atomic
from amct.errors import ArgumentTypeError
from amct.record.files import format_record, parse_caffe_record, parse_record
from amct.record.records import CaffeLayerRecord, CaffeRecord, DataFactors, KvCacheRecord, LayerRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from amct.atomic import AnyPath
    from amct.record.records import AnyLayer, AnyRecord

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
    if not isinstance(entry, LayerRecord | KvCacheRecord | CaffeLayerRecord):
        raise ArgumentTypeError(
            f"expected a LayerRecord, KvCacheRecord or CaffeLayerRecord, got {type(entry).__name__}"
        )
    _check_name(layer)
    source = os.fspath(path)

    def changed(part: bytes) -> AnyRecord:
        if isinstance(entry, CaffeLayerRecord):
            return parse_caffe_record(part, source).with_layers({layer: entry})
        record = parse_record(part, source)
        if isinstance(entry, KvCacheRecord):
            return record.with_kv_cache({layer: entry})
        return record.with_layers({layer: entry})

    atomic.modify(path, lambda content: _with_changed_block(content or b"", layer, changed))


def _check_name(layer: object) -> None:
    if not isinstance(layer, str) or not layer:
        raise ArgumentTypeError(f"the name of a layer: expected a non-empty string, got {layer!r}")


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

            def with_factors(part: bytes, layer: str = layer, factors: Sequence[DataFactors] = factors) -> AnyRecord:
                record = parse_caffe_record(part, source)
                return record.with_layers({layer: _with(record.layers.get(layer), factors)})

            after = _with_changed_block(after, layer, with_factors)
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


def _with_changed_block(content: bytes, layer: str, changed: Callable[[bytes], AnyRecord]) -> bytes:
    """Return the content with the record of one layer changed; ``changed`` gets its block, or the whole content."""
    blocks = _blocks(content)
    place = None if blocks is None else _places_of([layer], blocks)[layer]
    if blocks is None or place is None:
        return format_record(changed(content)).encode()
    old = b"".join(block + _END for block in blocks[place])
    blocks[place] = [format_record(changed(old)).encode().removesuffix(_END)]
    return _END.join([*blocks, b""])


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


def _places_of(layers: Iterable[str], blocks: list[bytes]) -> dict[str, slice | None]:
    """Return the slice of each layer's block, empty where it is to be inserted; None if the file must be parsed."""
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
