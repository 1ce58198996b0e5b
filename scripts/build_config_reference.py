"""Write ``docs/config-reference.md``: every field of the simple configs, its type, default, legal values and meaning.

Fields, types and defaults come from the descriptor set, legal ranges from the settings classes of ``amct.config`` and
its tables of layer types, meanings from ``config_meanings.py``. Run it (``make reference``) after one of them changed,
and commit the page; a test builds it again and compares.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config_meanings import DEFAULTS, LEGAL, MEANINGS
from pydantic import TypeAdapter

from amct.config import registry
from amct.config.layers import CAFFE_TYPES, FILTER_PRUNE_TYPES, PTQ_TYPES, QAT_TYPES, SELECTIVE_PRUNE_TYPES
from amct.numerics.settings import BatchNormUpdate
from amct.schema import descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

    from amct.config.registry import Algorithm
    from amct.schema import Schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config-reference.md"

INTRODUCTION = """\
# Config reference

Every field of the simple configs (`.cfg`, protobuf text format) that AMCT users write. This page is made by
`scripts/build_config_reference.py` from the schema and from the tables that configs are checked against.

The nearest setting wins: `override_layer_configs` (one layer), then `override_layer_types` (a type), then the common
block, then the fields of the whole file, then the default. An override replaces the common block as a whole. For your
model `amct config explain` says which line decides what, `amct config check` lists every mistake with its line, and
`amct config init` writes the full JSON config. Of blocks that exclude each other (*one of*) the last one counts.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One kind of simple config."""

    key: str
    title: str
    short: str
    text: str
    root: str
    schema: Schema
    algorithms: tuple[Algorithm, ...]


CONFIGS = (
    Config(
        key="ptq-pytorch",
        title="Post-training quantization, PyTorch",
        short="PTQ, PyTorch",
        text="For `amct.pytorch.quantize`, `amct_pytorch.create_quant_config` and `amct config` with `--kind ptq`.",
        root="AMCTPytorchProto.AMCTConfig",
        schema="pytorch",
        algorithms=registry.activation_algorithms("pytorch") + registry.PYTORCH_WEIGHT,
    ),
    Config(
        key="ptq-caffe",
        title="Post-training quantization, Caffe",
        short="PTQ, Caffe",
        text="For `amct.caffe.quantize`, `amct_caffe.create_quant_config` and `amct config` with `--kind ptq`.",
        root="AMCTCaffeProto.AMCTConfig",
        schema="caffe_config",
        algorithms=registry.activation_algorithms("caffe") + registry.CAFFE_WEIGHT,
    ),
    Config(
        key="retrain-pytorch",
        title="Retraining and pruning, PyTorch",
        short="retraining, PyTorch",
        text=(
            "Quantization-aware training (`--kind qat`), pruning, and both together (`--kind compress`): the blocks "
            "that are there decide."
        ),
        root="AMCTPytorchProto.AMCTRetrainConfig",
        schema="pytorch",
        algorithms=(
            registry.RETRAIN_ACTIVATION + registry.RETRAIN_WEIGHT + registry.FILTER_PRUNE + registry.SELECTIVE_PRUNE
        ),
    ),
    Config(
        key="retrain-caffe",
        title="Retraining, Caffe",
        short="retraining, Caffe",
        text="Quantization-aware training (`--kind qat`).",
        root="AMCTCaffeProto.AMCTRetrainConfig",
        schema="caffe_config",
        algorithms=registry.CAFFE_RETRAIN_ACTIVATION + registry.CAFFE_RETRAIN_WEIGHT,
    ),
    Config(
        key="distill",
        title="Distillation, PyTorch",
        short="distillation",
        text="For `amct_pytorch.create_distill_config`: `Conv2d` and `Linear` layers that learn from the float model.",
        root="AMCTPytorchDistillProto.AMCTDistillConfig",
        schema="pytorch",
        algorithms=registry.RETRAIN_ACTIVATION + registry.DISTILL_WEIGHT,
    ),
    Config(
        key="kv-cache",
        title="Key/value cache, PyTorch",
        short="kv-cache",
        text="The outputs of `Linear` layers in 8 bits (`--kind kv-cache`).",
        root="AMCTPytorchQuantCaliProto.AMCTQuantCaliConfig",
        schema="pytorch",
        algorithms=registry.activation_algorithms("kv_cache"),
    ),
)


# -- one field ---------------------------------------------------------------------------------------------------------


def find(table: Mapping[str, str], config: Config, field: FieldDescriptor) -> str | None:
    """The text of a field: the most specific entry of the table."""
    name = f"{field.containing_type.name}.{field.name}"
    keys = (f"{config.key}/{name}", f"{config.key}/{field.name}", name, field.name)
    return next((table[key] for key in keys if key in table), None)


def type_of(field: FieldDescriptor) -> str:
    """The type of a field, in words."""
    plain = {
        field.TYPE_UINT32: "integer",
        field.TYPE_FLOAT: "number",
        field.TYPE_BOOL: "bool",
        field.TYPE_STRING: "text",
    }
    text = "block" if field.message_type is not None else "name" if field.enum_type is not None else plain[field.type]
    return f"{text}, repeated" if field.is_repeated else f"{text}, required" if field.is_required else text


def default_of(config: Config, field: FieldDescriptor) -> str:
    """The default of a field."""
    text = find(DEFAULTS, config, field)
    if text is not None:
        return text
    if not field.has_default_value:
        return ""
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    if isinstance(field.default_value, bool):
        return str(field.default_value).lower()
    return f"{field.default_value:.7g}" if isinstance(field.default_value, float) else str(field.default_value)


def legal_of(config: Config, field: FieldDescriptor, properties: dict[str, Any]) -> str:
    """The legal values of a field."""
    text = find(LEGAL, config, field)
    if text is not None:
        return text
    if field.name in properties:
        legal = _range(properties[field.name])
        if legal:
            return legal
    if field.enum_type is not None:
        return ", ".join(value.name for value in field.enum_type.values)
    return "true, false" if field.type == field.TYPE_BOOL else ""


def _range(schema: dict[str, Any]) -> str:
    """A part of a JSON schema in words."""
    schema = next((item for item in schema.get("anyOf", ()) if item["type"] != "null"), schema)
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    low = _bound(schema, {"minimum": "≥", "exclusiveMinimum": ">"})
    high = _bound(schema, {"maximum": "≤", "exclusiveMaximum": "<"})
    return ", ".join(bound for bound in (low, high) if bound)


def _bound(schema: dict[str, Any], signs: dict[str, str]) -> str:
    return next((f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema), "")


# -- one message -------------------------------------------------------------------------------------------------------


def messages(root: Descriptor) -> dict[str, tuple[Descriptor, list[str]]]:
    """A message and all messages it contains, with the field names that lead there."""
    found: dict[str, tuple[Descriptor, list[str]]] = {root.full_name: (root, [])}
    waiting = [root]
    while waiting:
        for field in waiting.pop(0).fields:
            if field.message_type is None:
                continue
            if field.message_type.full_name not in found:
                found[field.message_type.full_name] = (field.message_type, [])
                waiting.append(field.message_type)
            names = found[field.message_type.full_name][1]
            names += [field.name] if field.name not in names else []
    return found


def properties_of(config: Config, field_name: str) -> dict[str, Any]:
    """The JSON schema of the settings of an algorithm's message, by the field names of the ``.cfg``."""
    if field_name == "bn_update_config":
        return dict(TypeAdapter(BatchNormUpdate).json_schema()["properties"])
    # clip_max and clip_min are in a separate message, one level deeper than the other settings.
    chosen = "ulq_quantize" if field_name == "clip_max_min" else field_name
    algorithm = next((item for item in config.algorithms if item.message == chosen), None)
    if algorithm is None:
        return {}
    schema = TypeAdapter(algorithm.settings).json_schema()["properties"]
    named = {}
    for key in algorithm.keys:
        if algorithm.field_of(key) in schema:
            for name in algorithm.cfg_fields.get(key, (key,)):
                named[name.rpartition(".")[2]] = schema[algorithm.field_of(key)]
    return named


