"""The deploy file in standard integer operators gives the integers of an independent NumPy executor."""

from __future__ import annotations

import numpy as np
import pytest
from export_nets import (
    Net,
    calibrate,
    grouped,
    linear,
    one_and_three_dimensions,
    pooled,
    recurrent,
    residual,
    transposed,
)
from numpy_nets import AscendExecutor
from onnx import helper, numpy_helper

from amct.errors import ExportError
from amct.export.check.integers import standard_model
from amct.export.check.running import LoadedModel
from amct.export.deploy import ascend_model

NETS = {
    "residual": residual,
    "grouped": grouped,
    "transposed": transposed,
    "linear": linear,
    "pooled": pooled,
    "one and three dimensions": one_and_three_dimensions,
}


def deploy_of(make, **options):
    net, model = make()
    factors, _ = calibrate(net, model, **options)
    return net, ascend_model(model, net.bindings(), factors).model


def largest_difference(deploy, feeds, packed=()):
    expected = AscendExecutor(deploy).run(feeds)
    got = LoadedModel(standard_model(deploy, packed=packed)).run(feeds)
    return {name: (np.abs(value - got[name]).max(), np.abs(value).max()) for name, value in expected.items()}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_integers_are_those_of_the_numpy_executor(make, symmetric):
    """Sums of integers are equal; the float operators between them may differ by a few roundings of float32."""
    net, deploy = deploy_of(make, symmetric=symmetric)
    for difference, size in largest_difference(deploy, net.data()).values():
        assert difference <= 8 * 2.0**-24 * size


def even_channels():
    """A net whose weights can all be packed to 4 bits."""
    net = Net(seed=8)
    y = net.layer("Conv", "conv", net.input("x", 2, 4, 6, 6), net.weight("w", 6, 4, 3, 3), net.weight("b", 6))
    y = net.layer("ConvTranspose", "up", y, net.weight("up.w", 6, 4, 2, 2), net.weight("up.b", 4), strides=[2, 2])
    y = net.layer("MatMul", "product", y, net.weight("product.w", 8, 3))
    net.add("Add", "bias", y, net.weight("product.b", 3), outputs=["y"])
    return net, net.model("y")


@pytest.mark.parametrize("act_bits", [4, 8])
def test_packed_weights_are_separated(act_bits):
    net, deploy = deploy_of(even_channels, wts_bits=4, act_bits=act_bits)
    for difference, size in largest_difference(deploy, net.data(), packed=set(net.layers)).values():
        assert difference <= 8 * 2.0**-24 * size


def test_what_cannot_be_computed_is_named():
    _, deploy = deploy_of(recurrent)
    with pytest.raises(ExportError, match=r'node ".+": BasicLSTMInplaceFillWindowCache on integers cannot be computed'):
        standard_model(deploy)
    _, deploy = deploy_of(residual, act_bits=16)
    with pytest.raises(ExportError, match="activations of 16 bits have no integer operator"):
        standard_model(deploy)


def test_constants_that_only_a_branch_reads_are_kept():
    """As in models of recurrent cells, whose weights are read in the branches of an If."""
    net, deploy = deploy_of(linear)
    result = deploy.graph.output[0].name
    constant = numpy_helper.from_array(np.float32(3), "only_inside")
    branches = {
        key: helper.make_graph(
            [helper.make_node(operator, [result, "only_inside"], [key])],
            key,
            [],
            [helper.make_empty_tensor_value_info(key)],
        )
        for key, operator in (("then_branch", "Mul"), ("else_branch", "Add"))
    }
    deploy.graph.initializer.extend([constant, numpy_helper.from_array(np.array(True), "yes")])
    deploy.graph.node.append(helper.make_node("If", ["yes"], ["chosen"], name="if", **branches))
    deploy.graph.output.append(helper.make_empty_tensor_value_info("chosen"))
    got = LoadedModel(standard_model(deploy)).run(net.data())
    np.testing.assert_allclose(got["chosen"], 3 * got[result], rtol=1e-6)
