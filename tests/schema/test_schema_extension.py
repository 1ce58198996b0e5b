"""Fields that extensions add at run time: a dataclass becomes a message in a private copy of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from amct.errors import ArgumentError, ArgumentTypeError, ParseError
from amct.schema import ExtraField, descriptor, message_class, parse_text


@dataclass(frozen=True, kw_only=True)
class Toy:
    count: Annotated[int, Field(ge=1)] = 3
    strength: float | None = 0.1
    on: bool = True
    mode: Literal["fast", "slow"] = "fast"
    limits: tuple[float, float] = (0.25, 4.0)


CONFIG = "AMCTPytorchProto.AMCTConfig"
TOY = ExtraField(
    container="AMCTPytorchProto.CalibrationConfig", name="toy_quantize", settings=Toy, oneof="acts_quant_algo"
)
TEXT = """common_config {
  toy_quantize { count: 5 strength: 0.3 on: false mode: "slow" limits: [0.5, 2] }
}
"""


def test_the_field_is_read_with_its_position() -> None:
    parsed = parse_text(TEXT, descriptor(CONFIG, schema="pytorch", extra=(TOY,)), "a.cfg")
    block = parsed.get("common_config")
    assert block.which("acts_quant_algo") == "toy_quantize"
    toy = block.get("toy_quantize")
    assert (toy.get("count"), toy.get("strength"), toy.get("on"), toy.get("mode")) == (5, 0.3, False, "slow")
    assert toy.all("limits") == [0.5, 2.0]
    assert str(toy.where("strength")) == "a.cfg:2:27"
    with pytest.raises(ParseError, match=r'a.cfg:2:18: ToyQuantize has no field coumt. Did you mean "?count'):
        parse_text(TEXT.replace("count", "coumt"), descriptor(CONFIG, schema="pytorch", extra=(TOY,)), "a.cfg")


def test_the_shared_schema_does_not_change() -> None:
    descriptor(CONFIG, schema="pytorch", extra=(TOY,))
    with pytest.raises(ParseError, match="has no field toy_quantize"):
        parse_text(TEXT, descriptor(CONFIG, schema="pytorch"), "a.cfg")


def test_the_message_has_the_defaults_and_survives_a_binary_file() -> None:
    extra = (ExtraField(container="caffe.LayerParameter", name="toy_param", settings=Toy),)
    layer = message_class("caffe.LayerParameter", schema="caffe", extra=extra)
    empty = layer(name="a").toy_param
    assert (empty.count, empty.strength, empty.on, empty.mode, list(empty.limits)) == (3, 0.1, True, "fast", [])
    again = layer.FromString(layer(toy_param={"limits": [1, 2], "count": 2**40}).SerializeToString())
    assert (list(again.toy_param.limits), again.toy_param.count) == ([1.0, 2.0], 2**40)


def test_numbers_follow_from_the_name_and_leave_the_schema_alone() -> None:
    assert TOY.number == ExtraField(container="caffe.LayerParameter", name="toy_quantize", settings=Toy).number
    assert 2**28 <= TOY.number < 2**29


def test_a_field_of_the_schema_cannot_be_replaced() -> None:
    extra = ExtraField(container="AMCTPytorchProto.CalibrationConfig", name="ifmr_quantize", settings=Toy)
    with pytest.raises(ArgumentError, match='"ifmr_quantize" clashes with "ifmr_quantize"'):
        descriptor(CONFIG, schema="pytorch", extra=(extra,))


def test_types_without_a_message_field_are_refused() -> None:
    @dataclass
    class Odd:
        table: dict[str, int]

    for settings in (Odd, int):
        extra = ExtraField(container="AMCTPytorchProto.CalibrationConfig", name="odd_quantize", settings=settings)
        with pytest.raises(ArgumentTypeError, match="expected"):
            descriptor(CONFIG, schema="pytorch", extra=(extra,))