def table_of(config: Config, message: Descriptor, properties: dict[str, Any]) -> Iterator[str]:
    """A row for each field."""
    yield "| field | type | default | legal values | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for field in message.fields:
        meaning = find(MEANINGS, config, field)
        if meaning is None:
            sys.exit(f"config_meanings.py: what does {message.name}.{field.name} mean?")
        if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
            others = [other.name for other in field.containing_oneof.fields if other is not field]
            meaning += f" *One of* with `{'`, `'.join(others)}`."
        default = default_of(config, field)
        yield f"| `{field.name}` | {type_of(field)} | {default} | {legal_of(config, field, properties)} | {meaning} |"


def section_of(config: Config) -> Iterator[str]:
    """One kind of config: the file, then its blocks."""
    yield f"\n## {config.title}\n\n{config.text}\n"
    for message, names in messages(descriptor(config.root, schema=config.schema)).values():
        if names:
            yield f"\n### `{'`, `'.join(names)}` ({config.short})\n"
        yield from table_of(config, message, properties_of(config, names[0]) if names else {})


# -- layer types -------------------------------------------------------------------------------------------------------


def layer_types() -> Iterator[str]:
    """The table of layer types and what they support."""
    yield "\n## Layer types\n\n### PyTorch\n"
    yield "| type | per channel | offset | INT16 activations | AdaRound | DMQ | QAT | pruning |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, can in PTQ_TYPES.items():
        int16 = "with a bias" if can.int16 and can.int16_needs_bias else _sign(can.int16)
        ways = [("channels", FILTER_PRUNE_TYPES), ("2 of 4", SELECTIVE_PRUNE_TYPES)]
        pruning = ", ".join(way for way, types in ways if name in types)
        signs = (_sign(can.channel_wise), _sign(can.asymmetric), int16, _sign(can.ada), _sign(can.dmq))
        yield f"| {name} | {' | '.join(signs)} | {_sign(name in QAT_TYPES)} | {pruning} |"
    yield "\n### Caffe\n"
    weights = [name for name, can in CAFFE_TYPES.items() if can.weights]
    data = [name for name, can in CAFFE_TYPES.items() if not can.weights and can.on_by_default]
    off = [name for name, can in CAFFE_TYPES.items() if not can.weights and not can.on_by_default]
    yield f"* Data and weights: {', '.join(weights)}."
    yield f"  * with a scale per channel: {', '.join(name for name in weights if CAFFE_TYPES[name].channel_wise)};"
    yield f"  * non-uniform (SNQ): {', '.join(name for name in weights if CAFFE_TYPES[name].snq)}."
    yield f"* Data only: {', '.join(data)}."
    yield f"* Data only, and off until `quant_enable` in the JSON switches them on: {', '.join(off)}."
    yield (
        "* Never, whatever their type: layers without weights that read coordinates, indices, labels or marks "
        "(ROIPooling, PSROIPooling, ROIAlign, Nms, Unpooling with a mask; Concat, Reshape, Power, ... of boxes or of "
        "ArgMax's result). `amct config explain` lists them with the reason."
    )


def _sign(can: bool) -> str:
    return "yes" if can else ""


def build() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip()]
    for config in CONFIGS:
        lines += section_of(config)
    lines += layer_types()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(build(), encoding="utf-8")
    sys.stdout.write(f"docs/{PAGE.name}: {len(build().splitlines())} lines\n")


if __name__ == "__main__":
    main()
