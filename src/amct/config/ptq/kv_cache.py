"""Quantization of key/value caches (PyTorch): config and plan.

Only ``Linear`` layers, always 8 bits. A layer is quantized when the common block lists it or an override names it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from amct.config.blocks import (
    AlgorithmBlock,
    check_block,
    check_members,
    is_object,
    known_members,
    read_algorithm,
    read_algorithm_block,
    read_json_object,
)
from amct.config.checks import ProblemList, check_settings, nowhere, show
from amct.config.full_config import DEFAULT, FullConfig, LayerBlock, Level, Origin
from amct.config.json_reader import JsonNode
from amct.config.layers import KV_CACHE_TYPES, LayerInfo, LayerList
from amct.config.plan import settings_of
from amct.config.registry import activation_algorithms, find_algorithm
from amct.config.simple_config import (
    Choice,
    Named,
    check_layer_names,
    named,
    read_names,
    read_overrides,
    without_repeats,
)
from amct.errors import (
    ArgumentTypeError,
    CalibrationArgumentError,
    CalibrationError,
    ConfigError,
    ConfigTypeError,
    did_you_mean,
)
from amct.numerics.settings import ActivationSettings, AtLeastOne, CheckedSettings, Switch
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.errors import Problem
    from amct.schema import TextMessage

GLOBAL_KEYS = ("batch_num", "activation_offset")
BLOCK_KEY = "kv_data_quant_config"
LAYERS_ARGUMENT = "kv_cache_quant_layers"
GRANULARITIES = ("per_tensor", "per_channel")  # the index is the number in the JSON


@dataclass(frozen=True, kw_only=True)
class KvCacheLayerPlan:
    """How the output of one layer is quantized for the cache."""

    name: str
    activation: ActivationSettings
    per_channel: bool = False
    batch_num: int = 1


@dataclass(frozen=True, kw_only=True)
class KvCachePlan:
    """How the caches of a model are quantized."""

    source: str
    batch_num: int
    activation_offset: bool
    layers: tuple[KvCacheLayerPlan, ...]
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    batch_num: AtLeastOne = 1
    activation_offset: Switch = True


def default_config(layers: Iterable[LayerInfo], quant_layers: Mapping[str, Sequence[str]]) -> FullConfig:
    """The full config for a list of layers.

    Args:
        layers: The layers of the model.
        quant_layers: ``{"kv_cache_quant_layers": [names]}``.

    Raises:
        ArgumentTypeError: ``quant_layers`` has another key.
        ConfigError: A layer is unknown, repeated or not ``Linear``.
        CalibrationError: No layer is given.
    """
    for key in quant_layers:
        if key != LAYERS_ARGUMENT:
            hint = did_you_mean(key, [LAYERS_ARGUMENT])
            raise ArgumentTypeError(f'quant_layers: the key "{key}" is unknown, expected "{LAYERS_ARGUMENT}".{hint}')
    problems, model = ProblemList(), LayerList(layers)
    names = tuple(Named(name) for name in quant_layers.get(LAYERS_ARGUMENT, ()))
    _check_names(names, "quant_layers", model, problems)
    choices = {each.name: Choice(None, Origin(Level.ARGUMENT)) for each in names}
    return _expand("create_quant_cali_config", _Globals(), choices, model, {}, problems)


def expand_config(text: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Expand a simple config of kv-cache quantization for a model.

    Raises:
        ParseError: The text is not such a config.
        ConfigError: It does not fit the model; all mistakes are listed.
        CalibrationError: It names no layer.
    """
    problems, model = ProblemList(), LayerList(layers)
    message = parse_text(text, descriptor("AMCTPytorchQuantCaliProto.AMCTQuantCaliConfig", schema="pytorch"), source)
    for warning in message.warnings:
        problems.warn(warning.message, warning.position)
    origins = {key: Origin(Level.GLOBAL, message.where(key)) for key in GLOBAL_KEYS if message.has(key)}
    if message.get("batch_num", 1) < 1:
        problems.add(f"batch_num must be at least 1, got {message.get('batch_num')}", message.where("batch_num"))
    fields = _Globals(batch_num=message.get("batch_num", 1), activation_offset=message.get("activation_offset", True))
    choices = _choices(message, model, problems)
    for choice in choices.values():
        check_block(_read_block(choice), "act_algo", problems)
    return _expand(source, fields, choices, model, origins, problems)


def _read_block(choice: Choice) -> AlgorithmBlock:
    return read_algorithm(choice, "acts_quant_algo", activation_algorithms("kv_cache"))


