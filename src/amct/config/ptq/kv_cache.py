"""Quantization of key/value caches (PyTorch): config and plan.

Only ``Linear`` layers, always 8 bits. A layer is quantized when the common block lists it or an override names it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from amct.config.blocks import (
    AlgorithmBlock,
    check_block,
    is_object,
    known_members,
    read_algorithm,
    read_algorithm_block,
)
from amct.config.checks import ProblemList, check_settings, nowhere, show
from amct.config.dialect import Dialect
from amct.config.layers import KV_CACHE_TYPES, LayerInfo, LayerList
from amct.config.plan import settings_of
from amct.config.registry import activation_algorithms, find_algorithm
from amct.config.simple_config import (
    DEFAULT,
    Choice,
    FullConfig,
    LayerBlock,
    Level,
    Named,
    Origin,
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
    CalibrationTypeError,
    ConfigError,
    ConfigTypeError,
    did_you_mean,
)
from amct.numerics.settings import ActivationSettings, AtLeastOne, CheckedSettings, IfmrSettings, Switch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.config.json_reader import JsonNode
    from amct.config.registry import Algorithm
    from amct.errors import Problem
    from amct.schema import TextMessage

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
class _KvCacheGlobals(CheckedSettings):
    batch_num: AtLeastOne = 1
    activation_offset: Switch = True


class KvCacheDialect(Dialect):
    """The configs of kv-cache quantization; one that names no layer is a ``CalibrationError``."""

    message = "AMCTPytorchQuantCaliProto.AMCTQuantCaliConfig"
    schema = "pytorch"
    globals = _KvCacheGlobals
    part_name = "module"

    @property
    def activation(self) -> tuple[Algorithm, ...]:
        """The activation algorithms, the default first."""
        return activation_algorithms("kv_cache")

    # -- simple config -------------------------------------------------------------------------------------------------

    def default_config(self, layers: Iterable[LayerInfo], quant_layers: Mapping[str, Sequence[str]]) -> FullConfig:
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
                raise ArgumentTypeError(
                    f'quant_layers: the key "{key}" is unknown, expected "{LAYERS_ARGUMENT}".{hint}'
                )
        problems, model = ProblemList(), LayerList(layers)
        names = tuple(Named(name) for name in quant_layers.get(LAYERS_ARGUMENT, ()))
        _check_names(names, "quant_layers", model, problems)
        choices = {each.name: Choice(None, Origin(Level.ARGUMENT)) for each in names}
        empty = FullConfig(source="create_quant_cali_config", fields=asdict(_KvCacheGlobals()), layers=())
        return self._expand(empty, choices, model, problems)

    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""
        fields = {
            key: message.get(key) if message.has(key) else value for key, value in asdict(_KvCacheGlobals()).items()
        }
        if fields["batch_num"] < 1:
            problems.add(f"batch_num must be at least 1, got {fields['batch_num']}", message.where("batch_num"))
        choices = _choices(message, layers, problems)
        for choice in choices.values():
            check_block(self._read(choice), "act_algo", problems)
        origins = {key: Origin(Level.GLOBAL, message.where(key)) for key in fields if message.has(key)}
        return self._expand(
            FullConfig(source=source, fields=fields, layers=(), origins=origins), choices, layers, problems
        )

    def _read(self, choice: Choice) -> AlgorithmBlock:
        return read_algorithm(choice, "acts_quant_algo", self.activation)

    def _expand(
        self, empty: FullConfig, choices: Mapping[str, Choice], model: LayerList, problems: ProblemList
    ) -> FullConfig:
        """Add the layers to a config that has none."""
        self.check_free_names((layer for layer in model if layer.name in choices), problems)
        problems.raise_all()
        layers = tuple(
            _layer_config(name, self._read(choice), _granularity(choice), empty.fields, empty.origins)
            for name, choice in choices.items()
        )
        return _with_layers(replace(empty, layers=layers, warnings=problems.warnings))

    # -- full config ---------------------------------------------------------------------------------------------------

    def read_config(self, data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
        """Read a JSON config and check it against a model, as the base class says.

        Raises:
            CalibrationError: It names no layer.
        """
        return _with_layers(super().read_config(data, source, layers))

    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config, in its order."""
        origins = {
            key: Origin(Level.FILE, root.value[key].key_position) for key in self.global_keys if key in root.value
        }
        found = []
        for name, node in root.value.items():
            if name in self.global_keys:
                continue
            if model.find(name) is None:
                known = (*self.global_keys, *model.names)
                problems.add_unknown("the layer or global field", name, known, node.key_position)
                continue
            check_layer_names([Named(name, node.key_position)], "the config", model, KV_CACHE_TYPES, problems)
            found.append(self._read_layer(name, node, written, origins, problems))
        return tuple(layer for layer in found if layer is not None)

    def _read_layer(
        self,
        name: str,
        node: JsonNode,
        fields: Mapping[str, Any],
        origins: Mapping[str, Origin],
        problems: ProblemList,
    ) -> LayerBlock | None:
        if not is_object(node, name, problems):
            return None
        members = known_members(node, (BLOCK_KEY,), name, problems)
        if BLOCK_KEY not in members:
            problems.add(f'{name}: the key "{BLOCK_KEY}" is missing', node.position)
            return None
        what, whole = f"{name}.{BLOCK_KEY}", members[BLOCK_KEY]
        if not is_object(whole, what, problems):
            return None
        inner = dict(whole.value)
        granularity = _read_granularity(inner.pop("quant_granularity", None), what, problems)
        block = read_algorithm_block(replace(whole, value=inner), self.activation, "act_algo", what, problems)
        return _layer_config(name, block, granularity, fields, origins) if block is not None else None

    # -- plan ----------------------------------------------------------------------------------------------------------

    def make_plan(self, config: FullConfig) -> KvCachePlan:
        """Turn a full config, expanded or read, into a plan."""
        offset, batch_num = config.fields["activation_offset"], config.fields["batch_num"]
        plans = []
        for layer in config.layers:
            block = dict(layer.data[BLOCK_KEY])
            per_channel = GRANULARITIES[block.pop("quant_granularity")] == "per_channel"
            settings = settings_of(block, self.activation, "act_algo", asymmetric=offset)
            plans.append(
                KvCacheLayerPlan(name=layer.name, activation=settings, per_channel=per_channel, batch_num=batch_num)
            )
        return KvCachePlan(
            source=config.source,
            batch_num=batch_num,
            activation_offset=offset,
            layers=tuple(plans),
            warnings=config.warnings,
        )


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
    fields: Mapping[str, Any],
    global_origins: Mapping[str, Origin],
) -> LayerBlock:
    data = {**block.to_json("act_algo"), "quant_granularity": granularity[0]}
    origins = {"": block.origin, **block.origins(BLOCK_KEY, "act_algo")}
    origins[f"{BLOCK_KEY}.quant_granularity"] = granularity[1]
    implied = {}
    if "asymmetric" not in block.given:
        implied[f"{BLOCK_KEY}.asymmetric"] = fields["activation_offset"]
        origins[f"{BLOCK_KEY}.asymmetric"] = global_origins.get("activation_offset", DEFAULT)
    return LayerBlock(name=name, type=KV_CACHE_TYPES[0], data={BLOCK_KEY: data}, origins=origins, implied=implied)


