"""The settings of every algorithm: one frozen class each, with default and legal range of every field.

An algorithm takes them as they are, and config files are checked against their annotations (``amct.config.checks``):
each default and each range stands here; the ``.proto`` files repeat AMCT's defaults, and a test compares them. This
file imports no torch: configs are read without it. The legal bit widths depend on the layer type: see
``amct.config.layers``. PyTorch gives a bit width of retraining by ``dst_type``
(INT4, INT8, INT16), Caffe by ``num_bits``; every class has ``num_bits``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from amct.errors import ConfigError


def _integer(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """Reject 1.0 and true, which pydantic accepts for the literal 1."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "not an integer")
    return value


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


Percentile = Annotated[float, Field(strict=True, gt=0.5, le=1.0)]
OpenFraction = Annotated[float, Field(strict=True, gt=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0.0)]
NegativeFloat = Annotated[float, Field(strict=True, lt=0.0)]
Count = Annotated[int, Field(strict=True, ge=0)]
AtLeastOne = Annotated[int, Field(strict=True, ge=1)]
Switch = StrictBool
Names = tuple[StrictStr, ...]
ExactInteger = BeforeValidator(_integer)
Version = Annotated[Literal[1], ExactInteger]
DataType = Literal["INT4", "INT8", "INT16"]
WeightType = Literal["INT4", "INT8"]

# None means "not given": null is not legal in the file.
DecimalAboveZero = Annotated[PositiveFloat | None, BeforeValidator(_decimal)]
DecimalBelowZero = Annotated[NegativeFloat | None, BeforeValidator(_decimal)]
NumberAboveZero = Annotated[PositiveFloat | None, BeforeValidator(_number)]
NumberBelowZero = Annotated[NegativeFloat | None, BeforeValidator(_number)]
OptionalBool = Annotated[StrictBool | None, BeforeValidator(_true_or_false)]

MOST_SEARCH_STEPS = 100_000
"""The largest number of ranges that IFMR tries: more would take hours or all memory, and find nothing better."""
FEW_BITS = 8
WIDE_SEARCH = (0.05, 1.01)
"""The search range of IFMR below 8 bits in this package's own calls: there the best range cuts off much more."""
_FLOAT32_EPSILON = 1.2e-7
"""Values in a .cfg are rounded to float32: adjacent ranges must allow for the rounding."""


class SettingsError(ConfigError):
    """A rule between two fields is violated; ``field`` is the field to correct."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class CheckedSettings:
    """Base of all settings: pydantic rejects unknown keys, NaN and infinity."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


# -- activations -------------------------------------------------------------------------------------------------------


class ActivationSettings(Protocol):
    """The fields common to the settings of all activation algorithms; extensions add their own."""

    @property
    def num_bits(self) -> int:
        """The bit width of the integers."""
        ...

    @property
    def asymmetric(self) -> bool:
        """Whether the range has an offset."""
        ...


@dataclass(frozen=True, kw_only=True)
class IfmrSettings(CheckedSettings):
    """IFMR: search the activation range around the percentiles that has the smallest quantization error."""

    num_bits: StrictInt = 8
    max_percentile: Percentile = 0.999999
    min_percentile: Percentile = 0.999999
    search_range: tuple[StrictFloat, StrictFloat] = (0.7, 1.3)
    search_step: PositiveFloat = 0.01
    asymmetric: StrictBool = True

    def __post_init__(self) -> None:
        start, end = self.search_range
        if not 0 < start < end:
            message = f"search_range needs 0 < start < end, got [{start:g}, {end:g}]"
            raise SettingsError("search_range", message)
        if self.search_step > (end - start) * (1 + _FLOAT32_EPSILON) + _FLOAT32_EPSILON:
            message = f"search_step must be at most the width {end - start:g} of search_range, got {self.search_step:g}"
            raise SettingsError("search_step", message)
        if (end - start) / self.search_step > MOST_SEARCH_STEPS:
            message = (
                f"search_step must divide search_range into at most {MOST_SEARCH_STEPS} steps, "
                f"got {self.search_step:g} for [{start:g}, {end:g}]"
            )
            raise SettingsError("search_step", message)


@dataclass(frozen=True, kw_only=True)
class HfmgSettings(CheckedSettings):
    """HFMG: search the activation range on a histogram."""

    num_bits: StrictInt = 8
    num_of_bins: Annotated[Literal[1024, 2048, 4096, 8192], ExactInteger] = 4096
    asymmetric: StrictBool = True


# -- weights -----------------------------------------------------------------------------------------------------------

WeightRounding = Literal["nearest", "error_cancelling"]
"""The rounding of uniform weights: each to nearest, or so that the errors of each output cancel."""
WeightScale = Literal["full_range", "negative_side"]
"""The divisor of the largest absolute weight: 2^(b-1)-1, or 2^(b-1) if the negative side is the larger one."""


@dataclass(frozen=True, kw_only=True)
class ArqSettings(CheckedSettings):
    """ARQ: scale weights by their largest absolute value, per output channel or per tensor."""

    num_bits: StrictInt = 8
    channel_wise: StrictBool = True


