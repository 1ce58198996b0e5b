"""Each mistake the JSON config of PyTorch's QAT can have, with its message and the text its position points at."""

from __future__ import annotations

import json

import pytest
from config_models import layers, marked, places_of

from amct.config.qat.dialect import PYTORCH_QAT
from amct.errors import ConfigError, ConfigTypeError, ParseError

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "pool:AvgPool2d", "fc:Linear", "dw:Conv2d", "circ:Conv2d",
    circ={"refusal": "padding_mode is circular"},
    dw={"can_pack_int4": False},
)  # fmt: skip


def data(**values: object) -> dict:
    return {"retrain_data_config": values}


def weight(**values: object) -> dict:
    return {"retrain_weight_config": values}


# What spoils a correct config (key, value), the message, and the text the reported column must point at.
WRONG_VALUE = {
    "version": ("version", 2, "version must be 1, got 2", "2"),
    "batch_num 0": ("batch_num", 0, "batch_num must be at least 1, got 0", "0"),
    "precision mode": ("fakequant_precision_mode", "FP16", "must be 'DEFAULT' or 'FORCE_FP16_QUANT'", '"FP16"'),
    "unknown layer": ("zzz", {}, 'the layer or global field "zzz" is unknown', '"zzz"'),
    "near layer": ("con", {}, '"con" is unknown. Did you mean "conv"', '"con"'),
    "layer of no use": ("bn", {}, 'the layer "bn" cannot be quantized: its type BatchNorm2d', '"bn"'),
    "type of PTQ only": ("pool", {}, 'the layer "pool" cannot be quantized: its type AvgPool2d', '"pool"'),
    "refused layer": ("circ", {"retrain_enable": True}, "padding_mode is circular. Remove it", '"circ"'),
    "unknown key": ("conv", {"retrain_enabled": True}, 'Did you mean "retrain_enable"', '"retrain_enabled"'),
    "key of pruning": (
        "conv",
        {"regular_prune_enable": True},
        'conv: the key "regular_prune_enable" is unknown',
        '"regular_prune_enable"',
    ),
    "clip_max 0": ("conv", data(clip_max=0.0, clip_min=-1.0), "clip_max must be greater than 0, got 0.0", "0.0"),
    "clip_min positive": ("conv", data(clip_max=1.0, clip_min=2.0), "clip_min must be less than 0, got 2.0", "2.0"),
    "clip_max alone": ("conv", data(clip_max=1.0), "clip_max needs clip_min beside it. Give both, or", "1.0"),
    "clip_min alone": ("conv", data(clip_min=-1.5), "clip_min needs clip_max beside it. Give both, or", "-1.5"),
    "data type": ("conv", data(dst_type="INT7"), "must be 'INT4', 'INT8' or 'INT16', got \"INT7\"", '"INT7"'),
    "weight type": ("conv", weight(dst_type="INT16"), "must be 'INT4' or 'INT8', got \"INT16\"", '"INT16"'),
    "pair A16W4": (
        "conv",
        {**data(dst_type="INT16"), **weight(dst_type="INT4")},
        'layer "conv": INT16 activations cannot go with INT4 weights',
        '"INT4"',
    ),
    "channel_wise": ("fc", weight(channel_wise=True), 'layer "fc": channel_wise must be false', "true"),
    "data algorithm": (
        "conv",
        data(algo="ulq_quantise"),
        'algo must be ulq_quantize, got "ulq_quantise". Did you mean "ulq_quantize"',
        '"ulq_quantise"',
    ),
    "weight algorithm": ("conv", weight(algo="arq"), "algo must be arq_retrain or ulq_retrain", '"arq"'),
    "unknown data key": ("conv", data(clip=1.0), 'conv.retrain_data_config: the key "clip" is unknown', '"clip"'),
    "key of Caffe": ("conv", weight(num_bits=8), 'the key "num_bits" is unknown', '"num_bits"'),
    "nothing switched on": ("conv", {"retrain_enable": False}, "no layer is switched on. Set retrain_enable", "{"),
}
WRONG_TYPE = {
    "version": ("version", "1", 'version must be 1, got "1"', '"1"'),
    "batch_num": ("batch_num", 1.5, "batch_num must be an integer, got 1.5", "1.5"),
    "layer": ("conv", [], r"conv must be an object in braces, got \[\]", "[]"),
    "retrain_enable": ("conv", {"retrain_enable": 1}, "retrain_enable must be true or false, got 1", "1"),
    "data": ("conv", {"retrain_data_config": True}, "conv.retrain_data_config must be an object in braces", "true"),
    "integer clip": (
        "conv",
        data(clip_max=6, clip_min=-6.0),
        "conv.retrain_data_config.clip_max must be a number with a decimal point, got 6",
        "6",
    ),
    "null clip": ("conv", data(clip_max=6.0, clip_min=None), "clip_min must be a number with a decimal", "null"),
    "fixed_min": ("conv", data(fixed_min=1), "fixed_min must be true or false, got 1", "1"),
    "null fixed_min": ("conv", data(fixed_min=None), "fixed_min must be true or false, got null", "null"),
    "dst_type": ("conv", data(dst_type=8), "dst_type must be 'INT4', 'INT8' or 'INT16', got 8", "8"),
    "channel_wise": ("conv", weight(channel_wise="yes"), 'channel_wise must be true or false, got "yes"', '"yes"'),
    "algo": ("conv", weight(algo=None), "algo must be arq_retrain or ulq_retrain, got null", "null"),
}


