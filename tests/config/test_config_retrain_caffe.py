"""Configs of Caffe's QAT: the guide's tables, the simple config, and each mistake with its place."""

from __future__ import annotations

import json

import pytest
from config_models import layers, marked, places_of

from amct.config.qat.dialect import CAFFE_QAT
from amct.config.simple_config import explain
from amct.errors import ConfigError, ConfigTypeError, ParseError
from amct.numerics.settings import CaffeArqRetrainSettings, CaffeUlqSettings

NETWORK = layers(
    "data:Data", "conv1:Convolution", "bn:BatchNorm", "relu:ReLU", "dw:DepthwiseConv", "up:Deconvolution", "lstm:LSTM",
    "pool:Pooling", "fc:InnerProduct", "shared:Convolution", "loss:SoftmaxWithLoss",
    shared={"refusal": "it shares its weights"},
)  # fmt: skip
ALL = ["conv1", "bn", "relu", "dw", "up", "pool", "fc"]


OFF_BY_DEFAULT = {
    "AbsVal", "PReLU", "ReLU", "Scale", "BatchNorm", "Bias", "Clip", "RReLU", "ReLU6",
}  # fmt: skip


def test_types_are_those_of_the_guides_list():
    with_weights = {name: each.channel_wise for name, each in CAFFE_QAT.types.items() if each.weights}
    assert with_weights == {"Convolution": True, "DepthwiseConv": True, "InnerProduct": False, "Deconvolution": True}
    data_only = {name: each.on_by_default for name, each in CAFFE_QAT.types.items() if not each.weights}
    assert len(data_only) == 49
    assert {name for name, on in data_only.items() if not on} == OFF_BY_DEFAULT


def test_default_config_has_the_guides_keys_in_its_order():
    config = CAFFE_QAT.default_config(NETWORK)
    assert list(config.to_dict()) == ["version", *ALL]
    assert json.dumps(config.to_dict()["conv1"]) == json.dumps(
        {
            "retrain_enable": True,
            "retrain_data_config": {"algo": "ulq_quantize", "num_bits": 8},
            "retrain_weight_config": {"algo": "arq_retrain", "channel_wise": True, "num_bits": 8},
        }
    )
    assert config.to_dict()["fc"]["retrain_weight_config"]["channel_wise"] is False
    plan = CAFFE_QAT.make_plan(config, NETWORK)
    assert plan.batch_num == 1
    assert plan.not_quantized == {
        "data": "Data cannot be quantized",
        "bn": "BatchNorm is off by default: switch it on with retrain_enable",
        "relu": "ReLU is off by default: switch it on with retrain_enable",
        "lstm": "LSTM cannot be quantized",
        "shared": "it shares its weights",
        "loss": "SoftmaxWithLoss cannot be quantized",
    }


SIMPLE = """batch_num: 4
retrain_data_quant_config: { ulq_quantize: { clip_max_min: { clip_max: 6.1 clip_min: -6.1 } num_bits: 12 } }
retrain_weight_quant_config: { arq_retrain: { channel_wise: true } }
skip_layers: "up"
quant_skip_types: "DepthwiseConv"
override_layer_types: { layer_type: "InnerProduct" retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }
override_layer_configs: {
  layer_name: "dw"
  retrain_data_quant_config {
    ulq_quantize { fixed_min: true fixed_clip: true clip_max_min { clip_max: 3 clip_min: -3 } }
  }
}"""


