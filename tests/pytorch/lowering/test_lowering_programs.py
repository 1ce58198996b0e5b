"""Whole networks: the lowered file against that of torch's exporter, names, constants, and what has no rule."""

from __future__ import annotations

import logging

import hypothesis.strategies as st
import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from lowering_check import Wrapped, captured, check, lowered, operators
from pytorch_nets import case
from torch import nn
from torch.nn import functional

from amct.errors import ExportError
from amct.pytorch.capture.trace import trace
from amct.pytorch.door import quantize
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import IoNames
from amct.pytorch.onnx import float_onnx as module
from amct.pytorch.onnx.float_onnx import float_onnx
from amct.pytorch.onnx.lowering.program import lower
from amct.pytorch.onnx.lowering.writer import NotLoweredError, Rules


def refuse(*_arguments: object, **_options: object) -> None:
    raise NotLoweredError("this test")


def outputs(model, tensors) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(
        None, {value.name: each.numpy() for value, each in zip(session.get_inputs(), tensors, strict=True)}
    )


@pytest.mark.parametrize("name", ["resnet20", "mobile", "variants", "transformer", "lstm"])
def test_the_file_computes_what_the_file_of_torchs_exporter_computes(name, monkeypatch):
    """To 64 roundings of the largest value: both are the same sums, in an order that may differ."""
    item = case(name)
    traced = trace(item.model(), item.inputs())
    own = float_onnx(traced, fuse(traced))
    monkeypatch.setattr(module, "lower", refuse)
    other = float_onnx(traced, fuse(traced))
    assert [(each.layer, each.kind, each.node) for each in own.bindings] == [
        (each.layer, each.kind, each.node) for each in other.bindings
    ]
    assert len(own.model.graph.node) <= len(other.model.graph.node)
    stored = {tensor.name for tensor in own.model.graph.initializer}
    assert {name for name in traced.model.state_dict() if name in stored} == {
        name for name in traced.model.state_dict() if name in {tensor.name for tensor in other.model.graph.initializer}
    }
    tensors = traced.inputs.tensors()
    for one, two in zip(outputs(own.model, tensors), outputs(other.model, tensors), strict=True):
        bound = 64 * np.finfo(np.float32).eps * max(np.abs(two).max(), 1)
        assert np.abs(one - two).max() <= bound


def test_the_record_is_that_of_torchs_exporter(monkeypatch):
    item = case("resnet20")
    own = quantize(item.model(), [item.inputs()])
    monkeypatch.setattr(module, "lower", refuse)
    other = quantize(item.model(), [item.inputs()])
    assert own.record == other.record


# -- what has no rule --------------------------------------------------------------------------------------------------


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).frac()


def test_a_program_with_an_unknown_operator_is_exported_by_torch(caplog):
    torch.manual_seed(0)
    model, x = Unknown().eval(), torch.randn(1, 3, 5, 5)
    traced = trace(model, x)
    with caplog.at_level(logging.DEBUG, logger=module.__name__):
        result = float_onnx(traced, fuse(traced))
    assert "torch.onnx exports the program, because of aten::frac has no rule" in caplog.text
    (found,) = outputs(result.model, [x])
    with torch.no_grad():
        expected = model(x).numpy()
    apart = np.abs(found - expected)
    assert np.minimum(apart, 1 - apart).max() <= 64 * np.finfo(np.float32).eps  # 0.9999 and 0 are neighbours


def test_torchs_exporter_leaves_an_axis_alone_that_squeeze_cannot_remove():
    """In ONNX, to squeeze an axis of size 3 is an error; one of size 1 is removed as ever."""
    model, x = Wrapped(lambda x: x.frac().squeeze(1).squeeze(0).squeeze((-1, 1))).eval(), torch.randn(1, 3, 5, 1)
    traced = trace(model, x)
    (found,) = outputs(float_onnx(traced, fuse(traced)).model, [x])
    np.testing.assert_array_equal(found, x.frac()[0, :, :, 0].numpy())


