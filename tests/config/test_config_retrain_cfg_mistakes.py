"""Each mistake a simple config of PyTorch's QAT can have, with its message and its place (marked by ``@``)."""

from __future__ import annotations

import pytest
from config_models import layers, marked, places_of

from amct.config.qat.dialect import PYTORCH_QAT
from amct.errors import ConfigError, ModelError, ParseError

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "pool:AvgPool2d", "fc:Linear", "rnn:LSTM", "circ:Conv2d",
    circ={"refusal": "padding_mode is circular"},
)  # fmt: skip
DATA, WEIGHT = "retrain_data_quant_config", "retrain_weight_quant_config"


def data(block: str) -> str:
    return f"{DATA} {{ ulq_quantize {{ {block} }} }}"


def clips(block: str) -> str:
    return data(f"clip_max_min {{ {block} }}")


def weight(block: str) -> str:
    return f"{WEIGHT} {{ {block} }}"


def of_layer(name: str, blocks: str = "") -> str:
    return f'override_layer_configs {{\n  layer_name: "{name}"\n  {blocks}\n}}'


def of_type(name: str, blocks: str = "") -> str:
    return f'override_layer_types {{\n  layer_type: "{name}"\n  {blocks}\n}}'


PRUNER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.3 } } }"
NAMES = {
    "layer overridden twice": (
        f"{of_layer('fc')}\n{of_layer('fc').replace('layer_name', '@layer_name')}",
        r'layer_name "fc" is overridden more than once \(first in line 1\)',
    ),
    "type overridden twice": (
        f"{of_type('Linear')}\n{of_type('Linear').replace('layer_type:', '@layer_type:')}",
        r'layer_type "Linear" is overridden more than once \(first in line 1\)',
    ),
    "unknown skip layer": ('@skip_layers: "convv"', 'skip_layers: the layer "convv" is unknown. Did you mean "conv"'),
    "unknown quant skip layer": ('@quant_skip_layers: "fcc"', 'quant_skip_layers: the layer "fcc" is unknown.*"fc"'),
    "skip layer that cannot be quantized": (
        '@skip_layers: "bn"',
        'the layer "bn" is of type BatchNorm2d, which cannot be quantized. Types that can: Conv1d, Conv2d',
    ),
    "quant skip of a type that QAT does not have": (
        '@quant_skip_layers: "pool"',
        "quant_skip_layers: .*of type AvgPool2d, which cannot be quantized",
    ),
    "unknown skip type": ('@skip_layer_types: "Conv9d"', 'the layer type "Conv9d" cannot be quantized. Did you mean'),
    "unsupported skip type": ('@quant_skip_types: "AvgPool2d"', 'type "AvgPool2d" cannot be quantized'),
    "unknown override layer": (f"@{of_layer('fd')}", 'override_layer_configs: the layer "fd" is unknown'),
    "override of a layer that cannot be quantized": (f"@{of_layer('bn')}", "of type BatchNorm2d, which cannot be"),
    "unsupported override type": (f"@{of_type('ReLU')}", 'the layer type "ReLU" cannot be quantized'),
    "everything skipped": (
        '@skip_layers: "conv"\nquant_skip_layers: "rnn"\nskip_layer_types: "Linear"',
        r"every layer that can be quantized \(3\) is switched off",
    ),
    "batch_num 0": ("\n@batch_num: 0", "batch_num must be at least 1, got 0"),
}
PRUNING = {
    "prune_config": (f"@{PRUNER}", "prune_config is about pruning"),
    "skip layers": ('@regular_prune_skip_layers: "conv"', "regular_prune_skip_layers is about pruning"),
    "skip types": ('@regular_prune_skip_types: "Conv2d"', "regular_prune_skip_types is about pruning"),
    "in a layer override": (of_layer("fc", f"@{PRUNER}"), "prune_config is about pruning"),
    "in a type override": (of_type("Linear", f"@{PRUNER}"), "prune_config is about pruning"),
}
VALUES = {
    "clip_max 0": (clips("@clip_max: 0 clip_min: -1"), "ulq_quantize.clip_max must be greater than 0, got 0.0"),
    "clip_max negative": (clips("@clip_max: -6.5 clip_min: -1"), "clip_max must be greater than 0, got -6.5"),
    "clip_min 0": (clips("clip_max: 1 @clip_min: 0"), "ulq_quantize.clip_min must be less than 0, got 0.0"),
    "clip that is no number": (clips("@clip_max: nan clip_min: -1"), "clip_max"),
    "INT16 weights": (weight("arq_retrain { @dst_type: INT16 }"), "arq_retrain.dst_type must be 'INT4' or 'INT8'"),
    "INT16 weights of ULQ": (weight("ulq_retrain { @dst_type: INT16 }"), "ulq_retrain.dst_type must be 'INT4' or"),
    "A16W4": (
        f"{data('dst_type: INT16')}\n{weight('arq_retrain { @dst_type: INT4 }')}",
        "INT16 activations cannot go with INT4 weights. Pairs that can: A8W8, A16W8, A8W4, A4W4",
    ),
    "A16W4 in an override": (
        of_layer("conv", f"{data('dst_type: INT16')} {weight('ulq_retrain { @dst_type: INT4 }')}"),
        "INT16 activations cannot go with INT4 weights",
    ),
    "channel_wise on a linear layer": (
        of_layer("fc", weight("arq_retrain { @channel_wise: true }")),
        'layer "fc": channel_wise must be false, Linear has one scale for all weights',
    ),
    "channel_wise on the linear type": (
        of_type("Linear", weight("ulq_retrain { @channel_wise: true }")),
        "type Linear: channel_wise must be false",
    ),
}
ALL = NAMES | PRUNING | VALUES


