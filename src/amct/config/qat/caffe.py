"""The configs of quantization-aware training of Caffe models.

The JSON has the guide's keys in the guide's order, layers in the order of the net. Two keys go beyond the guide and are
written only when given: ``batch_num`` (the simple config has it) and ``fixed_clip`` (false: given clips are trained).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from amct.config.dialect import QuantBlock
from amct.config.layers import CAFFE_RETRAIN_TYPES
from amct.config.qat.dialect import DATA_BLOCK, DATA_KEY, WEIGHT_BLOCK, WEIGHT_KEY, QatDialect, part
from amct.config.registry import CAFFE_RETRAIN_ACTIVATION, CAFFE_RETRAIN_WEIGHT
from amct.numerics.settings import AtLeastOne, CheckedSettings, Version, bits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amct.config.blocks import AlgorithmBlock
    from amct.config.layers import LayerInfo
    from amct.config.simple_config import Choice

DST_TYPES = {DATA_KEY: ("INT8", "INT16"), WEIGHT_KEY: ("INT8",)}


@dataclass(frozen=True, kw_only=True)
class _Globals(CheckedSettings):
    version: Version = 1
    batch_num: AtLeastOne = 1


class CaffeQat(QatDialect):
    """The QAT types of Caffe; a bit width is a number, and the simple config can also give it by ``dst_type``."""

    message = "AMCTCaffeProto.AMCTRetrainConfig"
    schema = "caffe_config"
    types = CAFFE_RETRAIN_TYPES
    activations = CAFFE_RETRAIN_ACTIVATION
    weight = CAFFE_RETRAIN_WEIGHT
    globals = _Globals
    optional_globals = frozenset({"batch_num"})
    part_name = "layer"

    def read_choice(self, choice: Choice) -> QuantBlock:
        """The algorithms of a message; ``dst_type`` gives ``num_bits`` where that is not given."""
        block = super().read_choice(choice)
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
        """Nothing changes: every layer can have every bit width."""
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
