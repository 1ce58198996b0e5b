"""Adds a Split layer, named as in Caffe, to each blob with several readers: each reader has its own gradient."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from amct.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

    Top = tuple[int, int]  # layer index, top index


def split_layer_name(layer: str, blob: str, top: int) -> str:
    """The name of the Split layer for top number ``top`` of a layer."""
    return f"{blob}_{layer}_{top}_split"


def split_blob_name(layer: str, blob: str, top: int, reader: int) -> str:
    """The name of the copy for reader number ``reader``."""
    return f"{split_layer_name(layer, blob, top)}_{reader}"


class _Readers:
    """The readers of each top. A top is one version of a blob: an in-place layer writes a new version."""

    def __init__(self, layers: list[ProtoMessage]) -> None:
        self.count: Counter[Top] = Counter()
        self.source: dict[tuple[int, int], Top] = {}
        self.loss_weight: dict[Top, float] = {}
        last: dict[str, Top] = {}
        for index, layer in enumerate(layers):
            for position, blob in enumerate(layer.bottom):
                if blob not in last:
                    raise ModelError(
                        f"Unknown bottom blob '{blob}' (layer '{layer.name}', bottom index {position})."
                        f"{did_you_mean(blob, last)} No layer before it has such a top in this phase."
                    )
                self.source[index, position] = last[blob]
                self.count[last[blob]] += 1
            for position, blob in enumerate(layer.top):
                last[blob] = (index, position)
            for weight, blob in zip(layer.loss_weight, layer.top, strict=False):
                self.loss_weight[last[blob]] = weight
                if weight:
                    self.count[last[blob]] += 1


def insert_splits(net: ProtoMessage) -> ProtoMessage:
    """Change the net, in place, so that each blob has one reader, and return it.

    Raises:
        ModelError: A layer reads a blob that no layer before it writes.
    """
    layers = list(net.layer)
    readers = _Readers(layers)
    if max(readers.count.values(), default=0) <= 1:
        return net
    used: Counter[Top] = Counter()
    result = []
    for index, layer in enumerate(layers):
        result.append(layer)
        for position, blob in enumerate(list(layer.bottom)):
            top = readers.source[index, position]
            if readers.count[top] > 1:
                layer.bottom[position] = split_blob_name(layers[top[0]].name, blob, top[1], used[top])
                used[top] += 1
        for position, blob in enumerate(layer.top):
            top = (index, position)
            if readers.count[top] <= 1:
                continue
            weight = readers.loss_weight.get(top, 0.0)
            split = type(layer)(**_split_fields(layer.name, blob, position, readers.count[top], weight))
            result.append(split)
            if weight:
                layer.ClearField("loss_weight")
                used[top] += 1
    whole = type(net)(layer=result)
    del net.layer[:]
    net.MergeFrom(whole)
    return net


def _split_fields(layer: str, blob: str, top: int, count: int, loss_weight: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": split_layer_name(layer, blob, top),
        "type": "Split",
        "bottom": [blob],
        "top": [split_blob_name(layer, blob, top, reader) for reader in range(count)],
    }
    if loss_weight:
        fields["loss_weight"] = [loss_weight] + [0.0] * (count - 1)
    return fields