def test_a_simple_config():
    config = CAFFE_QAT.expand_config(SIMPLE, "r.cfg", NETWORK)
    content = config.to_dict()
    assert list(content) == ["version", "batch_num", *ALL]
    assert list(content["conv1"]["retrain_data_config"].items()) == [
        ("algo", "ulq_quantize"),
        ("clip_max", 6.1),
        ("clip_min", -6.1),
        ("num_bits", 12),
    ]
    assert list(content["dw"]["retrain_data_config"].items()) == [
        ("algo", "ulq_quantize"),
        ("clip_max", 3.0),
        ("clip_min", -3.0),
        ("fixed_min", True),
        ("fixed_clip", True),
        ("num_bits", 8),
    ]
    assert content["fc"]["retrain_data_config"] == {"algo": "ulq_quantize", "num_bits": 16}
    plan = CAFFE_QAT.make_plan(config, NETWORK)
    assert [layer.name for layer in plan.enabled] == ["conv1", "dw", "pool", "fc"]
    assert [layer.name for layer in plan.enabled if not layer.quantizes_weights] == ["pool"]
    assert plan.not_quantized["up"] == "switched off: global field (r.cfg:4:1)"
    assert plan.find("dw").activation == CaffeUlqSettings(
        clip_max=3.0, clip_min=-3.0, fixed_min=True, fixed_clip=True, num_bits=8
    )
    assert plan.find("conv1").weight == CaffeArqRetrainSettings()
    assert {layer.batch_num for layer in plan.layers} == {4}
    reset = "the override has no retrain_weight_quant_config: built-in defaults apply instead of the global block"
    assert [str(warning) for warning in config.warnings] == [
        "r.cfg:7:1: quantized although skipped, because an override names these layers or their type: dw",
        f"r.cfg:7:1: {reset}: dw",
        f"r.cfg:6:1: {reset}: fc",
    ]


def test_global_channel_wise_is_per_tensor_with_a_warning_on_inner_product():
    config = CAFFE_QAT.expand_config(
        "retrain_weight_quant_config { arq_retrain { channel_wise: true } }", "r.cfg", NETWORK
    )
    assert [str(warning) for warning in config.warnings] == [
        "r.cfg:1:45: channel_wise does not apply to these layers, they are quantized per tensor: fc"
    ]
    assert CAFFE_QAT.make_plan(config, NETWORK).find("fc").weight == CaffeArqRetrainSettings(channel_wise=False)


def test_dst_type_and_num_bits_that_agree():
    text = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 num_bits: 16 } }"
    text += " retrain_weight_quant_config { arq_retrain { dst_type: INT8 } }"
    plan = CAFFE_QAT.make_plan(CAFFE_QAT.expand_config(text, "r.cfg", NETWORK), NETWORK)
    assert {(layer.activation.num_bits, layer.weight.num_bits) for layer in plan.layers} == {(16, 8)}


def test_explain():
    rows = {(row.layer, row.key): str(row.origin) for row in explain(CAFFE_QAT.expand_config(SIMPLE, "r.cfg", NETWORK))}
    assert rows["conv1", "retrain_data_config.clip_max"] == "common block (r.cfg:2:62)"
    assert rows["fc", "retrain_data_config.num_bits"] == "override of this layer type (r.cfg:6:95)"
    assert rows["dw", "retrain_data_config.fixed_clip"] == "override of this layer (r.cfg:10:36)"
    assert rows["dw", "retrain_data_config.num_bits"] == "built-in default"
    assert rows["", "batch_num"] == "global field (r.cfg:1:1)"


def test_a_layer_without_weights_has_data_factors_only():
    content = CAFFE_QAT.default_config(NETWORK).to_dict()
    assert content["pool"] == {
        "retrain_enable": True,
        "retrain_data_config": {"algo": "ulq_quantize", "num_bits": 8},
    }
    assert content["relu"]["retrain_enable"] is False
    content["relu"] = {"retrain_enable": True, "retrain_weight_config": {"algo": "arq_retrain"}}
    config = CAFFE_QAT.read_config(json.dumps(content), "c.json", NETWORK)
    assert [str(each).partition(": ")[2] for each in config.warnings] == [
        "relu.retrain_weight_config is ignored: ReLU has no weights to quantize"
    ]
    plan = CAFFE_QAT.make_plan(config, NETWORK)
    assert plan.find("relu").enabled
    assert not plan.find("relu").quantizes_weights
    assert plan.find("conv1").quantizes_weights


def test_an_override_switches_on_what_is_off_by_default():
    config = CAFFE_QAT.expand_config('override_layer_types { layer_type: "ReLU" }', "r.cfg", NETWORK)
    assert CAFFE_QAT.make_plan(config, NETWORK).find("relu").enabled


def data(block: str) -> str:
    return f"retrain_data_quant_config {{ ulq_quantize {{ {block} }} }}"


def weight(block: str) -> str:
    return f"retrain_weight_quant_config {{ arq_retrain {{ {block} }} }}"


