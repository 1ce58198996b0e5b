"""What a correct simple config of PyTorch's QAT means: precedence, skipped layers, bit widths, where it stands."""

from __future__ import annotations

import dataclasses

import pytest
from config_models import layers

from amct.config import registry
from amct.config.layers import FILTER_PRUNE_TYPES, QAT_TYPES, SELECTIVE_PRUNE_TYPES
from amct.config.qat.dialect import PYTORCH_QAT
from amct.config.simple_config import explain
from amct.numerics.settings import CaffeUlqSettings, SettingsError, UlqSettings
from amct.schema import descriptor

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "conv2:Conv2d", "conv3d:Conv3d", "deconv:ConvTranspose2d", "fc:Linear",
    "fcnb:Linear", "rnn:LSTM", "circ:Conv2d",
    fcnb={"has_bias": False},
    circ={"refusal": "padding_mode is circular"},
)  # fmt: skip
GLOBAL = """retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6 clip_min: -6 } dst_type: INT8 } }
retrain_weight_quant_config { ulq_retrain { channel_wise: false dst_type: INT4 } }
"""


def expand(text: str) -> dict:
    return PYTORCH_QAT.expand_config(text, "q.cfg", NETWORK).to_dict()


def warnings_of(text: str) -> list[str]:
    return [str(warning) for warning in PYTORCH_QAT.expand_config(text, "q.cfg", NETWORK).warnings]


def enabled(text: str) -> list[str]:
    return [name for name, block in expand(text).items() if isinstance(block, dict) and block["retrain_enable"]]


ALL = ["conv", "conv2", "conv3d", "deconv", "fc", "fcnb", "rnn"]


def test_an_empty_config_is_the_default_config():
    assert enabled("") == ALL
    assert expand("") == expand("retrain_data_quant_config { } retrain_weight_quant_config { }")


def test_layer_beats_type_beats_global():
    by_type = 'layer_type: "Conv2d" retrain_data_quant_config { ulq_quantize { fixed_min: true } }'
    by_layer = 'layer_name: "conv2" retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }'
    config = expand(f"{GLOBAL} override_layer_types {{ {by_type} }} override_layer_configs {{ {by_layer} }}")
    assert config["deconv"]["retrain_data_config"] == {
        "algo": "ulq_quantize",
        "clip_max": 6.0,
        "clip_min": -6.0,
        "dst_type": "INT8",
    }
    assert config["conv"]["retrain_data_config"] == {"algo": "ulq_quantize", "fixed_min": True, "dst_type": "INT8"}
    # An override inherits nothing: the half it leaves out is the default, not the global block.
    assert config["conv"]["retrain_weight_config"] == {"algo": "arq_retrain", "channel_wise": True, "dst_type": "INT8"}
    assert config["conv2"]["retrain_data_config"] == {"algo": "ulq_quantize", "dst_type": "INT8"}
    assert config["conv2"]["retrain_weight_config"] == {"algo": "arq_retrain", "channel_wise": True, "dst_type": "INT4"}


def test_skip_lists_are_united():
    text = 'skip_layers: "conv" quant_skip_layers: "conv2" skip_layer_types: "Linear" quant_skip_types: "LSTM"'
    assert enabled(text) == ["conv3d", "deconv"]
    assert warnings_of(text) == []


def test_an_override_switches_a_skipped_layer_on_again():
    text = """skip_layers: "conv"
quant_skip_types: "Linear"
override_layer_configs { layer_name: "conv" }
override_layer_types { layer_type: "Linear" retrain_weight_quant_config { arq_retrain { } } }"""
    assert enabled(text) == ALL
    again = "quantized although skipped, because an override names these layers or their type"
    none = "the override has no retrain_data_quant_config and no retrain_weight_quant_config: built-in defaults apply"
    assert warnings_of(text) == [
        f"q.cfg:3:1: {again}: conv",
        f"q.cfg:3:1: {none}: conv",
        f"q.cfg:4:1: {again}: fc, fcnb",
    ]


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("", ["data", "weight"]),
        ("retrain_data_quant_config { ulq_quantize { } }", ["weight"]),
        ("retrain_weight_quant_config { arq_retrain { } }", ["data"]),
        ("retrain_data_quant_config { } retrain_weight_quant_config { }", []),
    ],
)
@pytest.mark.parametrize("override", ['layer_configs { layer_name: "conv"', 'layer_types { layer_type: "Conv2d"'])
def test_what_an_override_resets_to_the_defaults_is_warned_of(override, given, missing):
    found = warnings_of(f"{GLOBAL}\noverride_{override} {given} }}")
    lacks = " and ".join(f"no retrain_{half}_quant_config" for half in missing)
    layers = "conv" if "layer_name" in override else "conv, conv2"
    what = f"the override has {lacks}: built-in defaults apply instead of the global block: {layers}"
    assert [text for text in found if "override" in text] == ([f"q.cfg:4:1: {what}"] if missing else [])


