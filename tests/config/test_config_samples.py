"""Every sample config of the documents (PTQ of PyTorch and of Caffe), with the outcome a reader of them expects.

The ``*.expected.json`` files were checked by eye against the documents: precedence, skipped layers, defaults.
"""

from __future__ import annotations

import json

import pytest
from config_models import CAFFE_RESNET, CAFFE_TWO_CONVS, SAMPLES, layers

from amct.config.ptq.caffe import CAFFE
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import ConfigError, ParseError
from amct.numerics.settings import SnqSettings

NETWORK = layers(
    "Opname:Conv2d", "bn:BatchNorm2d", "conv2:Conv2d", "deconv:ConvTranspose2d", "pool:AvgPool2d", "fc:Linear"
)


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def expected(name: str) -> str:
    return sample(f"{name}.expected.json").removesuffix("\n")


@pytest.mark.parametrize("name", ["pytorch_quant", "pytorch_dmq_balancer"])
def test_pytorch_sample_with_a_real_type_for_its_placeholder(name):
    text = sample(f"{name}.cfg").replace("Optype", "Linear")
    assert PYTORCH.expand_config(text, "quant.cfg", NETWORK).to_json() == expected(name)


def test_pytorch_samples_tell_about_layers_that_take_less():
    warnings = {
        name: [str(warning) for warning in PYTORCH.expand_config(text, "quant.cfg", NETWORK).warnings]
        for name in ("pytorch_quant", "pytorch_dmq_balancer")
        for text in [sample(f"{name}.cfg").replace("Optype", "Linear")]
    }
    per_tensor = "channel_wise does not apply to these layers, they are quantized per tensor: pool"
    balancer = "dmq_balancer does not apply to these layers: pool"
    assert warnings == {
        "pytorch_quant": [f"quant.cfg:22:10: {balancer}", f"quant.cfg:10:9: {per_tensor}"],
        "pytorch_dmq_balancer": [f"quant.cfg:21:9: {balancer}", f"quant.cfg:10:9: {per_tensor}"],
    }


def test_placeholder_types_of_the_samples_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        PYTORCH.expand_config(sample("pytorch_dmq_balancer.cfg"), "quant.cfg", NETWORK)
    assert [(problem.position.line, problem.position.column) for problem in caught.value.problems] == [(5, 1), (25, 1)]
    with pytest.raises(ConfigError, match=r'quant.cfg:5:1: skip_layer_types: the layer type "Optype" cannot be'):
        PYTORCH.expand_config(sample("pytorch_quant.cfg"), "quant.cfg", NETWORK)


def test_dots_of_the_hfmg_sample_are_no_text_format():
    text = sample("pytorch_hfmg_fragment.cfg")
    with pytest.raises(ParseError, match=r"quant\.cfg:4:1"):
        PYTORCH.expand_config(text, "quant.cfg", NETWORK)
    config = PYTORCH.expand_config(text.replace("...", "# ..."), "quant.cfg", NETWORK)
    assert config.to_json() == expected("pytorch_hfmg_fragment")


def test_ada_round_sample():
    config = PYTORCH.expand_config(sample("pytorch_ada_round.cfg"), "ada_round.cfg", NETWORK)
    assert config.to_json() == expected("pytorch_ada_round")
    assert config.warnings == ()


@pytest.mark.parametrize("name", ["caffe_snq_quant", "caffe_snq_steps"])
def test_caffe_snq_samples(name):
    config = CAFFE.expand_config(sample(f"{name}.cfg"), "quant.cfg", CAFFE_RESNET)
    assert config.to_json() == expected(name)
    plan = CAFFE.make_plan(config, CAFFE_RESNET)
    assert plan.find("res2a_branch1").weight == SnqSettings(init_algo="gaussian")
    assert plan.update_bn.bn_update_iterations == 30


@pytest.mark.parametrize("name", ["caffe_uniform.json", "caffe_create_quant_config.json"])
def test_caffe_samples_are_read_and_written_in_their_order(name):
    text = sample(name)
    config = CAFFE.read_config(text, name, CAFFE_TWO_CONVS)
    wanted = json.loads(text)
    wanted.pop("joint_quant", None)  # accepted, ignored, never written
    assert json.dumps(config.to_dict()) == json.dumps(wanted)
    plan = CAFFE.make_plan(config, CAFFE_TWO_CONVS)
    assert [layer.weight.channel_wise for layer in plan.layers] == [True, False]
    assert plan.batch_num == 2


def test_caffe_snq_json_sample_opens_with_two_braces():
    text = sample("caffe_snq_two_braces.json")
    with pytest.raises(ParseError, match=r'config.json:2:1: expected a key in double quotes or "}", found \'{\''):
        CAFFE.read_config(text, "config.json", CAFFE_RESNET)


def test_caffe_snq_json_sample_with_one_brace():
    text = sample("caffe_snq_two_braces.json").replace("{\n{", "{", 1)
    config = CAFFE.read_config(text, "config.json", CAFFE_RESNET)
    wanted = json.loads(text)
    layer = wanted["res2a_branch1"]
    layer["activation_quant_params"] = layer["activation_quant_params"][0]  # one bottom: written as an object
    assert json.dumps(config.to_dict()) == json.dumps(wanted)
    plan = CAFFE.make_plan(config, CAFFE_RESNET)
    assert plan.not_quantized["conv1"] == "not in the config"
    assert [item.name for item in plan.enabled] == ["res2a_branch1"]


GENERATED = {
    "pytorch default": lambda: (
        PYTORCH.default_config(NETWORK, batch_num=3, activation_offset=False, skip_layers=["fc"]),
        PYTORCH.read_config,
        NETWORK,
    ),
    "pytorch ada": lambda: (
        PYTORCH.expand_config(sample("pytorch_ada_round.cfg"), "a.cfg", NETWORK),
        PYTORCH.read_config,
        NETWORK,
    ),
    "caffe default": lambda: (CAFFE.default_config(CAFFE_RESNET), CAFFE.read_config, CAFFE_RESNET),
    "caffe snq": lambda: (
        CAFFE.expand_config(sample("caffe_snq_quant.cfg"), "s.cfg", CAFFE_RESNET),
        CAFFE.read_config,
        CAFFE_RESNET,
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_generated_read_and_written_again_is_byte_identical(name):
    config, read_config, network = GENERATED[name]()
    text = config.to_json()
    once = read_config(text, "config.json", network)
    assert once.to_json() == text
    assert read_config(once.to_json().encode(), "config.json", network).to_json() == text
