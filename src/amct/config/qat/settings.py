"""The settings of retraining: trained quantizers and pruners. One frozen class each, as in ``settings``.

PyTorch gives a bit width by ``dst_type`` (INT4, INT8, INT16), Caffe by ``num_bits``; every class has ``num_bits``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool
from pydantic_core import PydanticCustomError

from amct.config.settings import CheckedSettings, Count, ExactInteger, OpenFraction, SettingsError

DataType = Literal["INT4", "INT8", "INT16"]
WeightType = Literal["INT4", "INT8"]


def _decimal(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """AMCT accepts ``6.0`` and refuses ``6``; null is no number either."""
    if type(value) is not float:
        raise PydanticCustomError("decimal_type", "not a number with a decimal point")
    return value


def _number(value: Any) -> Any:  # noqa: ANN401  any JSON value
    if value is None:
        raise PydanticCustomError("float_type", "not a number")
    return value


def _true_or_false(value: Any) -> Any:  # noqa: ANN401  any JSON value
    if value is None:
        raise PydanticCustomError("bool_type", "not true or false")
    return value


# None means "not given": null is not legal in the file.
DecimalAboveZero = Annotated[Annotated[float, Field(strict=True, gt=0.0)] | None, BeforeValidator(_decimal)]
DecimalBelowZero = Annotated[Annotated[float, Field(strict=True, lt=0.0)] | None, BeforeValidator(_decimal)]
NumberAboveZero = Annotated[Annotated[float, Field(strict=True, gt=0.0)] | None, BeforeValidator(_number)]
NumberBelowZero = Annotated[Annotated[float, Field(strict=True, lt=0.0)] | None, BeforeValidator(_number)]
OptionalBool = Annotated[StrictBool | None, BeforeValidator(_true_or_false)]


class _TypedSettings(CheckedSettings):
    """Settings whose bit width is given by an integer type."""

    dst_type: DataType

    @property
    def num_bits(self) -> int:
        """The bit width of ``dst_type``."""
        return bits_of(self.dst_type)


@dataclass(frozen=True, kw_only=True)
class UlqSettings(_TypedSettings):
    """ULQ of activations: the clips are trained.

    Attributes:
        clip_max: Where the upper clip starts; None: IFMR determines it.
        clip_min: Where the lower clip starts; None: IFMR determines it.
        fixed_min: Whether the lower clip stays at 0; None: it does after a ReLU.
        dst_type: The integer type.
    """

    clip_max: DecimalAboveZero = None
    clip_min: DecimalBelowZero = None
    fixed_min: OptionalBool = None
    dst_type: DataType = "INT8"

    def __post_init__(self) -> None:
        if (self.clip_max is None) != (self.clip_min is None):
            given, missing = ("clip_max", "clip_min") if self.clip_min is None else ("clip_min", "clip_max")
            message = f"{given} needs {missing} beside it. Give both, or neither to let IFMR find them."
            raise SettingsError(given, message)


@dataclass(frozen=True, kw_only=True)
class ArqRetrainSettings(_TypedSettings):
    """ARQ of weights at every step, by their largest absolute value, with a straight-through gradient."""

    channel_wise: StrictBool = True
    dst_type: WeightType = "INT8"


@dataclass(frozen=True, kw_only=True)
class UlqRetrainSettings(_TypedSettings):
    """ULQ of weights: their scale is trained."""

    dst_type: WeightType = "INT8"
    channel_wise: StrictBool = True


@dataclass(frozen=True, kw_only=True)
class CaffeUlqSettings(CheckedSettings):
    """ULQ of activations in a Caffe net; each clip may be given alone.

    Attributes:
        clip_max: Where the upper clip starts; None: IFMR determines it.
        clip_min: Where the lower clip starts; None: IFMR determines it.
        fixed_min: Whether the lower clip stays at 0; None: it does after a ReLU.
        fixed_clip: Whether the clips that are given stay as they are instead of being trained.
        num_bits: 8, or 9 to 16: factors for that width, stored in 16 bits.
    """

    clip_max: NumberAboveZero = None
    clip_min: NumberBelowZero = None
    fixed_min: OptionalBool = None
    fixed_clip: StrictBool = False
    num_bits: Annotated[int, Field(strict=True, ge=8, le=16)] = 8

    def __post_init__(self) -> None:
        if self.fixed_clip and self.clip_max is None and self.clip_min is None:
            raise SettingsError("fixed_clip", "fixed_clip needs clip_max or clip_min: there is nothing to keep fixed")


@dataclass(frozen=True, kw_only=True)
class CaffeArqRetrainSettings(CheckedSettings):
    """ARQ of weights in a Caffe net, always 8 bits."""

    channel_wise: StrictBool = True
    num_bits: Annotated[Literal[8], ExactInteger] = 8


@dataclass(frozen=True, kw_only=True)
class FilterPruneSettings(CheckedSettings):
    """Balanced L2-norm filter pruning: remove output channels.

    Attributes:
        prune_ratio: The share of channels that is removed.
        ascend_optimized: Whether the number of channels left is a multiple of 16.
    """

    prune_ratio: OpenFraction
    ascend_optimized: StrictBool = True


@dataclass(frozen=True, kw_only=True)
class SelectivePruneSettings(CheckedSettings):
    """L1 selective pruning: keep the 2 largest of every 4 weights.

    Attributes:
        n_out_of_m_type: The pattern; there is only one.
        update_freq: The number of batches between two updates of the mask; 0: only the first batch sets it.
    """

    n_out_of_m_type: Literal["M4N2"] = "M4N2"
    update_freq: Count = 0


RetrainActivationSettings = UlqSettings | CaffeUlqSettings
RetrainWeightSettings = ArqRetrainSettings | UlqRetrainSettings | CaffeArqRetrainSettings
PruneSettings = FilterPruneSettings | SelectivePruneSettings


def bits_of(dst_type: str) -> int:
    """The bit width of an integer type.

    >>> bits_of("INT16")
    16
    """
    return int(dst_type.removeprefix("INT"))