def test_half_an_override_resets_nothing_where_the_file_has_no_global_block():
    assert warnings_of('override_layer_configs { layer_name: "conv" retrain_weight_quant_config { } }') == []
    lacks = "no retrain_data_quant_config and no retrain_weight_quant_config"
    assert warnings_of('override_layer_configs { layer_name: "conv" }') == [
        f"q.cfg:1:1: the override has {lacks}: built-in defaults apply: conv"
    ]


def test_names_given_twice_in_a_skip_list_are_only_warned_of():
    text = 'quant_skip_layers: "conv"\nquant_skip_layers: "conv"'
    assert enabled(text) == ALL[1:]
    assert warnings_of(text) == ['q.cfg:2:1: "conv" is repeated in quant_skip_layers. Name it once.']


def test_a_value_given_twice_keeps_the_last_one():
    text = "batch_num: 2\nbatch_num: 3"
    assert expand(text)["batch_num"] == 3
    assert len(warnings_of(text)) == 1


def test_the_last_algorithm_of_a_block_wins():
    text = "retrain_weight_quant_config { ulq_retrain { } arq_retrain { channel_wise: false } }"
    assert expand(text)["conv"]["retrain_weight_config"]["algo"] == "arq_retrain"
    text = "retrain_weight_quant_config { arq_retrain { } ulq_retrain { } }"
    assert expand(text)["conv"]["retrain_weight_config"]["algo"] == "ulq_retrain"


def test_global_channel_wise_is_per_tensor_with_a_warning_on_linear_layers():
    text = "retrain_weight_quant_config { arq_retrain { channel_wise: true } }"
    config = expand(text)
    assert [config[name]["retrain_weight_config"]["channel_wise"] for name in ALL] == [True] * 4 + [False] * 2 + [True]
    assert warnings_of(text) == [
        "q.cfg:1:45: channel_wise does not apply to these layers, they are quantized per tensor: fc, fcnb"
    ]
    assert warnings_of(text + ' skip_layer_types: "Linear"') == []


@pytest.mark.parametrize(
    ("activation", "weight"),
    [("INT4", "INT4"), ("INT8", "INT8"), ("INT8", "INT4"), ("INT16", "INT8"), ("INT4", "INT8")],
)
def test_pairs_of_types(activation, weight):
    text = (
        f"retrain_data_quant_config {{ ulq_quantize {{ dst_type: {activation} }} }}"
        f" retrain_weight_quant_config {{ arq_retrain {{ dst_type: {weight} }} }} quant_skip_layers: 'conv3d'"
        " quant_skip_layers: 'fcnb'"
    )
    plan = PYTORCH_QAT.make_plan(PYTORCH_QAT.expand_config(text, "q.cfg", NETWORK), NETWORK)
    assert {(layer.activation.dst_type, layer.weight.dst_type) for layer in plan.enabled} == {(activation, weight)}
    assert bool(plan.warnings) == ((activation, weight) == ("INT4", "INT8"))


def test_16_bit_activations_that_no_chip_runs_are_told_of():
    text = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
    assert warnings_of(text) == [
        "q.cfg:1:44: INT16 activations can be trained, but not deployed to a chip, for these layers: conv3d, fcnb"
    ]
    assert expand(text)["conv3d"]["retrain_data_config"]["dst_type"] == "INT16"


def test_clips_are_written_as_the_reference_writes_them():
    text = "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6.1 clip_min: -0.1 } } }"
    block = expand(text)["conv"]["retrain_data_config"]
    assert (block["clip_max"], block["clip_min"]) == (6.099999904632568, -0.10000000149011612)


def test_an_override_of_a_layer_that_cannot_be_quantized_is_warned_of():
    assert warnings_of('override_layer_configs { layer_name: "circ" }') == [
        'q.cfg:1:1: the override of "circ" has no effect: the layer cannot be quantized (padding_mode is circular)'
    ]


def test_precision_mode_stands_before_batch_num():
    config = PYTORCH_QAT.expand_config("batch_num: 4 fakequant_precision_mode: FORCE_FP16_QUANT", "q.cfg", NETWORK)
    assert list(config.fields.items()) == [
        ("version", 1),
        ("fakequant_precision_mode", "FORCE_FP16_QUANT"),
        ("batch_num", 4),
    ]
    plan = PYTORCH_QAT.make_plan(config, NETWORK)
    assert plan.force_fp16
    assert all(layer.force_fp16 and layer.batch_num == 4 for layer in plan.layers)


def test_explain_tells_the_line_of_each_setting():
    text = (
        GLOBAL + 'skip_layers: "conv2"\n'
        'override_layer_types { layer_type: "Linear" retrain_data_quant_config { ulq_quantize { fixed_min: true } } }\n'
        "batch_num: 2"
    )
    rows = {(row.layer, row.key): row for row in explain(PYTORCH_QAT.expand_config(text, "q.cfg", NETWORK))}
    assert str(rows["", "batch_num"].origin) == "global field (q.cfg:5:1)"
    assert str(rows["conv", "retrain_data_config.clip_max"].origin) == "common block (q.cfg:1:59)"
    assert str(rows["conv", "retrain_weight_config.dst_type"].origin) == "common block (q.cfg:2:65)"
    assert str(rows["conv2", "retrain_enable"].origin) == "global field (q.cfg:3:1)"
    assert rows["conv2", "retrain_enable"].value is False
    assert str(rows["fc", "retrain_data_config.fixed_min"].origin) == "override of this layer type (q.cfg:4:88)"
    assert str(rows["fc", "retrain_weight_config.dst_type"].origin) == "built-in default"
    assert str(rows["fc", "retrain_weight_config.dst_type"].block) == "override of this layer type (q.cfg:4:1)"
    assert ("fc", "retrain_data_config.clip_max") not in rows