UNKNOWN = {
    "aten::frac has no rule": lambda x: x.frac(),
    "dropout in training mode": lambda x: torch.dropout(x, 0.5, True),
    "aten::avg_pool2d with divisor_override=3": lambda x: functional.avg_pool2d(x[None], 2, divisor_override=3),
    "a mask as an index": lambda x: x[x > 0],
    "the type torch.complex64": lambda x: torch.fft.fft(x).real,
    "where with a condition only": lambda x: torch.where(x > 0)[0],
    "writes to a tensor that is not the program's own": lambda x: x.add_(1),
    "the type torch.bfloat16": lambda x: x.bfloat16() * 2,
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_has_no_rule_is_named(reason):
    with pytest.raises(NotLoweredError) as caught:
        lowered(UNKNOWN[reason], torch.randn(2, 4, 4))
    assert reason in str(caught.value)


def test_an_operator_has_one_rule():
    rules = Rules()
    rules.rule("relu")(lambda _, x: x)
    with pytest.raises(ValueError, match='operator "aten::relu" has two rules'):
        rules.rule("relu")(lambda _, x: x)


# -- names and constants -----------------------------------------------------------------------------------------------


def names_of(function, x, names: IoNames):
    return lower(captured(function, [x], dynamic=bool(names.axes)), names, {}, 18).model.graph


def test_inputs_outputs_and_axes_have_the_names_asked_for():
    names = IoNames(inputs=("relu",), outputs=("add", "sum"), axes={"relu": {0: "batch"}, "add": {0: "n"}})
    graph = names_of(lambda x: (x.relu() + 1, x.view(-1), x * 2), torch.randn(2, 3), names)
    assert [value.name for value in graph.input] == ["relu"]
    assert [value.name for value in graph.output] == ["add", "sum", "mul"]
    dims = [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.output]
    assert dims == [["n", 3], ["3*batch"], ["batch", 3]]
    written = [name for node in graph.node for name in node.output]
    assert len(set(written)) == len(written)


def test_names_that_do_not_fit_are_refused():
    linear = nn.Linear(3, 3)
    with pytest.raises(ExportError, match=r'"function\.weight" is the name of a parameter'):
        names_of(linear, torch.randn(2, 3), IoNames(inputs=("x",), outputs=("function.weight",), axes={}))
    with pytest.raises(ExportError, match="the model has 1 outputs, got 2 names"):
        names_of(linear, torch.randn(2, 3), IoNames(inputs=("x",), outputs=("a", "b"), axes={}))
    with pytest.raises(ExportError, match="axis 5 does not exist"):
        names_of(linear, torch.randn(2, 3), IoNames(inputs=("x",), outputs=("a",), axes={"x": {0: "n"}, "a": {5: "m"}}))


def test_constants_are_computed_while_lowering():
    def position(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(16).float()[:, None] / 10 ** torch.arange(0, 1, 0.25)
        return x + torch.stack([places.sin(), places.cos()], -1).flatten(1)

    assert operators(check(position, torch.randn(2, 16, 8))) == ["Add"]


def test_dynamic_sizes_are_read_only_where_they_cannot_be_derived():
    plain = check(lambda x: x.flatten(1).view(x.shape[0], 3, -1).permute(0, 2, 1), torch.randn(2, 6, 4), dynamic=True)
    assert operators(plain) == ["Reshape", "Reshape", "Transpose"]
    needed = check(lambda x: x[:1].expand(x.shape[0], 6), torch.randn(2, 6), dynamic=True)
    assert operators(needed).count("Shape") == 1


def test_an_output_that_is_an_input_or_a_parameter_is_a_tensor_of_its_own():
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + 1
            return x, self.weight, y, y, torch.arange(3)

    graph = check(Passing(), torch.randn(2, 3)).graph
    names = [value.name for value in graph.output]
    assert len(set(names)) == 5
    assert not {"in_0", "weight"}.intersection(names)


def test_the_same_program_gives_the_same_bytes():
    item = case("transformer")
    traced = trace(item.model(), item.inputs())
    first, second = (float_onnx(traced, fuse(traced)).model.SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


# -- laws --------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    up=st.booleans(),
    counted=st.booleans(),
)
def test_pooling_of_any_size(size, kernel, stride, padding, up, counted):
    padding = min(padding, kernel // 2)
    x = torch.randn(1, 2, *size, generator=torch.Generator().manual_seed(kernel))
    check(
        lambda x: (
            functional.avg_pool2d(x, kernel, stride, padding, ceil_mode=up, count_include_pad=counted),
            functional.max_pool2d(x, kernel, stride, padding, ceil_mode=up),
        ),
        x,
    )


@settings(max_examples=25, deadline=None)
@given(
    start=st.integers(-12, 12) | st.none(),
    end=st.integers(-12, 12) | st.none(),
    step=st.integers(1, 3),
    axis=st.sampled_from([1, -1]),
)
def test_slices_of_any_range(start, end, step, axis):
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    places = (slice(None), slice(start, end, step)) if axis == 1 else (..., slice(start, end, step))
    if x[places].numel():
        check(lambda x: x[places] * 2, x)
