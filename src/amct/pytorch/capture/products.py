"""Products of an activation with a weight of any number of axes: einsum, bmm, matmul, and the products of experts.

Each is a linear layer, or a convolution with a kernel of one position, between two arrangements of axes. Axes are
letters, as in einsum. Axes of the weight that the result has and the activation has not are output channels; axes that
only the result lacks are summed over. An axis that both operands and the result have divides the product into groups,
each with weights of its own: that is a convolution with groups.

The experts of a mixture (``grouped_mm``) each have some rows of the activation: all experts compute all rows, and
each row takes the result of its own. So the program has no sizes that depend on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Product:
    """The axes of a product: of its activation, its weight and its result."""

    activation: str
    weight: str
    result: str

    @property
    def groups(self) -> str:
        """Axes of which each position has weights of its own."""
        return "".join(axis for axis in self.weight if axis in self.activation and axis in self.result)

    @property
    def summed(self) -> str:
        """Axes that are summed over."""
        return "".join(axis for axis in self.weight if axis in self.activation and axis not in self.result)

    @property
    def outputs(self) -> str:
        """Axes of the output channels."""
        return "".join(axis for axis in self.weight if axis not in self.activation and axis in self.result)

    @property
    def free(self) -> str:
        """Axes that only the activation and the result have."""
        return "".join(axis for axis in self.result if axis not in self.weight)

    def rows(self, weight: Tensor) -> Tensor:
        """The weight in the layout of the layer: a row for each output channel of each group."""
        ordered = _moved(weight, self.weight, self.groups + self.outputs + self.summed)
        rows = ordered.reshape(-1, math.prod(weight.shape[self.weight.index(axis)] for axis in self.summed))
        return rows.unsqueeze(-1) if self.groups else rows

    def compute(self, layer: Layer, x: Tensor, weight: Tensor) -> Tensor:
        """The product, where ``layer`` multiplies by the rows of ``weight``, of which only the shape is read."""
        sizes = dict(zip(self.weight, weight.shape, strict=True))
        channels = [sizes[axis] for axis in self.groups + self.outputs]
        if not self.groups:
            x = _moved(x, self.activation, self.free + self.summed)
            made = layer(x if len(self.summed) == 1 else x.flatten(len(self.free)))
            made = _unflattened(made, -1, channels)
            return _moved(made, self.free + self.outputs, self.result)
        x = _moved(x, self.activation, self.groups + self.summed + self.free)
        count = len(self.groups + self.summed)
        others = list(x.shape[count:])
        made = layer(x.flatten(count).flatten(0, count - 1).unsqueeze(0) if others else x.reshape(1, -1, 1)).squeeze(0)
        made = _unflattened(_unflattened(made, -1, others), 0, channels)
        return _moved(made, self.groups + self.outputs + self.free, self.result)


def _unflattened(tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """A tensor with one of its axes divided into others, of which there may be none."""
    if not sizes:
        return tensor.squeeze(axis)
    return tensor if len(sizes) == 1 else torch.unflatten(tensor, axis, sizes)


def _moved(tensor: Tensor, axes: str, wanted: str) -> Tensor:
    """A tensor with its axes in another order; those that are not wanted have size 1."""
    if axes == wanted:
        return tensor
    for place in reversed(range(len(axes))):
        if axes[place] not in wanted:
            tensor = tensor.squeeze(place)
    kept = [axis for axis in axes if axis in wanted]
    return tensor if kept == list(wanted) else tensor.permute([kept.index(axis) for axis in wanted])


def einsum_product(equation: str, x: Tensor, weight: Tensor, *, weight_first: bool) -> Product | None:
    """How einsum of two operands is a product with a weight; None if it is none, as where an operand has a diagonal."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    found = terms.split(",")
    if len(found) != 2:
        return None
    first, second = _without_ellipsis(found, [weight.ndim, x.ndim] if weight_first else [x.ndim, weight.ndim])
    spare = [axis for axis in first if axis not in found[0]] or [axis for axis in second if axis not in found[1]]
    if arrow:
        result = result.replace("...", "".join(spare))
    else:
        once = sorted(axis for axis in first + second if (first + second).count(axis) == 1 and axis not in spare)
        result = "".join([*spare, *once])
    activation, own = (second, first) if weight_first else (first, second)
    return checked(Product(activation=activation, weight=own, result=result), x, weight)


