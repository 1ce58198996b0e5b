"""``LSTMQAT`` and ``GRUQAT``: one layer, one direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from amct.config.qat.single_op import SingleOpData
from amct.model.kinds import LayerKind
from amct.numerics.arq import reorder_gates
from amct.numerics.settings import WeightKind
from amct.pytorch.qat.single_op.module import SingleOp, checked_config
from amct.pytorch.qat.single_op.onnx_operators import is_exporting, symbolic_multi_out
from amct.pytorch.qat.single_op.state import InputQuantizer, WeightQuantizer

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Recurrent(SingleOp):
    """A recurrent layer: its input, its initial hidden state and both weights are quantized.

    ``wts_scales`` are those of the input weights, ``wts_scales_r`` those of the recurrent weights. The hidden state
    (``acts_h_…``) lies between -1 and 1, so its clips are not trained; between the steps it stays float.
    """

    settings = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")
    input_rank = 3
    kind: LayerKind

    def __init__(  # noqa: PLR0913  torch's signature
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        checked = checked_config(config, type(self).__name__)
        projection = {"proj_size": proj_size} if self.kind is LayerKind.LSTM else {}
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias=bias,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            device=device,
            dtype=dtype,
            **projection,
        )
        weights = [
            WeightQuantizer(checked.weights, name, WeightKind.RNN, self.kind.gates, suffix)
            for name, suffix in (("weight_ih_l0", ""), ("weight_hh_l0", "_r"))
        ]
        range_of_state = SingleOpData(dst_type=checked.data.dst_type, clip_max=1.0, clip_min=-1.0)
        self._state = InputQuantizer(range_of_state, prefix="acts_h", trained=False)
        self._add_quantizers(checked, [InputQuantizer(checked.data)], weights, device)
        self._state.add_state(self, device)
        self._state.refresh(self)

    def parameters_exchanged(self) -> None:
        """Let torch's list of weights be that of the exchanged parameters."""
        layer = cast("Any", self)
        layer._flat_weights = [layer._parameters[name] for name in layer._flat_weights_names]

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002, ANN401  torch's name; a tensor, a pair or None
        """Run the layer on the quantized input with quantized weights."""
        x, *weights = self.quantized(input)
        layer = cast("Any", self)
        biases = [layer.bias_ih_l0, layer.bias_hh_l0] if layer.bias else []
        states = self._states(input, hx)
        if is_exporting():
            return self._in_onnx(x, states, weights, biases)
        run: Any = torch.lstm if self.kind is LayerKind.LSTM else torch.gru
        state = states if self.kind is LayerKind.LSTM else states[0]
        output, *last = run(x, state, [*weights, *biases], layer.bias, 1, 0.0, self.training, False, layer.batch_first)
        return output, self._as_state(last)

    def _states(self, x: Tensor, hx: Any) -> tuple[Tensor, ...]:  # noqa: ANN401  a tensor, a pair or None
        """The initial states ``[1, batch, hidden]``; zero when none are given."""
        if hx is not None:
            h, *rest = hx if isinstance(hx, (tuple, list)) else (hx,)
            return (self._state.quantize(self, h) if self.config.retrain_enable else h, *rest)
        layer = cast("Any", self)
        batch = x.shape[0 if layer.batch_first else 1]
        zeros = x.new_zeros(1, batch, layer.hidden_size)
        return (zeros, zeros) if self.kind is LayerKind.LSTM else (zeros,)

    def _as_state(self, last: list[Tensor]) -> Any:  # noqa: ANN401  a tensor or a pair
        return tuple(last) if self.kind is LayerKind.LSTM else last[0]

    def _in_onnx(self, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor], biases: list[Tensor]) -> Any:  # noqa: ANN401  (output, state)
        """One ONNX node; torch's own export would unroll the time steps."""
        layer, order = cast("Any", self), self.kind.onnx_gates
        if layer.batch_first:
            x = x.transpose(0, 1)
        parameters = [reorder_gates(weight, order)[None] for weight in weights]
        bias = torch.cat([reorder_gates(each, order) for each in biases])[None] if biases else None
        time, batch, hidden = x.shape[0], x.shape[1], layer.hidden_size
        attributes = {"hidden_size": hidden}
        if self.kind is LayerKind.GRU:
            attributes["linear_before_reset"] = 1
        output, *last = symbolic_multi_out(
            "LSTM" if self.kind is LayerKind.LSTM else "GRU",
            (x, *parameters, bias, None, *states),
            attributes,
            dtypes=(x.dtype,) * (1 + len(states)),
            shapes=((time, 1, batch, hidden), *((1, batch, hidden) for _ in states)),
        )
        output = output.squeeze(1)
        return output.transpose(0, 1) if layer.batch_first else output, self._as_state(last)


class LSTMQAT(_Recurrent, nn.LSTM):  # type: ignore[misc]  # torch overloads forward for packed sequences
    """Quantization-aware ``nn.LSTM`` with one layer and one direction; the arguments are torch's, and ``config``."""

    float_class, kind = nn.LSTM, LayerKind.LSTM


class GRUQAT(_Recurrent, nn.GRU):  # type: ignore[misc]
    """Quantization-aware ``nn.GRU`` with one layer and one direction; the arguments are torch's, and ``config``."""

    float_class, kind = nn.GRU, LayerKind.GRU
