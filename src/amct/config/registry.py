"""Every algorithm that a config can name.

Weight, retraining and pruning algorithms are constant tables. Activation algorithms are registered: IFMR and HFMG at
the end of this module, those of extensions by ``amct.extend.register_activation``, all with ``register_activation``.
The entry of an algorithm determines how it is read, checked, expanded, written and explained.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from amct.config.checks import checked_settings
from amct.errors import ArgumentError, ArgumentTypeError, did_you_mean
from amct.numerics.settings import (
    AdaRoundSettings,
    ArqRetrainSettings,
    ArqSettings,
    CaffeArqRetrainSettings,
    CaffeUlqSettings,
    FilterPruneSettings,
    HfmgSettings,
    IfmrSettings,
    SelectivePruneSettings,
    SnqSettings,
    UlqRetrainSettings,
    UlqSettings,
)
from amct.schema import ExtraField

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct.numerics.affine import SymmetricScale
    from amct.numerics.observer import Observer
    from amct.numerics.settings import ActivationSettings


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One algorithm as spelled in the files of a dialect.

    Attributes:
        name: Its name in the JSON, the value of ``act_algo`` or ``wts_algo``.
        message: The field of a ``.cfg`` block that chooses it.
        settings: The class of its settings.
        keys: The keys of its JSON block in written order, including the key of the name.
        cfg_fields: The ``.cfg`` fields of keys with another name there: one field, or the two ends of a range; a dot
            separates an inner message from its field.
        json_fields: The settings fields of keys that have another name there.
        optional: Keys that are written only if they were given.
        float32: Keys whose numbers are written with all digits of the float32 (AMCT shortens all others).
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
        """The keys of settings: all but the key of the algorithm's name."""
        return tuple(key for key in self.keys if key != name_key)

    def field_of(self, key: str) -> str:
        """The settings field of a JSON key."""
        return self.json_fields.get(key, key)

    def default_of(self, key: str) -> Any:  # noqa: ANN401  a default is a number, a pair, a text or a bool
        """The built-in default of a JSON key; pairs become lists as in JSON."""
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
_CLIP: dict[str, tuple[str, ...]] = {key: (f"clip_max_min.{key}",) for key in ("clip_max", "clip_min")}


def _algorithm(name: str, settings: type[Any], *keys: str, **spelling: Any) -> Algorithm:  # noqa: ANN401  fields of Algorithm
    """An algorithm with the same name in the JSON and in the ``.cfg``."""
    return Algorithm(name=name, message=name, settings=settings, keys=keys, **spelling)


PYTORCH_WEIGHT = (
    _algorithm(
        "arq_quantize", ArqSettings, "num_bits", "channel_wise", "wts_algo", cfg_fields={"num_bits": ("quant_bits",)}
    ),
    _algorithm("ada_quantize", AdaRoundSettings, *_ADA_KEYS, cfg_fields=_BETA),
)
CAFFE_WEIGHT = (
    _algorithm("arq_quantize", ArqSettings, "wts_algo", "channel_wise", "num_bits"),
    _algorithm("snq_quantize", SnqSettings, *_SNQ_KEYS),
)
RETRAIN_ACTIVATION = (
    _algorithm(
        "ulq_quantize",
        UlqSettings,
        *("algo", *_CLIP, "fixed_min", "dst_type"),
        cfg_fields=_CLIP,
        optional=frozenset({*_CLIP, "fixed_min"}),
        float32=frozenset(_CLIP),
    ),
)
RETRAIN_WEIGHT = (
    _algorithm("arq_retrain", ArqRetrainSettings, "algo", "channel_wise", "dst_type"),
    _algorithm("ulq_retrain", UlqRetrainSettings, "algo", "dst_type", "channel_wise"),
)
DISTILL_WEIGHT = (
    _algorithm("arq_distill", ArqRetrainSettings, "algo", "channel_wise", "dst_type"),
    _algorithm("ulq_distill", UlqRetrainSettings, "algo", "channel_wise", "dst_type"),
)
CAFFE_RETRAIN_ACTIVATION = (
    _algorithm(
        "ulq_quantize",
        CaffeUlqSettings,
        *("algo", *_CLIP, "fixed_min", "fixed_clip", "num_bits"),
        cfg_fields=_CLIP,
        optional=frozenset({*_CLIP, "fixed_min", "fixed_clip"}),
    ),
)
CAFFE_RETRAIN_WEIGHT = (_algorithm("arq_retrain", CaffeArqRetrainSettings, "algo", "channel_wise", "num_bits"),)
FILTER_PRUNE = (
    _algorithm("balanced_l2_norm_filter_prune", FilterPruneSettings, "algo", "prune_ratio", "ascend_optimized"),
)
SELECTIVE_PRUNE = (_algorithm("l1_selective_prune", SelectivePruneSettings, "algo", "n_out_of_m_type", "update_freq"),)


