"""What PyTorch and Caffe spell differently in the configs of quantization-aware training.

A dialect knows its layer types, its algorithms and its rules about bit widths; expanding, reading and planning
(``qat_expand``, ``qat_json``) are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.config.precedence import DEFAULT
from amct.config.qat.simple import DATA_BLOCK, WEIGHT_BLOCK, part
from amct.config.text.algorithm_blocks import AlgorithmBlock, check_block, read_algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from amct.config.layers import LayerInfo
    from amct.config.precedence import Choice
    from amct.config.problems import ProblemList
    from amct.config.registry import Algorithm
    from amct.errors import Position

NAME_KEY = "algo"
SWITCH_KEY = "retrain_enable"
DATA_KEY = "retrain_data_config"
WEIGHT_KEY = "retrain_weight_config"
LAYER_KEYS = (SWITCH_KEY, DATA_KEY, WEIGHT_KEY)


@dataclass(frozen=True, kw_only=True)
class QuantBlock:
    """What a block of a file sets of activations and weights."""

    activation: AlgorithmBlock
    weight: AlgorithmBlock

    def position(self, key: str) -> Position | None:
        """Where the value behind a dotted key of the JSON stands, or the algorithm that has it."""
        prefix, _, name = key.partition(".")
        block = self.weight if prefix == WEIGHT_KEY else self.activation
        return block.positions.get(name, block.position)


class QatDialect(ABC):
    """The layer types, algorithms and bit widths of one framework.

    Attributes:
        types: Every layer type that can be trained quantized, and whether its weights can have a scale per channel.
        activation: The algorithms of activations, the default one first.
        weight: The algorithms of weights, the default one first.
        global_keys: The keys of the JSON that are no layers, in the order they are written.
        part_name: What a layer is called in the framework.
    """

    types: Mapping[str, bool]
    activation: tuple[Algorithm, ...]
    weight: tuple[Algorithm, ...]
    global_keys: tuple[str, ...]
    part_name: str

    def read(self, choice: Choice) -> QuantBlock:
        """The algorithms of the message that applies to a layer."""
        return QuantBlock(
            activation=read_algorithm(part(choice, DATA_BLOCK), "RetrainDataAlgorithm", self.activation),
            weight=read_algorithm(part(choice, WEIGHT_BLOCK), "RetrainWeightAlgorithm", self.weight),
        )

    def default_block(self, key: str) -> AlgorithmBlock:
        """The block of a layer whose JSON leaves out ``key``."""
        algorithms = self.weight if key == WEIGHT_KEY else self.activation
        return AlgorithmBlock(algorithm=algorithms[0], given={}, positions={}, origin=DEFAULT)

    def check(self, block: QuantBlock, problems: ProblemList) -> None:
        """Report values of a ``.cfg`` block that are wrong for every layer."""
        check_block(block.activation, NAME_KEY, problems)
        check_block(block.weight, NAME_KEY, problems)
        for key, message in self.illegal(block):
            problems.add(message, block.position(key))

    @abstractmethod
    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """What activations and weights cannot have together: the dotted key and what is wrong."""

    def unsupported(self, who: str, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """What was asked for exactly this layer or type and cannot be done: the dotted key and what is wrong."""
        if block.weight.given.get("channel_wise") is True and not self.types[layer.type]:
            yield (
                f"{WEIGHT_KEY}.channel_wise",
                f"{who}: channel_wise must be false, {layer.type} has no channels of its own",
            )

    @abstractmethod
    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """Weight settings that a layer must have instead of what the block says.

        Args:
            layer: The layer.
            block: What the config says of it.
            note: Takes the dotted key of a setting and what the user should know about it.
        """
