"""LSTM and GRU as one opaque operation each, so that a traced program keeps them whole.

torch's own tracing unrolls the time steps and so fixes the sequence length; these operations infer their shapes, keep
the sequence length dynamic, and become one ONNX node.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct.pytorch.capture.layer_types import setting_problem

if TYPE_CHECKING:
    from collections.abc import Callable


@torch.library.custom_op("amct::lstm", mutates_args=())
def lstm(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One LSTM layer over ``x`` [time, batch, input]; a missing state is zero. Returns output, last h, last c."""
    zeros = x.new_zeros(1, x.shape[1], weight_hh.shape[1])
    state = (zeros if h is None else h.contiguous(), zeros if c is None else c.contiguous())
    output, last_h, last_c = torch.lstm(
        x, state, _weights(weight_ih, weight_hh, bias_ih, bias_hh), bias_ih is not None, 1, 0.0, False, False, False
    )
    return output, last_h, last_c


@lstm.register_fake
def _lstm_shapes(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    weight_hh = rest[3]
    assert weight_hh is not None
    output, last = _shapes(x, weight_hh)
    return output, last, torch.empty_like(last)


@torch.library.custom_op("amct::gru", mutates_args=())
def gru(
    x: Tensor, h: Tensor | None, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One GRU layer over ``x`` [time, batch, input]; a missing state is zero. Returns output and last h."""
    state = x.new_zeros(1, x.shape[1], weight_hh.shape[1]) if h is None else h.contiguous()
    output, last_h = torch.gru(
        x, state, _weights(weight_ih, weight_hh, bias_ih, bias_hh), bias_ih is not None, 1, 0.0, False, False, False
    )
    return output, last_h


@gru.register_fake
def _gru_shapes(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    weight_hh = rest[2]
    assert weight_hh is not None
    return _shapes(x, weight_hh)


def _shapes(x: Tensor, weight_hh: Tensor) -> tuple[Tensor, Tensor]:
    steps, batch, hidden = x.shape[0], x.shape[1], weight_hh.shape[1]
    return x.new_empty(steps, batch, hidden), x.new_empty(1, batch, hidden)


def _weights(*parameters: Tensor | None) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter is not None]


def make_opaque(model: nn.Module) -> None:
    """Make every quantizable LSTM and GRU inside a (copied) model call the operations above."""
    for module in model.modules():
        if module is model or not isinstance(module, (nn.LSTM, nn.GRU)) or setting_problem(module):
            continue
        base = nn.LSTM if isinstance(module, nn.LSTM) else nn.GRU
        if type(module).forward is base.forward:
            setattr(module, "forward", functools.partial(_opaque_forward, module, module.forward))  # noqa: B010  for mypy


def hide_weight_list(model: nn.Module) -> None:
    """Let a (copied) model that is itself a recurrent layer have its list of weights only while it runs.

    torch.export exchanges the parameters for its own, and the layer follows in its list; releases before 2.9 refuse a
    model with an attribute that changed.
    """
    if not isinstance(model, nn.RNNBase):
        return
    names, forward = tuple(model._flat_weights_names), model.forward

    def with_weight_list(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  those of the layer
        model._flat_weights = [getattr(model, name, None) for name in names]
        try:
            return forward(*args, **kwargs)
        finally:
            model._flat_weights = []

    model._flat_weights_names, model._flat_weights, model._flat_weight_refs = [], [], []
    setattr(model, "forward", functools.wraps(forward)(with_weight_list))  # noqa: B010  for mypy


_State = Tensor | tuple[Tensor, Tensor]
_Result = tuple[Tensor, _State]


def _opaque_forward(
    module: nn.LSTM | nn.GRU,
    original: Callable[..., _Result],
    input: Tensor,  # noqa: A002  the name that callers of nn.LSTM may use
    hx: _State | None = None,
) -> _Result:
    """Replaces nn.LSTM.forward and nn.GRU.forward; packed or unbatched inputs use torch's own forward."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        return original(input, hx)
    x = input.transpose(0, 1) if module.batch_first else input
    last: _State
    if isinstance(module, nn.LSTM):
        h, c = hx if isinstance(hx, (tuple, list)) else (None, None)
        output, last_h, last_c = lstm(x, h, c, *_parameters(module))
        last = (last_h, last_c)
    else:
        assert not isinstance(hx, (tuple, list))
        output, last = gru(x, hx, *_parameters(module))
    return (output.transpose(0, 1) if module.batch_first else output), last


def _parameters(module: nn.RNNBase) -> list[Tensor | None]:
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    return [getattr(module, name, None) for name in names]
