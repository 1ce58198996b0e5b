"""Rules of padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule
from amct.pytorch.onnx.lowering.sizes import static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@rule("pad")
def padded(to: Writer, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Positions added at both ends of the last axes; torch lists the last axis first."""
    amounts = static(pad, "padding")
    if not any(amounts):
        return x
    places = len(amounts) // 2
    front = [0] * (x.rank - places)
    pads = [*front, *amounts[::2][::-1], *front, *amounts[1::2][::-1]]
    if mode != "constant" and min(pads) < 0:
        raise NotLoweredError(f"padding of {pads} in the mode {mode}")
    filling = to.constant(value or 0, x.dtype) if mode == "constant" else None
    return to.add("Pad", x, to.ints(pads), filling, mode=_MODES[mode])


@rule("constant_pad_nd")
def padded_with_a_value(to: Writer, x: Value, pad: Sequence[int], value: Number = 0) -> Value:
    """One value at both ends."""
    return padded(to, x, pad, "constant", value)


@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflected(to: Writer, x: Value, padding: Sequence[int]) -> Value:
    """The values next to the ends, mirrored."""
    return padded(to, x, padding, "reflect")


@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replicated(to: Writer, x: Value, padding: Sequence[int]) -> Value:
    """The values at the ends."""
    return padded(to, x, padding, "replicate")