def find_algorithm(algorithms: tuple[Algorithm, ...], name: object) -> Algorithm | None:
    """The algorithm of that JSON name, or None."""
    return next((algorithm for algorithm in algorithms if algorithm.name == name), None)


# -- activation algorithms ---------------------------------------------------------------------------------------------

Dialect = Literal["pytorch", "caffe", "kv_cache"]
"""The config dialects: the two of post-training quantization, and that of kv-cache quantization."""

_CONTAINERS = {"pytorch": "AMCTPytorchProto.CalibrationConfig", "caffe": "AMCTCaffeProto.CalibrationConfig"}
_COMMON_FIELDS = ("num_bits", "asymmetric")


class ObserverFactory(Protocol):
    """Creates an observer from settings."""

    def __call__(
        self,
        settings: Any,  # noqa: ANN401  the class is the algorithm's own
        *,
        channel_axis: int | None,
        symmetric_scale: SymmetricScale,
    ) -> Observer:
        """Create an observer; see ``amct.calibration.make_observer`` for the arguments."""
        ...


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A registered activation algorithm.

    Attributes:
        name: Its name in the JSON, the value of ``act_algo``.
        settings: The class of its settings.
        observer: Creates its observers.
        spellings: Its spelling in the files of each dialect that supports it.
        built_in: Whether the package's ``.proto`` files contain its message.
    """

    name: str
    settings: type[Any]
    observer: ObserverFactory
    spellings: Mapping[Dialect, Algorithm] = field(compare=False)
    built_in: bool = False

    def remove(self) -> None:
        """Remove the algorithm from the registry; configs can no longer name it."""
        _activations.pop(self.name, None)


_activations: dict[str, Activation] = {}


def register_activation(
    name: str,
    settings: type[Any],
    observer: ObserverFactory,
    spellings: Mapping[Dialect, Algorithm] | None = None,
) -> Activation:
    """Register an activation algorithm; ``amct.extend.register_activation`` is the public form.

    Args:
        name: Its name in the JSON.
        settings: A frozen, keyword-only dataclass with defaults for all fields, including ``num_bits`` and
            ``asymmetric``.
        observer: Creates an observer from settings.
        spellings: By dialect, for an algorithm whose message is in the ``.proto`` files; None: derived from the
            fields.

    Raises:
        ArgumentTypeError: the settings are not such a dataclass.
        ArgumentError: another algorithm has this name or settings class.
    """
    _check_settings_class(name, settings)
    known = Activation(
        name=name,
        settings=settings,
        observer=observer,
        spellings=MappingProxyType(dict(spellings or _derived_spellings(name, settings))),
        built_in=spellings is not None,
    )
    for other in _activations.values():
        if (other.name == name or other.settings is settings) and other != known:
            raise ArgumentError(
                f'register_activation: "{name}" with {settings.__name__} clashes with the registered algorithm '
                f'"{other.name}" with {other.settings.__name__}; choose another name, or remove that one first'
            )
    return _activations.setdefault(name, known)


def _check_settings_class(name: str, settings: object) -> None:
    if not name.isidentifier():
        raise ArgumentError(f"register_activation: name: expected letters, digits and underscores, got {name!r}")
    if not (isinstance(settings, type) and is_dataclass(settings) and _is_frozen(settings)):
        raise ArgumentTypeError(f"register_activation: settings: expected a frozen dataclass, got {settings!r}")
    defaults = {item.name: item.default for item in fields(settings)}
    missing = [key for key in _COMMON_FIELDS if key not in defaults]
    if missing:
        raise ArgumentTypeError(f"register_activation: {settings.__name__} needs the fields {' and '.join(missing)}")
    bare = [key for key, default in defaults.items() if default is MISSING]
    if bare:
        raise ArgumentTypeError(
            f"register_activation: every field of {settings.__name__} needs a default value; without one: "
            f"{', '.join(bare)}"
        )


def _is_frozen(settings: type[Any]) -> bool:
    return bool(settings.__dataclass_params__.frozen)


def _derived_spellings(name: str, settings: type[Any]) -> dict[Dialect, Algorithm]:
    own = [item.name for item in fields(settings) if item.name not in _COMMON_FIELDS]
    message = f"{name}_quantize"
    return {
        "pytorch": Algorithm(
            name=name, message=message, settings=settings, keys=("num_bits", "act_algo", "asymmetric", *own)
        ),
        "caffe": Algorithm(
            name=name,
            message=message,
            settings=settings,
            keys=("act_algo", "num_bits", *own, "with_offset"),
            cfg_fields={"with_offset": ("asymmetric",)},
            json_fields={"with_offset": "asymmetric"},
            optional=frozenset({"with_offset"}),
        ),
    }


def activation_algorithms(dialect: Dialect) -> tuple[Algorithm, ...]:
    """The activation algorithms that files of a dialect can name; the first one is the default."""
    return tuple(each.spellings[dialect] for each in _activations.values() if dialect in each.spellings)


def extra_fields(dialect: Dialect) -> tuple[ExtraField, ...]:
    """The fields that registered extensions add to the simple config of a dialect."""
    return tuple(
        ExtraField(
            container=_CONTAINERS[dialect],
            name=each.spellings[dialect].message,
            settings=each.settings,
            oneof="acts_quant_algo",
        )
        for each in _activations.values()
        if not each.built_in
    )


def activation_of(settings: ActivationSettings) -> Activation:
    """The registered algorithm of a settings object.

    Raises:
        ArgumentTypeError: no algorithm with this class is registered.
    """
    found = next((each for each in _activations.values() if each.settings is type(settings)), None)
    if found is None:
        known = ", ".join(each.settings.__name__ for each in _activations.values())
        raise ArgumentTypeError(
            f"activation settings: expected one of {known}, got {type(settings).__name__}; register the algorithm with "
            "amct.extend.register_activation"
        )
    return found


def settings_to_dict(settings: ActivationSettings) -> dict[str, Any]:
    """The settings of an activation algorithm as plain JSON data, with its name under ``act_algo``."""
    values = asdict(settings)  # type: ignore[call-overload]  # every registered class is a dataclass
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"act_algo": activation_of(settings).name, **plain}


def settings_from_dict(data: Mapping[str, Any]) -> ActivationSettings:
    """The inverse of ``settings_to_dict``; missing values take their defaults.

    Raises:
        ArgumentError: no algorithm with this name is registered.
        ConfigError: a value is invalid; all mistakes are listed.
    """
    name = data.get("act_algo", "ifmr")
    if name not in _activations:
        raise ArgumentError(f'act_algo: no algorithm "{name}" is registered.{did_you_mean(str(name), _activations)}')
    values = {key: value for key, value in data.items() if key != "act_algo"}
    settings: ActivationSettings = checked_settings(_activations[name].settings, values, block=name)
    return settings


def _observer(module: str, name: str) -> ObserverFactory:
    """An observer class of ``amct.numerics`` as a factory; it is imported, and torch with it, on first use."""

    def create(settings: Any, **options: Any) -> Observer:  # noqa: ANN401  see ObserverFactory
        made: Observer = getattr(import_module(f"amct.numerics.{module}"), name)(settings, **options)
        return made

    return create


_IFMR = Algorithm(name="ifmr", message="ifmr_quantize", settings=IfmrSettings, keys=(), cfg_fields=_SEARCH)
_HFMG = Algorithm(name="hfmg", message="hfmg_quantize", settings=HfmgSettings, keys=())

register_activation(
    "ifmr",
    IfmrSettings,
    _observer("ifmr", "IfmrObserver"),
    {
        "pytorch": replace(
            _IFMR, keys=("num_bits", *_IFMR_KEYS, "act_algo", "asymmetric"), cfg_fields=_SEARCH | _BITS_BY_TYPE
        ),
        "caffe": replace(
            _IFMR,
            keys=("num_bits", *_IFMR_KEYS, "with_offset"),
            json_fields={"with_offset": "asymmetric"},
            optional=frozenset({"with_offset"}),
        ),
        "kv_cache": replace(_IFMR, keys=("act_algo", *_IFMR_KEYS, "asymmetric"), optional=_ASYMMETRIC),
    },
)
register_activation(
    "hfmg",
    HfmgSettings,
    _observer("hfmg", "HfmgObserver"),
    {
        "pytorch": replace(_HFMG, keys=("num_bits", "act_algo", "asymmetric", "num_of_bins"), cfg_fields=_BITS_BY_TYPE),
        "kv_cache": replace(_HFMG, keys=("act_algo", "num_of_bins", "asymmetric"), optional=_ASYMMETRIC),
    },
)