CFG_MISTAKES = {
    "7 bits": (data("@num_bits: 7"), "ulq_quantize.num_bits must be at least 8, got 7"),
    "17 bits": (data("@num_bits: 17"), "ulq_quantize.num_bits must be at most 16, got 17"),
    "9-bit weights": (weight("@num_bits: 9"), "arq_retrain.num_bits must be 8, got 9"),
    "INT4 data": (data("@dst_type: INT4"), "ulq_quantize.dst_type must be INT8 or INT16, got INT4"),
    "INT16 weights": (weight("@dst_type: INT16"), "arq_retrain.dst_type must be INT8, got INT16"),
    "contradiction": (data("dst_type: INT8 @num_bits: 12"), "num_bits 12 contradicts dst_type INT8. Keep one"),
    "clip_max": (data("clip_max_min { @clip_max: -1 clip_min: -1 }"), "clip_max must be greater than 0, got -1"),
    "clip_min": (data("clip_max_min { clip_max: 1 @clip_min: 1 }"), "clip_min must be less than 0, got 1"),
    "nothing to fix": (data("@fixed_clip: true"), "fixed_clip needs clip_max or clip_min"),
    "channel_wise on a layer": (
        f'override_layer_configs {{ layer_name: "fc" {weight("@channel_wise: true")} }}',
        'layer "fc": channel_wise must be false, InnerProduct has one scale for all weights',
    ),
    "channel_wise on a type": (
        f'override_layer_types {{ layer_type: "InnerProduct" {weight("@channel_wise: true")} }}',
        "type InnerProduct: channel_wise must be false",
    ),
    "unknown layer": ('@skip_layers: "conv2"', 'the layer "conv2" is unknown. Did you mean "conv1"'),
    "layer without QAT": ('@quant_skip_layers: "lstm"', "of type LSTM, which cannot be quantized"),
    "type without QAT": ('@skip_layer_types: "LSTM"', 'the layer type "LSTM" cannot be quantized'),
    "everything skipped": (
        '@quant_skip_types: "Convolution" quant_skip_types: "DepthwiseConv" quant_skip_types: "Deconvolution"'
        ' skip_layers: "fc" skip_layers: "pool"',
        r"every layer that can be quantized \(7\) is switched off",
    ),
    "batch_num": ("@batch_num: 0", "batch_num must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", CFG_MISTAKES)
def test_mistake_in_a_simple_config(name):
    text, places = marked(CFG_MISTAKES[name][0])
    with pytest.raises(ConfigError, match=CFG_MISTAKES[name][1]) as caught:
        CAFFE_QAT.expand_config(text, "r.cfg", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prune_config { }", r"r\.cfg:1:1.*prune_config"),
        ("retrain_weight_quant_config { ulq_retrain { } }", "ulq_retrain.*Did you mean"),
        ("fakequant_precision_mode: FORCE_FP16_QUANT", "fakequant_precision_mode"),
        (data("clip_max_min { clip_max: 1 }"), "ClipMaxMin needs clip_min"),
    ],
)
def test_fields_that_caffe_does_not_have(text, message):
    with pytest.raises(ParseError, match=message):
        CAFFE_QAT.expand_config(text, "r.cfg", NETWORK)


def json_data(**values: object) -> dict:
    return {"retrain_data_config": values}


def json_weight(**values: object) -> dict:
    return {"retrain_weight_config": values}


