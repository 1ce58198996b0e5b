"""Quantization-aware training of Caffe models: config files and plan.

The JSON has the guide's keys in the guide's order, layers in the order of the net. Two keys go beyond the guide and are
written only when given: ``batch_num`` (the simple config has it) and ``fixed_clip`` (the clips are not trained).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from amct.config.full_config import FullConfig
from amct.config.json.blocks import check_members, read_json_object
from amct.config.layers import LayerList
from amct.config.precedence import Level, Origin
from amct.config.problems import ProblemList
from amct.config.ptq.caffe_types import RETRAIN_TYPES
from amct.config.qat.dialect import DATA_KEY, WEIGHT_KEY, QatDialect, QuantBlock
from amct.config.qat.expand import VERSION, expand_quantization
from amct.config.qat.json import make_retrain_plan, read_layers
from amct.config.qat.settings import bits_of
from amct.config.qat.simple import DATA_BLOCK, WEIGHT_BLOCK, RetrainSimple, part, read_retrain_simple
from amct.config.registry import CAFFE_RETRAIN_ACTIVATION, CAFFE_RETRAIN_WEIGHT
from amct.config.settings import CheckedSettings, Version
from amct.schema import descriptor, parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amct.config.layers import LayerInfo
    from amct.config.precedence import Choice
    from amct.config.qat.plan import RetrainPlan
    from amct.config.text.algorithm_blocks import AlgorithmBlock

MESSAGE = "AMCTCaffeProto.AMCTRetrainConfig"
DST_TYPES = {DATA_KEY: ("INT8", "INT16"), WEIGHT_KEY: ("INT8",)}


class CaffeQat(QatDialect):
    """The QAT types of Caffe; a bit width is a number, and the simple config may say it by ``dst_type`` too."""

    types = MappingProxyType({name: capability.channel_wise for name, capability in RETRAIN_TYPES.items()})
    activation = CAFFE_RETRAIN_ACTIVATION
    weight = CAFFE_RETRAIN_WEIGHT
    global_keys = ("version", "batch_num")
    part_name = "layer"

    def read(self, choice: Choice) -> QuantBlock:
        """The algorithms of a message; ``dst_type`` stands for ``num_bits`` where that is not given."""
        block = super().read(choice)
        return QuantBlock(
            activation=_with_dst_type(block.activation, part(choice, DATA_BLOCK), DATA_KEY),
            weight=_with_dst_type(block.weight, part(choice, WEIGHT_BLOCK), WEIGHT_KEY),
        )

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """A ``dst_type`` that Caffe does not have, or that contradicts ``num_bits``."""
        for key, half in ((DATA_KEY, block.activation), (WEIGHT_KEY, block.weight)):
            dst_type = half.given.get("dst_type")
            if dst_type is None:
                continue
            if dst_type not in DST_TYPES[key]:
                yield (
                    f"{key}.dst_type",
                    f"{half.algorithm.message}.dst_type must be {' or '.join(DST_TYPES[key])}, got {dst_type}",
                )
            elif bits_of(dst_type) != half.value("num_bits"):
                yield (
                    f"{key}.num_bits",
                    f"num_bits {half.value('num_bits')} contradicts dst_type {dst_type}. Keep one of them.",
                )

    def fit(self, layer: LayerInfo, block: QuantBlock, note: Callable[[str, str], None]) -> dict[str, Any]:  # noqa: ARG002  a dialect's signature
        """Every layer can have every bit width."""
        return {}


def _with_dst_type(block: AlgorithmBlock, choice: Choice, key: str) -> AlgorithmBlock:
    if choice.block is None or block.position is None:
        return block
    message = choice.block.get(block.algorithm.message)
    if not message.has("dst_type"):
        return block
    dst_type, position = message.get("dst_type"), message.where("dst_type")
    given, positions = {**block.given, "dst_type": dst_type}, {**block.positions, "dst_type": position}
    if dst_type in DST_TYPES[key] and "num_bits" not in given:
        given["num_bits"], positions["num_bits"] = bits_of(dst_type), position
    return replace(block, given=given, positions=positions)


CAFFE_QAT = CaffeQat()


def expand_config(text: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Expand a simple config for a net.

    Args:
        text: The content of the ``.cfg``.
        source: Its file name, for positions.
        layers: The layers of the net, quantizable or not, in its order.

    Raises:
        ParseError: The text is not a simple config of retraining.
        ConfigError: It does not fit the net or asks for what cannot be done; all mistakes are listed.
    """
    problems = ProblemList()
    message = parse_text(text, descriptor(MESSAGE, schema="caffe_config"), source)
    simple = read_retrain_simple(message, source, problems)
    batch_num = {"batch_num": simple.batch_num} if "batch_num" in simple.origins else {}
    fields = {"version": VERSION, **batch_num}
    return expand_quantization(simple, LayerList(layers), CAFFE_QAT, fields, problems)


def default_config(layers: Iterable[LayerInfo]) -> FullConfig:
    """The full config of a net without a simple config: every layer that can be quantized, with defaults.

    Raises:
        ConfigError: The net has no layer that can be quantized.
    """
    simple = RetrainSimple(source="create_quant_retrain_config")
    return expand_quantization(simple, LayerList(layers), CAFFE_QAT, {"version": VERSION}, ProblemList())


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    batch_num: Annotated[int, Field(strict=True, ge=1)] = 1


def read_config(data: str | bytes, source: str, layers: Iterable[LayerInfo]) -> FullConfig:
    """Read a JSON config, written by a tool or edited by hand, and check it against a net.

    What the file leaves out takes its default; a layer it does not name is not quantized.

    Args:
        data: The content of the file.
        source: Its name, for positions.
        layers: The layers of the net, quantizable or not, in its order.

    Raises:
        ParseError: The file is not JSON.
        ConfigTypeError: A value has the wrong type; all mistakes are listed.
        ConfigError: Any other mistake; all are listed.
    """
    problems = ProblemList()
    root = read_json_object(data, source, problems)
    nodes = {key: node for key, node in root.value.items() if key in CAFFE_QAT.global_keys}
    fields = check_members(_Globals, nodes, problems) or _Globals()
    read = read_layers(root, LayerList(layers), CAFFE_QAT, problems)
    problems.raise_all()
    return FullConfig(
        source=source,
        fields={"version": VERSION, **({"batch_num": fields.batch_num} if "batch_num" in nodes else {})},
        layers=read,
        origins={key: Origin(Level.FILE, node.key_position) for key, node in nodes.items()},
        warnings=problems.warnings,
    )


def make_plan(config: FullConfig, layers: Iterable[LayerInfo]) -> RetrainPlan:
    """Turn a full config, expanded or read, into the plan for the net it was checked against."""
    return make_retrain_plan(config, layers, CAFFE_QAT)
