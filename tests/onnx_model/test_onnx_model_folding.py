"""Folding batch norms of ONNX models: the result equals the float64 formula, and what stays says why."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_nets import graph_model, node, normal, run

from amct.onnx_model.folding import fold
from amct.onnx_model.reading import read_model

EPSILON = float(np.finfo(np.float32).eps)


def statistics(channels: int) -> dict[str, np.ndarray]:
    return {
        "gamma": normal(channels, seed=3),
        "beta": normal(channels, seed=4),
        "mean": normal(channels, seed=5),
        "var": np.abs(normal(channels, seed=6)) + np.float32(0.1),
    }


def normed(operator: str, weights: dict[str, np.ndarray], channels: int, **attributes) -> onnx.ModelProto:
    bias = " b" if "b" in weights else ""
    nodes = [
        node(operator, f"x w{bias}", "a", "layer", **attributes),
        node("BatchNormalization", "a gamma beta mean var", "y", "norm", epsilon=1e-3),
    ]
    shape = (2, 4) if operator == "Gemm" else (2, 4, 5, 5)
    return read_model(graph_model(nodes, {**weights, **statistics(channels)}, shape)).model


CASES = {
    "conv": ("Conv", {"w": normal(6, 4, 3, 3)}, 6, {}),
    "conv with bias": ("Conv", {"w": normal(6, 4, 3, 3), "b": normal(6)}, 6, {}),
    "depthwise": ("Conv", {"w": normal(8, 1, 3, 3)}, 8, {"group": 4}),
    "transposed": ("ConvTranspose", {"w": normal(4, 3, 2, 2)}, 6, {"group": 2}),
    "gemm": ("Gemm", {"w": normal(4, 6)}, 6, {}),
    "gemm transposed, one bias": ("Gemm", {"w": normal(6, 4), "b": normal(1)}, 6, {"transB": 1}),
}


@pytest.mark.parametrize(("operator", "weights", "channels", "attributes"), CASES.values(), ids=CASES)
def test_the_folded_model_computes_the_same(operator, weights, channels, attributes):
    model = normed(operator, weights, channels, **attributes)
    folded = fold(model)
    assert folded.fusions == {"layer": "norm"}
    assert [each.op_type for each in folded.model.graph.node] == [operator]
    x = normal(2, 4, seed=9) if operator == "Gemm" else normal(2, 4, 5, 5, seed=9)
    apart, together = run(model, {"x": x})[0], run(folded.model, {"x": x})[0]
    # A sum of up to 36 products, rounded once more by the fold; what the batch norm scales up is scaled up in both.
    values = statistics(channels)
    gain = np.abs(values["gamma"] / np.sqrt(values["var"] + 1e-3)).max()
    assert np.abs(apart - together).max() <= 40 * EPSILON * gain * max(np.abs(apart).max(), 1.0) * 4


@given(st.integers(0, 2**32 - 1))
def test_weights_are_the_float64_formula_rounded_once(seed):
    random = np.random.default_rng(seed)
    w, parts = random.normal(size=(3, 2, 1, 1)).astype(np.float32), random.normal(size=(4, 3)).astype(np.float32)
    gamma, beta, mean, var = parts[0], parts[1], parts[2], np.abs(parts[3]) + np.float32(0.01)
    nodes = [node("Conv", "x w", "a", "c"), node("BatchNormalization", "a g b m v", "y", "n")]
    model = graph_model(nodes, {"w": w, "g": gamma, "b": beta, "m": mean, "v": var}, ("n", 2, 3, 3))
    folded = fold(read_model(model).model).model
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    multiplier = gamma.astype(np.float64) / np.sqrt(var.astype(np.float64) + np.float32(1e-5))
    np.testing.assert_allclose(stored[folded.graph.node[0].input[1]], w * multiplier[:, None, None, None], rtol=EPSILON)
    bias = beta - mean * multiplier
    np.testing.assert_allclose(stored[folded.graph.node[0].input[2]], bias, rtol=EPSILON, atol=1e-30)


def unfolded(nodes, weights, shape=("n", 4, 5, 5), outputs=("y",), **arguments):
    model = read_model(graph_model(nodes, {**weights, **statistics(4)}, shape, outputs=outputs)).model
    folded = fold(model, **arguments)
    assert folded.fusions == {}
    return {skip.layer: skip.reason for skip in folded.skips}


NORM = node("BatchNormalization", "a gamma beta mean var", "y", "norm")
CONV = node("Conv", "x w", "a", "conv")
W = {"w": normal(4, 4, 1, 1)}


def test_what_is_not_folded_says_why():
    assert unfolded([CONV, NORM], W, do_fusion=False) == {"norm": "not folded: do_fusion is false"}
    assert "skip_fusion_layers" in unfolded([CONV, NORM], W, skip=("conv",))["norm"]
    assert (
        "reads the same tensor" in unfolded([CONV, NORM, node("Relu", "a", "r", "relu")], W, outputs=("y", "r"))["norm"]
    )
    assert 'model also returns what "conv" makes' in unfolded([CONV, NORM], W, outputs=("y", "a"))["norm"]
    alone = node("BatchNormalization", "x gamma beta mean var", "y", "norm")
    assert "reads an input of the model" in unfolded([alone], {})["norm"]
    computed = [
        node("GlobalAveragePool", "x", "p"),
        node("Constant", "", "s", value_ints=[4]),
        node("Slice", "p zero one zero", "q"),
        node("Reshape", "q s", "m"),
        CONV,
        node("BatchNormalization", "a gamma beta m var", "y", "norm"),
    ]
    extra = {"zero": np.array([0]), "one": np.array([1])}
    assert 'its mean "m" is computed' in unfolded(computed, {**W, **extra})["norm"]
    dynamic = [node("Relu", "w", "v"), node("Conv", "x v", "a", "conv"), NORM]
    assert "is computed; expected a constant" in unfolded(dynamic, W)["norm"]


def test_a_batch_norm_without_spread_stays():
    values = {**statistics(4), "var": np.full(4, -1.0, np.float32)}
    model = read_model(graph_model([CONV, NORM], {**W, **values}, ("n", 4, 5, 5))).model
    folded = fold(model)
    assert "variance + epsilon must be positive" in folded.skips[0].reason
    assert len(folded.model.graph.node) == 2


def test_a_shared_weight_is_folded_for_one_reader_only():
    nodes = [CONV, NORM, node("Conv", "y w", "z", "second")]
    model = read_model(graph_model(nodes, {**W, **statistics(4)}, ("n", 4, 5, 5), outputs=("z",))).model
    folded = fold(model)
    assert folded.fusions == {"conv": "norm"}
    x = normal(1, 4, 5, 5)
    expected = run(model, {"x": x})[0]
    assert np.abs(run(folded.model, {"x": x})[0] - expected).max() <= 100 * EPSILON * np.abs(expected).max()


# -- sums and products with constants ----------------------------------------------------------------------------------

PER_CHANNEL = {"none": (), "C": (4, 1, 1), "1C": (1, 4, 1, 1), "one": (1,)}


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", PER_CHANNEL.values(), ids=PER_CHANNEL)
@pytest.mark.parametrize("first", [True, False], ids=["layer first", "constant first"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_constants_per_channel_are_folded(operator, shape, first, bias):
    constant = np.asarray(1.5 + np.abs(normal(*shape, seed=3)), np.float32)
    weights = {"w": normal(4, 4, 3, 3), "c": constant, **({"b": normal(4, seed=2)} if bias else {})}
    nodes = [
        node("Conv", "x w b" if bias else "x w", "a", "conv"),
        node(operator, "a c" if first else "c a", "y", "constant"),
    ]
    model = read_model(graph_model(nodes, weights, (2, 4, 5, 5))).model
    folded = fold(model)
    if operator == "Div" and not first:
        assert folded.fusions == {}
        return
    assert folded.fusions == {"conv": "constant"}
    assert [each.op_type for each in folded.model.graph.node] == ["Conv"]
    x = normal(2, 4, 5, 5, seed=9)
    apart, together = run(model, {"x": x})[0], run(folded.model, {"x": x})[0]
    # A sum of 36 products and the constant; weight and bias are rounded once more.
    assert np.abs(apart - together).max() <= 40 * EPSILON * max(np.abs(apart).max(), 1.0) * 4


def test_a_chain_of_constants_and_a_batch_norm_is_folded():
    weights = {"w": normal(4, 4, 1, 1), "c": normal(4, 1, 1), "d": normal(4, 1, 1), **statistics(4)}
    nodes = [
        CONV,
        node("Mul", "a c", "m", "mul"),
        node("Add", "d m", "s", "add"),
        node("BatchNormalization", "s gamma beta mean var", "y", "norm"),
    ]
    model = read_model(graph_model(nodes, weights, (2, 4, 5, 5))).model
    folded = fold(model)
    assert [each.op_type for each in folded.model.graph.node] == ["Conv"]
    x = normal(2, 4, 5, 5, seed=9)
    np.testing.assert_allclose(run(folded.model, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("nodes", "constant", "outputs"),
    [
        ([CONV, node("Add", "a c", "y", "add")], normal(5), ("y",)),
        ([CONV, node("Add", "a c", "y", "add")], normal(2, 4, 5, 5), ("y",)),
        ([CONV, node("Add", "a c", "y", "add")], normal(1, 1, 4, 1, 1), ("y",)),
        ([CONV, node("Add", "a c", "y", "add"), node("Relu", "a", "z", "relu")], normal(4, 1, 1), ("y", "z")),
        ([CONV, node("Add", "a c", "y", "add")], normal(4, 1, 1), ("y", "a")),
        ([CONV, node("Add", "a a", "y", "add")], normal(4, 1, 1), ("y",)),
        ([CONV, node("Div", "a c", "y", "add")], np.zeros((4, 1, 1), np.float32), ("y",)),
    ],
    ids=["along a row", "by place", "another rank", "two readers", "an output", "no constant", "zero"],
)
def test_other_constants_are_not_folded(nodes, constant, outputs):
    model = read_model(graph_model(nodes, {**W, "c": constant}, (2, 4, 5, 5), outputs=outputs)).model
    folded = fold(model)
    assert folded.fusions == {}
    assert len(folded.model.graph.node) == len(nodes)


def test_constants_of_skipped_layers_are_not_folded():
    model = read_model(graph_model([CONV, node("Add", "a c", "y", "add")], {**W, "c": normal(4, 1, 1)}, (2, 4, 5, 5)))
    assert fold(model.model, skip=("conv",)).fusions == {}
    assert fold(model.model, do_fusion=False).fusions == {}