WRONG_VALUE = {
    "version": ("version", 2, "version must be 1, got 2", "2"),
    "batch_num": ("batch_num", 0, "batch_num must be at least 1, got 0", "0"),
    "unknown layer": ("conv2", {}, '"conv2" is unknown. Did you mean "conv1"', '"conv2"'),
    "unknown global": ("do_fusion", True, '"do_fusion" is unknown', '"do_fusion"'),
    "type without QAT": ("lstm", {}, 'the layer "lstm" cannot be quantized: its type LSTM is not', '"lstm"'),
    "refused": ("shared", {}, "it shares its weights. Remove it", '"shared"'),
    "7 bits": ("conv1", json_data(num_bits=7), "num_bits must be at least 8, got 7", "7"),
    "17 bits": ("conv1", json_data(num_bits=17), "num_bits must be at most 16, got 17", "17"),
    "4-bit weights": ("conv1", json_weight(num_bits=4), "retrain_weight_config.num_bits must be 8, got 4", "4"),
    "clip_max": ("conv1", json_data(clip_max=0), "clip_max must be greater than 0, got 0", "0"),
    "clip_min": ("conv1", json_data(clip_min=0.5), "clip_min must be less than 0, got 0.5", "0.5"),
    "nothing to fix": ("conv1", json_data(fixed_clip=True), "fixed_clip needs clip_max or clip_min", "true"),
    "channel_wise": ("fc", json_weight(channel_wise=True), 'layer "fc": channel_wise must be false', "true"),
    "data algorithm": ("conv1", json_data(algo="ulq"), 'must be ulq_quantize, got "ulq"', '"ulq"'),
    "weight algorithm": ("conv1", json_weight(algo="ulq_retrain"), "must be arq_retrain, got", '"ulq_retrain"'),
    "key of PyTorch": ("conv1", json_data(dst_type="INT8"), 'the key "dst_type" is unknown', '"dst_type"'),
    "nothing on": ("conv1", {"retrain_enable": False}, "no layer is switched on", "{"),
}
WRONG_TYPE = {
    "version": ("version", True, "version must be an integer, got true", "true"),
    "clip_max": ("conv1", json_data(clip_max="6"), 'clip_max must be a number, got "6"', '"6"'),
    "null clip": ("conv1", json_data(clip_max=None), "clip_max must be a number, got null", "null"),
    "weight num_bits": ("conv1", json_weight(num_bits=8.0), "num_bits must be an integer, got 8.0", "8.0"),
    "num_bits": ("conv1", json_data(num_bits=8.0), "num_bits must be an integer, got 8.0", "8.0"),
    "fixed_min": ("conv1", json_data(fixed_min=0), "fixed_min must be true or false, got 0", "0"),
    "weight": ("conv1", {"retrain_weight_config": []}, "must be an object in braces", "[]"),
}


def check(case: tuple, kind: type[ConfigError]) -> None:
    key, value, message, pointed_at = case
    text = json.dumps({"conv1": {}, "version": 1} | {key: value}, indent=1)
    with pytest.raises(kind, match=message) as caught:
        CAFFE_QAT.read_config(text, "config.json", NETWORK)
    assert type(caught.value) is kind
    [(line, column)] = places_of(caught.value)
    assert text.splitlines()[line - 1][column - 1 :].startswith(pointed_at)


@pytest.mark.parametrize("name", WRONG_VALUE)
def test_wrong_value(name):
    check(WRONG_VALUE[name], ConfigError)


@pytest.mark.parametrize("name", WRONG_TYPE)
def test_wrong_type(name):
    check(WRONG_TYPE[name], ConfigTypeError)


def test_everything_is_optional_as_the_tables_say():
    plan = CAFFE_QAT.make_plan(CAFFE_QAT.read_config('{"up":{}}', "config.json", NETWORK), NETWORK)
    assert [(layer.name, layer.enabled) for layer in plan.layers] == [("up", True)]
    assert plan.layers[0].activation == CaffeUlqSettings()
    assert plan.not_quantized["conv1"] == "not in the config"


def test_a_clip_may_be_given_alone_and_without_a_decimal_point():
    text = '{"version":1,"conv1":{"retrain_data_config":{"clip_max":6,"fixed_clip":true,"fixed_min":false}}}'
    config = CAFFE_QAT.read_config(text, "config.json", NETWORK)
    activation = CAFFE_QAT.make_plan(config, NETWORK).find("conv1").activation
    assert activation == CaffeUlqSettings(clip_max=6.0, fixed_clip=True, fixed_min=False)
    again = CAFFE_QAT.read_config(config.to_json(), "config.json", NETWORK)
    assert again.to_json() == config.to_json()


def test_nets_no_config_can_be_made_for():
    with pytest.raises(ConfigError, match="the model has no layer that can be quantized"):
        CAFFE_QAT.default_config(layers("data:Data", "lstm:LSTM"))
    with pytest.raises(ConfigError, match=r'"version" has the name of a global field .*Rename the layer'):
        CAFFE_QAT.default_config(layers("version:Convolution"))
