"""Lowers functions of tensors and compares what onnxruntime computes with torch and with torch in double precision."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amct.pytorch.capture.program import quiet_exporters
from amct.pytorch.inputs import IoNames
from amct.pytorch.onnx.lowering.program import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.pytorch.onnx.lowering.assembly import Lowered

OPSET = 18


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def captured(function: Callable[..., Any], tensors: Sequence[Tensor], *, dynamic: bool = False):
    """The program of a function or module; with the first axis of each input dynamic if asked for."""
    module = Wrapped(function).eval()  # modules too: older releases of torch export some of them only inside another
    shapes = None
    if dynamic:
        shapes = (tuple({0: torch.export.Dim.DYNAMIC} if tensor.ndim else None for tensor in tensors),)
    with quiet_exporters():
        return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)


def lowered(function: Callable[..., Any], *tensors: Tensor, dynamic: bool = False, opset: int = OPSET) -> Lowered:
    program = captured(function, tensors, dynamic=dynamic)
    names = tuple(f"in_{place}" for place in range(len(tensors)))
    return lower(program, IoNames(inputs=names, outputs=(), axes={}), {}, opset)


def run(model: onnx.ModelProto, tensors: Sequence[Tensor]) -> list[np.ndarray]:
    model.ir_version = 10
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {f"in_{place}": tensor.numpy() for place, tensor in enumerate(tensors)})


def assert_equal(found: np.ndarray, expected: Tensor, exact: Tensor) -> None:
    """Type and shape are torch's; the error is a few times torch's own, or 16 roundings of the largest value."""
    assert found.shape == tuple(expected.shape)
    assert torch.from_numpy(np.atleast_1d(found)).dtype == expected.dtype
    if not expected.is_floating_point():
        assert np.array_equal(found, expected.numpy())
        return
    exact_array = exact.double().numpy()
    assert np.array_equal(np.isnan(found), np.isnan(exact_array))
    assert np.array_equal(np.isinf(found), np.isinf(exact_array))
    finite = np.isfinite(exact_array)
    if not finite.any():
        return
    own = np.abs(expected.double().numpy() - exact_array)[finite].max()
    rounding = torch.finfo(expected.dtype).eps * max(np.abs(exact_array[finite]).max(), 1e-3)
    assert np.abs(found.astype(np.float64) - exact_array)[finite].max() <= 4 * own + 16 * rounding


def check(function: Callable[..., Any], *tensors: Tensor, dynamic: bool = False, opset: int = OPSET) -> onnx.ModelProto:
    """Lower a function and compare its results; a program with dynamic sizes also for larger inputs."""
    result = lowered(function, *tensors, dynamic=dynamic, opset=opset)
    batches = [tensors]
    if dynamic:
        batches.append(
            tuple(torch.cat([tensor, tensor.flip(0), tensor]) if tensor.ndim else tensor for tensor in tensors)
        )
    for given in batches:
        module = function.eval() if isinstance(function, nn.Module) else function
        with torch.no_grad():
            expected = pytree.tree_leaves(module(*given))
            exact = pytree.tree_leaves(
                _double(module)(*(each.double() if each.is_floating_point() else each for each in given))
            )
        for found, one, other in zip(run(result.model, given), expected, exact, strict=True):
            assert_equal(found, one, other)
    return result.model


def _double(module: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(module, nn.Module):
        return module
    return copy.deepcopy(module).double()


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]
