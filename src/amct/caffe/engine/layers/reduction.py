"""Reduction of trailing axes to one value, and ArgMax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amct.caffe.engine.layer import Layer
from amct.caffe.engine.registry import register
from amct.caffe.engine.shapes import canonical_axis, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct.caffe.engine.blob import Shape

SUM, ASUM, SUMSQ, MEAN = 1, 2, 3, 4


@register("Reduction")
class Reduction(Layer):
    """coeff * (sum, sum of |x|, sum of x^2 or mean) over all axes from ``axis`` on."""

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The axes before ``axis``."""
        self.axis = canonical_axis(self.parameter.reduction_param.axis, len(bottoms[0]), self.name)
        return [bottoms[0][: self.axis]]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Reduce by the operation."""
        options, bottom = self.parameter.reduction_param, bottoms[0]
        axes = list(range(self.axis, bottom.dim()))
        values = {ASUM: torch.abs, SUMSQ: torch.square}.get(options.operation, lambda tensor: tensor)(bottom)
        total = values.sum(axes) if axes else values.clone()
        factor = options.coeff
        if options.operation == MEAN:
            factor /= count(bottom.shape, self.axis)
        return [total if factor == 1.0 else total * factor]


@register("ArgMax")
class ArgMax(Layer):
    """The indices (and with ``out_max_val`` the values) of the ``top_k`` largest values; ties: later index first."""

    no_gradient = (0,)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the options."""
        options = self.options = self.parameter.argmax_param
        shape = bottoms[0]
        self.axis = canonical_axis(options.axis, len(shape), self.name) if options.HasField("axis") else None
        available = shape[self.axis] if self.axis is not None else count(shape, 1)
        if options.top_k < 1:
            raise self.error("top k must not be less than 1")
        if options.top_k > available:
            raise self.error(
                f"top_k must be less than or equal to the number of classes: {options.top_k} and {available}"
            )

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """With an axis: that axis becomes top_k; without: (N, 1 or 2, top_k)."""
        shape, options = bottoms[0], self.options
        if self.axis is not None:
            return [(*shape[: self.axis], options.top_k, *shape[self.axis + 1 :])]
        axes = max(len(shape), 3)
        rows = (2, options.top_k) if options.out_max_val else (1, options.top_k)
        return [(shape[0], *rows, *(1,) * (axes - 3))]

    def forward(self, bottoms: list[torch.Tensor], parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sort and take the first top_k."""
        bottom, options = bottoms[0], self.options
        values = bottom.movedim(self.axis, -1) if self.axis is not None else bottom.reshape(bottom.shape[0], -1)
        # The flip makes a stable sort return the later index of a tie first.
        order = values.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., : options.top_k]
        places = values.shape[-1] - 1 - order
        found = values.gather(-1, places)
        if self.axis is not None:
            result = found if options.out_max_val else places.to(bottom.dtype)
            return [result.movedim(-1, self.axis).contiguous()]
        pieces = [places.to(bottom.dtype), found] if options.out_max_val else [places.to(bottom.dtype)]
        return [torch.stack(pieces, 1).reshape(self.reshape([tuple(bottom.shape)])[0])]
