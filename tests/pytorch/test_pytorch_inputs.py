from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_nets import Attention, Conv1d3d, Keywords, OneDict
from torch import nn

import amct.pytorch
from amct.errors import ExportError, ModelError
from amct.pytorch.inputs import IoNames, IoOptions, example_inputs

X, Y = torch.randn(2, 6), torch.randn(2, 4)


class AnyKeywords(nn.Module):
    def forward(self, first, *rest, **more):
        return first + sum(rest) + more["last"]


class TensorThenDict(nn.Module):
    def forward(self, x, options):
        return x * options["scale"]


# -- example inputs -------------------------------------------------------------------------------------


def test_a_tensor_is_the_only_argument():
    inputs = example_inputs(Attention(), X)
    assert inputs.args == (X,)
    assert inputs.kwargs == {}
    assert inputs.names == ("x",)


FORMS = {
    "tuple": (X, Y),
    "list": [X, Y],
    "dict": {"a": X, "b": Y},
    "dict in another order": {"b": Y, "a": X},
    "tuple that ends in a dict": (X, {"b": Y}),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_of_two_arguments(data):
    inputs = example_inputs(Conv1d3d(), data)
    assert inputs.names == ("a", "b")
    assert [tensor is expected for tensor, expected in zip(inputs.tensors(), (X, Y), strict=True)] == [True, True]


def test_keywords_come_in_the_order_of_the_signature():
    inputs = example_inputs(Keywords(), {"scale": X, "extra": {"words": Y}, "image": X})
    assert list(inputs.kwargs) == ["image", "extra", "scale"]
    assert inputs.names == ("image", "extra_words", "scale")


def test_a_forward_that_takes_one_dict():
    inputs = example_inputs(OneDict(), {"x": X, "y": Y})
    assert inputs.args == ({"x": X, "y": Y},)
    assert inputs.names == ("batch_x", "batch_y")


@pytest.mark.parametrize("data", [(X, {"scale": Y}), (X, {"scale": Y}, {})], ids=["plain", "ended by an empty dict"])
def test_a_dict_as_last_positional_argument(data):
    inputs = example_inputs(TensorThenDict(), data)
    assert len(inputs.args) == 2
    assert inputs.names == ("x", "options_scale")


def test_open_signatures():
    inputs = example_inputs(AnyKeywords(), (X, X, X, {"last": X}))
    assert inputs.names == ("first", "rest_0", "rest_1", "last")


def test_bound():
    assert example_inputs(Conv1d3d(), (X, {"b": Y})).bound(Conv1d3d()) == {"a": X, "b": Y}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((2, 6)), r"got ndarray.*torch\.from_numpy"),
        (None, "got NoneType"),
        ((), "got a tuple of nothing"),
        (([1, 2], "x"), "got a tuple of list, str"),
        ({}, "got dict"),
        ((X, Y, X), r"does not fit Conv1d3d\.forward.*too many positional arguments"),
        ({"a": X}, "missing a required argument: 'b'"),
        ((X, Y, {"c": Y}), "got an unexpected keyword argument 'c'"),
        ((X, Y.to_sparse()), r"got a tensor of layout torch\.sparse_coo; give a dense tensor"),
        ((X, torch.nested.nested_tensor([Y, Y[:1]], layout=torch.jagged)), "got a nested tensor; give a dense tensor"),
    ],
    ids=[
        "array",
        "none",
        "empty",
        "no tensor",
        "empty dict",
        "too many",
        "too few",
        "unknown keyword",
        "sparse",
        "nested",
    ],
)
def test_what_does_not_fit_is_refused(data, message):
    with pytest.raises(ModelError, match=message):
        example_inputs(Conv1d3d(), data)


# -- names and axes -------------------------------------------------------------------------------------


def checked(inputs=("a", "b"), **given) -> IoNames:
    return IoNames.checked(IoOptions(**given), inputs)


def test_nothing_given():
    assert checked() == IoNames(inputs=("a", "b"), outputs=(), axes={})


