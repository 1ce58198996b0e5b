"""The settings of every algorithm: one frozen class each, with default and legal range of every field.

The rest of the program uses these classes. Config files are checked against their annotations (see ``checks``), so each
range is defined in one place. The legal bit widths depend on the layer type: see ``ptq.pytorch_types`` and
``ptq.caffe_types``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from amct.errors import ConfigError


def _integer(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """Reject 1.0 and true, which pydantic accepts for the literal 1."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("int_type", "not an integer")
    return value


MOST_SEARCH_STEPS = 100_000
"""The largest number of ranges that IFMR tries: more would take hours or all memory, and find nothing better."""
Percentile = Annotated[float, Field(strict=True, gt=0.5, le=1.0)]
OpenFraction = Annotated[float, Field(strict=True, gt=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0.0)]
Count = Annotated[int, Field(strict=True, ge=0)]
Switch = StrictBool
Names = tuple[StrictStr, ...]
AtLeastOne = Annotated[int, Field(strict=True, ge=1)]
ExactInteger = BeforeValidator(_integer)
Version = Annotated[Literal[1], ExactInteger]

# Values in a .cfg are rounded to float32: adjacent ranges must allow for the rounding.
_FLOAT32_EPSILON = 1.2e-7


class SettingsError(ConfigError):
    """A rule between two fields is violated; ``field`` is the field to correct."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class CheckedSettings:
    """Base of all settings: pydantic rejects unknown keys, NaN and infinity."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


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


@dataclass(frozen=True, kw_only=True)
class SnqSettings(CheckedSettings):
    """SNQ: non-uniform weights, clustered to 16 values."""

    num_bits: StrictInt = 4
    channel_wise: StrictBool = True
    max_iteration: Annotated[int, Field(strict=True, ge=500, le=2000)] = 1000
    min_distance: Annotated[float, Field(strict=True, ge=1e-10, le=1e-3)] = 1e-10
    init_algo: Literal["uniform", "gaussian", "d2sampling"] = "uniform"


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


WeightRounding = Literal["nearest", "error_cancelling"]
"""The rounding of uniform weights: each to nearest, or so that the errors of each output cancel."""
WeightScale = Literal["full_range", "negative_side"]
"""The divisor of the largest absolute weight: 2^(b-1)-1, or 2^(b-1) if the negative side is the larger one."""
WeightSettings = ArqSettings | AdaRoundSettings | SnqSettings


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Quantization settings of layers; missing ones take their defaults.

    Attributes:
        weights: ``ArqSettings``; ``AdaRoundSettings`` (PyTorch) or ``SnqSettings`` (Caffe).
        activations: ``IfmrSettings``, ``HfmgSettings`` (PyTorch, ONNX), or the settings of a registered algorithm.
        migration_strength: 0.2 to 0.8 balances the layer with DMQ before it is quantized (PyTorch, ONNX).
    """

    weights: WeightSettings | None = None
    activations: ActivationSettings | None = None
    migration_strength: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatchNormUpdate(CheckedSettings):
    """How BatchNorm statistics are updated after non-uniform quantization (Caffe)."""

    bn_moving_average_fraction: OpenFraction = 0.5
    bn_update_iterations: Annotated[int, Field(strict=True, gt=0, lt=1000)] = 30
    bn_dump_dir: Annotated[str, Field(strict=True, min_length=1)] = "tmp/bn_data"
