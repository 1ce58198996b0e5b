"""Nets without in-place layers: every layer writes its own blob, so that each step can be observed and changed.

The last layer that writes a blob keeps the blob's name, so that after a forward the blob has the same values as before;
earlier contents are called ``<layer>_out``. The inputs of a net always keep their names: scripts fill them by name.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from amct import log
from amct.arguments import check_types, output_file
from amct.atomic import write_text
from amct.schema import format_text

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage

_IN_PLACE = (
    "ReLU", "PReLU", "ELU", "Sigmoid", "TanH", "Clip", "ReLU6", "Dropout", "BatchNorm", "BN", "Scale", "Bias"
)  # fmt: skip


def uninplace_model(
    model_file: str | os.PathLike[str],
    uninplaced_model_file: str | os.PathLike[str],
    custom_proto: str | os.PathLike[str] | None = None,
) -> None:
    """Write a prototxt without in-place layers; layers of other phases than TEST are removed.

    Args:
        model_file: The prototxt.
        uninplaced_model_file: The file to write; an existing file is overwritten.
        custom_proto: A ``custom.proto`` with messages of your own layers (not in AMCT).

    Raises:
        ArgumentTypeError: an argument is not a path.
        FileError: a file cannot be read or written.
        ParseError, ModelError: the file is not a prototxt, or not a valid net.
    """
    from amct.caffe.model import read_net

    paths = (str, os.PathLike)
    check_types(
        "uninplace_model",
        {
            "model_file": (model_file, paths),
            "uninplaced_model_file": (uninplaced_model_file, paths),
            "custom_proto": (custom_proto, (*paths, type(None))),
        },
    )
    log.start("amct_caffe")
    target = output_file(uninplaced_model_file, "uninplaced_model_file")
    write_text(target, format_text(read_net(model_file, custom_proto)))


def remove_in_place(net: ProtoMessage) -> ProtoMessage:
    """Rename blobs so that each blob is written by one layer only; changes the net and returns it."""
    writers = Counter(blob for layer in net.layer for blob in layer.top)
    taken = {blob for layer in net.layer for blob in (*layer.bottom, *layer.top)}
    left = Counter(writers)
    sources = {blob for layer in net.layer if not layer.bottom for blob in layer.top}
    current: dict[str, str] = {}
    for layer in net.layer:
        for position, blob in enumerate(layer.bottom):
            layer.bottom[position] = current.get(blob, blob)
        for position, blob in enumerate(list(layer.top)):
            left[blob] -= 1
            keeps_name = not layer.bottom if blob in sources else left[blob] == 0
            if not keeps_name:
                suffix = f"_out{position}" if len(layer.top) > 1 else "_out"
                current[blob] = free_name(layer.name + suffix, taken)
            else:
                current[blob] = blob
            layer.top[position] = current[blob]
    return net


def restore_in_place(net: ProtoMessage) -> None:
    """Make elementwise layers work in place again where ``remove_in_place`` gave them a blob; changes the net.

    The engine then merges them with the layer before them: a calibration model runs about as fast as the original.
    """
    makers = {blob: layer for layer in net.layer for blob in layer.top}
    readers = Counter(blob for layer in net.layer for blob in layer.bottom)
    for layer in net.layer:
        if layer.type not in _IN_PLACE or len(layer.bottom) != 1:
            continue
        maker = makers.get(layer.bottom[0])
        if maker is None or len(maker.top) != 1 or layer.bottom[0] != f"{maker.name}_out":
            continue
        if readers[layer.bottom[0]] == 1:
            maker.top[0] = layer.bottom[0] = layer.top[0]
            makers[layer.top[0]] = layer


def free_name(wanted: str, taken: set[str]) -> str:
    """The wanted name, with a number appended if it is taken; the result is added to ``taken``."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name