@dataclass(frozen=True, kw_only=True)
class AdaRoundSettings(CheckedSettings):
    """AdaRound: learn whether each weight is rounded up or down."""

    num_bits: StrictInt = 8
    reg_param: OpenFraction = 0.01
    warm_start: OpenFraction = 0.2
    num_iteration: Count = 10000
    beta_range: tuple[StrictFloat, StrictFloat] = (20.0, 2.0)
    channel_wise: StrictBool = True

    def __post_init__(self) -> None:
        start, end = self.beta_range
        if not start > end > 0:
            message = f"beta_range needs start > end > 0, got [{start:g}, {end:g}]"
            raise SettingsError("beta_range", message)

    def beta_at(self, iteration: int) -> float | None:
        """The exponent of the regularizer, or None during the warm start."""
        begin = self.num_iteration * self.warm_start
        if iteration < begin:
            return None
        start, end = self.beta_range
        done = (iteration - begin) / (self.num_iteration - begin)
        return end + 0.5 * (start - end) * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class SnqSettings(CheckedSettings):
    """SNQ: non-uniform weights, clustered to 16 values.

    Attributes:
        num_bits: The bits of an index: always 4.
        channel_wise: Whether each output channel has 16 values of its own.
        max_iteration: The most steps of the clustering.
        min_distance: It ends when no centre moves farther than this, in steps of the int8 grid.
        init_algo: Where the centres start: evenly between the smallest and the largest weight, at the quantiles of the
            normal distribution, or at randomly drawn weights far from each other (k-means++).
    """

    num_bits: StrictInt = 4
    channel_wise: StrictBool = True
    max_iteration: Annotated[int, Field(strict=True, ge=500, le=2000)] = 1000
    min_distance: Annotated[float, Field(strict=True, ge=1e-10, le=1e-3)] = 1e-10
    init_algo: Literal["uniform", "gaussian", "d2sampling"] = "uniform"


WeightSettings = ArqSettings | AdaRoundSettings | SnqSettings


@dataclass(frozen=True, kw_only=True)
class BatchNormUpdate(CheckedSettings):
    """How BatchNorm statistics are updated after non-uniform quantization (Caffe)."""

    bn_moving_average_fraction: OpenFraction = 0.5
    bn_update_iterations: Annotated[int, Field(strict=True, gt=0, lt=1000)] = 30
    bn_dump_dir: Annotated[str, Field(strict=True, min_length=1)] = "tmp/bn_data"


# -- retraining --------------------------------------------------------------------------------------------------------


def bits_of(dst_type: str) -> int:
    """The bit width of an integer type.

    >>> bits_of("INT16")
    16
    """
    return int(dst_type.removeprefix("INT"))


class TypedSettings(CheckedSettings):
    """Settings whose bit width is given by an integer type."""

    dst_type: DataType

    @property
    def num_bits(self) -> int:
        """The bit width of ``dst_type``."""
        return bits_of(self.dst_type)


@dataclass(frozen=True, kw_only=True)
class UlqSettings(TypedSettings):
    """ULQ of activations: the clips are trained.

    Attributes:
        clip_max: Where the upper clip starts; None: IFMR determines it.
        clip_min: Where the lower clip starts; None: IFMR determines it.
        fixed_min: Whether the lower clip stays at 0; None: it does after a ReLU, unless clips are given.
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
class ArqRetrainSettings(TypedSettings):
    """ARQ of weights at every step, by their largest absolute value, with a straight-through gradient."""

    channel_wise: StrictBool = True
    dst_type: WeightType = "INT8"


@dataclass(frozen=True, kw_only=True)
class UlqRetrainSettings(TypedSettings):
    """ULQ of weights: their scale is trained."""

    dst_type: WeightType = "INT8"
    channel_wise: StrictBool = True


@dataclass(frozen=True, kw_only=True)
class CaffeUlqSettings(CheckedSettings):
    """ULQ of activations in a Caffe net; each clip may be given alone.

    Attributes:
        clip_max: Where the upper clip starts; None: IFMR determines it.
        clip_min: Where the lower clip starts; None: IFMR determines it.
        fixed_min: Whether the lower clip stays at 0; None: it does after a ReLU, unless a clip is given.
        fixed_clip: Whether the clips that are given stay as they are instead of being trained; None: they do.
        num_bits: 8, or 9 to 16: factors for that width, stored in 16 bits.
    """

    clip_max: NumberAboveZero = None
    clip_min: NumberBelowZero = None
    fixed_min: OptionalBool = None
    fixed_clip: OptionalBool = None
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


# -- The memory layouts of weights. This module imports no torch -------------------------------------------------------


class WeightKind(Enum):
    """Where a weight keeps its output channels."""

    CONV = "conv"
    """``[Cout, Cin/groups, k...]`` of Conv1d/2d/3d."""
    CONV_TRANSPOSE = "conv_transpose"
    """``[Cin, Cout/groups, k...]``; group g owns rows g·Cin/groups and following."""
    LINEAR = "linear"
    """``[Cout, Cin]``."""
    RNN = "rnn"
    """``[gates · hidden, input]`` of LSTM/GRU; without channel_wise, ``groups`` gates have a scale each."""

    @property
    def channel_axis(self) -> int:
        """The axis of the layer's input that holds its channels (features)."""
        return -1 if self in (WeightKind.LINEAR, WeightKind.RNN) else 1