def _choices(message: TextMessage, model: LayerList, problems: ProblemList) -> dict[str, Choice]:
    """The block of each layer: listed layers in their order, then layers that only an override names."""
    common = message.get("kv_cache_quant_config")
    choices: dict[str, Choice] = {}
    if common is not None:
        names = read_names(common, "quant_layers")
        _check_names(names, "quant_layers", model, problems)
        choice = Choice(common.get("calibration_config"), Origin(Level.COMMON, common.position))
        choices = {each.name: choice for each in names}
    entries = message.all("override_layers_configs")
    overrides = read_overrides(entries, "layer_name", BLOCK_KEY, problems)
    check_layer_names(named(overrides), "override_layers_configs", model, KV_CACHE_TYPES, problems)
    return {**choices, **overrides}


def _check_names(names: tuple[Named, ...], field: str, model: LayerList, problems: ProblemList) -> None:
    unique = without_repeats(names, field, problems)
    check_layer_names(unique, field, model, KV_CACHE_TYPES, problems)


def _expand(
    source: str,
    fields: _Globals,
    choices: Mapping[str, Choice],
    model: LayerList,
    origins: Mapping[str, Origin],
    problems: ProblemList,
) -> FullConfig:
    for layer in model:
        if layer.name in choices and layer.name in GLOBAL_KEYS:
            problems.add(f'the layer "{layer.name}" has the name of a global field of the config. Rename the module.')
    problems.raise_all()
    _require_layers(choices, source)
    layers = tuple(
        _layer_config(name, _read_block(choice), _granularity(choice), fields, origins)
        for name, choice in choices.items()
    )
    return FullConfig(
        source=source,
        fields={key: getattr(fields, key) for key in GLOBAL_KEYS},
        layers=layers,
        origins=origins,
        warnings=problems.warnings,
    )


def _require_layers(layers: Iterable[Any], source: str) -> None:
    if not list(layers):
        raise CalibrationError(
            f"{source}: no layer is named for kv-cache quantization. List Linear layers in quant_layers."
        )


def _granularity(choice: Choice) -> tuple[int, Origin]:
    """The number of the granularity, a field of the algorithm's message, and its origin."""
    chosen = choice.block.which("acts_quant_algo") if choice.block is not None else None
    if choice.block is None or chosen is None or not choice.block.get(chosen).has("quant_granularity"):
        return 0, DEFAULT
    algorithm = choice.block.get(chosen)
    number = GRANULARITIES.index(algorithm.get("quant_granularity"))
    return number, Origin(choice.origin.level, algorithm.where("quant_granularity"))


def _layer_config(
    name: str,
    block: AlgorithmBlock,
    granularity: tuple[int, Origin],
    fields: _Globals,
    global_origins: Mapping[str, Origin],
) -> LayerBlock:
    data = {**block.to_json("act_algo"), "quant_granularity": granularity[0]}
    origins = {"": block.origin, **block.origins(BLOCK_KEY, "act_algo")}
    origins[f"{BLOCK_KEY}.quant_granularity"] = granularity[1]
    implied = {}
    if "asymmetric" not in block.given:
        implied[f"{BLOCK_KEY}.asymmetric"] = fields.activation_offset
        origins[f"{BLOCK_KEY}.asymmetric"] = global_origins.get("activation_offset", DEFAULT)
    return LayerBlock(name=name, type=KV_CACHE_TYPES[0], data={BLOCK_KEY: data}, origins=origins, implied=implied)


