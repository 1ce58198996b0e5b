"""Every function reads the prototxt once and the caffemodel once."""

from __future__ import annotations

import pytest
from ptq_caffe_flow import batch, golden_flow

from amct.caffe import prototxt, quantize
from amct.caffe.engine import weights


@pytest.fixture
def reads(monkeypatch):
    """The files that were parsed, by what parsed them."""
    found = {"read_net_message": [], "read_weights": []}
    for module, (name, calls) in zip((prototxt, weights), found.items(), strict=True):
        original = getattr(module, name)

        def spy(*args, original=original, calls=calls):
            calls.append(args)
            return original(*args)

        monkeypatch.setattr(module, name, spy)
    return found


@pytest.mark.parametrize("step", ["create_quant_config", "init", "quantize"])
def test_the_prototxt_and_the_caffemodel_are_read_once(step, golden, tmp_path, reads):
    flow = golden_flow("mini_resnet", golden, tmp_path).configure()
    data = batch(flow.original(), 0)
    for calls in reads.values():
        calls.clear()
    {
        "create_quant_config": flow.configure,
        "init": flow.init,
        "quantize": lambda: quantize(flow.model, flow.weights, [data]),
    }[step]()
    assert {name: len(calls) for name, calls in reads.items()} == {"read_net_message": 1, "read_weights": 1}
