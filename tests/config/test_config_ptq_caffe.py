"""PTQ configs of Caffe: the guide's keys, defaults and rules, and each mistake with its place (marked by ``@``)."""

from __future__ import annotations

import json

import pytest
from config_models import CAFFE_RESNET, layers, marked, places_of

from amct.config.layers import CAFFE_TYPES
from amct.config.ptq.caffe import CAFFE
from amct.config.simple_config import explain
from amct.errors import ConfigError, ConfigTypeError, ParseError
from amct.numerics.settings import ArqSettings, BatchNormUpdate, IfmrSettings

IFMR = {
    "num_bits": 8,
    "max_percentile": 0.999999,
    "min_percentile": 0.999999,
    "search_range": [0.7, 1.3],
    "search_step": 0.01,
}


def expand(text: str) -> dict:
    return CAFFE.expand_config(text, "quant.cfg", CAFFE_RESNET).to_dict()


def warnings_of(text: str) -> list[str]:
    return [str(warning) for warning in CAFFE.expand_config(text, "quant.cfg", CAFFE_RESNET).warnings]


def plan_of(data: dict):
    config = CAFFE.read_config(json.dumps(data), "config.json", CAFFE_RESNET)
    return CAFFE.make_plan(config, CAFFE_RESNET)


def of_layer(name: str, block: str) -> str:
    return f'override_layer_configs {{\n  layer_name: "{name}"\n  calibration_config {{ {block} }}\n}}\n'


def of_type(name: str, block: str) -> str:
    return f'override_layer_types {{\n  layer_type: "{name}"\n  calibration_config {{ {block} }}\n}}\n'


def common(block: str) -> str:
    return f"common_config {{ {block} }}\n"


def test_default_config_has_the_guides_keys_in_its_order():
    config = CAFFE.default_config(CAFFE_RESNET, batch_num=2).to_dict()
    assert json.dumps({key: value for key, value in config.items() if not isinstance(value, dict)}) == json.dumps(
        {"version": 1, "batch_num": 2, "activation_offset": True, "do_fusion": True, "skip_fusion_layers": []}
    )
    assert [key for key, value in config.items() if isinstance(value, dict)] == [
        layer.name for layer in CAFFE_RESNET if layer.type != "Input"
    ]
    weight = {"wts_algo": "arq_quantize", "channel_wise": True, "num_bits": 8}
    assert json.dumps(config["conv1"]) == json.dumps(
        {"quant_enable": True, "activation_quant_params": IFMR, "weight_quant_params": weight}
    )
    assert config["fc1000"]["weight_quant_params"]["channel_wise"] is False
    assert config["lstm1"]["weight_quant_params"]["channel_wise"] is False
    assert config["res2a"] == {"quant_enable": True, "activation_quant_params": [IFMR, IFMR]}
    assert config["prob"] == {"quant_enable": True, "activation_quant_params": IFMR}


def test_every_type_of_the_table_is_on_or_off_as_the_guide_says():
    network = layers(*(f"layer_{name}:{name}" for name in CAFFE_TYPES))
    plan = CAFFE.make_plan(CAFFE.default_config(network), network)
    assert len(plan.layers) == 78
    assert {layer.type for layer in plan.layers if not layer.enabled} == {
        name for name, capability in CAFFE_TYPES.items() if not capability.on_by_default
    }
    assert all((layer.weight is not None) == CAFFE_TYPES[layer.type].weights for layer in plan.layers)


def test_a_layer_off_by_default_is_switched_on_by_hand():
    config = CAFFE.default_config(CAFFE_RESNET).to_dict()
    assert config["conv1_relu"]["quant_enable"] is False
    config["conv1_relu"]["quant_enable"] = True
    assert plan_of(config).find("conv1_relu").enabled


def test_an_override_of_a_layer_off_by_default_tells_what_to_do():
    text = of_type("ReLU", "ifmr_quantize { num_bits: 12 }")
    assert expand(text)["conv1_relu"]["quant_enable"] is False
    assert "acts only after quant_enable is set to true in the JSON" in warnings_of(text)[0]


def test_arguments_and_global_fields():
    config = CAFFE.default_config(CAFFE_RESNET, activation_offset=False)
    plan = CAFFE.make_plan(config, CAFFE_RESNET)
    assert not plan.find("conv1").activation.asymmetric
    config = expand("batch_num: 3 activation_offset: false do_fusion: false")
    assert (config["batch_num"], config["activation_offset"], config["do_fusion"]) == (3, False, False)


