"""Layers with the meaning of ONNX operators, against NumPy and the ONNX reference evaluator's definitions."""

from __future__ import annotations

import numpy as np
import pytest
from layer_checks import check_gradients, net_of, run
from onnx import helper
from onnx.reference import ReferenceEvaluator

from amct.errors import ModelError

random = np.random.RandomState(5)


@pytest.fixture(autouse=True)
def _same_values_in_every_order():
    """Each test draws from the beginning, whichever tests ran before it."""
    random.seed(5)


def rand(*shape):
    return random.uniform(-2, 2, shape).astype(np.float32)


def distinct(*shape):
    """Values that differ by at least 0.1, so that small steps change no order."""
    return (random.permutation(int(np.prod(shape))).reshape(shape) * 0.1 - 1).astype(np.float32)


def onnx_run(kind, inputs, outputs=1, **attributes):
    """What the ONNX operator of that name gives, by the reference implementation of the onnx package."""
    names = [f"x{index}" for index in range(len(inputs))]
    tops = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(kind, names, tops, **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, 1, value.shape) for name, value in zip(names, inputs, strict=True)],
        [helper.make_empty_tensor_value_info(top) for top in tops],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    results = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    return results[0] if outputs == 1 else results


# ------------------------------------------------------------------ products


@pytest.mark.parametrize(
    ("a", "b", "parameters", "formula"),
    [
        ((3, 4), (4, 5), "", lambda a, b: a @ b),
        ((2, 3, 4), (2, 4, 5), "", lambda a, b: a @ b),
        ((2, 1, 3, 4), (6, 4, 5), "", lambda a, b: a @ b),
        ((2, 4, 3), (2, 4, 5), "matmul_param { transpose_a: true }", lambda a, b: a.swapaxes(-1, -2) @ b),
        ((2, 3, 4), (2, 5, 4), "matmul_param { transpose_b: true }", lambda a, b: a @ b.swapaxes(-1, -2)),
    ],
)
def test_matmul(a, b, parameters, formula):
    a, b = rand(*a), rand(*b)
    expected = formula(a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(run("MatMul", parameters, a, b), expected, rtol=1e-5, atol=1e-6)
    check_gradients("MatMul", parameters, a, b)


def test_mvm():
    matrix, vector = rand(2, 3, 4), rand(2, 4)
    expected = np.einsum("nmk,nk->nm", matrix.astype(np.float64), vector)
    np.testing.assert_allclose(run("Mvm", "", matrix, vector), expected, rtol=1e-5, atol=1e-6)
    check_gradients("Mvm", "", matrix, vector)


@pytest.mark.parametrize("c", [None, (3, 5), (5,), (3, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm(c, transposed):
    a, b = (rand(4, 3), rand(5, 4)) if transposed else (rand(3, 4), rand(4, 5))
    inputs = [a, b] if c is None else [a, b, rand(*c)]
    flag = str(transposed).lower()
    parameters = f"gemm_param {{ alpha: 0.5 beta: 2 trans_a: {flag} trans_b: {flag} }}"
    expected = onnx_run("Gemm", inputs, alpha=0.5, beta=2.0, transA=int(transposed), transB=int(transposed))
    np.testing.assert_allclose(run("Gemm", parameters, *inputs), expected, rtol=1e-5, atol=1e-6)
    check_gradients("Gemm", parameters, *inputs)


def test_axpy():
    for a in (rand(2, 3, 1, 1), rand(2, 3)):
        x, y = rand(2, 3, 2, 2), rand(2, 3, 2, 2)
        np.testing.assert_allclose(run("Axpy", "", a, x, y), a.reshape(2, 3, 1, 1) * x + y, rtol=1e-6)
        check_gradients("Axpy", "", a, x, y)


# ------------------------------------------------------------------ comparisons


def test_equal_and_greater():
    a = random.randint(0, 3, (2, 3, 4)).astype(np.float32)
    b = random.randint(0, 3, (3, 1)).astype(np.float32)
    for kind in ("Equal", "Greater"):
        np.testing.assert_array_equal(run(kind, "", a, b), onnx_run(kind, [a, b]).astype(np.float32))
        net = net_of(kind, "", [a.shape, b.shape])
        net.forward()
        net.blobs["t0"].diff[...] = 1
        net.backward()
        assert not net.blobs["b0"].diff.any()


# ------------------------------------------------------------------ reductions

REDUCE = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceProd": np.prod, "ReduceMax": np.max, "ReduceMin": np.min}


@pytest.mark.parametrize("kind", REDUCE)
@pytest.mark.parametrize(
    ("parameters", "axes", "keepdims"),
    [
        ("", (0, 1, 2), True),
        ("axes: 1", (1,), True),
        ("axes: -1 axes: 0 keepdims: false", (0, 2), False),
        ("axes: 0 axes: 1 axes: 2 keepdims: false", (0, 1, 2), False),
    ],
)
def test_reduce(kind, parameters, axes, keepdims):
    x = distinct(2, 3, 4)
    text = f"reduce_param {{ {parameters} }}"
    expected = REDUCE[kind](x.astype(np.float64), axis=axes, keepdims=keepdims)
    np.testing.assert_allclose(run(kind, text, x), expected, rtol=1e-5, atol=1e-6)
    # the product of 24 values is not near enough to linear for a difference: four of them
    small = x[:1, :1] + 0.55 if kind == "ReduceProd" else x
    check_gradients(kind, text, small)


def test_reduce_without_axes_may_do_nothing():
    x = rand(2, 3)
    np.testing.assert_array_equal(run("ReduceMax", "reduce_param { noop_with_empty_axes: true }", x), x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_argmin(axis, keepdims, last):
    x = random.randint(0, 3, (3, 4, 5)).astype(np.float32)
    parameters = (
        f"argmin_param {{ axis: {axis} keepdims: {str(keepdims).lower()} select_last_index: {str(last).lower()} }}"
    )
    expected = onnx_run("ArgMin", [x], axis=axis, keepdims=int(keepdims), select_last_index=int(last))
    np.testing.assert_array_equal(run("ArgMin", parameters, x), expected.astype(np.float32))


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_sort(axis, descending):
    x = distinct(3, 4, 2)
    parameters = f"sort_param {{ axis: {axis} descending: {str(descending).lower()} }}"
    values, places = run("Sort", parameters, x, tops=2)
    order = np.argsort(-x if descending else x, axis=axis)
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis))
    check_gradients("Sort", parameters, x)


def test_sort_keeps_the_order_of_equal_values():
    x = np.array([[1, 0, 1, 0, 1]], np.float32)
    assert run("Sort", "sort_param { descending: true }", x, tops=2)[1].tolist() == [[0, 2, 4, 1, 3]]
    assert run("Sort", "", x, tops=2)[1].tolist() == [[1, 3, 0, 2, 4]]


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("axis", [-1, 1])
def test_topk(axis, largest):
    x = distinct(3, 5, 4)
    parameters = f"topk_param {{ k: 3 axis: {axis} largest: {str(largest).lower()} }}"
    values, places = run("TopK", parameters, x, tops=2)
    order = np.argsort(-x if largest else x, axis=axis).take(range(3), axis)
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis))
    check_gradients("TopK", parameters, x)


def boxes_of(count):
    corner = random.uniform(0, 8, (count, 2))
    return np.concatenate([corner, corner + random.uniform(1, 5, (count, 2))], 1).astype(np.float32)


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("threshold", [None, 0.4])
def test_nms(center, threshold):
    boxes = np.stack([boxes_of(12), boxes_of(12)])
    if not center:
        boxes[:, ::3] = boxes[:, ::3][..., [2, 3, 0, 1]]  # corners in any order
    scores = random.permutation(2 * 3 * 12).reshape(2, 3, 12).astype(np.float32) / 72
    values = [boxes, scores, np.array([3], np.int64), np.array([0.3], np.float32)]
    values += [np.array([threshold], np.float32)] if threshold else []
    expected = onnx_run_nms(values, center)
    text = f"max_output_boxes_per_class: 3 iou_threshold: 0.3 center_point_box: {'true' if center else 'false'}"
    text += f" score_threshold: {threshold}" if threshold else ""
    found = run("Nms", f"nms_param {{ {text} }}", boxes, scores)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def onnx_run_nms(values, center):
    import onnxruntime

    names = [f"x{index}" for index in range(len(values))]
    node = helper.make_node("NonMaxSuppression", names, ["y"], center_point_box=center)
    inputs = [
        helper.make_tensor_value_info(name, 7 if value.dtype == np.int64 else 1, value.shape)
        for name, value in zip(names, values, strict=True)
    ]
    graph = helper.make_graph([node], "nms", inputs, [helper.make_tensor_value_info("y", 7, [None, 3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, values, strict=True)))[0]


def test_nms_without_limits_and_without_boxes():
    boxes = np.array([[[0, 0, 1, 1], [0, 0, 1, 1.01], [5, 5, 6, 6]]], np.float32)
    scores = np.array([[[0.5, 0.6, 0.1]]], np.float32)
    assert run("Nms", "nms_param { iou_threshold: 0.5 }", boxes, scores).tolist() == [[0, 0, 1], [0, 0, 2]]
    assert run("Nms", "nms_param { score_threshold: 0.9 }", boxes, scores).shape == (0, 3)


# ------------------------------------------------------------------ normalization


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups):
    x = rand(2, 4, 3, 2)
    parameters = f"group_norm_param {{ group_num: {groups} eps: 0.01 }}"
    grouped = x.astype(np.float64).reshape(2, groups, -1)
    expected = (grouped - grouped.mean(2, keepdims=True)) / np.sqrt(grouped.var(2, keepdims=True) + 0.01)
    np.testing.assert_allclose(run("GroupNorm", parameters, x), expected.reshape(x.shape), rtol=1e-4, atol=1e-5)
    check_gradients("GroupNorm", parameters, x)


@pytest.mark.parametrize(("axis", "inner"), [(-1, (4,)), (1, (3, 4))])
def test_layer_normalization(axis, inner):
    x, scale, bias = rand(2, 3, 4), rand(*inner), rand(*inner)
    parameters = f"layer_normalization_param {{ axis: {axis} epsilon: 0.001 }}"
    axes = tuple(range(axis % 3, 3))
    exact = x.astype(np.float64)
    normal = (exact - exact.mean(axes, keepdims=True)) / np.sqrt(exact.var(axes, keepdims=True) + 0.001)
    expected = normal * scale + bias
    kind = "LayerNormalization"
    np.testing.assert_allclose(run(kind, parameters, x, blobs=[scale, bias]), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(kind, parameters, x, scale, bias), expected, rtol=1e-4, atol=1e-5)
    check_gradients(kind, parameters, x, blobs=[scale, bias])
    check_gradients(kind, parameters, x, scale, bias)


def test_layer_normalization_starts_with_one_and_zero_and_may_have_no_bias():
    x = rand(2, 5)
    net = net_of("LayerNormalization", "layer_normalization_param { bias_term: false }", [x.shape])
    assert [blob.data.tolist() for blob in net.params["layer"]] == [[1.0] * 5]


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("kind", "parameters", "shapes", "message"),
    [
        ("MatMul", "", [(2, 3), (4, 5)], r"layer \"layer\" \(MatMul\): cannot multiply \(2, 3\) by \(4, 5\)"),
        ("MatMul", "", [(2, 2, 3), (3, 3, 5)], r"the leading axes \(2,\) and \(3,\) cannot be broadcast"),
        ("MatMul", "", [(3,), (3, 5)], "cannot multiply"),
        ("Mvm", "", [(2, 3), (4,)], "cannot multiply"),
        ("Gemm", "", [(2, 3, 4), (4, 5)], r"needs matrices \(2 axes\), got shape \(2, 3, 4\)"),
        ("Gemm", "", [(2, 3), (3, 5), (7, 2, 5)], r"C of shape \(7, 2, 5\) cannot be broadcast to \(2, 5\)"),
        ("Equal", "", [(2, 3), (4,)], r"bottoms of shapes \(2, 3\) and \(4,\) cannot be broadcast"),
        ("Axpy", "", [(2, 4), (2, 3, 2, 2), (2, 3, 2, 2)], r"one factor per channel of \(2, 3, 2, 2\)"),
        ("Axpy", "", [(2, 3), (2, 3, 2, 2), (2, 3, 2, 1)], "x and y must have one shape"),
        ("ReduceSum", "reduce_param { axes: 3 }", [(2, 3)], "axis 3 is out of range"),
        ("ArgMin", "argmin_param { axis: 2 }", [(2, 3)], "axis 2 is out of range"),
        ("ArgMin", "argmin_param { axis: 1 }", [(2, 0)], "there is no smallest value"),
        ("Sort", "sort_param { axis: 2 }", [(2, 3)], "axis 2 is out of range"),
        ("TopK", "topk_param { k: 4 }", [(2, 3)], "k must lie between 1 and the 3 values of axis 1, got 4"),
        ("TopK", "", [(2, 3)], "k must lie between 1 and the 3 values"),
        ("Nms", "", [(2, 3, 4), (2, 1, 4)], r"needs boxes \(N, B, 4\) and scores"),
        ("Nms", "nms_param { iou_threshold: 2 }", [(2, 3, 4), (2, 1, 3)], "iou_threshold must lie between 0 and 1"),
        ("Nms", "nms_param { max_output_boxes_per_class: -1 }", [(2, 3, 4), (2, 1, 3)], "must not be negative, got -1"),
        ("GroupNorm", "group_norm_param { group_num: 3 }", [(2, 4)], r"group_num 3 does not divide the channels"),
        ("LayerNormalization", "", [(2, 4), (3,)], r"scale and bias must have shape \(4,\).*got \(3,\)"),
    ],
)
def test_mistakes(kind, parameters, shapes, message):
    with pytest.raises(ModelError, match=message):
        net_of(kind, parameters, shapes)
