"""Several blobs to one and one to several: Split, Concat, Slice, Eltwise; choosing samples: BatchReindex, Filter."""

from __future__ import annotations

from itertools import pairwise

import torch

from amct.caffe.engine.layer import AutogradContext, Layer, Place, ProtoMessage, Shape, Tensors, count, register
from amct.caffe.engine.onnx_place import BOOL, INT64, fixed


@register("Split")
class Split(Layer):
    """One top per reader of a blob, all with the bottom's values; their gradients are summed."""

    moves_values = True
    top_count = (1, None)
    returns_views = True
    shares_memory = True
    allows_in_place = False

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape for each top."""
        return [bottoms[0]] * len(self.top_blobs)

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Views of the bottom, without a copy."""
        bottom = bottoms[0]
        if not bottom.requires_grad:
            return [bottom] * len(self.top_blobs)
        return [bottom.view_as(bottom) for _ in self.top_blobs]

    def to_onnx(self, place: Place) -> None:
        """Aliases: an ONNX tensor may have several readers."""
        for index in range(len(place.tops)):
            place.alias(place.bottom, index)


def _read_axis(layer: Layer, options: ProtoMessage, old_name: str, shape: Shape) -> int:
    """The axis of Concat or Slice: ``axis``, or its older name."""
    if options.HasField("axis") and options.HasField(old_name):
        raise layer.error(f"Either axis or {old_name} should be specified; not both")
    axis = getattr(options, old_name) if options.HasField(old_name) else options.axis
    return layer.canonical_axis(axis, len(shape))


@register("Concat")
class Concat(Layer):
    """The bottoms concatenated along ``axis``."""

    moves_values = True
    bottom_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axis: ``axis`` or the older ``concat_dim``."""
        self.axis = _read_axis(self, self.parameter.concat_param, "concat_dim", bottoms[0])
        self.shares_memory = len(bottoms) == 1

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The sum of the sizes along the axis; all other sizes must be equal."""
        first, axis = bottoms[0], self.axis
        for index, shape in enumerate(bottoms[1:], 1):
            if len(shape) != len(first):
                raise self.error(
                    f"All inputs must have the same #axes: bottom {index} has shape {shape}, bottom 0 {first}"
                )
            if shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
                raise self.error(
                    f"All inputs must have the same shape, except at concat_axis {axis}: bottom {index} has {shape}, "
                    f"bottom 0 {first}"
                )
        return [(*first[:axis], sum(shape[axis] for shape in bottoms), *first[axis + 1 :])]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        return [torch.cat(bottoms, self.axis)]

    def to_onnx(self, place: Place) -> None:
        if len(place.bottoms) == 1:
            place.alias(place.bottom)
        else:
            place.top("Concat", *place.bottoms, axis=self.axis)


@register("Slice")
class Slice(Layer):
    """Splits the bottom along ``axis`` at ``slice_point``, or into equal parts."""

    moves_values = True
    top_count = (1, None)

    def setup(self, bottoms: list[Shape]) -> None:
        """Read the axis (``axis`` or the older ``slice_dim``) and the slice points."""
        options = self.parameter.slice_param
        self.axis = _read_axis(self, options, "slice_dim", bottoms[0])
        self.points = list(options.slice_point)
        self.shares_memory = len(self.top_blobs) == 1

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The shape of each part."""
        shape, tops = bottoms[0], len(self.top_blobs)
        total = shape[self.axis]
        if self.points:
            if len(self.points) != tops - 1:
                raise self.error(f"{tops} tops need {tops - 1} slice_point, got {len(self.points)}")
            ends = [0, *self.points, total]
            self.sizes = [after - before for before, after in pairwise(ends)]
            if any(size <= 0 for size in self.sizes):
                raise self.error(
                    f"slice_point {self.points} must rise and stay below the {total} values of axis {self.axis}"
                )
        elif total % tops:
            raise self.error(f"Number of top blobs ({tops}) should evenly divide input slice axis ({total})")
        else:
            self.sizes = [total // tops] * tops
        return [(*shape[: self.axis], size, *shape[self.axis + 1 :]) for size in self.sizes]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Copies, because a later in-place layer must not change the bottom."""
        return [piece.clone() for piece in torch.split(bottoms[0], self.sizes, self.axis)]

    def to_onnx(self, place: Place) -> None:
        """ONNX's Split."""
        if len(place.tops) == 1:
            place.alias(place.bottom)
            return
        fixed([dims[self.axis] for dims in place.top_dims])
        place.node("Split", "", [place.bottom, place.value("sizes", self.sizes)], place.tops, axis=self.axis)