def test_bn_update_is_written_only_when_asked_for():
    assert "update_bn" not in expand("")
    config = expand("update_bn: true")
    assert config["bn_update_config"] == {
        "bn_moving_average_fraction": 0.5,
        "bn_update_iterations": 30,
        "bn_dump_dir": "tmp/bn_data",
    }
    assert list(config)[:7][-2:] == ["update_bn", "bn_update_config"]
    assert plan_of({"update_bn": True}).update_bn == BatchNormUpdate()
    assert plan_of({"update_bn": False, "bn_update_config": {"bn_update_iterations": 7}}).update_bn is None
    assert warnings_of("\nbn_update_config { }") == [
        "quant.cfg:2:1: bn_update_config has no effect while update_bn is not true"
    ]


def test_with_offset_of_a_layer_beats_activation_offset():
    block = {"activation_quant_params": {"with_offset": False, "num_bits": 12}}
    plan = plan_of({"conv1": block, "pool1": {}})
    assert plan.find("conv1").activation == IfmrSettings(num_bits=12, asymmetric=False)
    assert plan.find("pool1").activation.asymmetric
    written = CAFFE.read_config(json.dumps({"conv1": block, "pool1": {}}), "c.json", CAFFE_RESNET).to_dict()
    assert written["conv1"]["activation_quant_params"]["with_offset"] is False
    assert "with_offset" not in written["pool1"]["activation_quant_params"]


def test_several_bottoms_take_a_list_an_object_or_one_entry_for_all():
    for given in ([{"num_bits": 9}, {"num_bits": 10}], [{"num_bits": 9}], {"num_bits": 9}):
        plan = plan_of({"res2a": {"activation_quant_params": given}})
        second = 10 if given == [{"num_bits": 9}, {"num_bits": 10}] else 9
        assert [item.num_bits for item in plan.find("res2a").activations] == [9, second]


def test_deleting_a_layer_from_the_json_skips_it():
    config = CAFFE.default_config(CAFFE_RESNET).to_dict()
    del config["conv1"]
    plan = plan_of(config)
    assert plan.find("conv1") is None
    assert plan.not_quantized["conv1"] == "not in the config"


def test_joint_quant_may_be_false_as_in_generated_files_and_is_refused_else_in_both_forms():
    config = CAFFE.read_config('{"joint_quant": false, "conv1": {}}', "c.json", CAFFE_RESNET)
    assert "joint_quant" not in config.to_dict()
    with pytest.raises(ConfigError, match=r"c\.json:1:17: joint_quant must be false: the inputs of an Eltwise"):
        CAFFE.read_config('{"joint_quant": true, "conv1": {}}', "c.json", CAFFE_RESNET)
    with pytest.raises(ParseError, match=r"c\.cfg:2:1: AMCTConfig has no field joint_quant"):
        CAFFE.expand_config("batch_num: 2\njoint_quant: true", "c.cfg", CAFFE_RESNET)


def test_weight_blocks_of_layers_without_weights():
    weight = {"weight_quant_params": {"wts_algo": "arq_quantize", "channel_wise": False, "num_bits": 8}}
    plan = plan_of({"pool5": weight})
    assert (plan.find("pool5").weight, plan.warnings) == (None, ())
    plan = plan_of({"prob": weight})
    assert plan.find("prob").weight is None
    assert "prob.weight_quant_params is ignored: Softmax has no weights" in str(plan.warnings[0])


def test_a_missing_weight_block_means_arq():
    assert plan_of({"fc1000": {}}).find("fc1000").weight == ArqSettings(channel_wise=False)


def test_what_the_common_block_cannot_give_every_layer():
    text = common("snq_quantize { channel_wise: true }")
    config = expand(text)
    assert config["conv1"]["weight_quant_params"]["num_bits"] == 4
    assert config["fc1000"]["weight_quant_params"]["channel_wise"] is False
    assert config["lstm1"]["weight_quant_params"] == {"wts_algo": "arq_quantize", "channel_wise": False, "num_bits": 8}
    assert warnings_of(text) == [
        "quant.cfg:1:32: channel_wise does not apply to these layers, they are quantized per tensor:"
        " pool5, lstm1, fc1000",
        "quant.cfg:1:17: snq_quantize does not apply to these layers, arq_quantize is used: lstm1",
    ]


