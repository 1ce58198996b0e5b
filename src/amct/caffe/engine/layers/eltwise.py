"""Eltwise: sum, product or maximum of several blobs, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import require_same_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape
    from amct.caffe.engine.layer import AutogradContext

PROD, SUM, MAX = 0, 1, 2


class _Maximum(torch.autograd.Function):
    """max(a, b); on a tie the gradient goes to ``b``, or to ``a`` if ``tie_to_first`` (torch would share it)."""

    @staticmethod
    def forward(ctx: AutogradContext, first: torch.Tensor, second: torch.Tensor, tie_to_first: bool) -> torch.Tensor:
        chosen = first >= second if tie_to_first else first > second
        ctx.save_for_backward(chosen)
        return torch.where(chosen, first, second)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (chosen,) = ctx.saved_tensors
        zero = torch.zeros_like(gradient)
        return torch.where(chosen, gradient, zero), torch.where(chosen, zero, gradient), None


@register("Eltwise")
class Eltwise(Layer):
    """sum(coeff_i * x_i), prod(x_i) or max(x_i) of bottoms with the same shape.

    FlowNet's Caffe also multiplies a single bottom by its coefficient.
    """

    bottom_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read operation and coefficients."""
        options = self.parameter.eltwise_param
        self.operation: int = options.operation
        coefficients = list(options.coeff)
        if len(bottoms) == 1 and not coefficients:
            raise self.error("Eltwise Layer takes at least 2 bottom blob(s) as input, or one with a coeff; got 1")
        if coefficients and len(coefficients) != len(bottoms):
            raise self.error(
                f"Eltwise Layer takes one coefficient per bottom blob: {len(coefficients)} for {len(bottoms)} bottoms"
            )
        if coefficients and self.operation != SUM:
            raise self.error("Eltwise layer only takes coefficients for summation")
        self.coefficients = coefficients or [1.0] * len(bottoms)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottoms' common shape."""
        for index, shape in enumerate(bottoms[1:], 1):
            require_same_shape(bottoms[0], shape, self.name, index)
        return [bottoms[0]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Combine the bottoms from first to last."""
        if self.operation == SUM:
            return [self._sum(bottoms)]
        result = bottoms[0]
        for index, other in enumerate(bottoms[1:]):
            if self.operation == PROD:
                result = result * other
            elif result.requires_grad or other.requires_grad:
                result = _Maximum.apply(result, other, index > 0)  # type: ignore[no-untyped-call]
            else:
                result = torch.maximum(result, other)
        return [result]

    def _sum(self, bottoms: list[torch.Tensor]) -> torch.Tensor:
        first = self.coefficients[0]
        if len(bottoms) == 1:
            return torch.mul(bottoms[0], first)
        second = self.coefficients[1]
        start = bottoms[0] if first == 1.0 else bottoms[0] * first
        if self.may_overwrite and start is bottoms[0] and not start.requires_grad:
            result = start.add_(bottoms[1], alpha=second)
        else:
            result = torch.add(start, bottoms[1], alpha=second)
        for other, coefficient in zip(bottoms[2:], self.coefficients[2:], strict=True):
            result = torch.add(result, other, alpha=coefficient)
        return result
