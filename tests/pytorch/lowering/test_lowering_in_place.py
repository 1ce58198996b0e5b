"""Programs are lowered without being traced again where nothing reads memory that was written through a view."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from amct.pytorch.capture.trace import trace
from amct.pytorch.folding import fuse
from amct.pytorch.inputs import IoOptions
from amct.pytorch.onnx.float_onnx import float_onnx


class Net(nn.Module):
    def __init__(self, tail) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.norm(self.conv(x)))


def reads_what_was_written(x: Tensor) -> Tensor:
    activated = x.relu_()
    activated.add_(1)
    return x * activated


def adds_a_shortcut(x: Tensor) -> Tensor:
    y = nn.functional.relu(x) * 2
    y += x
    return y * x


def writes_through_an_alias(x: Tensor) -> Tensor:
    y = x * 2
    same = y[:, :4]
    same += 1
    return y + same


def classifier(x: Tensor) -> Tensor:
    pooled = nn.functional.adaptive_avg_pool2d(nn.functional.hardswish(x, inplace=True), 1)
    return nn.functional.dropout(pooled.flatten(1), 0.2, training=False, inplace=True)


def writes_to_a_tensor_with_a_view(x: Tensor) -> Tensor:
    view = x.permute(0, 2, 3, 1)
    x.relu_()
    return view.sum(1)


def writes_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1].relu_()
    return y


def keeps_the_type_of_what_is_written(x: Tensor) -> Tensor:
    half = x.half()
    half += torch.arange(4.0).reshape(4, 1, 1).to(x)
    return half.float()


def pools_to_four(x: Tensor) -> Tensor:
    return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


QUICK = [
    adds_a_shortcut,
    reads_what_was_written,
    classifier,
    keeps_the_type_of_what_is_written,
    pools_to_four,
]
BATCH = {"x": {0: "batch"}}
TRACED_AGAIN = [
    writes_to_a_tensor_with_a_view,
    writes_through_a_view,
]


def check(tail, axes=None) -> ExportedProgram:
    """64 float32 rounding errors of the largest value, or one of float16 where the net rounds to that."""
    model, x = Net(tail).eval(), torch.randn(2, 3, 6, 6)
    traced = trace(model, x, io=IoOptions(input_names=["x"], dynamic_axes=axes))
    result = float_onnx(traced, fuse(traced, do_fusion=False))
    session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()})
    with torch.no_grad():
        expected = model(x).numpy()
    epsilon = torch.finfo(torch.half).eps if tail is keeps_the_type_of_what_is_written else 64 * np.finfo("f4").eps
    np.testing.assert_allclose(found, expected, rtol=0, atol=epsilon * max(np.abs(expected).max(), 1))
    return traced.program


@pytest.mark.parametrize(
    ("tail", "axes"),
    [*((tail, None) for tail in QUICK), (reads_what_was_written, BATCH), (classifier, BATCH)],
)
def test_a_program_with_local_replacements_is_not_traced_again(tail, axes, monkeypatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the program is traced again")

    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    check(tail, axes)


@pytest.fixture
def traced_again(monkeypatch):
    """The programs that torch traces again."""
    calls, original = [], ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, *arguments: object, **options: object) -> ExportedProgram:
        calls.append(self)
        return original(self, *arguments, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return calls


@pytest.mark.parametrize("tail", TRACED_AGAIN)
def test_a_program_that_needs_more_is_traced_again_and_stays_right(tail, traced_again):
    check(tail)
    assert traced_again


def test_a_slice_of_everything_is_traced_again_only_where_torch_records_it(traced_again):
    """Torch 2.8 records the slice, 2.13 an alias."""
    program = check(writes_through_an_alias)
    slices = program.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert bool(traced_again) == bool(slices)
