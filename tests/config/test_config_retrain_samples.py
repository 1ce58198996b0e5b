"""Every sample config of the retraining documents, with the outcome a reader of them expects.

The ``*.expected.json`` files were checked by eye against the documents: precedence, skipped layers, defaults.
"""

from __future__ import annotations

import json

import pytest
from config_models import SAMPLES, layers, places_of

from amct.config.prune.dialect import COMPRESSION, PRUNING
from amct.config.qat.dialect import CAFFE_QAT, PYTORCH_QAT
from amct.errors import ConfigError, ParseError
from amct.numerics.settings import CaffeArqRetrainSettings, CaffeUlqSettings

NETWORK = layers(
    "Opname:Conv2d", "bn:BatchNorm2d", "conv2:Conv2d", "quant_skip_layers_name_0:Conv2d", "deconv:ConvTranspose2d",
    "pool:AvgPool2d", "fc:Linear",
)  # fmt: skip
CAFFE = layers(
    "data:Data", "conv1:Convolution", "drop:Dropout", "conv2_1/expand:Convolution", "conv2_1/dwise:DepthwiseConv",
    "loss:SoftmaxWithLoss",
)  # fmt: skip
PYTORCH_SAMPLES = {
    "quant": PYTORCH_QAT,
    "prune": COMPRESSION,
    "selective_prune": COMPRESSION,
    "compressed1": COMPRESSION,
    "compressed2": COMPRESSION,
}
AGAIN = "quantized although skipped, because an override names these layers or their type"
STAYS = "not pruned although overridden: a skipped layer stays as it is"
RESET = "the override has no retrain_{}_quant_config: built-in defaults apply instead of the global block"
WARNINGS = {
    "quant": [
        f"33:1: {AGAIN}: Opname",
        f"33:1: {RESET.format('weight')}: Opname",
        "41:12: AMCT does not train INT4 activations with INT8 weights, here they are trained: Opname",
        f"23:1: {AGAIN}: fc",
        f"23:1: {RESET.format('data')}: fc",
    ],
    "prune": ['13:1: "Opname" is repeated in regular_prune_skip_layers. Name it once.', f"12:1: {STAYS}: Opname"],
    "selective_prune": [
        '13:1: "Opname" is repeated in regular_prune_skip_layers. Name it once.',
        f"12:1: {STAYS}: Opname",
    ],
    "compressed1": [f"23:1: {AGAIN}: fc", f"11:1: {STAYS}: fc"],
    "compressed2": [f"22:1: {AGAIN}: fc", f"10:1: {STAYS}: fc"],
}


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


@pytest.mark.parametrize("name", PYTORCH_SAMPLES)
def test_pytorch_sample_with_a_real_type_for_its_placeholder(name):
    text = sample(f"pytorch_retrain_{name}.cfg").replace("Optype", "Linear")
    config = PYTORCH_SAMPLES[name].expand_config(text, "s.cfg", NETWORK)
    assert config.to_json() == sample(f"pytorch_retrain_{name}.expected.json").removesuffix("\n")
    assert [str(warning) for warning in config.warnings] == [f"s.cfg:{text}" for text in WARNINGS[name]]


@pytest.mark.parametrize(
    ("name", "places"),
    [("quant", [(21, 1), (23, 1)]), ("compressed1", [(11, 1), (14, 1), (23, 1), (23, 1)])],
)
def test_placeholder_types_of_the_samples_are_reported_together(name, places):
    with pytest.raises(ConfigError, match='the layer type "Optype" cannot be') as caught:
        PYTORCH_SAMPLES[name].expand_config(sample(f"pytorch_retrain_{name}.cfg"), "s.cfg", NETWORK)
    assert places_of(caught.value) == places


def test_prune_samples_are_the_same_for_pruning_alone():
    for name in ("prune", "selective_prune"):
        text = sample(f"pytorch_retrain_{name}.cfg")
        alone = PRUNING.expand_config(text, "s.cfg", NETWORK)
        assert alone.to_json() == COMPRESSION.expand_config(text, "s.cfg", NETWORK).to_json()


