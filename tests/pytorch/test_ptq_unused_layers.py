"""A layer that runs for nothing is left out with its reason, and the rest can be saved."""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch
from torch import nn

import amct.pytorch as amct


class WithPooler(nn.Module):
    """As BERT: the pooler runs, but the user takes the hidden state only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.pooler = nn.Linear(8, 8)
        self.added = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.body(x)
        torch.tanh(self.pooler(hidden))
        return torch.relu(hidden).clone().add_(self.added(hidden))


def test_layer_that_no_output_depends_on_stays_float_and_saving_works(tmp_path):
    torch.manual_seed(0)
    model, x = WithPooler().eval(), torch.randn(4, 8)
    quantized = amct.quantize(model, x)
    assert quantized.layers == ("body", "added")  # what is added in place counts as used
    assert {skip.layer: skip.reason for skip in quantized.skipped} == {"pooler": "no output of the model depends on it"}
    quantized.save(tmp_path / "net")
    session = onnxruntime.InferenceSession(str(tmp_path / "net_qdq_model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = model(x).numpy()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