def test_the_first_inputs_can_be_named():
    names = checked(input_names=["image"], output_names=["logits"])
    assert names.inputs == ("image", "b")
    assert names.outputs == ("logits",)


def test_axes():
    names = checked(output_names=["y"], dynamic_axes={"a": {0: "batch"}, "b": [0, 1], "y": {0: "batch"}})
    assert names.axes == {
        "a": {0: "batch"},
        "b": {0: "b_dynamic_axes_1", 1: "b_dynamic_axes_2"},
        "y": {0: "batch"},
    }
    assert names.open_axes([X, Y]) == [{0: "batch"}, {0: "b_dynamic_axes_1", 1: "b_dynamic_axes_2"}]
    assert names.described_axes() == '"a" [0], "b" [0, 1]'


def test_axes_of_outputs_alone_open_nothing():
    assert checked(output_names=["y"], dynamic_axes={"y": [0]}).open_axes([X, Y]) is None


def test_an_axis_that_the_example_lacks():
    with pytest.raises(ExportError, match=r'dynamic_axes\["a"\]: axis 2 does not exist, the example input has 2 axes'):
        checked(dynamic_axes={"a": [2]}).open_axes([X, Y])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_names": "a"}, "input_names: expected a list of strings, got 'a'"),
        ({"input_names": [1]}, r"input_names: expected a list of strings, got \[1\]"),
        ({"output_names": [""]}, "output_names: expected a list of strings"),
        ({"output_names": ("y", None)}, "output_names: expected a list of strings"),
        ({"input_names": ["a", "b", "c"]}, r"the model has 2 input tensors \(a, b\), got 3 names \(a, b, c\)"),
        ({"input_names": ["b"]}, '"b" is the name of two tensors'),
        ({"output_names": ["a"]}, '"a" is the name of two tensors'),
        ({"dynamic_axes": ["a"]}, r"expected \{name: \{axis: label\}\}.*got list"),
        ({"dynamic_axes": {1: [0]}}, "got the key 1"),
        ({"dynamic_axes": {"imgae": [0]}, "input_names": ["image"]}, 'named "imgae". Did you mean "image"'),
        ({"dynamic_axes": {"a": 0}}, 'for "a" got 0'),
        ({"dynamic_axes": {"a": [-1]}}, 'for "a" got -1'),
        ({"dynamic_axes": {"a": ["0"]}}, "for \"a\" got '0'"),
        ({"dynamic_axes": {"a": [True]}}, 'for "a" got True'),
        ({"dynamic_axes": {"a": {0: 1}}}, 'for "a" got 0: 1'),
        ({"dynamic_axes": {"a": {0: ""}}}, 'for "a" got 0'),
    ],
    ids=str,
)
def test_malformed_names_and_axes(given, message):
    with pytest.raises(ExportError, match=message):
        checked(**given)


class AnySize(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, picture):
        return self.conv(picture)


def _sizes_told(caplog, data, **options):
    caplog.clear()
    amct.pytorch.quantize(AnySize(), data, **options)
    told = [record.getMessage() for record in caplog.records]
    found = [text for text in told if "will take the sizes of the first batch only" in text]
    before = [text[:10] for text in told].index("calibrated")
    return found, [told.index(text) < before for text in found]


def test_sizes_that_vary_are_told_before_calibration_with_what_frees_them(caplog):
    data = [torch.rand(2, 3, 8, size) for size in (8, 8, 10)]
    (told,), (before,) = _sizes_told(caplog, data)
    assert before
    assert 'axis 3 of "picture" is 8 in the first batch and 10 in another' in told
    assert "IoOptions(dynamic_axes={'picture': [3]})" in told
    assert _sizes_told(caplog, data, io=amct.pytorch.IoOptions(dynamic_axes={"picture": [3]})) == ([], [])
    assert len(_sizes_told(caplog, (each for each in data))[0]) == 1
    assert _sizes_told(caplog, data[:2]) == ([], [])