def test_a_combined_sample_for_pruning_alone_loses_its_quantization_only():
    text = sample("pytorch_retrain_compressed1.cfg").replace("Optype", "Linear")
    alone = PRUNING.expand_config(text, "s.cfg", NETWORK).to_dict()
    both = COMPRESSION.expand_config(text, "s.cfg", NETWORK).to_dict()
    assert alone.pop("version") == both.pop("version") == 1
    assert "deconv" not in alone
    for name, data in alone.items():
        assert data == {key: value for key, value in both[name].items() if key.startswith("regular_prune")}


@pytest.mark.parametrize("name", ["caffe_retrain_config.json", "caffe_retrain_create.json"])
def test_caffe_samples_end_with_a_comma_too_many(name):
    with pytest.raises(ParseError, match=r'config.json:38:7: the comma before "}" has nothing after it') as caught:
        CAFFE_QAT.read_config(sample(name), "config.json", CAFFE)
    assert sample(name).splitlines()[37] == "     }, "
    assert places_of(caught.value) == [(38, 7)]


@pytest.mark.parametrize("name", ["caffe_retrain_config.json", "caffe_retrain_create.json"])
def test_caffe_samples_without_that_comma_are_the_default_config(name):
    text = sample(name)
    repaired = text[: text.rindex(",")] + text[text.rindex(",") + 1 :]
    config = CAFFE_QAT.read_config(repaired, "config.json", CAFFE)
    assert json.dumps(config.to_dict()) == json.dumps(json.loads(repaired))
    assert config.to_json() == CAFFE_QAT.default_config(CAFFE).to_json()
    plan = CAFFE_QAT.make_plan(config, CAFFE)
    assert [layer.name for layer in plan.enabled] == ["conv1", "conv2_1/expand", "conv2_1/dwise"]
    assert {(layer.activation, layer.weight) for layer in plan.layers} == {
        (CaffeUlqSettings(), CaffeArqRetrainSettings())
    }


def test_caffe_sample_with_clips():
    text, network = sample("caffe_retrain_clips.json"), layers("layername1:Convolution", "layername2:Convolution")
    config = CAFFE_QAT.read_config(text, "config.json", network)
    assert json.dumps(config.to_dict()) == json.dumps(json.loads(text))
    plan = CAFFE_QAT.make_plan(config, network)
    assert [layer.activation for layer in plan.layers] == [CaffeUlqSettings(clip_max=3.0, clip_min=-3.0)] * 2
    assert plan.layers[0].activation.fixed_clip is None  # the clips that are given stay


GENERATED = {
    "pytorch default": lambda: (PYTORCH_QAT, PYTORCH_QAT.default_config(NETWORK), NETWORK),
    "pytorch sample": lambda: (
        PYTORCH_QAT,
        PYTORCH_QAT.expand_config(sample("pytorch_retrain_quant.cfg").replace("Optype", "Linear"), "s.cfg", NETWORK),
        NETWORK,
    ),
    "pytorch everything": lambda: (
        PYTORCH_QAT,
        PYTORCH_QAT.expand_config(
            "batch_num: 7 fakequant_precision_mode: FORCE_FP16_QUANT quant_skip_types: 'Conv2d'"
            " retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6.1 clip_min: -1e-3 } "
            " fixed_min: false dst_type: INT16 } }"
            " retrain_weight_quant_config { ulq_retrain { channel_wise: true } }",
            "s.cfg",
            NETWORK,
        ),
        NETWORK,
    ),
    "caffe default": lambda: (CAFFE_QAT, CAFFE_QAT.default_config(CAFFE), CAFFE),
    "caffe everything": lambda: (
        CAFFE_QAT,
        CAFFE_QAT.expand_config(
            "batch_num: 2 skip_layers: 'conv1' retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6.1"
            " clip_min: -0.1 } fixed_min: true fixed_clip: true num_bits: 12 } }",
            "s.cfg",
            CAFFE,
        ),
        CAFFE,
    ),
}


@pytest.mark.parametrize("name", GENERATED)
def test_generated_read_and_written_again_is_byte_identical(name):
    kind, config, network = GENERATED[name]()
    text = config.to_json()
    once = kind.read_config(text, "config.json", network)
    assert once.to_json() == text
    assert kind.read_config(once.to_json().encode(), "config.json", network).to_json() == text
    assert kind.make_plan(once, network).layers == kind.make_plan(config, network).layers