def read_config(data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Read a JSON config of kv-cache quantization and check it against a model.

    Raises:
        ParseError: The file is not JSON.
        ConfigTypeError: A value has the wrong type; all mistakes are listed.
        ConfigError: Any other mistake; all are listed.
        CalibrationError: It names no layer.
    """
    problems, model = ProblemList(), LayerList(layers)
    root = read_json_object(data, source, problems)
    global_nodes = {key: node for key, node in root.value.items() if key in GLOBAL_KEYS}
    fields = check_members(_Globals, global_nodes, problems) or _Globals()
    origins = {key: Origin(Level.FILE, node.key_position) for key, node in global_nodes.items()}
    configs = []
    for name, node in root.value.items():
        if name in GLOBAL_KEYS:
            continue
        if model.find(name) is None:
            problems.add_unknown("the layer or global field", name, (*GLOBAL_KEYS, *model.names), node.key_position)
            continue
        check_layer_names([Named(name, node.key_position)], "the config", model, KV_CACHE_TYPES, problems)
        configs.append(_read_layer(name, node, fields, origins, problems))
    problems.raise_all()
    _require_layers(configs, source)
    return FullConfig(
        source=source,
        fields={key: getattr(fields, key) for key in GLOBAL_KEYS},
        layers=tuple(config for config in configs if config is not None),
        origins=origins,
        warnings=problems.warnings,
    )


def _read_layer(
    name: str, node: JsonNode, fields: _Globals, origins: Mapping[str, Origin], problems: ProblemList
) -> LayerBlock | None:
    if not is_object(node, name, problems):
        return None
    members = known_members(node, (BLOCK_KEY,), name, problems)
    if BLOCK_KEY not in members:
        problems.add(f'{name}: the key "{BLOCK_KEY}" is missing', node.position)
        return None
    what = f"{name}.{BLOCK_KEY}"
    block_node = members[BLOCK_KEY]
    if not is_object(block_node, what, problems):
        return None
    inner = dict(block_node.value)
    granularity = _read_granularity(inner.pop("quant_granularity", None), what, problems)
    rest = JsonNode(inner, block_node.lines, block_node.offset, block_node.key_offset)
    block = read_algorithm_block(rest, activation_algorithms("kv_cache"), "act_algo", what, problems)
    return _layer_config(name, block, granularity, fields, origins) if block is not None else None


def _read_granularity(node: JsonNode | None, what: str, problems: ProblemList) -> tuple[int, Origin]:
    if node is None:
        return 0, DEFAULT
    value = node.value
    if type(value) is int and value in (0, 1):
        return value, Origin(Level.FILE, node.position)
    message = f"{what}.quant_granularity must be 0 (per tensor) or 1 (per channel), got {show(node.plain())}"
    (problems.add if type(value) is int else problems.add_wrong_type)(message, node.position)
    return 0, DEFAULT


def make_plan(config: FullConfig) -> KvCachePlan:
    """Turn a full config, expanded or read, into a plan."""
    offset = config.fields["activation_offset"]
    plans = []
    for layer in config.layers:
        block = dict(layer.data[BLOCK_KEY])
        granularity = block.pop("quant_granularity")
        plans.append(
            KvCacheLayerPlan(
                name=layer.name,
                activation=settings_of(block, activation_algorithms("kv_cache"), "act_algo", asymmetric=offset),
                per_channel=GRANULARITIES[granularity] == "per_channel",
                batch_num=config.fields["batch_num"],
            )
        )
    return KvCachePlan(
        source=config.source,
        batch_num=config.fields["batch_num"],
        activation_offset=offset,
        layers=tuple(plans),
        warnings=config.warnings,
    )


@dataclass(frozen=True, kw_only=True)
class _Parameters(CheckedSettings):
    """The settings of ``QuantCalibrationOp`` that both algorithms have."""

    batch_num: AtLeastOne = 1
    act_algo: Literal["ifmr", "hfmg"] = "ifmr"
    quant_granularity: Literal["per_tensor", "per_channel"] = "per_tensor"


def plan_from_parameters(parameters: Mapping[str, Any], argument: str) -> KvCacheLayerPlan:
    """The plan of layers that have no config: the settings are a dict, the granularity is a word.

    Args:
        parameters: Settings by the names of the JSON, and ``batch_num``.
        argument: The name of the argument in messages.

    Raises:
        ArgumentTypeError: A value has the wrong type; all mistakes are listed.
        CalibrationArgumentError: Any other mistake; all are listed.
    """
    problems = ProblemList()
    shared = {item.name for item in fields(_Parameters)}
    common = check_settings(
        _Parameters, {key: parameters[key] for key in parameters if key in shared}, nowhere, problems, block=argument
    )
    rest = {key: value for key, value in parameters.items() if key not in shared}
    settings = _algorithm_settings(rest, common.act_algo, argument, problems) if common is not None else None
    try:
        problems.raise_all()
    except ConfigTypeError as error:
        raise ArgumentTypeError(str(error), problems=error.problems) from None
    except ConfigError as error:
        raise CalibrationArgumentError(str(error), problems=error.problems) from None
    assert common is not None
    assert settings is not None
    return KvCacheLayerPlan(
        name=argument,
        activation=settings,
        per_channel=common.quant_granularity == "per_channel",
        batch_num=common.batch_num,
    )


def _algorithm_settings(
    values: Mapping[str, Any], name: str, argument: str, problems: ProblemList
) -> ActivationSettings | None:
    algorithms = activation_algorithms("kv_cache")
    algorithm = find_algorithm(algorithms, name)
    assert algorithm is not None
    own = algorithm.setting_keys("act_algo")
    for key in values:
        if key in own:
            continue
        owner = next((other.name for other in algorithms if key in other.keys), None)
        if owner is None:
            known = {*own, *(item.name for item in fields(_Parameters))}
            problems.add_unknown(f"{argument}: the key", str(key), known)
        else:
            problems.add(f'{argument}: the key "{key}" belongs to {owner}, but act_algo is {name}. Remove it.')
    given = {algorithm.field_of(key): value for key, value in values.items() if key in own}
    settings: ActivationSettings | None = check_settings(algorithm.settings, given, nowhere, problems, block=argument)
    return settings
