"""Configs as Python objects, and the plan from a config of any form."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from amct.atomic import read_bytes
from amct.config.checks import ProblemList, check_settings
from amct.config.plan import FORCE_FP16, NO_CONFIG, OPEN_ENDED
from amct.config.ptq.dialect import OWN_ROUNDING
from amct.config.ptq.pytorch import PYTORCH
from amct.config.qat.dialect import PYTORCH_QAT
from amct.config.simple_config import (
    FUSION_SKIPS,
    NO_BLOCK,
    Blocks,
    Choice,
    LayerConfig,
    Level,
    Named,
    Origin,
    RetrainEntry,
    SimpleConfig,
    without_repeats,
)
from amct.errors import ArgumentError, ArgumentTypeError, Position
from amct.numerics.settings import (
    FEW_BITS,
    WIDE_SEARCH,
    ArqRetrainSettings,
    AtLeastOne,
    CheckedSettings,
    IfmrSettings,
    Names,
    Switch,
    UlqRetrainSettings,
    UlqSettings,
    WeightRounding,
    WeightScale,
)

if TYPE_CHECKING:
    from amct.config.dialect import Dialect
    from amct.config.layers import LayerList
    from amct.config.plan import LayerPlan, Plan, RetrainPlan
    from amct.config.ptq.dialect import PtqDialect
    from amct.config.simple_config import FullConfig
    from amct.numerics.settings import ActivationSettings


SOURCE = "config"


@dataclass(frozen=True, kw_only=True)
class _QuantGlobals(CheckedSettings):
    """The global fields of a ``QuantConfig`` with their types and ranges."""

    batch_num: AtLeastOne | None = None
    activation_offset: Switch = True
    do_fusion: Switch = True
    skip_layers: Names = ()
    skip_layer_types: Names = ()
    skip_fusion_layers: Names = ()
    force_fp16: Switch = False
    weight_rounding: WeightRounding | None = None
    weight_scale: WeightScale | None = None
    bias_correction: Switch | None = None


@dataclass(frozen=True, kw_only=True)
class QuantConfig(_QuantGlobals):
    """What to quantize and how; the fields of AMCT's simple config under the same names where it has them.

    An entry of ``types`` or ``layers`` replaces ``common`` as a whole, the layer's own entry before that of its type.
    Settings that a layer type cannot have (AdaRound of a Conv3d) are left out there when they come from ``common``.

    Attributes:
        batch_num: Number of calibration batches; None: all.
        activation_offset: Whether activations have an offset where their settings do not say.
        common: For every layer.
        types: By layer type, such as "Linear".
        layers: By layer name.
        skip_layers: Layers that stay float.
        skip_layer_types: Types that stay float.
        do_fusion: Whether batch norms are folded.
        skip_fusion_layers: Layers whose batch norm stays.
        force_fp16: Whether activation scales are rounded to half precision (PyTorch, ONNX).
        weight_rounding: How uniform weights are rounded: "error_cancelling", so that the errors of each output add up
            to less than a step (the default), or "nearest".
        weight_scale: What the largest absolute weight is divided by: "negative_side", 128 where the negative side is
            the larger one and else 127 (the default of PyTorch and ONNX models), or "full_range", always 127 (Caffe).
        bias_correction: Whether biases make up for the mean error of rounding the weights; None: they do.
    """

    common: LayerConfig = field(default_factory=LayerConfig)
    types: Mapping[str, LayerConfig] = field(default_factory=dict)
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)


AnyConfig = QuantConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def plan_of(
    config: AnyConfig, layers: LayerList, batches: int | None, dialect: PtqDialect = PYTORCH
) -> tuple[Plan, bool]:
    """The plan of a model, and whether the config leaves the number of batches open.

    Args:
        config: A simple config or a JSON file, the content of a JSON config as a dict, a ``QuantConfig``, or None.
        layers: The model's layers.
        batches: The number of batches, for a config that leaves it open; None when it is not known.
        dialect: The format of the files, and the defaults.

    Raises:
        ArgumentTypeError: The config is of another type.
        ParseError, ConfigError: The config has mistakes; all of them are listed.
        FileError: The file cannot be read.
    """
    if config is None:
        config = QuantConfig()
    if isinstance(config, QuantConfig):
        return _plan_of_object(config, layers, batches, dialect), config.batch_num is None
    full = _full_config(config, layers, dialect, "QuantConfig")
    is_open = "batch_num" not in full.origins
    if is_open:
        full = replace(full, fields={**full.fields, "batch_num": batches or OPEN_ENDED})
    return _searching_wide(dialect.make_plan(full, layers, OWN_ROUNDING)), is_open


def _full_config(config: object, layers: LayerList, dialect: Dialect, kind: str) -> FullConfig:
    """The full config of a file, or of the content of a JSON file; ``kind`` is the class of Python objects."""
    if isinstance(config, Mapping):
        return dialect.read_config(json.dumps(config), SOURCE, layers)
    if isinstance(config, (str, os.PathLike)):
        content, source = read_bytes(config), os.fspath(config)
        reader = dialect.read_config if content.lstrip()[:1] == b"{" else dialect.expand_config
        return reader(content, source, layers)
    raise ArgumentTypeError(
        f"config: expected the path of a .cfg or .json, a dict, a {kind} or None, got {type(config).__name__}"
    )


def _plan_of_object(config: QuantConfig, layers: LayerList, batches: int | None, dialect: PtqDialect) -> Plan:
    problems = ProblemList()
    values = {item.name: getattr(config, item.name) for item in fields(_QuantGlobals)}
    check_settings(_QuantGlobals, values, lambda path: Position(f"{SOURCE}.{path[0]}"), problems)
    entries = {"common": config.common, **_by_name(config.types, "types"), **_by_name(config.layers, "layers")}
    for place, entry in entries.items():
        _check_entry(entry, f"{SOURCE}.{place}", dialect, problems)
    if config.force_fp16 and not dialect.balances:
        problems.add("force_fp16 is only for PyTorch and ONNX models", Position(f"{SOURCE}.force_fp16"))
    problems.raise_all()
    batch_num = config.batch_num if config.batch_num is not None else batches or OPEN_ENDED
    full = dialect.expand(_as_simple_config(config, batch_num), layers, problems)
    return _searching_wide(dialect.make_plan(full, layers, OWN_ROUNDING))


def _searching_wide(plan: Plan) -> Plan:
    """The plan with a wider search where IFMR's default range meets few bits: the best cuts off much more then."""

    def widened(settings: ActivationSettings) -> ActivationSettings:
        if not isinstance(settings, IfmrSettings) or settings.num_bits >= FEW_BITS:
            return settings
        is_default = settings.search_range == IfmrSettings().search_range
        return replace(settings, search_range=WIDE_SEARCH) if is_default else settings

    def of_layer(layer: LayerPlan) -> LayerPlan:
        return replace(layer, activations=tuple(map(widened, layer.activations)))

    return replace(plan, layers=tuple(map(of_layer, plan.layers)))


