"""Quantization-aware training of PyTorch models: config files and plan.

The JSON has AMCT's keys in AMCT's order: version, precision mode, number of batches, then the layers in model order.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from amct.config.full_config import FullConfig
from amct.config.json.blocks import check_members, read_json_object
from amct.config.layers import LayerList
from amct.config.precedence import Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.pytorch_types import QAT_TYPES, can_int16
from amct.config.qat.dialect import DATA_KEY, WEIGHT_KEY, QatDialect, QuantBlock
from amct.config.qat.expand import VERSION, expand_quantization
from amct.config.qat.json import make_retrain_plan, read_layers
from amct.config.qat.simple import PRUNE_BLOCK, RetrainSimple, read_retrain_simple, sets
from amct.config.registry import RETRAIN_ACTIVATION, RETRAIN_WEIGHT
from amct.config.settings import CheckedSettings, Version
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amct.config.layers import LayerInfo
    from amct.config.qat.plan import RetrainPlan
    from amct.schema import TextMessage

MESSAGE = "AMCTPytorchProto.AMCTRetrainConfig"
PRUNE_FIELDS = (PRUNE_BLOCK, "regular_prune_skip_layers", "regular_prune_skip_types")
MANDATORY = ("version", "batch_num")


class PyTorchQat(QatDialect):
    """The QAT types of torch.nn; bit widths are integer types that go together in pairs."""

    types = MappingProxyType({name: capability.channel_wise for name, capability in QAT_TYPES.items()})
    activation = RETRAIN_ACTIVATION
    weight = RETRAIN_WEIGHT
    global_keys = ("version", "fakequant_precision_mode", "batch_num")
    part_name = "module"

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """16-bit activations with 4-bit weights are no pair."""
        if _types(block) == ("INT16", "INT4"):
            key = WEIGHT_KEY if "dst_type" in block.weight.given else DATA_KEY
            yield (
                f"{key}.dst_type",
                "INT16 activations cannot go with INT4 weights. Pairs that can: A8W8, A16W8, A8W4, A4W4.",
            )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:
        """4-bit weights that cannot be packed become 8-bit; odd combinations are only told of."""
        activation, weight = _types(block)
        changed = {}
        if weight == "INT4" and not layer.can_pack_int4:
            weight = changed["dst_type"] = "INT8"
            what = "4-bit weights need one group and an even number of input channels, INT8 is used for these layers"
            note(f"{WEIGHT_KEY}.dst_type", what)
        if (activation, weight) == ("INT4", "INT8"):
            what = "INT4 activations with INT8 weights is a pair that AMCT does not train, taken as asked for"
            note(f"{DATA_KEY}.dst_type", what)
        if activation == "INT16" and not can_int16(layer.type, has_bias=layer.has_bias):
            what = "INT16 activations can be trained, but not deployed to a chip, for these layers"
            note(f"{DATA_KEY}.dst_type", what)
        return changed


def _types(block: QuantBlock) -> tuple[str, str]:
    return block.activation.value("dst_type"), block.weight.value("dst_type")


PYTORCH_QAT = PyTorchQat()


def expand_config(text: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Expand a simple config for a model.

    Args:
        text: The content of the ``.cfg``.
        source: Its file name, for positions.
        layers: The layers of the model, quantizable or not, in model order.

    Raises:
        ParseError: The text is not a simple config of retraining.
        ConfigError: It does not fit the model or asks for what cannot be done; all mistakes are listed.
    """
    problems = ProblemList()
    message = parse_text(text, descriptor(MESSAGE, schema="pytorch"), source)
    simple = read_retrain_simple(message, source, problems)
    _refuse_pruning(simple, message, problems)
    return expand_quantization(simple, LayerList(layers), PYTORCH_QAT, global_fields(simple), problems)


def default_config(layers: Iterable[LayerInfo]) -> FullConfig:
    """The full config of a model without a simple config: every layer that can be quantized, with defaults.

    Raises:
        ConfigError: The model has no layer that can be quantized.
    """
    simple = RetrainSimple(source="create_quant_retrain_config")
    return expand_quantization(simple, LayerList(layers), PYTORCH_QAT, global_fields(simple), ProblemList())


def global_fields(simple: RetrainSimple) -> dict[str, Any]:
    """The global fields as they are written."""
    mode = {"fakequant_precision_mode": simple.precision_mode} if simple.precision_mode else {}
    return {"version": VERSION, **mode, "batch_num": simple.batch_num}


def _refuse_pruning(simple: RetrainSimple, message: TextMessage, problems: ProblemList) -> None:
    """Report every field that speaks of pruning."""
    what = "speaks of pruning, which quantization-aware training does not do. Remove it, or compress the model instead."
    for name in PRUNE_FIELDS:
        if sets(message, name):
            problems.add(f"{name} {what}", message.where(name, 0))
    for choice in simple.overrides():
        assert choice.block is not None
        if sets(choice.block, PRUNE_BLOCK):
            problems.add(f"{PRUNE_BLOCK} {what}", choice.block.where(PRUNE_BLOCK))


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    fakequant_precision_mode: Literal["DEFAULT", "FORCE_FP16_QUANT"] = "DEFAULT"
    batch_num: Annotated[int, Field(strict=True, ge=1)] = 1


def read_config(data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Read a JSON config, written by a tool or edited by hand, and check it against a model.

    ``version`` and ``batch_num`` must be there; everything else the file leaves out takes its default. A layer it does
    not name is not quantized. Weights that cannot have 4 bits get 8, with a warning.

    Args:
        data: The content of the file.
        source: Its name, for positions.
        layers: The layers of the model, quantizable or not, in model order.

    Raises:
        ParseError: The file is not JSON.
        ConfigTypeError: A value has the wrong type; all mistakes are listed.
        ConfigError: Any other mistake; all are listed.
    """
    problems = ProblemList()
    root = read_json_object(data, source, problems)
    nodes = {key: node for key, node in root.value.items() if key in PYTORCH_QAT.global_keys}
    for key in MANDATORY:
        if key not in nodes:
            problems.add(f'the key "{key}" is missing. Add "{key}":1.', root.position)
    fields = check_members(_Globals, nodes, problems) or _Globals()
    read = read_layers(root, LayerList(layers), PYTORCH_QAT, problems)
    problems.raise_all()
    mode = fields.fakequant_precision_mode
    return FullConfig(
        source=source,
        fields={
            "version": VERSION,
            **({} if mode == "DEFAULT" else {"fakequant_precision_mode": mode}),
            "batch_num": fields.batch_num,
        },
        layers=read,
        origins={key: Origin(Level.FILE, node.key_position) for key, node in nodes.items()},
        warnings=problems.warnings,
    )


def make_plan(config: FullConfig, layers: Iterable[LayerInfo]) -> RetrainPlan:
    """Turn a full config, expanded or read, into the plan for the model it was checked against."""
    return make_retrain_plan(config, layers, PYTORCH_QAT)
