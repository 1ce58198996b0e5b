"""Every algorithm a config can name, one line each.

To add one: write its settings class in ``settings``, its message in the ``.proto`` and its line here. Reading,
checking, expanding, writing and explaining follow from the line; the front doors ask for the settings class and
nothing else.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from amct.config.checks import checked_settings
from amct.config.qat.settings import (
    ArqRetrainSettings,
    CaffeArqRetrainSettings,
    CaffeUlqSettings,
    FilterPruneSettings,
    SelectivePruneSettings,
    UlqRetrainSettings,
    UlqSettings,
)
from amct.config.settings import (
    AdaRoundSettings,
    ArqSettings,
    HfmgSettings,
    IfmrSettings,
    SnqSettings,
)
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.config.settings import ActivationSettings


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm as it is spelled in a dialect's files.

    Attributes:
        name: Its name in the JSON, the value of ``act_algo`` or ``wts_algo``.
        message: The field of a ``.cfg`` block that chooses it.
        settings: What it becomes.
        keys: The keys of its JSON block in the order they are written, the key of the name among them.
        cfg_fields: Where a key is called otherwise in the ``.cfg``: one field, or the two ends of a range; a dot leads
            into an inner message.
        json_fields: Where a key of the JSON is called otherwise in the settings.
        optional: Keys that are written only when they were given.
        float32: Keys whose numbers are written as a float32 holds them (the reference shortens all others).
    """

    name: str
    message: str
    settings: type[Any]
    keys: tuple[str, ...]
    cfg_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    json_fields: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    float32: frozenset[str] = frozenset()

    def setting_keys(self, name_key: str | None) -> tuple[str, ...]:
        """The keys that are settings: all but the one that holds the algorithm's name."""
        return tuple(key for key in self.keys if key != name_key)

    def field_of(self, key: str) -> str:
        """The settings field behind a JSON key."""
        return self.json_fields.get(key, key)

    def default_of(self, key: str) -> Any:  # noqa: ANN401  a default is a number, a pair, a text or a bool
        """The built-in default of a JSON key, lists for pairs as JSON has them."""
        default = {item.name: item.default for item in fields(self.settings)}[self.field_of(key)]
        assert default is not MISSING
        return list(default) if isinstance(default, tuple) else default


_SEARCH: dict[str, tuple[str, ...]] = {"search_range": ("search_range_start", "search_range_end")}
_BETA = {"beta_range": ("beta_range_start", "beta_range_end")}
_IFMR_KEYS = ("max_percentile", "min_percentile", "search_range", "search_step")
_ADA_KEYS = ("num_bits", "reg_param", "warm_start", "num_iteration", "beta_range", "channel_wise", "wts_algo")
_SNQ_KEYS = ("wts_algo", "channel_wise", "num_bits", "max_iteration", "min_distance", "init_algo")
_BITS_BY_TYPE: dict[str, tuple[str, ...]] = {"num_bits": ("dst_type",)}
_ASYMMETRIC = frozenset({"asymmetric"})
_CLIP_KEYS = frozenset({"clip_max", "clip_min"})
_CLIP: dict[str, tuple[str, ...]] = {key: (f"clip_max_min.{key}",) for key in ("clip_max", "clip_min")}