def _by_name(entries: Mapping[str, LayerConfig], field_name: str) -> dict[str, LayerConfig]:
    return {f'{field_name}["{name}"]': entry for name, entry in entries.items()}


def _check_entry(entry: LayerConfig, place: str, dialect: PtqDialect, problems: ProblemList) -> None:
    """Report settings of a class, or a bit width, that the dialect does not have."""
    if not isinstance(entry, LayerConfig):
        problems.add_wrong_type(f"expected a LayerConfig, got {type(entry).__name__}", Position(place))
        return
    for part, algorithms in (("weights", dialect.weight), ("activations", dialect.activation)):
        given, known = getattr(entry, part), [each.settings for each in algorithms]
        if given is not None and type(given) not in known:
            names = " or ".join(each.__name__ for each in known)
            problems.add_wrong_type(f"expected {names}, got {type(given).__name__}", Position(f"{place}.{part}"))
    bits = getattr(entry.activations, "num_bits", 8)
    if bits not in dialect.activation_bits:
        allowed = " or ".join(map(str, dialect.activation_bits))
        problems.add(f"activations can have {allowed} bits here, got {bits}", Position(f"{place}.activations.num_bits"))
    if entry.migration_strength is not None and not dialect.balances:
        problems.add("DMQ is only for PyTorch and ONNX models", Position(f"{place}.migration_strength"))


def _as_simple_config(config: QuantConfig, batch_num: int) -> SimpleConfig:
    extra = {
        "fakequant_precision_mode": FORCE_FP16 if config.force_fp16 else None,
        "weight_rounding": config.weight_rounding,
        "weight_scale": config.weight_scale,
        "bias_correction": config.bias_correction,
    }
    given = {key: value for key, value in extra.items() if value is not None}
    default = config == QuantConfig(batch_num=config.batch_num)
    fields = {
        "batch_num": batch_num,
        "activation_offset": config.activation_offset,
        "do_fusion": config.do_fusion,
        **given,
    }
    lists = ("skip_layers", "skip_layer_types", FUSION_SKIPS)
    return SimpleConfig(
        source=NO_CONFIG if default else SOURCE,
        fields={**fields, FUSION_SKIPS: list(config.skip_fusion_layers)},
        origins={key: Origin(Level.ARGUMENT) for key in fields},
        names={key: _named(getattr(config, key), key) for key in lists},
        blocks=Blocks(
            common=_choice(config.common, Level.COMMON, "common"),
            by_type={name: _choice(entry, Level.TYPE, f'types["{name}"]') for name, entry in config.types.items()},
            by_layer={name: _choice(entry, Level.LAYER, f'layers["{name}"]') for name, entry in config.layers.items()},
        ),
    )


