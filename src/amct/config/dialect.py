"""One kind of config (post-training quantization, retraining) in the form of one framework.

A dialect defines the layer types, algorithms, keys and rules of its files. Expanding a simple config, reading a full
config and checking both against a model are the same for all dialects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from amct.config.blocks import (
    AlgorithmBlock,
    check_block,
    check_members,
    find_layer,
    is_object,
    known_members,
    read_algorithm,
    read_algorithm_block,
    read_bool,
    read_json_object,
)
from amct.config.checks import ProblemList
from amct.config.layers import LayerInfo, LayerList
from amct.config.simple_config import (
    LAYER_OVERRIDES,
    TYPE_OVERRIDES,
    FullConfig,
    LayerBlock,
    Level,
    Origin,
    check_layer_names,
    check_type_names,
    named,
)
from amct.schema import ExtraField, descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from amct.config.json_reader import JsonNode
    from amct.config.layers import Capability
    from amct.config.registry import Algorithm
    from amct.config.simple_config import Blocks, Choice, SimpleConfig
    from amct.errors import Position
    from amct.numerics.settings import CheckedSettings
    from amct.schema import Schema, TextMessage


MODE_KEY = "fakequant_precision_mode"


@dataclass(frozen=True, kw_only=True)
class QuantBlock:
    """The settings of a block for activations and weights, and its DMQ migration strength."""

    activation: AlgorithmBlock
    weight: AlgorithmBlock
    strength: float | None = None
    strength_position: Position | None = None

    def position(self, key: str) -> Position | None:
        """The position of the value of a dotted JSON key, or of its algorithm."""
        part, _, name = key.partition(".")
        if part == "dmq_balancer_param":
            return self.strength_position
        block = self.weight if "weight" in part else self.activation
        return block.positions.get(name, block.position)


class Dialect(ABC):
    """The files of one framework for one kind of config.

    Attributes:
        message: The protobuf message of the simple config.
        schema: The schema that contains the message.
        globals: The settings class of the global fields; its fields are the keys in written order.
        optional_globals: Global keys that are written only when the file has them.
        part_name: The framework's term for a layer.
    """

    message: ClassVar[str]
    schema: ClassVar[Schema]
    globals: ClassVar[type[CheckedSettings]]
    optional_globals: ClassVar[frozenset[str]] = frozenset()
    part_name: ClassVar[str]

    @property
    @abstractmethod
    def activation(self) -> tuple[Algorithm, ...]:
        """The activation algorithms, the default first."""

    @property
    def global_keys(self) -> tuple[str, ...]:
        """The top-level JSON keys that are not layers, in written order."""
        return tuple(item.name for item in fields(self.globals))  # type: ignore[arg-type]  # a dataclass

    def extra_fields(self) -> tuple[ExtraField, ...]:
        """The fields that registered extensions add to the simple config."""
        return ()

    def check_free_names(self, layers: Iterable[LayerInfo], problems: ProblemList) -> None:
        """Report layers named like a global field."""
        for layer in layers:
            if layer.name in self.global_keys:
                problems.add(
                    f'the layer "{layer.name}" has the name of a global field of the config.'
                    f" Rename the {self.part_name}."
                )

    # -- simple config -------------------------------------------------------------------------------------------------

    def expand_config(self, text: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
        """Expand a simple config for a model.

        Args:
            text: The content of the ``.cfg``.
            source: Its file name, for positions.
            layers: The layers of the model, quantizable or not, in model order.

        Raises:
            ParseError: The text is not a simple config of this kind.
            ConfigError: It does not fit the model or has unsupported settings; all mistakes are listed.
        """
        root = descriptor(self.message, schema=self.schema, extra=self.extra_fields())
        message, problems = parse_text(text, root, source), ProblemList()
        problems.warn_all(message.warnings)
        return self.expand_message(message, source, LayerList(layers), problems)

    @abstractmethod
    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""

    # -- full config ---------------------------------------------------------------------------------------------------

    def read_config(self, data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
        """Read a JSON config, generated or edited, and check it against a model.

        Missing values take their defaults; a layer that is not in the file is not quantized.

        Args:
            data: The content of the file.
            source: Its name, for positions.
            layers: The layers of the model, quantizable or not, in model order.

        Raises:
            ParseError: The file is not JSON.
            ConfigTypeError: A value has the wrong type; all mistakes are listed.
            ConfigError: Any other mistake; all are listed.
        """
        problems, model = ProblemList(), LayerList(layers)
        root = read_json_object(data, source, problems)
        nodes = {key: node for key, node in root.value.items() if key in self.global_keys}
        settings = check_members(self.globals, self.global_nodes(nodes, root, model, problems), problems)
        written = self.written_globals(settings or self.globals(), nodes)
        read = self.read_layers(root, model, written, problems)
        problems.raise_all()
        return FullConfig(
            source=source,
            fields=written,
            layers=read,
            origins={key: Origin(Level.FILE, node.key_position) for key, node in nodes.items()},
            warnings=problems.warnings,
        )

    def global_nodes(
        self,
        nodes: Mapping[str, JsonNode],
        root: JsonNode,  # noqa: ARG002  for dialects with mandatory fields
        model: LayerList,  # noqa: ARG002  for dialects whose fields name layers
        problems: ProblemList,  # noqa: ARG002
    ) -> Mapping[str, JsonNode]:
        """Check the global fields beyond what their settings class checks; return those that the class checks."""
        return nodes

    def written_globals(self, settings: CheckedSettings, given: Collection[str]) -> dict[str, Any]:
        """The global fields of a JSON config in their written form; a precision mode only if it is not the default."""
        written = self._written(settings, given)
        return {key: value for key, value in written.items() if (key, value) != (MODE_KEY, "DEFAULT")}

    def simple_globals(self, simple: SimpleConfig) -> dict[str, Any]:
        """The global fields of a simple config in their written form."""
        return self._written(self.globals(**simple.fields), simple.fields)

    def _written(self, settings: CheckedSettings, given: Collection[str]) -> dict[str, Any]:
        values: dict[str, Any] = asdict(settings)  # type: ignore[call-overload]  # a dataclass
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values.items()
            if key not in self.optional_globals or key in given
        }

    @abstractmethod
    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config."""


