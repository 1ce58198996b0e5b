"""Boxes and what feeds what: the framework-independent form of a network in a report."""

from __future__ import annotations

from dataclasses import dataclass, replace

LARGEST_NETWORK = 4000
"""The maximum number of boxes that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """One operation, or a layer with the cheap operations behind it.

    Attributes:
        name: Its name in the model.
        type: Its operator or layer type.
        inputs: The boxes that feed it, by their index; each is smaller than its own.
        layer: The quantized layer that it computes; None for any other operation.
        integer: Whether its result is rounded to integers in the quantized model.
        merged: The types of the operations that were merged into it.
    """

    name: str
    type: str
    inputs: tuple[int, ...] = ()
    layer: str | None = None
    integer: bool = False
    merged: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Network:
    """The boxes of a network in execution order."""

    boxes: tuple[Box, ...]


def merged_chains(boxes: list[Box], cheap: frozenset[str]) -> Network:
    """Merge operations of a ``cheap`` type with one input into the box that feeds them, if nobody else reads that.

    A network then has about as many boxes as a person would draw.
    """
    readers = [0] * len(boxes)
    for box in boxes:
        for source in box.inputs:
            readers[source] += 1
    kept: list[Box] = []
    place: list[int] = []
    for box in boxes:
        sources = tuple(dict.fromkeys(place[source] for source in box.inputs))
        if len(box.inputs) == 1 and box.layer is None and box.type in cheap and readers[box.inputs[0]] == 1:
            (target,) = sources
            kept[target] = replace(
                kept[target], merged=(*kept[target].merged, box.type), integer=kept[target].integer or box.integer
            )
            place.append(target)
            continue
        place.append(len(kept))
        kept.append(replace(box, inputs=sources))
    return Network(boxes=tuple(kept))
