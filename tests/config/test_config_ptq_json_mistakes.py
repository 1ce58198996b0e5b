"""Each mistake the JSON config of PyTorch's PTQ can have, with its message and the text its position points at."""

from __future__ import annotations

import json

import pytest
from config_models import layers, marked, places_of

from amct.config.ptq.pytorch import PYTORCH
from amct.errors import ConfigError, ConfigTypeError

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "conv3d:Conv3d", "pool:AvgPool2d", "fc:Linear", "fcnb:Linear", "rnn:LSTM",
    "circ:Conv2d", "dw:Conv2d",
    fcnb={"has_bias": False},
    circ={"refusal": "padding_mode is circular"},
    dw={"can_pack_int4": False},
)  # fmt: skip


def activation(**values: object) -> dict:
    return {"activation_quant_params": values}


def weight(**values: object) -> dict:
    return {"weight_quant_params": values}


# What spoils a correct config (key, value), the error, the message, and the text the reported column must point at.
WRONG_VALUE = {
    "unknown layer": ("zzz", {}, 'the layer or global field "zzz" is unknown', '"zzz"'),
    "near layer": ("con", {}, '"con" is unknown. Did you mean "conv"', '"con"'),
    "unknown global": ("batch_numb", 2, 'Did you mean "batch_num"', '"batch_numb"'),
    "version": ("version", 2, "version must be 1, got 2", "2"),
    "batch_num 0": ("batch_num", 0, "batch_num must be at least 1, got 0", "0"),
    "precision mode": ("fakequant_precision_mode", "FP16", "must be 'DEFAULT' or 'FORCE_FP16_QUANT'", '"FP16"'),
    "skip fusion unknown": ("skip_fusion_layers", ["x"], 'the layer "x" is unknown', '"x"'),
    "skip fusion kind": ("skip_fusion_layers", ["pool"], "AvgPool2d, which cannot be fused", '"pool"'),
    "skip fusion twice": ("skip_fusion_layers", ["conv", "conv"], '"conv" is repeated', '"conv"'),
    "layer of no use": ("bn", {}, 'the layer "bn" cannot be quantized: its type BatchNorm2d', '"bn"'),
    "refused layer": ("circ", {"quant_enable": True}, "padding_mode is circular. Remove it", '"circ"'),
    "unknown key in layer": ("conv", {"foo": 1}, 'conv: the key "foo" is unknown', '"foo"'),
    "dmq range": ("conv", {"dmq_balancer_param": 0.1}, "at least 0.2 and at most 0.8, got 0.1", "0.1"),
    "dmq pool": ("pool", {"dmq_balancer_param": 0.5}, "dmq_balancer is not possible", '"dmq_balancer_param"'),
    "act_algo": ("conv", activation(act_algo="ifrm"), 'Did you mean "ifmr"', '"ifrm"'),
    "hfmg key in ifmr": (
        "conv",
        activation(act_algo="ifmr", search_step=0.01, num_of_bins=4096),
        'the key "num_of_bins" belongs to hfmg, but the block is of ifmr',
        '"num_of_bins"',
    ),
    "ifmr key in hfmg": (
        "conv",
        activation(act_algo="hfmg", search_step=0.1),
        'the key "search_step" belongs to ifmr, but the block is of hfmg',
        '"search_step"',
    ),
    "unknown key in block": (
        "conv",
        activation(max_percentil=1.0),
        'Did you mean "max_percentile"',
        '"max_percentil"',
    ),
    "percentile": (
        "conv",
        activation(max_percentile=1.5),
        "conv.activation_quant_params.max_percentile must be at most 1, got 1.5",
        "1.5",
    ),
    "search_range reversed": ("conv", activation(search_range=[1.3, 0.7]), "needs 0 < start < end", "["),
    "search_step 0": ("conv", activation(search_step=0), "greater than 0, got 0", "0"),
    "num_of_bins": (
        "conv",
        activation(act_algo="hfmg", num_of_bins=1000),
        "num_of_bins must be 1024, 2048, 4096 or 8192, got 1000",
        "1000",
    ),
    "activation bits": ("conv", activation(num_bits=5), "4, 8, 16 bits, got 5", "5"),
    "int16": ("conv3d", activation(num_bits=16), "INT16 activations are not possible of type Conv3d", "16"),
    "int16 no bias": ("fcnb", activation(num_bits=16), "not possible without a bias", "16"),
    "asymmetric Conv3d": ("conv3d", activation(asymmetric=True), "asymmetric must be false", "true"),
    "weight bits": ("conv", weight(num_bits=5), "4, 6, 7, 8 bits, got 5", "5"),
    "weight bits 6": ("fc", weight(num_bits=6), "only for Conv2d, not for Linear", "6"),
    "ada bits": ("conv", weight(wts_algo="ada_quantize", num_bits=9), "bits, got 9", "9"),
    "ada on LSTM": ("rnn", weight(wts_algo="ada_quantize"), "ada_quantize is only for", '"weight_quant_params"'),
    "channel_wise": ("fc", weight(channel_wise=True), "channel_wise must be false", "true"),
    "wts_algo": ("fc", weight(wts_algo="arq"), "must be arq_quantize or ada_quantize", '"arq"'),
    "foreign weight key": ("fc", weight(reg_param=0.1), "belongs to ada_quantize, but", '"reg_param"'),
    "num_iteration": ("conv", weight(wts_algo="ada_quantize", num_iteration=-1), "at least 0", "-1"),
}
WRONG_TYPE = {
    "batch_num text": ("batch_num", "two", 'batch_num must be an integer, got "two"', '"two"'),
    "batch_num bool": ("batch_num", True, "batch_num must be an integer, got true", "true"),
    "activation_offset": ("activation_offset", 1, "activation_offset must be true or false", "1"),
    "do_fusion": ("do_fusion", None, "do_fusion must be true or false, got null", "null"),
    "skip fusion": ("skip_fusion_layers", "conv", "skip_fusion_layers must be a list", '"conv"'),
    "skip fusion item": ("skip_fusion_layers", [3], r"skip_fusion_layers\[0\] must be a string", "3"),
    "layer": ("conv", 3, "conv must be an object in braces, got 3", "3"),
    "quant_enable": ("conv", {"quant_enable": 1}, "conv.quant_enable must be true or false", "1"),
    "dmq int": ("conv", {"dmq_balancer_param": 1}, "must be a number with a decimal point", "1"),
    "activation": ("conv", {"activation_quant_params": []}, "must be an object in braces", "[]"),
    "act_algo": ("conv", activation(act_algo=1), "must be ifmr or hfmg", "1"),
    "search_range short": ("conv", activation(search_range=[1.3]), "must be a list of two numbers", "["),
    "search_range long": ("conv", activation(search_range=[1, 2, 3]), "must be a list of two numbers", "["),
    "search_range text": ("conv", activation(search_range=[0.7, "x"]), r"search_range\[1\] must be a number", '"x"'),
    "num_of_bins": ("conv", activation(act_algo="hfmg", num_of_bins="4096"), "num_of_bins must be 1024", '"4096"'),
}