class QuantDialect(Dialect):
    """The files whose layers have a block for activations and a block for weights.

    Attributes:
        types: The layer types that can be quantized.
        weight: The weight algorithms, the default first.
        switch_key: The JSON key that switches a layer on or off.
        data_key: The JSON key of a layer's activation block.
        weight_key: The JSON key of a layer's weight block.
        name_keys: The JSON keys that name the algorithms of activations and weights.
        oneofs: The oneofs of the simple config that choose these algorithms.
        more_layer_keys: Further keys of a layer's JSON block.
        layer_overrides: The field of the simple config with overrides by layer.
        type_overrides: That with overrides by type.
    """

    types: ClassVar[Mapping[str, Capability]]
    weight: ClassVar[tuple[Algorithm, ...]]
    switch_key: ClassVar[str]
    data_key: ClassVar[str]
    weight_key: ClassVar[str]
    name_keys: ClassVar[tuple[str, str]]
    oneofs: ClassVar[tuple[str, str]]
    more_layer_keys: ClassVar[tuple[str, ...]] = ()
    layer_overrides: ClassVar[str] = LAYER_OVERRIDES
    type_overrides: ClassVar[str] = TYPE_OVERRIDES

    def read(self, data: Choice, weight: Choice) -> QuantBlock:
        """The algorithms of the blocks that apply to the activations and weights of a layer."""
        return QuantBlock(
            activation=read_algorithm(data, self.oneofs[0], self.activation),
            weight=read_algorithm(weight, self.oneofs[1], self.weight),
        )

    @abstractmethod
    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of the block that applies to a layer."""

    def check_blocks(self, blocks: Blocks, layers: LayerList, problems: ProblemList) -> None:
        """Report overrides of unknown names, illegal values, and what a layer or type cannot do or be called."""
        check_layer_names(named(blocks.by_layer), self.layer_overrides, layers, self.types, problems)
        check_type_names(named(blocks.by_type), self.type_overrides, self.types, problems)
        for choice in blocks.all():
            block = self.read_choice(choice)
            check_block(block.activation, self.name_keys[0], problems)
            check_block(block.weight, self.name_keys[1], problems)
            for key, message in self.illegal(block):
                problems.add(message, block.position(key))
        for choice, layer in blocks.overridden(layers, self.types):
            self.check_override(choice, layer, problems)
        self.check_free_names(layers.quantizable(self.types), problems)

    def check_override(self, choice: Choice, layer: LayerInfo, problems: ProblemList) -> None:
        """Report settings of an override that its layer, or type (a layer without a name), does not support."""
        block = self.read_choice(choice)
        for key, message in self.unsupported(layer, block):
            problems.add(f"{label(layer)}: {message}", block.position(key))

    @abstractmethod
    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Values that are illegal for every layer: the dotted key and the message."""

    @abstractmethod
    def unsupported(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Values that this layer or type does not support: the dotted key and the message."""

    def read_layers(
        self, root: JsonNode, model: LayerList, written: Mapping[str, Any], problems: ProblemList
    ) -> tuple[LayerBlock, ...]:
        """The layers of a JSON config, in model order."""
        read = {}
        for name, node in root.value.items():
            if name in self.global_keys:
                continue
            layer = find_layer(name, node, model, self.types, self.global_keys, problems, switch_key=self.switch_key)
            if layer is not None:
                read[name] = self._read_layer(layer, node, written, problems)
        return tuple(read[layer.name] for layer in model if layer.name in read)

    def _read_layer(
        self, layer: LayerInfo, node: JsonNode, written: Mapping[str, Any], problems: ProblemList
    ) -> LayerBlock:
        members: Mapping[str, JsonNode] = {}
        if is_object(node, layer.name, problems):
            keys = (self.switch_key, *self.more_layer_keys, self.data_key, self.weight_key)
            members = known_members(node, keys, layer.name, problems)
        origins = {"": Origin(Level.FILE, node.key_position)}
        origins |= {key: Origin(Level.FILE, member.key_position) for key, member in members.items()}
        data = {self.switch_key: read_bool(members, self.switch_key, True, layer.name, problems)}
        target = LayerBlock(name=layer.name, type=layer.type, data=data, origins=origins)
        if self.weight_key in members and self.warns_of_weight_block(layer):
            what = f"{layer.name}.{self.weight_key} is ignored: {layer.type} has no weights to quantize"
            problems.warn(what, members[self.weight_key].key_position)
        self.read_members(layer, members, written, target, problems)
        return target

    def has_weight_block(self, layer: LayerInfo) -> bool:
        """Whether the JSON block of a layer can have a weight block."""
        return self.types[layer.type].weights

    def warns_of_weight_block(self, layer: LayerInfo) -> bool:
        """Whether a weight block of a layer is ignored with a warning."""
        return not self.has_weight_block(layer)

    @abstractmethod
    def read_members(
        self,
        layer: LayerInfo,
        members: Mapping[str, JsonNode],
        written: Mapping[str, Any],
        target: LayerBlock,
        problems: ProblemList,
    ) -> None:
        """Read and check the JSON block of a layer; ``target`` collects its written form."""

    def read_block(self, key: str, node: JsonNode | None, what: str, problems: ProblemList) -> AlgorithmBlock:
        """Read one JSON block of a layer; the default algorithm if it is missing or has mistakes."""
        weights = key == self.weight_key
        algorithms = self.weight if weights else self.activation
        block = None
        if node is not None:
            block = read_algorithm_block(node, algorithms, self.name_keys[weights], what, problems)
        return block or AlgorithmBlock(algorithm=algorithms[0])


def label(layer: LayerInfo) -> str:
    """The name of a layer, or of a layer type (a layer without a name), in messages."""
    return f'layer "{layer.name}"' if layer.name else f"type {layer.type}"


def warn_of_refused(blocks: Blocks, layers: LayerList, problems: ProblemList, *, verb: str = "quantized") -> None:
    """Warn about overrides without effect because the layer cannot be ``verb``."""
    for name, choice in blocks.by_layer.items():
        layer = layers.find(name)
        reason = None if layer is None else layer.refusal if verb == "quantized" else layer.prune_refusal
        if reason is not None:
            what = f'the override of "{name}" has no effect: the layer cannot be {verb} ({reason})'
            problems.warn(what, choice.origin.position)