def _named(names: Iterable[str], field_name: str) -> tuple[Named, ...]:
    return tuple(Named(name, Position(f"{SOURCE}.{field_name}")) for name in names)


def _choice(entry: LayerConfig, level: Level, place: str) -> Choice:
    if entry == LayerConfig() and level is Level.COMMON:
        return NO_BLOCK
    return Choice(None, Origin(level, Position(f"{SOURCE}.{place}")), entry)


SOURCE = "config"
WeightTraining = Literal["learned", "measured"]
_WEIGHT_TRAINING = {"learned": UlqRetrainSettings, "measured": ArqRetrainSettings}


@dataclass(frozen=True, kw_only=True)
class QatConfig:
    """What to train quantized, and with how many bits.

    Attributes:
        weight_bits: 4 or 8.
        activation_bits: 4, 8 or 16.
        layers: By layer name: other bits of weights and activations.
        types: By layer type, such as "Linear": other bits.
        skip_layers: Layers that stay float.
        skip_layer_types: Types that stay float.
        weight_scales: "learned" (``ulq_retrain``), or "measured" in every step (``arq_retrain``).
    """

    weight_bits: int = 8
    activation_bits: int = 8
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    types: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    skip_layers: tuple[str, ...] = ()
    skip_layer_types: tuple[str, ...] = ()
    weight_scales: WeightTraining = "learned"


AnyQatConfig = QatConfig | Mapping[str, Any] | str | os.PathLike[str] | None


def retrain_plan_of(config: AnyQatConfig, layers: LayerList) -> RetrainPlan:
    """The plan of a model from a config of any form.

    Args:
        config: A simple config or a JSON file, the content of a JSON config as a dict, a ``QatConfig``, or None.
        layers: The model's layers.

    Raises:
        ArgumentTypeError: The config is of another type.
        ParseError, ConfigError: The config has mistakes; all of them are listed.
        FileError: The file cannot be read.
    """
    dialect = PYTORCH_QAT
    if config is None:
        config = QatConfig()
    if isinstance(config, QatConfig):
        problems = ProblemList()
        full = dialect.expand(_as_retrain_simple(config, problems), layers, problems)
    else:
        full = _full_config(config, layers, dialect, "QatConfig")
    return dialect.make_plan(full, layers)


def _as_retrain_simple(config: QatConfig, problems: ProblemList) -> SimpleConfig:
    def choice(bits: tuple[int, int], level: Level, place: str) -> Choice:
        weights = _WEIGHT_TRAINING[config.weight_scales](dst_type=_type("weight_bits", bits[0], (4, 8)))
        activations = UlqSettings(dst_type=_type("activation_bits", bits[1], (4, 8, 16)))
        entry = RetrainEntry(activations=activations, weights=weights)
        return Choice(None, Origin(level, Position(f"{SOURCE}{place}")), entry)

    if config.weight_scales not in _WEIGHT_TRAINING:
        raise ArgumentError(f'weight_scales: expected "learned" or "measured", got {config.weight_scales!r}')
    names = {
        key: without_repeats(_named(given, key), key, problems, only_warn=True)
        for key, given in (("skip_layers", config.skip_layers), ("skip_layer_types", config.skip_layer_types))
    }
    blocks = Blocks(
        common=choice((config.weight_bits, config.activation_bits), Level.COMMON, ""),
        by_type={name: choice(bits, Level.TYPE, f'.types["{name}"]') for name, bits in config.types.items()},
        by_layer={name: choice(bits, Level.LAYER, f'.layers["{name}"]') for name, bits in config.layers.items()},
    )
    return SimpleConfig(source=SOURCE, names=names, blocks=blocks)


def _type(name: str, bits: int, legal: tuple[int, ...]) -> Any:  # noqa: ANN401  one of the literal types
    if bits not in legal:
        raise ArgumentError(f"{name}: expected {', '.join(map(str, legal[:-1]))} or {legal[-1]}, got {bits}")
    return f"INT{bits}"
