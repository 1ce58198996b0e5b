"""The two pruning methods: their fields in a ``.cfg`` and the layers that they can prune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct.config.precedence import Choice
from amct.config.ptq.pytorch_types import FILTER_PRUNE_TYPES, SELECTIVE_PRUNE_TYPES
from amct.config.registry import FILTER_PRUNE, SELECTIVE_PRUNE
from amct.config.text.algorithm_blocks import AlgorithmBlock, check_block, read_algorithm

if TYPE_CHECKING:
    from amct.config.layers import LayerInfo
    from amct.config.problems import ProblemList
    from amct.config.registry import Algorithm

NAME_KEY = "algo"


@dataclass(frozen=True, kw_only=True)
class PruneMethod:
    """One pruning method.

    Attributes:
        prune_type: Its name in AMCT's configs.
        field: The field of ``PruneConfig`` that chooses it.
        oneof: The oneof of that field's message that chooses the algorithm.
        algorithms: Its algorithms.
        types: The layer types that can be pruned by themselves.
        done: The participle of the method in messages.
        depthwise: Whether a depthwise convolution can be pruned by itself.
    """

    prune_type: str
    field: str
    oneof: str
    algorithms: tuple[Algorithm, ...]
    types: tuple[str, ...]
    done: str
    depthwise: bool

    def refusal(self, layer: LayerInfo) -> str | None:
        """Why this method cannot prune such a layer; None when it can."""
        if layer.type not in self.types:
            return f"{layer.type} cannot be {self.done}"
        if layer.depthwise and not self.depthwise:
            return f"a depthwise convolution cannot be {self.done}, it follows the layer before it"
        return None


FILTER = PruneMethod(
    prune_type="filter_prune",
    field="filter_pruner",
    oneof="filter_prune_algo",
    algorithms=FILTER_PRUNE,
    types=FILTER_PRUNE_TYPES,
    done="pruned by filters",
    depthwise=False,
)
SELECTIVE = PruneMethod(
    prune_type="selective_prune",
    field="n_out_of_m_pruner",
    oneof="n_out_of_m_prune_algo",
    algorithms=SELECTIVE_PRUNE,
    types=SELECTIVE_PRUNE_TYPES,
    done="pruned 4 to 2",
    depthwise=True,
)
METHODS = (FILTER, SELECTIVE)


@dataclass(frozen=True, kw_only=True)
class Pruner:
    """The method of a ``prune_config`` and the settings of its algorithm."""

    method: PruneMethod
    block: AlgorithmBlock


def read_pruner(choice: Choice) -> Pruner | None:
    """The pruner of a ``prune_config``; None when it names none (see ``check_pruner``)."""
    block = choice.block
    chosen = block.which("pruner") if block is not None else None
    if block is None or chosen is None:
        return None
    method = next(item for item in METHODS if item.field == chosen)
    inner = block.get(chosen)
    if inner.which(method.oneof) is None:
        return None
    return Pruner(method=method, block=read_algorithm(Choice(inner, choice.origin), method.oneof, method.algorithms))


def check_pruner(choice: Choice, problems: ProblemList) -> None:
    """Report a ``prune_config`` that names no pruner or no algorithm, and values out of range."""
    pruner, block = read_pruner(choice), choice.block
    if pruner is not None:
        check_block(pruner.block, NAME_KEY, problems)
    elif block is not None:
        chosen = block.which("pruner")
        if chosen is None:
            fields = " or ".join(method.field for method in METHODS)
            problems.add(f"prune_config names no pruner. Put {fields} into it.", choice.origin.position)
        else:
            method = next(item for item in METHODS if item.field == chosen)
            message = f"{chosen} names no algorithm. Put {method.algorithms[0].message} into it."
            problems.add(message, block.where(chosen))