def test_explain_shows_every_bottom_and_the_offset_that_holds():
    config = CAFFE.expand_config("activation_offset: false", "q.cfg", CAFFE_RESNET)
    rows = {row.key: row for row in explain(config) if row.layer == "res2a"}
    assert rows["activation_quant_params[1].num_bits"].value == 8
    assert str(rows["activation_quant_params[1].with_offset"].origin) == "global field (q.cfg:1:1)"
    assert rows["activation_quant_params[1].with_offset"].value is False


CFG = {
    "unknown skip layer": ('@skip_layers: "conv2"', 'the layer "conv2" is unknown. Did you mean "conv1"'),
    "layer of no use": ('@skip_layers: "data"', '"data" is of type Input, which cannot be quantized'),
    "unknown type": ('@skip_layer_types: "Convolutoin"', 'cannot be quantized. Did you mean "Convolution"'),
    "skip fusion": ('@skip_fusion_layers: "prob"', "of type Softmax, which cannot be fused"),
    "batch_num": ("@batch_num: 0", "batch_num must be at least 1"),
    "channel_wise on InnerProduct": (
        of_type("InnerProduct", "arq_quantize { @channel_wise: true }"),
        "type InnerProduct: channel_wise must be false, InnerProduct has one scale",
    ),
    "channel_wise on LSTM": (
        of_layer("lstm1", "arq_quantize { @channel_wise: true }"),
        'layer "lstm1": channel_wise must be false',
    ),
    "channel_wise on AVE pooling": (
        of_layer("pool5", "arq_quantize { @channel_wise: true }"),
        'layer "pool5": channel_wise must be false, AVE pooling has one scale',
    ),
    "channel_wise on the pooling type": (
        of_type("Pooling", "arq_quantize { @channel_wise: true }"),
        "type Pooling: channel_wise must be false, AVE pooling",
    ),
    "snq on LSTM": (
        of_layer("lstm1", "@snq_quantize { }"),
        "snq_quantize is only for Convolution, DepthwiseConv, InnerProduct, Deconvolution",
    ),
    "activation bits 7": (common("ifmr_quantize { @num_bits: 7 }"), "activations can have 8 to 16 bits, got 7"),
    "activation bits 17": (common("ifmr_quantize { @num_bits: 17 }"), "activations can have 8 to 16 bits, got 17"),
    "weight bits": (common("arq_quantize { @num_bits: 4 }"), "arq_quantize gives weights 8 bits, got 4"),
    "max_iteration": (common("snq_quantize { @max_iteration: 499 }"), "max_iteration must be at least 500, got 499"),
    "min_distance": (common("snq_quantize { @min_distance: 0.01 }"), "min_distance must be at most 0.001"),
    "init_algo": (common("snq_quantize { @init_algo: 'random' }"), "'uniform', 'gaussian' or 'd2sampling'"),
    "bn iterations": ("update_bn: true bn_update_config { @bn_update_iterations: 1000 }", "less than 1000, got 1000"),
    "bn fraction": ("bn_update_config { @bn_moving_average_fraction: 1 }", "must be less than 1, got 1"),
    "bn folder": ("bn_update_config { @bn_dump_dir: '' }", "bn_update_config.bn_dump_dir"),
}


@pytest.mark.parametrize("name", CFG)
def test_mistake_in_a_simple_config(name):
    text, places = marked(CFG[name][0])
    with pytest.raises(ConfigError, match=CFG[name][1]) as caught:
        CAFFE.expand_config(text, "quant.cfg", CAFFE_RESNET)
    assert places_of(caught.value) == places


def test_other_mistakes():
    with pytest.raises(ParseError, match=r"quant\.cfg:1:17"):
        CAFFE.expand_config("common_config { hfmg_quantize { } }", "quant.cfg", CAFFE_RESNET)
    with pytest.raises(ConfigError, match="batch_num must be at least 1, got 0"):
        CAFFE.default_config(CAFFE_RESNET, batch_num=0)
    with pytest.raises(ConfigError, match=r"no layer that can be quantized(.|\n)*\n  data \(Input\): this type cannot"):
        CAFFE.default_config(layers("data:Input"))
    with pytest.raises(ConfigError, match='"joint_quant" has the name of a global field'):
        CAFFE.default_config(layers("joint_quant:Convolution"))


