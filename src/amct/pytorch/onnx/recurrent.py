"""LSTM and GRU in ONNX: translations of the opaque operations, and torch's weights in ONNX's gate order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.model.kinds import LayerKind
from amct.numerics.arq import reorder_gates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_Value = Any  # of the exporter's graph, or None


def translations() -> Mapping[Any, Callable[..., Any]]:
    """The torch.onnx translation table for the operations of ``amct.pytorch.capture.recurrent``.

    The weights are placeholders: ``onnx_parameters`` replaces them later.
    """
    from onnxscript import opset18

    operators: Any = opset18  # its type hints require tensors where lists are accepted too
    # Releases before 2.8 match arguments by name, and a missing state only with a parameter that has a default.

    def lstm(
        x: _Value,
        h: _Value = None,
        c: _Value = None,
        weight_ih: _Value = None,
        weight_hh: _Value = None,
        bias_ih: _Value = None,  # noqa: ARG001  the biases are in ``onnx_parameters``
        bias_hh: _Value = None,  # noqa: ARG001
    ) -> _Value:
        output, last_h, last_c = operators.LSTM(x, weight_ih, weight_hh, None, None, h, c)
        return operators.Squeeze(output, [1]), last_h, last_c

    def gru(
        x: _Value,
        h: _Value = None,
        weight_ih: _Value = None,
        weight_hh: _Value = None,
        bias_ih: _Value = None,  # noqa: ARG001  the biases are in ``onnx_parameters``
        bias_hh: _Value = None,  # noqa: ARG001
    ) -> _Value:
        output, last_h = operators.GRU(x, weight_ih, weight_hh, None, None, h, linear_before_reset=1)
        return operators.Squeeze(output, [1]), last_h

    return {torch.ops.amct.lstm.default: lstm, torch.ops.amct.gru.default: gru}


def onnx_parameters(module: nn.RNNBase) -> tuple[Tensor, Tensor, Tensor | None]:
    """W ``[1, gates · hidden, input]``, R ``[1, gates · hidden, hidden]``, B ``[1, 2 · gates · hidden]`` or None."""
    order = (LayerKind.LSTM if isinstance(module, nn.LSTM) else LayerKind.GRU).onnx_gates
    weights = [reorder_gates(getattr(module, name).detach(), order) for name in ("weight_ih_l0", "weight_hh_l0")]
    if not module.bias:
        return weights[0][None], weights[1][None], None
    biases = [reorder_gates(getattr(module, name).detach(), order) for name in ("bias_ih_l0", "bias_hh_l0")]
    return weights[0][None], weights[1][None], torch.cat(biases)[None]