def check(case: tuple, kind: type[ConfigError]) -> None:
    key, value, message, pointed_at = case
    text = json.dumps({"version": 1, "batch_num": 1, key: value}, indent=1)
    with pytest.raises(kind, match=message) as caught:
        PYTORCH.read_config(text, "config.json", NETWORK)
    assert type(caught.value) is kind
    [(line, column)] = places_of(caught.value)
    assert text.splitlines()[line - 1][column - 1 :].startswith(pointed_at)


@pytest.mark.parametrize("name", WRONG_VALUE)
def test_wrong_value(name):
    check(WRONG_VALUE[name], ConfigError)


@pytest.mark.parametrize("name", WRONG_TYPE)
def test_wrong_type(name):
    check(WRONG_TYPE[name], ConfigTypeError)


def test_all_mistakes_are_reported_together():
    text, places = marked(
        """{
  "version": 1,
  "batch_num": @0,
  @"batch_num": 2,
  "conv": {"activation_quant_params": {"num_bits": @"x", "search_step": @-1}, "weight_quant_params": {"num_bits": @5}},
  @"nope": {},
  "fc": {"weight_quant_params": {"num_bits": @null, "channel_wise": @true}}
}"""
    )
    with pytest.raises(ConfigTypeError, match="8 mistakes") as caught:
        PYTORCH.read_config(text, "config.json", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"config\.json:1:1: the config must be an object in braces, got \[\]"),
        ("3", r"config\.json:1:1: the config must be an object in braces, got 3"),
    ],
)
def test_json_that_is_no_object(text, message):
    with pytest.raises(ConfigTypeError, match=message):
        PYTORCH.read_config(text, "config.json", NETWORK)


def test_what_a_hand_edited_json_leaves_out_takes_its_default():
    text = '{"activation_offset": false, "conv": {}, "conv3d": {}, "circ": {"quant_enable": false}}'
    config = PYTORCH.read_config(text, "c.json", NETWORK)
    plan = PYTORCH.make_plan(config, NETWORK)
    assert [layer.name for layer in plan.enabled] == ["conv", "conv3d"]
    assert plan.find("conv").activation.asymmetric is False
    assert plan.find("conv").weight.channel_wise is True
    assert plan.not_quantized == {
        "bn": "BatchNorm2d cannot be quantized",
        "pool": "not in the config",
        "fc": "not in the config",
        "fcnb": "not in the config",
        "rnn": "not in the config",
        "circ": "padding_mode is circular",
        "dw": "not in the config",
    }


def test_adaround_takes_2_to_8_bits_in_the_json_only():
    for bits in range(2, 9):
        block = {"weight_quant_params": {"wts_algo": "ada_quantize", "num_bits": bits}}
        plan = PYTORCH.make_plan(PYTORCH.read_config(json.dumps({"conv": block}), "c.json", NETWORK), NETWORK)
        assert plan.find("conv").weight.num_bits == bits


def test_4_bit_weights_that_cannot_be_packed_get_8_with_a_warning():
    text = '{"dw": {"weight_quant_params": {"num_bits": 4}}}'
    config = PYTORCH.read_config(text, "c.json", NETWORK)
    plan = PYTORCH.make_plan(config, NETWORK)
    assert plan.find("dw").weight.num_bits == 8
    assert [str(warning) for warning in plan.warnings] == [
        'c.json:1:45: 4-bit weights need one group and an even number of input channels: 8 bits are used for "dw"'
    ]
    assert config.to_dict()["dw"]["weight_quant_params"]["num_bits"] == 4