def test_explain_of_a_lowered_setting_and_of_json():
    text = "retrain_weight_quant_config { arq_retrain { channel_wise: true } }"
    config = PYTORCH_QAT.expand_config(text, "q.cfg", NETWORK)
    rows = {(row.layer, row.key): row for row in explain(config)}
    lowered = rows["fc", "retrain_weight_config.channel_wise"]
    assert (lowered.value, str(lowered.origin)) == (False, "rule of the layer type (q.cfg:1:45)")
    written = config.to_json()
    read = {(row.layer, row.key): row for row in explain(PYTORCH_QAT.read_config(written, "c.json", NETWORK))}
    position = read["fc", "retrain_weight_config.channel_wise"].origin.position
    assert written.splitlines()[position.line - 1][position.column - 1 :] == "false,"
    assert position.line > written[: written.index('"fc"')].count("\n")
    assert str(read["", "batch_num"].origin) == "config file (c.json:3:5)"
    assert {key: row.value for key, row in read.items()} == {key: row.value for key, row in rows.items()}


# -- the tables --------------------------------------------------------------------------------------------------------


BLOCKS = {
    "pytorch data": ("pytorch", "AMCTPytorchProto.RetrainDataQuantConfig", registry.RETRAIN_ACTIVATION),
    "pytorch weight": ("pytorch", "AMCTPytorchProto.RetrainWeightQuantConfig", registry.RETRAIN_WEIGHT),
    "filter pruner": ("pytorch", "AMCTPytorchProto.FilterPruner", registry.FILTER_PRUNE),
    "selective pruner": ("pytorch", "AMCTPytorchProto.NOutOfMPruner", registry.SELECTIVE_PRUNE),
    "caffe data": ("caffe_config", "AMCTCaffeProto.RetrainDataQuantConfig", registry.CAFFE_RETRAIN_ACTIVATION),
    "caffe weight": ("caffe_config", "AMCTCaffeProto.RetrainWeightQuantConfig", registry.CAFFE_RETRAIN_WEIGHT),
}
ENUMS = {"dst_type": ["INT4", "INT8", "INT16"], "n_out_of_m_type": ["M4N2"]}


def leaves(message, prefix=""):
    for field in message.fields:
        if field.message_type is not None:
            yield from leaves(field.message_type, f"{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


@pytest.mark.parametrize("name", BLOCKS)
def test_every_algorithm_and_default_of_the_schema_is_in_the_registry(name):
    schema, full_name, algorithms = BLOCKS[name]
    fields = descriptor(full_name, schema=schema).fields_by_name
    assert {item.message for item in algorithms} == set(fields)
    for algorithm in algorithms:
        known = {field: key for key in algorithm.keys for field in algorithm.cfg_fields.get(key, (key,))}
        for path, field in leaves(fields[algorithm.message].message_type):
            if schema == "caffe_config" and path == "dst_type":
                continue  # another spelling of num_bits, handled by qat_caffe
            key = known[path]
            if field.enum_type is not None:
                assert [value.name for value in field.enum_type.values] == ENUMS[key]
                assert algorithm.default_of(key) == field.enum_type.values_by_number[field.default_value].name
            elif field.has_default_value:
                assert algorithm.default_of(key) == field.default_value, (algorithm.message, path)


def test_layer_types_are_those_of_the_documents():
    qat = ["Conv1d", "Conv2d", "Conv3d", "Linear", "ConvTranspose1d", "ConvTranspose2d", "LSTM", "GRU"]
    assert list(QAT_TYPES) == list(PYTORCH_QAT.types) == qat
    assert [name for name, able in PYTORCH_QAT.types.items() if not able.channel_wise] == ["Linear"]
    assert FILTER_PRUNE_TYPES == ("Conv2d", "Linear")
    assert SELECTIVE_PRUNE_TYPES == ("Conv2d", "Linear", "ConvTranspose2d")
    assert set(FILTER_PRUNE_TYPES) < set(SELECTIVE_PRUNE_TYPES) < set(QAT_TYPES)


def test_rules_between_fields_hold_for_direct_construction_too():
    with pytest.raises(SettingsError, match="clip_max needs clip_min beside it"):
        UlqSettings(clip_max=1.0)
    with pytest.raises(SettingsError, match="fixed_clip needs clip_max or clip_min"):
        CaffeUlqSettings(fixed_clip=True)
    assert CaffeUlqSettings(clip_max=1.0, fixed_clip=True).clip_min is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        UlqSettings().dst_type = "INT4"