def check(case: tuple, kind: type[ConfigError]) -> None:
    key, value, message, pointed_at = case
    text = json.dumps({"version": 1, "batch_num": 1, **({} if key == "conv" else {"conv": {}}), key: value}, indent=1)
    with pytest.raises(kind, match=message) as caught:
        PYTORCH_QAT.read_config(text, "config.json", NETWORK)
    assert type(caught.value) is kind
    [(line, column)] = places_of(caught.value)
    assert text.splitlines()[line - 1][column - 1 :].startswith(pointed_at)


@pytest.mark.parametrize("name", WRONG_VALUE)
def test_wrong_value(name):
    check(WRONG_VALUE[name], ConfigError)


@pytest.mark.parametrize("name", WRONG_TYPE)
def test_wrong_type_is_a_type_error_and_a_value_error(name):
    check(WRONG_TYPE[name], ConfigTypeError)


@pytest.mark.parametrize("key", ["version", "batch_num"])
def test_mandatory_fields(key):
    content = {"version": 1, "batch_num": 1, "conv": {}}
    del content[key]
    with pytest.raises(ConfigError, match=f'config.json:1:1: the key "{key}" is missing. Add "{key}":1.'):
        PYTORCH_QAT.read_config(json.dumps(content), "config.json", NETWORK)


def test_all_mistakes_are_reported_together_in_file_order():
    text, places = marked(
        """@{
  "version": @2,
  "conv": {
    @"retrain": true,
    "retrain_data_config": {"clip_max": @-6.0, "clip_min": @6.0, @"dst": "INT8"},
    "retrain_weight_config": {"algo": @"arq"}
  },
  "fc": {"retrain_weight_config": {"channel_wise": @true}},
  @"fc": {},
  @"nope": {}
}"""
    )
    with pytest.raises(ConfigError, match=r'"batch_num" is missing') as caught:
        PYTORCH_QAT.read_config(text, "config.json", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "1:1: expected a value"), ("[]", "the config must be an object in braces"), ('{"version":1,}', "1:13: the")],
)
def test_files_that_are_no_config(text, message):
    with pytest.raises((ParseError, ConfigTypeError), match=message):
        PYTORCH_QAT.read_config(text, "config.json", NETWORK)


def test_a_layer_that_cannot_be_quantized_may_stand_there_switched_off():
    text = '{"version":1,"batch_num":1,"conv":{},"circ":{"retrain_enable":false},"bn":{"retrain_enable":false}}'
    config = PYTORCH_QAT.read_config(text, "config.json", NETWORK)
    assert [layer.name for layer in config.layers] == ["conv"]


def test_what_a_file_leaves_out_takes_its_default():
    text = '{"version":1,"batch_num":3,"fc":{},"conv":{"retrain_weight_config":{"algo":"ulq_retrain"}}}'
    config = PYTORCH_QAT.read_config(text, "config.json", NETWORK)
    assert list(config.to_dict()) == ["version", "batch_num", "conv", "fc"]
    assert config.to_dict()["conv"] == {
        "retrain_enable": True,
        "retrain_data_config": {"algo": "ulq_quantize", "dst_type": "INT8"},
        "retrain_weight_config": {"algo": "ulq_retrain", "dst_type": "INT8", "channel_wise": True},
    }
    plan = PYTORCH_QAT.make_plan(config, NETWORK)
    assert plan.find("fc").weight.channel_wise is False
    assert {layer.batch_num for layer in plan.layers} == {3}
    assert plan.not_quantized["dw"] == "not in the config"
    assert plan.not_quantized["circ"] == "padding_mode is circular"


def test_odd_types_of_a_hand_written_config_are_told_of_once():
    odd = {**data(dst_type="INT4"), **weight(dst_type="INT8")}
    content = {"version": 1, "batch_num": 1, "conv": odd, "fc": odd, "dw": weight(dst_type="INT4")}
    config = PYTORCH_QAT.read_config(json.dumps(content, indent=1), "config.json", NETWORK)
    assert [str(warning) for warning in config.warnings] == [
        "config.json:6:16: AMCT does not train INT4 activations with INT8 weights, here they are trained: conv, fc",
        "config.json:22:16: 4-bit weights need one group and an even number of input channels,"
        " INT8 is used for these layers: dw",
    ]
    assert PYTORCH_QAT.make_plan(config, NETWORK).find("dw").weight.num_bits == 8


def test_default_precision_mode_is_read_and_not_written():
    text = '{"version":1,"fakequant_precision_mode":"DEFAULT","batch_num":1,"conv":{}}'
    assert list(PYTORCH_QAT.read_config(text, "c.json", NETWORK).fields) == ["version", "batch_num"]
    forced = PYTORCH_QAT.read_config(text.replace("DEFAULT", "FORCE_FP16_QUANT"), "c.json", NETWORK)
    assert list(forced.fields) == ["version", "fakequant_precision_mode", "batch_num"]
    plan = PYTORCH_QAT.make_plan(forced, NETWORK)
    assert plan.force_fp16
    assert plan.find("conv").force_fp16
