"""Sums in front of a LayerNorm in the fast QDQ file: onnxruntime does not compute both in one, which is slower."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_nets import Net, calibrate, run
from transformer_nets import WIDTH, layer_norm, layer_norm_of_arithmetic, rms_norm

from amct.export.onnx.runtimes import count_integer_kernels
from amct.export.qdq.exporter import qdq_model


def block(norm=layer_norm, *, shape=(2, 5, WIDTH), what=""):
    """linear layer → sum with its input → normalization → linear layer."""
    net = Net()
    x = net.input("x", *shape)
    y = net.layer("MatMul", "first", x, net.weight("w1", WIDTH, WIDTH))
    y = net.add("Add", "first_add", y, net.weight("b1", WIDTH))
    total = net.add("Add", "total", y, x)
    y = norm(net, "norm", total)
    y = net.add("Add", "again", y, total) if what == "two_readers" else y
    y = net.layer("MatMul", "second", y, net.weight("w2", WIDTH, WIDTH))
    net.add("Add", "second_add", y, net.weight("b2", WIDTH), outputs=["y"])
    return net, net.model("y", *(["total_out"] if what == "output" else []))


def exported(net, model, **options):
    factors, tensors = calibrate(net, model)
    return qdq_model(model, net.bindings(), factors, tensors=tensors, **options).model


def node(model, output):
    return next(each for each in model.graph.node if output in each.output)


@pytest.mark.parametrize("norm", [layer_norm, layer_norm_of_arithmetic])
def test_a_sum_that_only_a_layer_norm_reads_is_not_fused_with_it(norm, tmp_path):
    net, model = block(norm)
    file = exported(net, model)
    assert node(file, "total_out").op_type == "Sum"
    onnx.save(file, tmp_path / "file.onnx")
    operators = count_integer_kernels(tmp_path / "file.onnx").operators
    assert "LayerNormalization" in operators
    assert "SkipLayerNormalization" not in operators
    got = run(file, net.data(), optimize=False)["y"]
    node(file, "total_out").op_type = "Add"
    np.testing.assert_array_equal(got, run(file, net.data(), optimize=False)["y"])


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (rms_norm, {}),
        (layer_norm, {"what": "two_readers"}),
        (layer_norm, {"what": "output"}),
        (layer_norm, {"shape": (2, 3, 5, WIDTH)}),
    ],
    ids=["rms", "two_readers", "output", "four_dimensions"],
)
def test_other_sums_stay(norm, options):
    net, model = block(norm, **options)
    sums = [each.op_type for each in exported(net, model).graph.node if "first_add_out" in each.input]
    assert sums == ["Add"]
