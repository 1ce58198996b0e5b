"""A large model in parts: they compute what the whole model computes, and each has few of the weights."""

from __future__ import annotations

import numpy as np
import pytest
from export_nets import residual, run
from onnx import helper

from amct.export.check.parts import consecutive_parts, part_model
from amct.export.check.running import LoadedModel
from amct.export.onnx.messages import parameter_bytes


@pytest.mark.parametrize("most", [1, 3000, 10**9], ids=["one layer each", "two layers", "everything"])
def test_parts_compute_what_the_whole_model_computes(most):
    net, model = residual()
    feeds = net.data()
    parts = consecutive_parts(model, most)
    values, sizes = dict(feeds), []
    for index in range(len(parts)):
        part = part_model(model, parts, index, values)
        sizes.append(parameter_bytes(part))
        loaded = LoadedModel(part)
        values |= loaded.run({name: values[name] for name in loaded.inputs})

    assert [node.name for part in parts for node in part] == [node.name for node in model.graph.node]
    assert len(parts) == {1: 4, 3000: 3, 10**9: 1}[most]
    assert sum(sizes) == parameter_bytes(model)
    np.testing.assert_allclose(values["y"], run(model, feeds)["y"], rtol=1e-5, atol=1e-6)


def test_what_follows_a_layer_stays_with_it():
    _, model = residual()
    assert all(part[0].op_type in ("Conv", "Gemm") for part in consecutive_parts(model, 1))


def test_a_model_with_sequences_is_one_part():
    _, model = residual()
    model.graph.node.append(helper.make_node("SequenceConstruct", ["y"], ["all"]))
    assert len(consecutive_parts(model, 1)) == 1
