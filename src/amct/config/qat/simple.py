"""The simple config (``.cfg``) of retraining, for PyTorch and Caffe, before it is checked against a model.

It differs from the one of post-training quantization in three ways. Data, weight and prune blocks stand side by side in
the file and in each override. There are three pairs of skip lists: for everything, for quantization, for pruning. A
name that is repeated in a skip list gives only a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.config.precedence import DEFAULT, Blocks, Choice, Level, Origin, read_overrides
from amct.config.text.names import Named, SkipList, check_layer_names, check_type_names, read_names, without_repeats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from amct.config.layers import LayerList
    from amct.config.problems import ProblemList
    from amct.schema import TextMessage

DATA_BLOCK = "retrain_data_quant_config"
WEIGHT_BLOCK = "retrain_weight_quant_config"
PRUNE_BLOCK = "prune_config"
QUANT_BLOCKS = (DATA_BLOCK, WEIGHT_BLOCK)
LAYER_OVERRIDES = "override_layer_configs"
TYPE_OVERRIDES = "override_layer_types"
SKIP_FIELDS = (
    "skip_layers", "skip_layer_types", "quant_skip_layers", "quant_skip_types", "regular_prune_skip_layers",
    "regular_prune_skip_types",
)  # fmt: skip
SCALARS = ("batch_num", "fakequant_precision_mode")


@dataclass(frozen=True, kw_only=True)
class RetrainSimple:
    """The content of a simple config; all defaults when there is none.

    Attributes:
        source: The file, or the function that was called without one.
        message: The parsed file; None when there is none.
        batch_num: How many batches determine the initial clips.
        precision_mode: ``FORCE_FP16_QUANT`` or None.
        names: The skip lists by their field names, each name once.
        by_type: The overrides by layer type, with any blocks.
        by_layer: The overrides by layer name.
        origins: The origins of the global fields.
    """

    source: str
    message: TextMessage | None = None
    batch_num: int = 1
    precision_mode: str | None = None
    names: Mapping[str, tuple[Named, ...]] = field(default_factory=dict)
    by_type: Mapping[str, Choice] = field(default_factory=dict)
    by_layer: Mapping[str, Choice] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def skips(self, kind: str) -> SkipList:
        """The union of the lists for everything and the lists of one kind (``quant_`` or ``regular_prune_``)."""
        (all_layers, all_types), (layers, types) = _skip_fields(""), _skip_fields(kind)
        return SkipList(
            (*self.names.get(all_layers, ()), *self.names.get(layers, ())),
            (*self.names.get(all_types, ()), *self.names.get(types, ())),
        )

    def check_skips(
        self, kind: str, layers: LayerList, types: Sequence[str], problems: ProblemList, *, verb: str = "quantized"
    ) -> None:
        """Report names in the skip lists of one kind ("" for everything) that are unknown or cannot be ``verb``."""
        by_layer, by_type = _skip_fields(kind)
        check_layer_names(self.names.get(by_layer, ()), by_layer, layers, types, problems, verb=verb)
        check_type_names(self.names.get(by_type, ()), by_type, types, problems, verb=verb)

    def blocks(self, fields: tuple[str, ...]) -> Blocks:
        """The blocks that have certain fields."""
        return Blocks(
            common=self._common(fields),
            by_type={name: choice for name, choice in self.by_type.items() if _has_any(choice, fields)},
            by_layer={name: choice for name, choice in self.by_layer.items() if _has_any(choice, fields)},
        )

    def _common(self, fields: tuple[str, ...]) -> Choice:
        present = [name for name in fields if self.message is not None and sets(self.message, name)]
        if self.message is None or not present:
            return Choice(None, DEFAULT)
        return Choice(self.message, Origin(Level.COMMON, self.message.where(present[0])))

    def asks_for(self, fields: tuple[str, ...]) -> bool:
        """Whether the file has one of these blocks, globally or in an override."""
        messages = [self.message, *(choice.block for choice in self.overrides())]
        return any(message is not None and sets(message, name) for message in messages for name in fields)

    def overrides(self) -> Iterable[Choice]:
        """Every override, types first."""
        yield from self.by_type.values()
        yield from self.by_layer.values()


def _skip_fields(kind: str) -> tuple[str, str]:
    return f"{kind}skip_layers", f"{kind}skip_types" if kind else "skip_layer_types"


def sets(message: TextMessage, name: str) -> bool:
    """Whether a message sets a field; one that its dialect does not have is never set."""
    return name in message.descriptor.fields_by_name and message.has(name)


def _has_any(choice: Choice, fields: tuple[str, ...]) -> bool:
    """Whether an override has one of these blocks; one without any block asks for quantization with defaults."""
    block = choice.block
    assert block is not None
    if any(sets(block, name) for name in fields):
        return True
    return fields == QUANT_BLOCKS and not sets(block, PRUNE_BLOCK)


def part(choice: Choice, name: str) -> Choice:
    """One block of the message that applies to a layer; an override without it inherits nothing."""
    if choice.block is None or not sets(choice.block, name):
        return Choice(None, choice.origin)
    return Choice(choice.block.get(name), Origin(choice.origin.level, choice.block.where(name)))


def read_retrain_simple(message: TextMessage, source: str, problems: ProblemList) -> RetrainSimple:
    """Read a parsed ``.cfg``; a repeated override is reported, a repeated name in a skip list gives a warning."""
    for warning in message.warnings:
        problems.warn(warning.message, warning.position)
    names = {
        name: without_repeats(read_names(message, name), name, problems, only_warn=True)
        for name in SKIP_FIELDS
        if sets(message, name)
    }
    batch_num = message.get("batch_num", 1)
    if batch_num < 1:
        problems.add(f"batch_num must be at least 1, got {batch_num}", message.where("batch_num"))
    return RetrainSimple(
        source=source,
        message=message,
        batch_num=batch_num,
        precision_mode=message.get("fakequant_precision_mode") if sets(message, "fakequant_precision_mode") else None,
        names=names,
        by_type=read_overrides(message.all(TYPE_OVERRIDES), "layer_type", None, problems),
        by_layer=read_overrides(message.all(LAYER_OVERRIDES), "layer_name", None, problems),
        origins={name: Origin(Level.GLOBAL, message.where(name)) for name in SCALARS if sets(message, name)},
    )