def _without_ellipsis(terms: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """The axes of each operand, with letters of their own for the axes that an ellipsis stands for."""
    spare = [letter for letter in ascii_letters if not any(letter in term for term in terms)]
    found = []
    for term, rank in zip(terms, ranks, strict=True):
        count = rank - len(term.replace("...", ""))
        found.append(term.replace("...", "".join(spare[:count][::-1])))
    return found


def matmul_product(x: Tensor, weight: Tensor, *, weight_first: bool) -> Product | None:
    """How ``torch.matmul`` with a weight of two or more axes is such a product; leading axes are broadcast."""
    if weight.ndim < 2 or x.ndim < 1:
        return None
    row, summed, column, *letters = list(ascii_letters)
    given, own, result = [], [], []
    for place in range(max(x.ndim, weight.ndim) - 2, 0, -1):
        axis, other = letters.pop(), letters.pop()  # the second is for an axis of size 1 that is broadcast
        in_x, in_weight = x.ndim - 2 >= place, weight.ndim - 2 >= place
        weight_has_one = in_weight and weight.shape[-2 - place] == 1
        x_has_one = in_x and in_weight and not weight_has_one and _is_one(x.shape[-2 - place])
        result.append(axis)
        given += [other if x_has_one else axis] if in_x else []
        own += [other if weight_has_one and in_x else axis] if in_weight else []
    rows = [row] if x.ndim > 1 else []
    given += [summed, *rows] if weight_first else [*rows, summed]
    own += [column, summed] if weight_first else [summed, column]
    result += [column, *rows] if weight_first else [*rows, column]
    return checked(Product(activation="".join(given), weight="".join(own), result="".join(result)), x, weight)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def tensordot_product(x: Tensor, weight: Tensor, dims: Any, *, weight_first: bool) -> Product | None:  # noqa: ANN401  a number or two lists
    """How ``torch.tensordot`` is such a product."""
    first, second = (weight, x) if weight_first else (x, weight)
    if isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = (list(range(first.ndim - dims, first.ndim)), list(range(dims)))
    one, two = list(ascii_letters[: first.ndim]), list(ascii_letters[first.ndim : first.ndim + second.ndim])
    for axis, other in zip(*dims, strict=True):
        two[other] = one[axis]
    result = "".join([*(axis for axis in one if axis not in two), *(axis for axis in two if axis not in one)])
    activation, own = ("".join(two), "".join(one)) if weight_first else ("".join(one), "".join(two))
    return checked(Product(activation=activation, weight=own, result=result), x, weight)


def checked(product: Product, x: Tensor, weight: Tensor) -> Product | None:
    """The product, if each axis is there once in an operand and what is left out has size 1."""
    terms = (product.activation, product.weight, product.result)
    if len(product.activation) != x.ndim or len(product.weight) != weight.ndim or not product.summed:
        return None
    if any(len(set(term)) != len(term) for term in terms) or not set(product.result) <= set(terms[0] + terms[1]):
        return None
    return product if all(size == 1 for size in _left_out(product, x, weight)) else None


def _left_out(product: Product, x: Tensor, weight: Tensor) -> Iterator[int]:
    """The sizes of the axes that only one operand has."""
    for axes, other, tensor in ((product.activation, product.weight, x), (product.weight, product.activation, weight)):
        for axis, size in zip(axes, tensor.shape, strict=True):
            if axis not in other and axis not in product.result:
                yield size
            if axis in other and size != (weight if tensor is x else x).shape[other.index(axis)]:
                yield 0  # broadcast, not a product of equal sizes


EXPERTS = Product(activation="sk", weight="ekn", result="sen")
"""Every expert with every row."""


def own_rows(made: Tensor, ends: Tensor) -> Tensor:
    """Of the results of all experts, [rows, experts, channels], that of the expert of each row.

    ``ends``: behind which row each expert's rows end, in order; rows behind all of them belong to no expert.
    """
    count, experts = made.shape[:2]
    rows = torch.arange(count, device=made.device)
    expert = (rows.unsqueeze(1) >= ends).sum(1).clamp(max=experts - 1)
    return made.flatten(0, 1).index_select(0, rows * experts + expert)