@pytest.mark.parametrize("name", ALL)
def test_mistake(name):
    text, places = marked(ALL[name][0])
    with pytest.raises(ConfigError, match=ALL[name][1]) as caught:
        PYTORCH_QAT.expand_config(text, "quant.cfg", NETWORK)
    assert places_of(caught.value) == places
    assert caught.value.position.source == "quant.cfg"


def test_all_mistakes_are_reported_together_in_file_order():
    text, places = marked(
        f"""@batch_num: 0
@skip_layers: "nope"
{clips("@clip_max: -1 @clip_min: 1")}
{weight("arq_retrain { @dst_type: INT16 }")}
@{PRUNER}
{of_layer("fc", weight("arq_retrain { @channel_wise: true }"))}
@{of_type("Pool")}"""
    )
    with pytest.raises(ConfigError, match="8 mistakes") as caught:
        PYTORCH_QAT.expand_config(text, "quant.cfg", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_nums: 1", r'quant\.cfg:1:1.*Did you mean "batch_num"'),
        (clips("clip_max: 1"), r"quant\.cfg:1:44: ClipMaxMin needs clip_min"),
        (clips("clip_min: -1"), r"quant\.cfg:1:44: ClipMaxMin needs clip_max"),
        (weight("arq_retrain { dst_type: INT5 }"), "takes one of INT4, INT8, INT16; got INT5"),
        (data("fixed_min: 3"), r"quant\.cfg:1:55"),
        (f"{WEIGHT} {{ nuq_retrain {{ }} }}", "nuq_retrain"),
        (f"override_layer_configs {{ {data('')} }}", r"quant\.cfg:1:1.*layer_name"),
        ("fakequant_precision_mode: FP16", "FORCE_FP16_QUANT"),
    ],
)
def test_text_that_is_no_simple_config(text, message):
    with pytest.raises(ParseError, match=message):
        PYTORCH_QAT.expand_config(text, "quant.cfg", NETWORK)


def test_models_no_config_can_be_made_for():
    with pytest.raises(ConfigError, match=r"no layer that can be quantized\. Types that can: Conv1d"):
        PYTORCH_QAT.default_config(layers("relu:ReLU", "pool:AvgPool2d"))
    with pytest.raises(ConfigError, match="the model has no layer that can be quantized"):
        PYTORCH_QAT.default_config([layer for layer in NETWORK if layer.name == "circ"])
    with pytest.raises(ConfigError, match=r'"batch_num" has the name of a global field .*Rename the module'):
        PYTORCH_QAT.default_config(layers("batch_num:Conv2d"))
    with pytest.raises(ModelError, match="layer names must be unique"):
        PYTORCH_QAT.default_config(layers("a:Conv2d", "a:Linear"))
