"""The configs of quantization-aware training of PyTorch models.

The JSON has AMCT's keys in AMCT's order: version, precision mode, number of batches, then the layers in model order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from amct.config.layers import QAT_TYPES, can_int16
from amct.config.qat.dialect import DATA_KEY, PRUNE_BLOCK, WEIGHT_KEY, QatDialect
from amct.config.registry import RETRAIN_ACTIVATION, RETRAIN_WEIGHT
from amct.config.simple_config import sets
from amct.numerics.settings import AtLeastOne, CheckedSettings, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from amct.config.checks import ProblemList
    from amct.config.dialect import QuantBlock
    from amct.config.full_config import FullConfig
    from amct.config.json_reader import JsonNode
    from amct.config.layers import LayerInfo, LayerList
    from amct.config.simple_config import SimpleConfig

MODE_KEY = "fakequant_precision_mode"
PRUNE_FIELDS = (PRUNE_BLOCK, "regular_prune_skip_layers", "regular_prune_skip_types")
MANDATORY = ("version", "batch_num")


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    fakequant_precision_mode: Literal["DEFAULT", "FORCE_FP16_QUANT"] = "DEFAULT"
    batch_num: AtLeastOne = 1


class PyTorchQat(QatDialect):
    """The QAT types of torch.nn; bit widths are integer types, and only some pairs of them are possible."""

    message = "AMCTPytorchProto.AMCTRetrainConfig"
    schema = "pytorch"
    types = QAT_TYPES
    activations = RETRAIN_ACTIVATION
    weight = RETRAIN_WEIGHT
    globals = _Globals
    optional_globals = frozenset({MODE_KEY})
    part_name = "module"

    def expand(self, simple: SimpleConfig, layers: LayerList, problems: ProblemList) -> FullConfig:
        """The full config of a model; every field about pruning is reported."""
        what = "is about pruning, which quantization-aware training does not do. Remove it, or compress the model."
        for choice in simple.blocks.all():
            for name in PRUNE_FIELDS if choice is simple.blocks.common else PRUNE_FIELDS[:1]:
                if choice.block is not None and sets(choice.block, name):
                    problems.add(f"{name} {what}", choice.block.where(name, 0))
        return super().expand(simple, layers, problems)

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """16-bit activations with 4-bit weights."""
        if _types(block) == ("INT16", "INT4"):
            key = WEIGHT_KEY if "dst_type" in block.weight.given else DATA_KEY
            yield (
                f"{key}.dst_type",
                "INT16 activations cannot go with INT4 weights. Pairs that can: A8W8, A16W8, A8W4, A4W4.",
            )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """4-bit weights that cannot be packed become 8-bit; unusual combinations only give a warning."""
        activation, weight = _types(block)
        changed = {}
        if weight == "INT4" and not layer.can_pack_int4:
            weight = changed[f"{WEIGHT_KEY}.dst_type"] = "INT8"
            what = "4-bit weights need one group and an even number of input channels, INT8 is used for these layers"
            note(f"{WEIGHT_KEY}.dst_type", what)
        if (activation, weight) == ("INT4", "INT8"):
            what = "AMCT does not train INT4 activations with INT8 weights, here they are trained"
            note(f"{DATA_KEY}.dst_type", what)
        if activation == "INT16" and not can_int16(layer):
            what = "INT16 activations can be trained, but not deployed to a chip, for these layers"
            note(f"{DATA_KEY}.dst_type", what)
        return changed

    def global_nodes(
        self, nodes: Mapping[str, JsonNode], root: JsonNode, model: LayerList, problems: ProblemList
    ) -> Mapping[str, JsonNode]:
        """Report missing mandatory fields."""
        for key in MANDATORY:
            if key not in nodes:
                problems.add(f'the key "{key}" is missing. Add "{key}":1.', root.position)
        return super().global_nodes(nodes, root, model, problems)

    def written_globals(self, settings: CheckedSettings, given: Collection[str]) -> dict[str, Any]:
        """The global fields as they are written: the precision mode only when it is not the default."""
        written = super().written_globals(settings, given)
        return {key: value for key, value in written.items() if (key, value) != (MODE_KEY, "DEFAULT")}


def _types(block: QuantBlock) -> tuple[str, str]:
    return block.activation.value("dst_type"), block.weight.value("dst_type")


PYTORCH_QAT = PyTorchQat()