def _read_granularity(node: JsonNode | None, what: str, problems: ProblemList) -> tuple[int, Origin]:
    if node is None:
        return 0, DEFAULT
    value = node.value
    if type(value) is int and value in (0, 1):
        return value, Origin(Level.FILE, node.position)
    message = f"{what}.quant_granularity must be 0 (per tensor) or 1 (per channel), got {show(node.plain())}"
    (problems.add if type(value) is int else problems.add_wrong_type)(message, node.position)
    return 0, DEFAULT


def _with_layers(config: FullConfig) -> FullConfig:
    if not config.layers:
        raise CalibrationError(
            f"{config.source}: no layer is named for kv-cache quantization. List Linear layers in quant_layers."
        )
    return config


KV_CACHE = KvCacheDialect()


@dataclass(frozen=True, kw_only=True)
class _Parameters(CheckedSettings):
    """The settings of ``QuantCalibrationOp`` that both algorithms have."""

    batch_num: AtLeastOne = 1
    act_algo: Literal["ifmr", "hfmg"] = "ifmr"
    quant_granularity: Literal["per_tensor", "per_channel"] = "per_tensor"


_Percentile = Annotated[float, Field(strict=True, ge=0.5, le=1.0)]


@dataclass(frozen=True, kw_only=True)
class _IfmrParameters(IfmrSettings):
    """IFMR as ``QuantCalibrationOp`` takes it: its percentiles may be 0.5, those of a config may not."""

    max_percentile: _Percentile = IfmrSettings.max_percentile
    min_percentile: _Percentile = IfmrSettings.min_percentile


def plan_from_parameters(parameters: Mapping[str, Any], argument: str) -> KvCacheLayerPlan:
    """The plan of layers that have no config: the settings are a dict, the granularity is a word.

    Args:
        parameters: Settings by the names of the JSON, and ``batch_num``.
        argument: The name of the argument in messages.

    Raises:
        CalibrationTypeError: A value has the wrong type; all mistakes are listed.
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
        raise CalibrationTypeError(str(error), problems=error.problems) from None
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
    kind = _IfmrParameters if algorithm.settings is IfmrSettings else algorithm.settings
    checked = check_settings(kind, given, nowhere, problems, block=argument)
    return None if checked is None else algorithm.settings(**vars(checked))