@register("Tile")
class Tile(Layer):
    """Repeats the bottom ``tiles`` times along ``axis``."""

    moves_values = True

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottom's shape with ``tiles`` times the size along the axis."""
        options, shape = self.parameter.tile_param, bottoms[0]
        if options.tiles <= 0:
            raise self.error(f"Number of tiles must be positive, got {options.tiles}")
        self.axis = self.canonical_axis(options.axis, len(shape))
        return [(*shape[: self.axis], shape[self.axis] * options.tiles, *shape[self.axis + 1 :])]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        times = [1] * bottoms[0].dim()
        times[self.axis] = self.parameter.tile_param.tiles
        return [bottoms[0].repeat(times)]

    def to_onnx(self, place: Place) -> None:
        times = [1] * len(place.bottom_dims[0])
        times[self.axis] = self.parameter.tile_param.tiles
        place.top("Tile", place.bottom, place.value("times", times))


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
        self.require_same_shapes(bottoms)
        return [bottoms[0]]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
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

    def _sum(self, bottoms: Tensors) -> torch.Tensor:
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

    def to_onnx(self, place: Place) -> None:
        """A chain of Add or Mul, or Max; a single bottom is multiplied by its coefficient."""
        if len(place.bottoms) == 1:
            place.top("Mul", place.bottom, place.value("coefficient", float(self.coefficients[0])))
            return
        if self.operation == MAX:
            place.top("Max", *place.bottoms)
            return
        operator = "Mul" if self.operation == PROD else "Add"
        operands = []
        for index, (bottom, coefficient) in enumerate(zip(place.bottoms, self.coefficients, strict=True)):
            weighted = bottom
            if coefficient != 1.0:
                weighted = place.step(
                    f"weighted{index}", "Mul", bottom, place.value(f"coefficient{index}", float(coefficient))
                )
            operands.append(weighted)
        total = operands[0]
        for index, operand in enumerate(operands[1:-1], 1):
            total = place.step(f"partial{index}", operator, total, operand)
        place.top(operator, total, operands[-1])


@register("BatchReindex")
class BatchReindex(Layer):
    """top[i] = bottom[index[i]]."""

    bottom_count = (2, 2)
    no_gradient = (1,)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """(number of indices, ...)."""
        if len(bottoms[1]) != 1:
            raise self.error(f"the second bottom must be a list of indices, got shape {bottoms[1]}")
        return [(bottoms[1][0], *bottoms[0][1:])]

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Select the samples."""
        index = bottoms[1].detach().to(torch.int64)
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < bottoms[0].shape[0]):
            raise self.error(
                f"an index lies outside 0..{bottoms[0].shape[0] - 1}: {int(index.min())}..{int(index.max())}"
            )
        return [bottoms[0].index_select(0, index)]

    def to_onnx(self, place: Place) -> None:
        """Gather of samples."""
        place.top("Gather", place.bottom, place.step("index", "Cast", place.bottoms[1], to=INT64), axis=0)


@register("Filter")
class Filter(Layer):
    """Keeps the samples whose selector (the last bottom) is not 0; the tops' shapes are the bottoms' until forward."""

    bottom_count = (2, None)
    top_count = (1, None)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """The bottoms' shapes; forward sets the real number of samples."""
        *values, selector = bottoms
        if len(values) != len(self.top_blobs):
            raise self.error(f"needs one top for each bottom but the selector: {len(self.top_blobs)} for {len(values)}")
        if count(selector, 1) != 1:
            raise self.error(
                f"Selector blob must have all the dimensions of size 1 (except the first one), got {selector}"
            )
        for index, shape in enumerate(values):
            if shape[:1] != selector[:1]:
                raise self.error(
                    f"Each bottom should have the same 0th dimension as the selector: {shape} (bottom {index})"
                )
        self.no_gradient = (len(values),)
        return values

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Select the samples."""
        kept = bottoms[-1].detach().reshape(-1).nonzero().reshape(-1)
        return [bottom.index_select(0, kept) for bottom in bottoms[:-1]]

    def to_onnx(self, place: Place) -> None:
        """Compress by the last bottom."""
        selector = place.reshaped(place.bottoms[-1], (None,), "selector")
        kept = place.step("kept", "Cast", selector, to=BOOL)
        for index, bottom in enumerate(place.bottoms[:-1]):
            place.top("Compress", bottom, kept, index=index, axis=0)


@register("Silence")
class Silence(Layer):
    """Consumes blobs that no other layer reads, so that they are not outputs of the net."""

    bottom_count = (1, None)
    top_count = (0, 0)

    def reshape(self, bottoms: list[Shape]) -> list[Shape]:
        """No tops."""
        return []

    def forward(self, bottoms: Tensors, parameters: Tensors) -> Tensors:
        """Do nothing."""
        return []
