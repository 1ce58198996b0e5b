"""The configs of distillation (PyTorch): those of training, with other keys, and groups of layers that learn together.

The JSON has AMCT's keys: version, number of batches, group size, data dump, groups, then the layers in model order. A
group is a list of layers that read each other; its first and its last name are enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct.config.checks import ProblemList
from amct.config.layers import DISTILL_TYPES, LayerInfo, LayerList
from amct.config.qat.dialect import QatDialect
from amct.config.registry import DISTILL_WEIGHT, RETRAIN_ACTIVATION
from amct.config.simple_config import (
    DEFAULT,
    Blocks,
    Choice,
    Level,
    Origin,
    SimpleConfig,
    check_batch_num,
    check_layer_names,
    check_type_names,
    read_names,
    read_overrides,
    without_repeats,
)
from amct.numerics.settings import AtLeastOne, CheckedSettings, Names, Switch, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from amct.config.dialect import QuantBlock
    from amct.config.json_reader import JsonNode
    from amct.config.simple_config import FullConfig
    from amct.schema import TextMessage

GROUPS_KEY = "distill_group"
_DATA, _WEIGHT = "distill_data_config", "distill_weight_config"
_SKIPS = {"quant_skip_layers": "quant_skip_layers", "quant_skip_layer_types": "quant_skip_types"}
"""The skip lists by their names in this dialect, with those that all dialects have in common."""


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    batch_num: AtLeastOne = 1
    group_size: AtLeastOne = 1
    data_dump: Switch = False
    distill_group: tuple[Names, ...] = ()


class DistillDialect(QatDialect):
    """Conv2d and Linear with 4 or 8 bits, the same for data and weights."""

    message = "AMCTPytorchDistillProto.AMCTDistillConfig"
    schema = "pytorch"
    types = DISTILL_TYPES
    activations = RETRAIN_ACTIVATION
    weight = DISTILL_WEIGHT
    globals = _Globals
    part_name = "module"
    switch_key = "quant_enable"
    data_key = _DATA
    weight_key = _WEIGHT
    quant_blocks = ("distill_data_quant_config", "distill_weight_quant_config")
    oneofs = ("DistillDataAlgorithm", "DistillWeightAlgorithm")
    layer_overrides = "distill_override_layers"
    type_overrides = "distill_override_layer_types"
    skip_wins = True

    def default_config(self, layers: Iterable[LayerInfo]) -> FullConfig:
        """The full config of a model without a simple config: every layer that can be quantized, with defaults."""
        model = LayerList(layers)
        return self.expand(SimpleConfig(source="create_distill_config"), model, ProblemList())

    def expand_message(self, message: TextMessage, source: str, layers: LayerList, problems: ProblemList) -> FullConfig:
        """Expand a parsed simple config."""
        fields: dict[str, Any] = {
            name: message.get(name) for name in ("batch_num", "group_size", "data_dump") if message.has(name)
        }
        origins = {name: Origin(Level.GLOBAL, message.where(name)) for name in fields}
        check_batch_num(fields.get("batch_num", 1), origins.get("batch_num", DEFAULT), problems)
        if fields.get("group_size", 1) < 1:
            problems.add(f"group_size must be at least 1, got {fields['group_size']}", origins["group_size"].position)
        groups = message.all("distill_group")
        for group in groups:
            for key in ("start_layer_name", "end_layer_name"):
                _check_group([group.get(key)], layers, problems, group.where(key))
        if groups:
            fields[GROUPS_KEY] = [[each.get("start_layer_name"), each.get("end_layer_name")] for each in groups]
            origins[GROUPS_KEY] = Origin(Level.GLOBAL, groups[0].position)
        blocks = Blocks(
            common=Choice(message, Origin(Level.COMMON, message.position)),
            by_type=read_overrides(message.all(self.type_overrides), "layer_type", None, problems),
            by_layer=read_overrides(message.all(self.layer_overrides), "layer_name", None, problems),
        )
        names = {
            common: without_repeats(read_names(message, name), name, problems, only_warn=True)
            for name, common in _SKIPS.items()
        }
        simple = SimpleConfig(source=source, fields=fields, origins=origins, names=names, blocks=blocks)
        return self.expand(simple, layers, problems)

    def check_skips(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> None:
        """Report names in the skip lists that are unknown or cannot be quantized."""
        (by_layer, layer_names), (by_type, type_names) = _SKIPS.items()
        check_layer_names(simple.names.get(layer_names, ()), by_layer, layers, self.types, problems)
        check_type_names(simple.names.get(type_names, ()), by_type, self.types, problems)

    def global_nodes(
        self, nodes: Mapping[str, JsonNode], root: JsonNode, model: LayerList, problems: ProblemList
    ) -> Mapping[str, JsonNode]:
        """Check the names of the groups."""
        found = nodes.get(GROUPS_KEY)
        groups = found.plain() if found is not None else []
        if found is not None and isinstance(groups, list):
            for group in groups:
                if isinstance(group, list) and all(isinstance(name, str) for name in group):
                    _check_group(group, model, problems, found.position)
        return super().global_nodes(nodes, root, model, problems)

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """16 bits, and other bits of data than of weights."""
        activation, weight = block.activation.value("dst_type"), block.weight.value("dst_type")
        if activation == "INT16":
            yield f"{_DATA}.dst_type", "activations can have INT4 or INT8 in distillation, got INT16"
        elif activation != weight:
            key = _WEIGHT if "dst_type" in block.weight.given else _DATA
            yield (
                f"{key}.dst_type",
                f"data and weights must have the same dst_type, got {activation} and {weight}. Give both blocks one.",
            )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """4-bit weights that cannot be packed become 8-bit."""
        if block.weight.value("dst_type") != "INT4" or layer.can_pack_int4:
            return {}
        what = "4-bit weights need one group and an even number of input channels, INT8 is used for these layers"
        note(f"{_WEIGHT}.dst_type", what)
        return {f"{_WEIGHT}.dst_type": "INT8"}


def _check_group(names: list[Any], layers: LayerList, problems: ProblemList, position: Any) -> None:  # noqa: ANN401  a position or None
    """Report names that are not in the model."""
    if not names:
        problems.add(f"{GROUPS_KEY}: a group without a layer. Name its first and its last layer.", position)
    for name in names:
        if layers.find(name) is None:
            problems.add_unknown(f"{GROUPS_KEY}: the layer", name, layers.names, position)


PYTORCH_DISTILL = DistillDialect()
