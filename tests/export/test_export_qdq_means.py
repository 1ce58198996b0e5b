"""Means over rows and columns in the fast QDQ file: computed in integers, as GlobalAveragePool."""

from __future__ import annotations

import numpy as np
import pytest
from export_nets import Net, calibrate, run

from amct.export.qdq.exporter import plan_tensors, qdq_model


def network(axes, opset, keepdims=1, shape=(2, 3, 8, 8)):
    net = Net(opset=opset)
    x = net.add("Relu", "relu", net.layer("Conv", "first", net.input("x", *shape), net.weight("w1", 6, 3, 3, 3)))
    if opset < 18:
        mean = net.add("ReduceMean", "mean", x, axes=axes, keepdims=keepdims)
    else:
        mean = net.add("ReduceMean", "mean", x, net.constant("axes", np.array(axes)), keepdims=keepdims)
    if keepdims and len(axes) == 2:
        net.layer("Conv", "second", mean, net.weight("w2", 4, 6, 1, 1), outputs=["y"])
    else:
        net.add("Neg", "other", mean, outputs=["y"])
    return net, net.model("y")


def operators(model):
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(("axes", "opset"), [([2, 3], 17), ([-1, -2], 17), ([2, 3], 18)])
def test_a_mean_over_rows_and_columns_is_a_pooling_on_integers(axes, opset):
    net, model = network(axes, opset)
    factors, tensors = calibrate(net, model)
    assert set(plan_tensors(model, net.bindings()).observed) <= set(tensors)
    exported = qdq_model(model, net.bindings(), factors, tensors=tensors, target="vnni")
    assert {"relu_out", "mean_out"} <= set(exported.tensors)
    assert "GlobalAveragePool" in operators(exported.model)
    assert "ReduceMean" not in operators(exported.model)
    assert "ReduceMean" in operators(model)
    assert "ReduceMean" in operators(qdq_model(model, net.bindings(), factors, placement="exact").model)
    expected, got = (run(each, net.data())["y"].astype(np.float64) for each in (model, exported.model))
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 30


@pytest.mark.parametrize(("axes", "keepdims"), [([2, 3], 0), ([1], 1), ([1, 2, 3], 1)])
def test_other_means_stay(axes, keepdims):
    net, model = network(axes, 17, keepdims)
    factors, tensors = calibrate(net, model)
    assert "ReduceMean" in operators(qdq_model(model, net.bindings(), factors, tensors=tensors).model)
