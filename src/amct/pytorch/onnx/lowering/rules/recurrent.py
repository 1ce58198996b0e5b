"""Rules of recurrent layers."""

from __future__ import annotations

import torch

from amct.pytorch.onnx.lowering.registry import rule
from amct.pytorch.onnx.lowering.writer import Value, Writer


@rule("amct::lstm")
def lstm(
    to: Writer,
    x: Value,
    h: Value | None,
    c: Value | None,
    weight_ih: Value,
    weight_hh: Value,
    bias_ih: Value | None,
    bias_hh: Value | None,
) -> list[Value]:
    """One node; it gets its weights in ONNX's order when the layers are placed."""
    del bias_ih, bias_hh
    return _layer(to, "LSTM", [x, weight_ih, weight_hh, None, None, h, c])


@rule("amct::gru")
def gru(
    to: Writer,
    x: Value,
    h: Value | None,
    weight_ih: Value,
    weight_hh: Value,
    bias_ih: Value | None,
    bias_hh: Value | None,
) -> list[Value]:
    """One node; it gets its weights in ONNX's order when the layers are placed."""
    del bias_ih, bias_hh
    return _layer(to, "GRU", [x, weight_ih, weight_hh, None, None, h], linear_before_reset=1)


def _layer(to: Writer, operator: str, inputs: list[Value | None], **settings: object) -> list[Value]:
    output, *last = [tuple(each.shape) for each in to.result]
    steps, batch, hidden = output
    shapes = [(steps, 1, batch, hidden), *last]
    outputs: list[tuple[torch.dtype, tuple[int | torch.SymInt, ...]]] = [(to.result[0].dtype, each) for each in shapes]
    found, *states = to.add_many(operator, *inputs, outputs=outputs, **settings)
    return [to.squeeze(found, [1]), *states]
