"""Layers quantized alone: what comes before them is computed once, and the result is that of whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amct.pytorch
from amct.export.check.losses import similarity_over
from amct.export.onnx.runtime import Runner
from amct.pipeline import sensitivity


class Net(nn.Module):
    """Blocks beside a stream, and an output from the middle."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
        self.early, self.head = nn.Linear(8, 2), nn.Linear(8, 4)
        self.part = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        early = None
        for number, block in enumerate(self.blocks):
            if number == 5:  # one of the tensors of a split is kept, the other is computed again
                one, other = torch.split(x, 4, 1)
                x = torch.cat([one, self.part(other)], 1)
            x = x + torch.relu(block(x))
            early = self.early(x.mean((2, 3))) if number == 2 else early
        return self.head(x.mean((2, 3))), early


@pytest.fixture(scope="module")
def quantized():
    torch.manual_seed(0)
    return amct.pytorch.quantize(Net().eval(), [torch.randn(6, 3, 8, 8), torch.randn(4, 3, 8, 8)])


@pytest.mark.parametrize("most", [sensitivity.MOST_KEPT, 20_000, 0])
def test_layers_alone_run_from_the_last_place_before_them(quantized, most, monkeypatch):
    prepared, qparams = quantized.prepared, quantized.qparams
    batches = [prepared.onnx_inputs(each) for each in quantized.examples]
    whole = Runner(prepared.with_only(qparams, ()).model)
    exact = [whole.run(batch) for batch in batches]
    sizes = []

    class Counting(Runner):
        def __init__(self, model, *options, **more):
            sizes.append(len(model.graph.node))
            super().__init__(model, *options, **more)

    monkeypatch.setattr(sensitivity, "Runner", Counting)
    monkeypatch.setattr(sensitivity, "MOST_KEPT", most)
    found = {each.layer: each.sqnr for each in quantized.sensitivity()}
    assert set(found) == set(quantized.layers)
    whole_sizes = []
    for name in quantized.layers:
        alone = prepared.with_only(qparams, [name])
        runner = Runner(alone.model)
        whole_sizes.append(len(alone.model.graph.node))
        expected, _ = similarity_over((one, runner.run(batch)) for one, batch in zip(exact, batches, strict=True))
        assert found[name] == pytest.approx(expected.sqnr, abs=0.01), name
    own = sizes[1:]  # without the float model
    assert len(own) == len(quantized.layers)
    if most == 0:
        assert own[0] == max(whole_sizes)
    assert sum(own) <= (1.0 if most < 1_000_000 else 0.75) * sum(whole_sizes)