JSON = {
    "unknown layer": ('{@"conv9": {}}', ConfigError, 'the layer or global field "conv9" is unknown'),
    "layer of no use": ('{@"data": {}}', ConfigError, 'the layer "data" cannot be quantized: its type Input'),
    "repeated layer": ('{"conv1": {}, @"conv1": {}}', ConfigError, 'the key "conv1" is repeated'),
    "version": ('{"version": @3}', ConfigError, "version must be 1, got 3"),
    "joint_quant": ('{"joint_quant": @1}', ConfigTypeError, "joint_quant must be true or false"),
    "update_bn": ('{"update_bn": @"yes"}', ConfigTypeError, "update_bn must be true or false"),
    "bn config": ('{"bn_update_config": @3}', ConfigTypeError, "bn_update_config must be an object"),
    "bn iterations": ('{"bn_update_config": {"bn_update_iterations": @0}}', ConfigError, "must be greater than 0"),
    "bn unknown": ('{"bn_update_config": {@"bn_dump": "x"}}', ConfigError, 'Did you mean "bn_dump_dir"'),
    "skip fusion": ('{"skip_fusion_layers": [@"prob"]}', ConfigError, "Softmax, which cannot be fused"),
    "dmq": ('{"conv1": {@"dmq_balancer_param": 0.5}}', ConfigError, 'the key "dmq_balancer_param" is unknown'),
    "asymmetric": (
        '{"conv1": {"activation_quant_params": {@"asymmetric": true}}}',
        ConfigError,
        'the key "asymmetric" is unknown',
    ),
    "with_offset": (
        '{"conv1": {"activation_quant_params": {"with_offset": @1}}}',
        ConfigTypeError,
        r"conv1\.activation_quant_params\.with_offset must be true or false",
    ),
    "bits": ('{"conv1": {"activation_quant_params": {"num_bits": @17}}}', ConfigError, "can have 8 to 16 bits, got 17"),
    "bits in a list": (
        '{"res2a": {"activation_quant_params": [{}, {"num_bits": @7}]}}',
        ConfigError,
        r"res2a\.activation_quant_params\[1\]: activations can have 8 to 16 bits, got 7",
    ),
    "too many bottoms": (
        '{"res2a": {"activation_quant_params": @[{}, {}, {}]}}',
        ConfigError,
        "has 3 entries, but the layer has 2 inputs",
    ),
    "no bottoms": ('{"conv1": {"activation_quant_params": @[]}}', ConfigError, "has 0 entries, but the layer has 1"),
    "bottom is no object": (
        '{"res2a": {"activation_quant_params": [{}, @3]}}',
        ConfigTypeError,
        r"activation_quant_params\[1\] must be an object",
    ),
    "weight bits": ('{"conv1": {"weight_quant_params": {"num_bits": @4}}}', ConfigError, "8 bits, got 4"),
    "snq bits": (
        '{"conv1": {"weight_quant_params": {"wts_algo": "snq_quantize", "num_bits": @8}}}',
        ConfigError,
        "snq_quantize gives weights 4 bits, got 8",
    ),
    "snq key in arq": (
        '{"conv1": {"weight_quant_params": {@"max_iteration": 1000}}}',
        ConfigError,
        '"max_iteration" belongs to snq_quantize, but the block is of arq_quantize',
    ),
    "snq on LSTM": (
        '{"lstm1": {@"weight_quant_params": {"wts_algo": "snq_quantize"}}}',
        ConfigError,
        "snq_quantize is only for",
    ),
    "channel_wise": (
        '{"fc1000": {"weight_quant_params": {"channel_wise": @true}}}',
        ConfigError,
        "InnerProduct has one scale",
    ),
    "channel_wise pool": (
        '{"pool5": {"weight_quant_params": {"channel_wise": @true}}}',
        ConfigError,
        "AVE pooling has one scale",
    ),
}


@pytest.mark.parametrize("name", JSON)
def test_mistake_in_a_json_config(name):
    text, places = marked(JSON[name][0])
    with pytest.raises(JSON[name][1], match=JSON[name][2]) as caught:
        CAFFE.read_config(text, "config.json", CAFFE_RESNET)
    assert places_of(caught.value) == places
    assert type(caught.value) is JSON[name][1]


def test_weights_asked_for_a_layer_without_weights_are_a_warning():
    text = of_layer("prob", "arq_quantize { }")
    assert warnings_of(text) == [
        'quant.cfg:3:24: layer "prob": arq_quantize has no effect, Softmax has no weights to quantize'
    ]
    assert "weight_quant_params" not in expand(text)["prob"]
