"""The config of a single quantization-aware module (``Conv2dQAT`` and the like): a dict with two blocks.

::

    {"retrain_enable": True,
     "retrain_data_config": {"dst_type": "INT8", "batch_num": 1, "fixed_min": False, "clip_min": -6.0, "clip_max": 6.0},
     "retrain_weight_config": {"dst_type": "INT8", "weights_retrain_algo": "arq_retrain", "channel_wise": True}}

Every key may be missing. AMCT checks ``weight_retrain_algo`` but uses ``weights_retrain_algo``: both are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from amct.config.checks import ProblemList, check_settings, nowhere, show
from amct.numerics.settings import (
    AtLeastOne,
    CheckedSettings,
    DecimalAboveZero,
    DecimalBelowZero,
    SettingsError,
    Switch,
    bits_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA_KEY = "retrain_data_config"
WEIGHT_KEY = "retrain_weight_config"
ALGORITHM_KEY = "weights_retrain_algo"
_OTHER_ALGORITHM_KEY = "weight_retrain_algo"
_KEYS = ("retrain_enable", DATA_KEY, WEIGHT_KEY)


@dataclass(frozen=True, kw_only=True)
class SingleOpData(CheckedSettings):
    """How the input of a module is quantized.

    Attributes:
        dst_type: The integer type.
        batch_num: The number of forwards that IFMR observes; without effect when ``clip_max`` is given.
        fixed_min: Whether the lower clip stays at 0.
        clip_max: Where the upper clip starts; None: IFMR determines both clips.
        clip_min: Where the lower clip starts; None: at ``-clip_max``.
    """

    dst_type: Literal["INT8", "INT16"] = "INT8"
    batch_num: AtLeastOne = 1
    fixed_min: Switch = False
    clip_max: DecimalAboveZero = None
    clip_min: DecimalBelowZero = None

    def __post_init__(self) -> None:
        if self.clip_min is not None and self.clip_max is None:
            message = "clip_min needs clip_max beside it. Give both, or neither to let IFMR find them."
            raise SettingsError("clip_min", message)

    @property
    def num_bits(self) -> int:
        """The bit width of ``dst_type``."""
        return bits_of(self.dst_type)


@dataclass(frozen=True, kw_only=True)
class SingleOpWeights(CheckedSettings):
    """How the weights of a module are quantized: measured in every step, or with a learned step."""

    dst_type: Literal["INT8"] = "INT8"
    weights_retrain_algo: Literal["arq_retrain", "ulq_retrain"] = "arq_retrain"
    channel_wise: Switch = True

    @property
    def num_bits(self) -> int:
        """The bit width of ``dst_type``."""
        return bits_of(self.dst_type)

    @property
    def learned(self) -> bool:
        """Whether the scales are trained."""
        return self.weights_retrain_algo == "ulq_retrain"


@dataclass(frozen=True, kw_only=True)
class SingleOpConfig:
    """The checked config of a module."""

    retrain_enable: bool = True
    data: SingleOpData = field(default_factory=SingleOpData)
    weights: SingleOpWeights = field(default_factory=SingleOpWeights)


def read_single_op_config(config: Mapping[str, Any], *, channel_wise: bool = True) -> SingleOpConfig:
    """Check the config of a module.

    Args:
        config: The dict.
        channel_wise: The value where the config has none.

    Raises:
        ConfigTypeError: A value has the wrong type; all mistakes are listed.
        ConfigError: Any other mistake; all are listed.
    """
    problems = ProblemList()
    for key in config:
        if key not in _KEYS:
            problems.add_unknown("config: the key", str(key), _KEYS)
    enable = config.get("retrain_enable", True)
    if not isinstance(enable, bool):
        problems.add_wrong_type(f"config: retrain_enable must be true or false, got {show(enable)}")
    data = check_settings(SingleOpData, _block(config, DATA_KEY, problems), nowhere, problems, block=DATA_KEY)
    given = {"channel_wise": channel_wise, **_with_one_name(_block(config, WEIGHT_KEY, problems), problems)}
    weights = check_settings(SingleOpWeights, given, nowhere, problems, block=WEIGHT_KEY)
    problems.raise_all()
    assert data is not None
    assert weights is not None
    return SingleOpConfig(retrain_enable=enable, data=data, weights=weights)


def _block(config: Mapping[str, Any], key: str, problems: ProblemList) -> dict[str, Any]:
    block = config.get(key, {})
    if isinstance(block, dict):
        return block
    problems.add_wrong_type(f"config: {key} must be a dict, got {show(block)}")
    return {}


def _with_one_name(block: Mapping[str, Any], problems: ProblemList) -> dict[str, Any]:
    """The block with the algorithm under one of its two names."""
    rest = dict(block)
    other = rest.pop(_OTHER_ALGORITHM_KEY, None)
    if other is None:
        return rest
    if rest.setdefault(ALGORITHM_KEY, other) != other:
        problems.add(f"{WEIGHT_KEY}: {ALGORITHM_KEY} and {_OTHER_ALGORITHM_KEY} contradict each other. Give one.")
    return rest
