"""Gradients: one autograd graph per layer.

A layer that needs gradients (Caffe's rule, ``build/needs_backward.py``) runs its forward on leaf tensors and keeps the
graph; other layers run without one. Backward goes from the last layer to the first: it reads the tops' ``diff``, asks
the layer's graph for gradients and writes the bottoms' ``diff``. As in Caffe this allows ranges of layers, diffs edited
in between, gradients of single blobs and repeated backwards (parameter gradients accumulate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Blob
    from amct.caffe.engine.graph import LayerNode
    from amct.caffe.engine.layer import Layer


@dataclass(eq=False)
class RecordedForward:
    """The autograd graph of one layer's last forward."""

    bottoms: list[torch.Tensor]
    parameters: list[torch.Tensor]
    tops: Sequence[torch.Tensor]


def _leaf(blob: Blob, needs_gradient: bool) -> torch.Tensor:
    return blob.tensor.detach().requires_grad_(needs_gradient)


def record_forward(node: LayerNode, bottoms: list[Blob]) -> RecordedForward:
    """Run a layer's forward and keep its graph."""
    layer = node.layer
    inputs = [_leaf(blob, needs) for blob, needs in zip(bottoms, node.bottom_needs_gradient, strict=True)]
    parameters = [_leaf(blob, needs) for blob, needs in zip(layer.blobs, layer.parameter_needs_gradient, strict=True)]
    with torch.enable_grad():
        tops = layer.forward(inputs, parameters)
        exact = layer.forward_on_integers([each.detach() for each in inputs])
        if exact is not None:
            tops = _with_gradient_of(exact, tops)
    return RecordedForward(inputs, parameters, tops)


def run_backward(node: LayerNode, record: RecordedForward, bottoms: list[Blob], tops: list[Blob]) -> None:
    """Compute the bottoms' gradients from the tops', and add to the parameters' gradients."""
    layer = node.layer
    wanted = [tensor for tensor in (*record.bottoms, *record.parameters) if tensor.requires_grad]
    found = _gradients(record, wanted, tops)
    remaining = iter(found)
    for tensor, blob in zip(record.bottoms, bottoms, strict=True):
        if tensor.requires_grad:
            gradient = next(remaining)
            blob.set_gradient(torch.zeros_like(tensor) if gradient is None else gradient)
    _add_parameter_gradients(layer, record, remaining)


def _gradients(record: RecordedForward, wanted: list[torch.Tensor], tops: list[Blob]) -> Sequence[torch.Tensor | None]:
    pairs = [(value, blob.gradient) for value, blob in zip(record.tops, tops, strict=True) if value.requires_grad]
    if not wanted or not pairs:
        return [None] * len(wanted)
    return torch.autograd.grad(
        [value for value, _ in pairs],
        wanted,
        [gradient.to(value.device) for value, gradient in pairs],
        retain_graph=True,
        allow_unused=True,
    )


def _add_parameter_gradients(layer: Layer, record: RecordedForward, gradients: object) -> None:
    for tensor, blob in zip(record.parameters, layer.blobs, strict=True):
        if tensor.requires_grad:
            gradient: torch.Tensor | None = next(gradients)  # type: ignore[call-overload]
            if gradient is not None:
                blob.set_gradient(blob.gradient.to(gradient.device) + gradient.reshape(blob.shape))


class _ValueOf(torch.autograd.Function):
    """The value of the second tensor with the gradient of the first."""

    @staticmethod
    def forward(ctx: object, carrier: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        del ctx, carrier
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del ctx
        return gradients[0], None


def _with_gradient_of(values: Sequence[torch.Tensor], carriers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values, with the gradients of other tensors of the same shapes."""
    return [_ValueOf.apply(carrier, value) for carrier, value in zip(carriers, values, strict=True)]  # type: ignore[no-untyped-call]