# fmt: off  (a line for each algorithm)
PYTORCH_ACTIVATION = (
    Algorithm(
        name="ifmr",
        message="ifmr_quantize",
        settings=IfmrSettings,
        keys=("num_bits", *_IFMR_KEYS, "act_algo", "asymmetric"),
        cfg_fields=_SEARCH | _BITS_BY_TYPE,
    ),
    Algorithm(
        name="hfmg",
        message="hfmg_quantize",
        settings=HfmgSettings,
        keys=("num_bits", "act_algo", "asymmetric", "num_of_bins"),
        cfg_fields=_BITS_BY_TYPE,
    ),
)
PYTORCH_WEIGHT = (
    Algorithm(
        name="arq_quantize",
        message="arq_quantize",
        settings=ArqSettings,
        keys=("num_bits", "channel_wise", "wts_algo"),
        cfg_fields={"num_bits": ("quant_bits",)},
    ),
    Algorithm(name="ada_quantize", message="ada_quantize", settings=AdaRoundSettings, keys=_ADA_KEYS, cfg_fields=_BETA),
)
KV_CACHE = (
    Algorithm(
        name="ifmr",
        message="ifmr_quantize",
        settings=IfmrSettings,
        keys=("act_algo", *_IFMR_KEYS, "asymmetric"),
        cfg_fields=_SEARCH,
        optional=_ASYMMETRIC,
    ),
    Algorithm(
        name="hfmg",
        message="hfmg_quantize",
        settings=HfmgSettings,
        keys=("act_algo", "num_of_bins", "asymmetric"),
        optional=_ASYMMETRIC,
    ),
)
CAFFE_ACTIVATION = (
    Algorithm(
        name="ifmr",
        message="ifmr_quantize",
        settings=IfmrSettings,
        keys=("num_bits", *_IFMR_KEYS, "with_offset"),
        cfg_fields=_SEARCH,
        json_fields={"with_offset": "asymmetric"},
        optional=frozenset({"with_offset"}),
    ),
)
CAFFE_WEIGHT = (
    Algorithm(
        name="arq_quantize", message="arq_quantize", settings=ArqSettings, keys=("wts_algo", "channel_wise", "num_bits")
    ),
    Algorithm(name="snq_quantize", message="snq_quantize", settings=SnqSettings, keys=_SNQ_KEYS),
)
RETRAIN_ACTIVATION = (
    Algorithm(
        name="ulq_quantize",
        message="ulq_quantize",
        settings=UlqSettings,
        keys=("algo", "clip_max", "clip_min", "fixed_min", "dst_type"),
        cfg_fields=_CLIP,
        optional=_CLIP_KEYS | {"fixed_min"},
        float32=_CLIP_KEYS,
    ),
)
RETRAIN_WEIGHT = (
    Algorithm(
        name="arq_retrain",
        message="arq_retrain",
        settings=ArqRetrainSettings,
        keys=("algo", "channel_wise", "dst_type"),
    ),
    Algorithm(
        name="ulq_retrain",
        message="ulq_retrain",
        settings=UlqRetrainSettings,
        keys=("algo", "dst_type", "channel_wise"),
    ),
)
CAFFE_RETRAIN_ACTIVATION = (
    Algorithm(
        name="ulq_quantize",
        message="ulq_quantize",
        settings=CaffeUlqSettings,
        keys=("algo", "clip_max", "clip_min", "fixed_min", "fixed_clip", "num_bits"),
        cfg_fields=_CLIP,
        optional=_CLIP_KEYS | {"fixed_min", "fixed_clip"},
    ),
)
CAFFE_RETRAIN_WEIGHT = (
    Algorithm(
        name="arq_retrain",
        message="arq_retrain",
        settings=CaffeArqRetrainSettings,
        keys=("algo", "channel_wise", "num_bits"),
    ),
)
FILTER_PRUNE = (
    Algorithm(
        name="balanced_l2_norm_filter_prune",
        message="balanced_l2_norm_filter_prune",
        settings=FilterPruneSettings,
        keys=("algo", "prune_ratio", "ascend_optimized"),
    ),
)
SELECTIVE_PRUNE = (
    Algorithm(
        name="l1_selective_prune",
        message="l1_selective_prune",
        settings=SelectivePruneSettings,
        keys=("algo", "n_out_of_m_type", "update_freq"),
    ),
)
# fmt: on


def find_algorithm(algorithms: tuple[Algorithm, ...], name: object) -> Algorithm | None:
    """The algorithm of that JSON name, or None."""
    return next((algorithm for algorithm in algorithms if algorithm.name == name), None)


def settings_to_dict(settings: ActivationSettings) -> dict[str, Any]:
    """The settings of an activation algorithm as plain JSON data, with its name under ``act_algo``."""
    name = next(each.name for each in PYTORCH_ACTIVATION if each.settings is type(settings))
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}
    return {"act_algo": name, **plain}


def settings_from_dict(data: Mapping[str, Any]) -> ActivationSettings:
    """The inverse of ``settings_to_dict``; what is left out takes its default.

    Raises:
        ArgumentError: no algorithm of that name is registered.
        ConfigError: a value is not legal; all mistakes are listed.
    """
    name = data.get("act_algo", "ifmr")
    found = find_algorithm(PYTORCH_ACTIVATION, name)
    if found is None:
        raise ArgumentError(f'act_algo: no algorithm "{name}" is registered')
    values = {key: value for key, value in data.items() if key != "act_algo"}
    settings: ActivationSettings = checked_settings(found.settings, values, block=found.name)
    return settings
