"""``Conv1dQAT`` to ``ConvTranspose2dQAT``, ``LinearQAT`` and ``MatMulQAT``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from amct.arguments import check_types
from amct.errors import ModelArgumentError, ModelTypeError
from amct.numerics.settings import WeightKind
from amct.pytorch.qat.layers import ConvForward, ConvTransposeForward, LinearForward
from amct.pytorch.qat.single_op.module import SingleOp, checked_config
from amct.pytorch.qat.single_op.state import InputQuantizer, WeightQuantizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

_MOST_AXES = 6
"""Of the operands of a quantized product, as in AMCT."""


class _Convolution(SingleOp):
    """A convolution of any number of dimensions, transposed or not."""

    settings = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    weight_kind = WeightKind.CONV

    def __init__(  # noqa: PLR0913  torch's signature
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        checked = checked_config(config, type(self).__name__)
        self._check_axes(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )
        weights = WeightQuantizer(checked.weights, "weight", self.weight_kind, groups)
        self._add_quantizers(checked, [InputQuantizer(checked.data)], [weights], device)

    def _check_axes(self, **settings: int | tuple[int, ...] | str) -> None:
        """Raise for a setting with too few or too many numbers, which torch notices in the first forward only.

        Raises:
            ModelArgumentError: The message names the setting.
        """
        axes = (self.input_rank or 0) - 2
        for name, value in settings.items():
            if isinstance(value, tuple) and len(value) != axes:
                raise ModelArgumentError(
                    f"{type(self).__name__}: {name} must be one number or {axes}, one for each axis, got {value}"
                )

    @classmethod
    def _like(cls, mod: Any, config: Mapping[str, Any] | None) -> Self:  # noqa: ANN401  the attributes are those of its class
        made = super()._like(mod, config)
        cast("Any", made).output_padding = mod.output_padding
        return made


class _ConvTranspose(ConvTransposeForward, _Convolution):
    weight_kind = WeightKind.CONV_TRANSPOSE


class Conv1dQAT(ConvForward, _Convolution, nn.Conv1d):
    """Quantization-aware ``nn.Conv1d``; the arguments are torch's, and ``config``."""

    float_class, input_rank = nn.Conv1d, 3


class Conv2dQAT(ConvForward, _Convolution, nn.Conv2d):
    """Quantization-aware ``nn.Conv2d``; the arguments are torch's, and ``config``."""

    float_class, input_rank = nn.Conv2d, 4


class Conv3dQAT(ConvForward, _Convolution, nn.Conv3d):
    """Quantization-aware ``nn.Conv3d``; the arguments are torch's, and ``config``. ``dilation[0]`` must be 1."""

    float_class, input_rank = nn.Conv3d, 5


class ConvTranspose1dQAT(_ConvTranspose, nn.ConvTranspose1d):
    """Quantization-aware ``nn.ConvTranspose1d``; without ``output_padding``, which only ``from_float`` keeps."""

    float_class, input_rank, dimensions = nn.ConvTranspose1d, 3, 1


class ConvTranspose2dQAT(_ConvTranspose, nn.ConvTranspose2d):
    """Quantization-aware ``nn.ConvTranspose2d``; without ``output_padding``, which only ``from_float`` keeps."""

    float_class, input_rank, dimensions = nn.ConvTranspose2d, 4, 2


class LinearQAT(LinearForward, SingleOp, nn.Linear):
    """Quantization-aware ``nn.Linear``; its weight has one scale, so ``channel_wise`` is False."""

    float_class = nn.Linear
    settings = ("in_features", "out_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        checked = checked_config(config, type(self).__name__, per_channel=False)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        weights = WeightQuantizer(checked.weights, "weight", WeightKind.LINEAR)
        self._add_quantizers(checked, [InputQuantizer(checked.data)], [weights], device)


class MatMulQAT(SingleOp):
    """The product of two quantized tensors, ``torch.matmul(input, other)``.

    Each operand has clips of its own, both trained: ``acts_clip_max`` of the first, ``acts_other_clip_max`` of the
    second, and so on.
    """

    def __init__(self, device: torch.device | str | None = None, config: Mapping[str, Any] | None = None) -> None:
        checked = checked_config(config, type(self).__name__)
        check_types("MatMulQAT", {"device": (device, (str, torch.device, type(None)))})
        super().__init__()
        inputs = [InputQuantizer(checked.data), InputQuantizer(checked.data, prefix="acts_other")]
        self._add_quantizers(checked, inputs, [], device)

    @classmethod
    def from_float(cls, mod: nn.Module, config: Mapping[str, Any] | None = None) -> Self:
        """Make a module from one of a class named ``MatMul``, which torch does not have.

        Raises:
            TypeError, RuntimeError: the class has another name. The error is both.
        """
        if not isinstance(mod, nn.Module) or type(mod).__name__ != "MatMul":
            raise ModelTypeError(
                f"{cls.__name__}.from_float: mod must be a module of a class MatMul, got {type(mod).__name__}"
            )
        return cls(config=config).train(mod.training)

    def forward(self, input: Tensor, other: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Multiply the quantized tensors, of 2 to 6 dimensions."""
        for operand in (input, other):
            if isinstance(operand, Tensor) and not 2 <= operand.dim() <= _MOST_AXES:
                shape = list(operand.shape)
                raise ModelArgumentError(f"MatMulQAT: operands must have 2 to {_MOST_AXES} dimensions, got {shape}")
        first, second = self.quantized(input, other)
        return first @ second
