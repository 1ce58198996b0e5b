"""Each update rule against its formula in float64 NumPy, with every setting that changes what reaches it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.solvers.rules import RULES, learning_rate
from amct.caffe.engine.solvers.solver import EngineSolver
from amct.errors import ConfigError

INPUTS, TARGETS = 3, 2
NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "t" type: "Input" top: "t" input_param { shape { dim: 4 dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 2 }
        param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0.5 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""
ITERATIONS = 4


def make_solver(text):
    parameter = parse_message(f'base_lr: 0.1 lr_policy: "fixed" solver_mode: CPU {text}', "SolverParameter")
    parameter.net_param.CopyFrom(parse_message(NET, "NetParameter"))
    return EngineSolver(parameter)


def sgd(g, h, rate, s, _):
    h[0] = s["momentum"] * h[0] + rate * g
    return h[0]


def nesterov(g, h, rate, s, _):
    before = h[0]
    h[0] = s["momentum"] * h[0] + rate * g
    return (1 + s["momentum"]) * h[0] - s["momentum"] * before


def adagrad(g, h, rate, s, _):
    h[0] = h[0] + g**2
    return rate * g / (np.sqrt(h[0]) + s["delta"])


def rmsprop(g, h, rate, s, _):
    h[0] = s["rms_decay"] * h[0] + (1 - s["rms_decay"]) * g**2
    return rate * g / (np.sqrt(h[0]) + s["delta"])


def adadelta(g, h, rate, s, _):
    m = s["momentum"]
    h[0] = m * h[0] + (1 - m) * g**2
    u = g * np.sqrt((h[1] + s["delta"]) / (h[0] + s["delta"]))
    h[1] = m * h[1] + (1 - m) * u**2
    return rate * u


def adam(g, h, rate, s, t):
    b1, b2 = s["momentum"], s["momentum2"]
    h[0] = b1 * h[0] + (1 - b1) * g
    h[1] = b2 * h[1] + (1 - b2) * g**2
    return rate * math.sqrt(1 - b2**t) / (1 - b1**t) * h[0] / (np.sqrt(h[1]) + s["delta"])


FORMULAS = {
    "SGD": sgd, "Nesterov": nesterov, "AdaGrad": adagrad, "RMSProp": rmsprop, "AdaDelta": adadelta, "Adam": adam
}  # fmt: skip


def expected(rule, s, weights, batches):
    """Train y = x W' + b on the batches in float64 and return the weights and the last updates."""
    values = [w.astype(np.float64) for w in weights]
    history = [[np.zeros_like(w), np.zeros_like(w)] for w in values]
    updates = []
    for t in range(1, ITERATIONS + 1):
        gradients = [np.zeros_like(w) for w in values]
        for x, target in batches[(t - 1) * s["iter_size"] : t * s["iter_size"]]:
            error = (x @ values[0].T + values[1] - target) / len(x)
            gradients[0] += error.T @ x
            gradients[1] += error.sum(0)
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        if 0 <= s["clip"] < norm:
            gradients = [g * s["clip"] / norm for g in gradients]
        updates = []
        for w, g, h, lr_mult, decay_mult in zip(values, gradients, history, (1, 2), (1, 0.5), strict=True):
            penalty = np.sign(w) if s["l1"] else w
            total = g / s["iter_size"] + s["decay"] * decay_mult * penalty
            updates.append(FORMULAS[rule](total, h, 0.1 * lr_mult, s, t))
        values = [w - u for w, u in zip(values, updates, strict=True)]
    return values, updates


