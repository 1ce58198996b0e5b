"""Fillers: the distributions a real Caffe draws from, and that they are drawn only when needed, reproducibly."""

from __future__ import annotations

import numpy as np
import pytest

from amct.caffe import pycaffe as caffe
from amct.errors import ModelError


def weights(write, filler, outputs=400, inputs=50):
    net = caffe.Net(
        write(
            f'layer {{ name: "in" type: "Input" top: "d" input_param {{ shape {{ dim: 1 dim: {inputs} }} }} }}'
            f'layer {{ name: "ip" type: "InnerProduct" bottom: "d" top: "y" '
            f"inner_product_param {{ num_output: {outputs} weight_filler {{ {filler} }} }} }}"
        ),
        caffe.TEST,
    )
    return net.params["ip"][0].data


# 20 000 values: the mean is within 5 std / sqrt(20000), the deviation within 5 / sqrt(40000), of the true ones.
@pytest.mark.parametrize(
    ("filler", "mean", "deviation", "low", "high"),
    [
        ('type: "uniform" min: -2 max: 1', -0.5, 3 / np.sqrt(12), -2, 1),
        ('type: "gaussian" mean: 1 std: 0.5', 1, 0.5, -np.inf, np.inf),
        ('type: "xavier"', 0, np.sqrt(1 / 50), -np.sqrt(3 / 50), np.sqrt(3 / 50)),
        ('type: "xavier" variance_norm: FAN_OUT', 0, np.sqrt(1 / 400), -np.sqrt(3 / 400), np.sqrt(3 / 400)),
        ('type: "xavier" variance_norm: AVERAGE', 0, np.sqrt(1 / 225), -np.sqrt(3 / 225), np.sqrt(3 / 225)),
        ('type: "msra"', 0, np.sqrt(2 / 50), -np.inf, np.inf),
        ('type: "msra" variance_norm: AVERAGE', 0, np.sqrt(2 / 225), -np.inf, np.inf),
    ],
)
def test_distributions(write, filler, mean, deviation, low, high):
    values = weights(write, filler).astype(np.float64)
    assert abs(values.mean() - mean) < 5 * deviation / np.sqrt(values.size)
    assert abs(values.std() / deviation - 1) < 0.025
    assert low <= values.min()
    assert values.max() <= high


def test_constant_sparse_and_unitball(write):
    assert (weights(write, 'type: "constant" value: 3') == 3).all()
    assert (weights(write, "value: 2") == 2).all()
    ball = weights(write, 'type: "positive_unitball"')
    np.testing.assert_allclose(ball.sum(1), 1, rtol=1e-5)
    assert ball.min() >= 0
    sparse = weights(write, 'type: "gaussian" std: 1 sparse: 5')
    assert (sparse == 0).mean() == pytest.approx(1 - 5 / 400, abs=0.005)


@pytest.mark.parametrize(("size", "line"), [(4, [0.25, 0.75, 0.75, 0.25]), (3, [0.5, 1, 0.5]), (2, [0.5, 0.5])])
def test_bilinear(write, size, line):
    net = caffe.Net(
        write(
            'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 2 dim: 3 dim: 3 } } }'
            'layer { name: "up" type: "Deconvolution" bottom: "d" top: "y" convolution_param { num_output: 2 group: 2 '
            f'kernel_size: {size} weight_filler {{ type: "bilinear" }} }} }}'
        ),
        caffe.TEST,
    )
    np.testing.assert_allclose(net.params["up"][0].data[1, 0], np.outer(line, line), rtol=1e-6)


def test_seeded_draws_do_not_depend_on_who_reads_first(write):
    layer = (
        'layer {{ name: "{0}" type: "InnerProduct" bottom: "{1}" top: "{0}" '
        'inner_product_param {{ num_output: 4 weight_filler {{ type: "xavier" }} }} }}'
    )
    head = 'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 4 } } }'
    path = write(head + layer.format("a", "d") + layer.format("b", "a"))
    found = []
    for order in (("a", "b"), ("b", "a")):
        caffe.set_random_seed(3)
        net = caffe.Net(path, caffe.TEST)
        found.append({name: net.params[name][0].data.copy() for name in order})
    np.testing.assert_array_equal(found[0]["a"], found[1]["a"])
    np.testing.assert_array_equal(found[0]["b"], found[1]["b"])
    assert not np.array_equal(found[0]["a"], found[0]["b"])


@pytest.mark.parametrize(
    ("filler", "message"),
    [
        ('type: "gausian"', 'Unknown filler name: "gausian". Did you mean "gaussian"'),
        ('type: "xavier" sparse: 3', "sparsity is only supported by the gaussian filler"),
        ('type: "bilinear"', "needs a blob of 4 axes with square kernels"),
        ('type: "uniform" min: 2 max: 1', "min 2.0 must not be above max 1.0"),
    ],
)
def test_fillers_that_cannot_fill(write, filler, message):
    with pytest.raises(ModelError, match=message):
        weights(write, filler)


def test_random_dummy_data_changes_constant_does_not(write):
    net = caffe.Net(
        write(
            'layer { name: "x" type: "DummyData" top: "a" top: "b" dummy_data_param { shape { dim: 2 dim: 2 } '
            'data_filler { type: "gaussian" } data_filler { type: "constant" value: 3 } } }'
        ),
        caffe.TEST,
    )
    first = net.forward()["a"].copy()
    assert not np.array_equal(net.forward()["a"], first)
    net.blobs["b"].data[...] = 5
    assert (net.forward()["b"] == 5).all()
