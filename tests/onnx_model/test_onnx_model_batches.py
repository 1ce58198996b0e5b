"""Calibration data of every form as feeds of an ONNX model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import graph_model, node

from amct.caffe.model import inputs_by_name
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.onnx_model.batches import onnx_batches

X, IDS = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2])


def model(*, inputs: int = 1, shape=("n", 3)):
    made = graph_model([node("Relu", "x", "y")], {}, shape)
    if inputs == 2:
        made.graph.input.append(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"]))
    return made


@pytest.mark.parametrize(
    "data",
    [X, torch.from_numpy(X), {"x": X}, [X], [(X, [0, 1])], iter([{"x": X}]), [X.astype(np.float64)], (X,)],
    ids=["array", "tensor", "dict", "list", "labels", "iterator", "double", "tuple"],
)
def test_every_form_gives_the_same_feeds(data):
    (feeds,) = onnx_batches(model(), data)
    assert feeds["x"].dtype == np.float32
    np.testing.assert_array_equal(feeds["x"], X)


def test_several_inputs_in_order_or_by_name():
    for batch in ((X, IDS), (X, IDS, "label"), {"ids": IDS, "x": X}, [X, IDS.astype(np.int32)]):
        (feeds,) = onnx_batches(model(inputs=2), [batch])
        assert feeds["ids"].dtype == np.int64
        np.testing.assert_array_equal(feeds["ids"], IDS)


def test_a_function_chooses_the_inputs():
    (feeds,) = onnx_batches(model(), [{"image": X, "label": 3}], lambda batch: batch["image"])
    np.testing.assert_array_equal(feeds["x"], X)


def test_an_iterator_is_read_once_unless_it_is_kept():
    once = onnx_batches(model(), iter([X, X + 1]))
    assert once.length is None
    np.testing.assert_array_equal(once.first()["x"], X)
    assert len(list(once)) == 2
    assert len(list(once)) == 0
    kept = onnx_batches(model(), iter([X, X + 1]))
    kept.keep()
    assert [len(list(kept)), len(list(kept.limited(1))), onnx_batches(model(), [X, X]).length] == [2, 1, 2]


WRONG = {
    "number": (5, ArgumentTypeError, "expected an array, a dict of arrays .* or an iterable of batches, got int"),
    "text": ("x.npy", ArgumentTypeError, "got str"),
    "unknown name": ({"z": X}, ArgumentError, r'\(x\): "z" is none of them'),
    "wrong rank": (X[0], ArgumentError, r'input "x": expected shape \[n, 3\], got \[3\]'),
    "wrong size": (X[:, :2], ArgumentError, r"expected shape \[n, 3\], got \[2, 2\]"),
    "words": (np.array([["a", "b", "c"]]), ArgumentTypeError, 'input "x": expected values of float32, got <U1'),
}  # fmt: skip


@pytest.mark.parametrize(("data", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_data_is_said(data, error, message):
    with pytest.raises(error, match=message):
        onnx_batches(model(), data).first()


def test_a_missing_input_and_floats_for_whole_numbers():
    with pytest.raises(ArgumentError, match=r'inputs of the model \(x, ids\): "ids" is missing'):
        onnx_batches(model(inputs=2), [X]).first()
    with pytest.raises(ArgumentTypeError, match='input "ids": expected values of int64, got float32'):
        onnx_batches(model(inputs=2), [(X, X[:, 0])]).first()


def test_a_fixed_batch_size_is_explained():
    with pytest.raises(ArgumentError, match=r"got \[2, 3\]; the file fixes the batch size, so give batches of 1"):
        onnx_batches(model(shape=(1, 3)), X).first()


def test_no_data():
    with pytest.raises(CalibrationError, match="data is empty"):
        onnx_batches(model(), []).first()


@pytest.mark.parametrize("values", [torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, dtype=torch.bfloat16)])
def test_tensors_that_numpy_cannot_read(values):
    with pytest.raises(ArgumentTypeError, match=r'^data: input "x".*tensor\.float\(\)'):
        onnx_batches(model(), values).first()
    with pytest.raises(ArgumentTypeError, match=r'^data: input "data".*tensor\.float\(\)'):
        inputs_by_name(["data"], values)
