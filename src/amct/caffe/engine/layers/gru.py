"""GRU: a recurrent layer with two gates, with the bottoms, tops and options of Caffe's LSTM."""

from __future__ import annotations

import torch

from amct.caffe.engine.layers.recurrent import Recurrent
from amct.caffe.engine.registry import register


@register("GRU")
class GRU(Recurrent):
    """Blobs: W_xc (3H, D), b_c (3H), W_xc_static if there is a static input, W_hc (3H, H); gates in the order z, r, h.

    The formulas are ONNX's (``linear_before_reset`` 0): z = sigmoid(W_z x + R_z h + b_z), r likewise, n = tanh(W_h x +
    R_h (r * h) + b_h), and the new h = (1 - z) * n + z * h. Bottoms, tops and options are those of Caffe's LSTM
    (``recurrent_param``); h is multiplied by ``cont`` before use.
    """

    gates = 3

    def step(
        self, drive: torch.Tensor, cont: torch.Tensor, states: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One time step; the only state is h."""
        gated = 2 * self.outputs
        before = cont * states[0]
        hidden = self.product(self.rounded(before), parameters, -1, rows=slice(0, gated))
        gates = torch.sigmoid(drive[:, :gated] + hidden)
        update, reset = gates.chunk(2, -1)
        hidden = self.product(self.rounded(reset * before), parameters, -1, rows=slice(gated, None))
        new = torch.tanh(drive[:, gated:] + hidden)
        hidden = (1 - update) * new + update * before
        return hidden, [hidden]
