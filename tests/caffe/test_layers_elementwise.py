"""Element-wise layers beyond Caffe 1.0 against formulas in float64, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
from layer_checks import check_gradients, net_of, run
from scipy import special

from amct.caffe.pycaffe import TRAIN, set_random_seed
from amct.errors import ModelError

X = np.random.RandomState(1).uniform(-8, 8, (2, 4, 3, 5))

# kind, parameters, formula, input
FUNCTIONS = [
    ("ReLU6", "", lambda x: np.minimum(np.maximum(x, 0), 6), X),
    ("ReLU6", "relu6_param { negative_slope: 0.25 }", lambda x: np.minimum(np.where(x > 0, x, 0.25 * x), 6), X),
    ("Hswish", "", lambda x: x * np.clip(x + 3, 0, 6) / 6, X),
    ("HardSwish", "", lambda x: x * np.clip(x + 3, 0, 6) / 6, X),
    ("HSigmoid", "", lambda x: np.clip(x + 3, 0, 6) / 6, X),
    ("Mish", "", lambda x: x * np.tanh(np.log1p(np.exp(x))), X),
    ("RReLU", "", lambda x: np.where(x > 0, x, x * (1 / 8 + 1 / 3) / 2), X),
    ("RReLU", "rrelu_param { lower: 0.1 upper: 0.3 }", lambda x: np.where(x > 0, x, 0.2 * x), X),
    ("Sqrt", "", np.sqrt, np.abs(X) + 0.5),
    ("Ceil", "", np.ceil, X),
    ("Sign", "", np.sign, np.where(np.abs(X) < 1, 0, X)),
    ("Cos", "", np.cos, X),
    ("Sin", "", np.sin, X),
    ("Erf", "", special.erf, X / 4),
    ("CReLU", "", lambda x: np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], 1), X),
    (
        "CReLU",
        "crelu_param { negative_slope: 0.5 concat_axis: -1 }",
        lambda x: np.concatenate([np.where(x > 0, x, x / 2), np.where(x < 0, -x, -x / 2)], -1),
        X,
    ),
    ("Dropout", "dropout_param { dropout_ratio: 0.3 scale_train: false }", lambda x: 0.7 * x, X),
]


@pytest.mark.parametrize(("kind", "parameters", "formula", "x"), FUNCTIONS, ids=[f"{f[0]} {f[1]}" for f in FUNCTIONS])
def test_values(kind, parameters, formula, x):
    x = x.astype(np.float32)
    np.testing.assert_allclose(run(kind, parameters, x), formula(x.astype(np.float64)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "parameters", "formula", "x"), FUNCTIONS, ids=[f"{f[0]} {f[1]}" for f in FUNCTIONS])
def test_gradients(kind, parameters, formula, x):
    del formula
    # away from corners, where a difference sees both sides
    part = x[:1, :, :2, :2]
    corners = np.array([-3, 0, 3, 6]) if kind != "Ceil" else np.arange(-9, 10)
    near = np.abs(part[..., None] - corners).min(-1) < 0.05
    check_gradients(kind, parameters, np.where(near, part + 0.2, part))


def test_relu6_can_run_inside_the_convolution_in_front():
    assert net_of("ReLU6", "", [(1, 4)]).layers[1].activation() == ("hardtanh", (0.0, 6.0))
    assert net_of("ReLU6", "relu6_param { negative_slope: 1 }", [(1, 4)]).layers[1].activation() is None


def test_rrelu_draws_slopes_while_training():
    set_random_seed(3)
    x = -np.ones((1, 2000), np.float32)
    slopes = -run("RReLU", "rrelu_param { lower: 0.1 upper: 0.3 }", x, phase=TRAIN)
    assert slopes.min() >= 0.1
    assert slopes.max() <= 0.3
    # the mean of 2000 uniform values: five standard deviations of 0.2 / sqrt(12 * 2000)
    assert abs(slopes.mean() - 0.2) < 5 * 0.2 / np.sqrt(12 * 2000)


def test_rrelu_range():
    with pytest.raises(ModelError, match=r"needs 0 <= lower <= upper, got 0.5 and 0.25"):
        net_of("RReLU", "rrelu_param { lower: 0.5 upper: 0.25 }", [(1, 2)])


def test_dropout_that_scales_while_testing_only_drops_while_training():
    set_random_seed(4)
    x = np.full((1, 4000), 3.0, np.float32)
    y = run("Dropout", "dropout_param { dropout_ratio: 0.25 scale_train: false }", x, phase=TRAIN)
    assert set(np.unique(y)) == {0.0, 3.0}
    # the number of zeros: five standard deviations of a binomial
    assert abs((y == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)