@settings(max_examples=25)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    clip=st.sampled_from([-1.0, 0.2, 5.0]),
    iter_size=st.integers(1, 3),
    l1=st.booleans(),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_is_its_formula(rule, momentum, decay, clip, iter_size, l1, seed):
    s = {
        "momentum": 0.0 if rule in ("AdaGrad", "RMSProp") else momentum,
        "momentum2": 0.95, "rms_decay": 0.8, "delta": 0.01,
        "decay": decay, "clip": clip, "iter_size": iter_size, "l1": l1,
    }  # fmt: skip
    solver = make_solver(
        f'type: "{rule}" momentum: {s["momentum"]} momentum2: 0.95 rms_decay: 0.8 delta: 0.01 weight_decay: {decay} '
        f'clip_gradients: {clip} iter_size: {iter_size} regularization_type: "{"L1" if l1 else "L2"}"'
    )
    random = np.random.default_rng(seed)
    weights = [random.normal(size=(TARGETS, INPUTS)).astype("f"), random.normal(size=TARGETS).astype("f")]
    batches = [
        (random.normal(size=(4, INPUTS)).astype("f"), random.normal(size=(4, TARGETS)).astype("f"))
        for _ in range(ITERATIONS * iter_size)
    ]
    blobs = solver.net.layers[solver.net.layer_names.index("ip")].blobs
    for blob, values in zip(blobs, weights, strict=True):
        blob.data[...] = values
    remaining = iter(batches)

    def next_batch(_):
        x, target = next(remaining)
        solver.net.blob("x").data[...] = x
        solver.net.blob("t").data[...] = target

    solver.net.on("before_forward", lambda layer: next_batch(layer) if layer == 0 else None)
    solver.step(ITERATIONS)
    values, updates = expected(rule, s, weights, batches)
    # float32 over four iterations: 2^-24 a step, grown by the division by a root of at least delta
    for blob, value, update in zip(blobs, values, updates, strict=True):
        np.testing.assert_allclose(blob.data, value, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(blob.diff, update, rtol=2e-4, atol=2e-5)


POLICIES = {
    "fixed": ("", lambda _: 0.1),
    "step": ("gamma: 0.5 stepsize: 3", lambda i: 0.1 * 0.5 ** (i // 3)),
    "exp": ("gamma: 0.9", lambda i: 0.1 * 0.9**i),
    "inv": ("gamma: 0.2 power: 0.6", lambda i: 0.1 * (1 + 0.2 * i) ** -0.6),
    "multistep": ("gamma: 0.5 stepvalue: 2 stepvalue: 7", lambda i: 0.1 * 0.5 ** ((i >= 2) + (i >= 7))),
    "poly": ("power: 2 max_iter: 30", lambda i: 0.1 * (1 - i / 30) ** 2),
    "sigmoid": ("gamma: 0.3 stepsize: 5", lambda i: 0.1 / (1 + math.exp(-0.3 * (i - 5)))),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_its_formula(policy):
    text, formula = POLICIES[policy]
    parameter = parse_message(f'base_lr: 0.1 lr_policy: "{policy}" {text}', "SolverParameter")
    step = 0
    for iteration in range(20):
        rate, step = learning_rate(parameter, iteration, step)
        assert rate == pytest.approx(formula(iteration), rel=1e-6)


def test_sigmoid_far_from_its_step_is_zero_or_one_and_poly_beyond_its_end_is_not_a_number():
    parameter = parse_message('base_lr: 1 lr_policy: "sigmoid" gamma: 100 stepsize: 1000', "SolverParameter")
    assert learning_rate(parameter, 0, 0)[0] == 0.0
    assert learning_rate(parameter, 5000, 0)[0] == 1.0
    parameter = parse_message('base_lr: 1 lr_policy: "poly" power: 0.5 max_iter: 10', "SolverParameter")
    assert math.isnan(learning_rate(parameter, 11, 0)[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('lr_policy: "setp"', r'Unknown learning rate policy: "setp". Did you mean "step"\?'),
        ("", r'Unknown learning rate policy: "". Set lr_policy'),
        ('lr_policy: "step" gamma: 0.1', "step needs stepsize > 0, got 0"),
        ('lr_policy: "sigmoid" gamma: -1 stepsize: 3', "sigmoid needs gamma >= 0, got -1"),
        ('lr_policy: "exp" gamma: -0.5', "exp needs gamma >= 0"),
        ('lr_policy: "poly" power: 1', "poly needs max_iter > 0, got 0"),
    ],
)
def test_policies_refuse_what_makes_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate(parse_message(f"base_lr: 0.1 {text}", "SolverParameter"), 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('type: "AdaGrad" momentum: 0.9', r"Momentum cannot be used with AdaGrad: momentum must be 0, got 0.9"),
        ('type: "RMSProp" momentum: 0.5', "Momentum cannot be used with RMSProp"),
        ('type: "RMSProp" rms_decay: 1', r"rms_decay should lie between 0 and 1 \(1 excluded\), got 1"),
        ('type: "Adam" momentum: 1', "Adam: momentum should lie between 0 and 1"),
        ('type: "Adam" momentum2: 1.5', "Adam: momentum2 should lie between 0 and 1"),
        ('type: "Foo"', r"Unknown solver type: Foo \(known types: AdaDelta, AdaGrad, Adam, Nesterov, RMSProp, SGD\)"),
        ('type: "Adma"', 'Did you mean "Adam"'),
        ("iter_size: 0", "iter_size should be at least 1, got 0"),
        ("average_loss: 0", "average_loss should be at least 1, got 0"),
    ],
)
def test_solvers_refuse_what_makes_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        make_solver(text)


def test_an_unknown_regularization_is_told_at_the_first_update():
    solver = make_solver('weight_decay: 0.1 regularization_type: "L3"')
    with pytest.raises(ConfigError, match='Unknown regularization type: "L3"'):
        solver.step(1)
    assert make_solver('regularization_type: "L3"').step(1) is None


HALF = """
layer { name: "x%d" type: "Input" top: "x%d" input_param { shape { dim: %d dim: 3 } } }
layer { name: "t%d" type: "Input" top: "t%d" input_param { shape { dim: %d dim: 2 } } }
layer { name: "ip%d" type: "InnerProduct" bottom: "x%d" top: "y%d" inner_product_param { num_output: 2 }
        param { name: "w" lr_mult: 0.5 } param { name: "b" decay_mult: 0 } }
layer { name: "loss%d" type: "EuclideanLoss" bottom: "y%d" bottom: "t%d" top: "loss%d" loss_weight: %g }
"""


def half(number, rows, weight):
    n = number
    return HALF % (n, n, rows, n, n, rows, n, n, n, n, n, n, n, weight)


def test_shared_parameters_learn_from_both_their_layers():
    """Two layers that share weights learn what one layer learns from both batches at once."""
    settings_text = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01 clip_gradients: 1 type: "SGD"'
    random = np.random.default_rng(4)
    x, target = random.normal(size=(8, 3)), random.normal(size=(8, 2))
    start = random.normal(size=(2, 3))
    results = []
    for text, parts in ((half(1, 4, 1) + half(2, 4, 1), ((1, 0), (2, 4))), (half(1, 8, 2), ((1, 0),))):
        parameter = parse_message(settings_text, "SolverParameter")
        parameter.net_param.CopyFrom(parse_message(text, "NetParameter"))
        solver = EngineSolver(parameter)
        assert len(solver.net.learnable) == 2
        blobs = solver.net.layers[solver.net.layer_names.index("ip1")].blobs
        blobs[0].data[...] = start
        for number, first in parts:
            rows = slice(first, first + solver.net.blob(f"x{number}").shape[0])
            solver.net.blob(f"x{number}").data[...] = x[rows]
            solver.net.blob(f"t{number}").data[...] = target[rows]
        solver.step(6)
        results.append([blob.data.copy() for blob in blobs])
    for both, one in zip(*results, strict=True):
        np.testing.assert_allclose(both, one, rtol=1e-5, atol=1e-6)
