"""Quantization parameters: the one form they have from an observer to an exported file.

``q = round(x / scale) + offset``, as ``affine.py`` defines it. Records and files have words of their
own for the same numbers, which are converted at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from amct.errors import ArgumentError
from amct.numerics.affine import SymmetricScale, integer_range, is_near_zero, scalar_factors, scale_and_offset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from amct.numerics.settings import ActivationSettings


def float32_tensor(numbers: float | Sequence[float]) -> Tensor:
    """The numbers as a tensor."""
    return torch.tensor(numbers, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class QParams:
    """How a tensor is quantized: 0-d tensors, or ``[n]`` for the n parts of an axis.

    Attributes:
        scale: float32.
        offset: int32, the integer that represents zero.
        bits: Of the integers, which are signed.
        axis: The axis whose parts have parameters of their own; of a weight, that of its rows ``[Cout, -1]``.
    """

    scale: Tensor
    offset: Tensor
    bits: int = 8
    axis: int | None = None

    @classmethod
    def of(cls, scale: float | Sequence[float], offset: int | Sequence[int] = 0, bits: int = 8) -> Self:
        """The parameters with these numbers; several are along axis 0."""
        steps, shifts = float32_tensor(scale), torch.tensor(offset, dtype=torch.int32)
        axis = None if steps.ndim == 0 else 0
        return cls(scale=steps, offset=shifts.expand(steps.shape), bits=bits, axis=axis)

    @classmethod
    def symmetric(cls, scale: Tensor, bits: int = 8) -> QParams:
        """The parameters with this scale and no offset."""
        return QParams(scale=scale, offset=torch.zeros_like(scale, dtype=torch.int32), bits=bits, axis=0)

    @property
    def step(self) -> float:
        """The scale as a number; only where the whole tensor has one."""
        return float(self.scale)

    @property
    def zero_point(self) -> int:
        """The offset as a number; only where the whole tensor has one."""
        return int(self.offset)

    @property
    def clip_min(self) -> Tensor:
        """The smallest representable value: values below it become the lowest integer."""
        return self.scale * (integer_range(self.bits)[0] - self.offset)

    @property
    def clip_max(self) -> Tensor:
        """The largest representable value."""
        return self.scale * (integer_range(self.bits)[1] - self.offset)

    def moved(self, step: float, zero_point: int) -> Self:
        """The same with other numbers."""
        new = QParams.of(step, zero_point)
        return replace(self, scale=new.scale, offset=new.offset)

    def per_row(self, rows: int) -> QParams:
        """The same with ``[1]`` or ``[rows]`` numbers: those of a gate are repeated for each of its rows.

        Raises:
            ArgumentError: The number of parameters does not divide the number of rows.
        """
        count = self.scale.numel()
        if count in (1, rows):
            return self
        if count == 0 or rows % count:
            raise ArgumentError(f"{count} scales do not fit {rows} output channels")
        repeats = rows // count
        scale, offset = (numbers.repeat_interleave(repeats) for numbers in (self.scale, self.offset))
        return replace(self, scale=scale, offset=offset)

    def numbers(self) -> tuple[object, ...]:
        """Everything as plain numbers, which can be compared."""
        return self.bits, self.axis, *self.scale.reshape(-1).tolist(), *self.offset.reshape(-1).tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QParams) and self.numbers() == other.numbers()

    def __hash__(self) -> int:
        return hash(self.numbers())


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed(QParams):
    """The quantization parameters of an observed tensor, with what else its observer tells.

    Attributes:
        near_zero: True where the data was practically zero, so that the scale is 1 by convention; callers log a
            warning.
        balance: Factors ``[C]`` that the tensor is divided by before it is quantized; None: no balancing.
        mean: Mean of every channel ``[C]``, if the observer computes it.
        others: What other settings find in the same values, for a search; not sent to other processes.
    """

    near_zero: Tensor = field(default_factory=lambda: torch.tensor(data=False))
    balance: Tensor | None = None
    mean: Tensor | None = None
    others: tuple[tuple[ActivationSettings, QParams], ...] = ()

    @classmethod
    def from_range(
        cls,
        minimum: Tensor,
        maximum: Tensor,
        bits: int,
        *,
        asymmetric: bool,
        symmetric_scale: SymmetricScale,
        axis: int | None = None,
    ) -> Self:
        """The parameters that cover the range ``minimum``..``maximum``, 0-d or ``[C]`` along ``axis``."""
        if minimum.ndim == maximum.ndim == 0 and minimum.is_cpu:
            ends = minimum.item(), maximum.item()
            found = scalar_factors(*ends, bits, asymmetric=asymmetric, symmetric_scale=symmetric_scale)
            if found is not None:
                step, shift, is_tiny = found
                return cls(  # an array becomes a tensor in a third of the time that a number takes
                    scale=torch.from_numpy(np.array(step)),
                    offset=torch.from_numpy(np.array(shift, np.int32)),
                    bits=bits,
                    near_zero=torch.from_numpy(np.array(is_tiny)),
                )
        scale, offset = scale_and_offset(minimum, maximum, bits, asymmetric=asymmetric, symmetric_scale=symmetric_scale)
        near_zero = scale == 1  # the fallback of scale_and_offset
        if bool(near_zero.any()):
            near_zero = is_near_zero(minimum, maximum, bits, asymmetric=asymmetric, symmetric_scale=symmetric_scale)
        return cls(scale=scale, offset=offset, bits=bits, axis=axis, near_zero=near_zero)

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The same as arrays, to send it to another process; what it does not have is left out."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
        return {**arrays, "bits": np.array([self.bits, *(() if self.axis is None else (self.axis,))], np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """What was turned into arrays."""
        bits, *axis = arrays["bits"].tolist()
        tensors: dict[str, Any] = {name: torch.from_numpy(each) for name, each in arrays.items() if name in _TENSORS}
        return cls(bits=bits, axis=axis[0] if axis else None, **tensors)


_TENSORS = ("scale", "offset", "near_zero", "balance", "mean")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerQParams:
    """How one layer is quantized.

    Attributes:
        inputs: By number of the input.
        weights: Of its weights, in their own order; a recurrent layer has those of the data and of the hidden state,
            each with one scale, one per gate or one per row, in ONNX's order of gates. None for average pooling.
        hidden: Of the hidden state of a recurrent layer.
        balance: DMQ's factors, one per input channel: the input is divided by them, the weight multiplied.
        sizes: By number of the input: channels, height and width of an image, which Caffe's records have.
        cancels_errors: Whether the weight is rounded so that errors cancel, not to the nearest.
        mean: The mean of each channel of the first input, after balancing: what the weight is multiplied by.
        corrects_bias: Whether the bias makes up for the mean error of rounding the weight, where the mean is known.
        lost: What each output loses on average where exported models hold the rounded weight, because its rounding is
            learned: of the rounded weight alone it cannot be told.
    """

    inputs: Mapping[int, QParams]
    weights: tuple[QParams, ...] = ()
    hidden: QParams | None = None
    balance: Tensor | None = None
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cancels_errors: bool = False
    mean: Tensor | None = None
    corrects_bias: bool = False
    lost: Tensor | None = None

    @property
    def input(self) -> QParams:
        """Of the first input."""
        return self.inputs[0]

    @property
    def weight(self) -> QParams:
        """Of the first weight; a layer without weights counts as one whose weights are 1."""
        return self.weights[0] if self.weights else _UNIT

    @property
    def scale_d(self) -> float:
        """The scale of the first input, by the name that AMCT's records give it."""
        return self.input.step

    @property
    def scale_w(self) -> NDArray[np.float32]:
        """The scales of the first weight, by the name that AMCT's records give them."""
        scales: NDArray[np.float32] = self.weight.scale.reshape(-1).cpu().numpy()
        return scales


_UNIT = QParams.of([1.0])


def with_means(
    layers: Mapping[str, LayerQParams], tensors: Mapping[str, Observed] | None, inputs: Mapping[str, str]
) -> dict[str, LayerQParams]:
    """The parameters of layers with the means of their inputs, where these were observed.

    Args:
        layers: The parameters.
        tensors: What was observed of the tensors between layers.
        inputs: By layer: the ONNX name of its input.
    """
    found = dict(layers)
    for name, qparams in layers.items():
        observed = (tensors or {}).get(inputs.get(name, ""))
        if observed is not None and observed.mean is not None:
            balance = qparams.balance
            fits = balance is None or balance.numel() == observed.mean.numel()
            mean = observed.mean if balance is None or not fits else observed.mean / balance
            found[name] = replace(qparams, mean=mean if fits else None)
    return found
