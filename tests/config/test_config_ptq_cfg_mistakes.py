"""Each mistake a simple PTQ config of PyTorch can have, with its message and its place (marked by ``@``)."""

from __future__ import annotations

import pytest
from config_models import layers, marked, places_of

from amct.config.ptq.pytorch import PYTORCH
from amct.errors import ConfigError, ModelError, ParseError

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "conv3d:Conv3d", "pool:AvgPool2d", "fc:Linear", "fcnb:Linear", "rnn:LSTM",
    "circ:Conv2d", "dw:Conv2d",
    fcnb={"has_bias": False},
    circ={"refusal": "padding_mode is circular"},
    dw={"can_pack_int4": False},
)  # fmt: skip


def of_type(name: str, block: str) -> str:
    return f'override_layer_types {{\n  layer_type: "{name}"\n  calibration_config {{ {block} }}\n}}'


def of_layer(name: str, block: str) -> str:
    return f'override_layer_configs {{\n  layer_name: "{name}"\n  calibration_config {{ {block} }}\n}}'


def common(block: str) -> str:
    return f"common_config {{ {block} }}"


def skip(field: str, *names: str) -> str:
    return "\n".join(f'{field}: "{name}"' for name in names)


NAMES = {
    "repeated skip layer": ('skip_layers: "fc"\n@skip_layers: "fc"', '"fc" is repeated in skip_layers'),
    "repeated skip type": (
        'skip_layer_types: "Linear"\n@skip_layer_types: "Linear"',
        '"Linear" is repeated in skip_layer_types',
    ),
    "repeated skip fusion": (
        'skip_fusion_layers: "conv" @skip_fusion_layers: "conv"',
        '"conv" is repeated in skip_fusion_layers',
    ),
    "layer overridden twice": (
        f"{of_layer('fc', '')}\n{of_layer('fc', '').replace('layer_name', '@layer_name')}",
        r'layer_name "fc" is overridden more than once \(first in line 1\)',
    ),
    "type overridden twice": (
        f"{of_type('Linear', '')}\n{of_type('Linear', '').replace('layer_type:', '@layer_type:')}",
        r'layer_type "Linear" is overridden more than once \(first in line 1\)',
    ),
    "unknown skip layer": ('@skip_layers: "convv"', 'the layer "convv" is unknown. Did you mean "conv"'),
    "unknown override layer": (f"@{of_layer('fd', '')}", 'override_layer_configs: the layer "fd" is unknown'),
    "unknown skip fusion layer": (
        '@skip_fusion_layers: "nope"',
        'skip_fusion_layers: the layer "nope" is unknown',
    ),
    "skip layer that cannot be quantized": (
        '@skip_layers: "bn"',
        "skip_layers: .*of type BatchNorm2d, which cannot be quantized",
    ),
    "override of a layer that cannot be quantized": (
        f"@{of_layer('bn', 'arq_quantize { channel_wise: true }')}",
        'the layer "bn" is of type BatchNorm2d, which cannot be quantized',
    ),
    "skip fusion of a layer that is never fused": (
        '@skip_fusion_layers: "pool"',
        "of type AvgPool2d, which cannot be fused with BatchNorm. Types that can: Conv1d, Conv2d, Conv3d, Linear, "
        "ConvTranspose1d, ConvTranspose2d, ConvTranspose3d",
    ),
    "unknown skip type": ('@skip_layer_types: "Conv9d"', 'type "Conv9d" cannot be quantized. Did you mean'),
    "unknown override type": (f"@{of_type('ReLU', '')}", 'the layer type "ReLU" cannot be quantized. Types that'),
    "all layers skipped": (
        "@" + skip("skip_layers", "conv", "conv3d", "pool", "fc", "fcnb", "rnn", "dw"),
        r"switch off every layer that can be quantized \(7\)",
    ),
    "all types skipped": (
        "@" + skip("skip_layer_types", "Conv2d", "Conv3d", "AvgPool2d", "Linear", "LSTM"),
        "switch off every layer that can be quantized",
    ),
    "batch_num 0": ("\n@batch_num: 0", "batch_num must be at least 1, got 0"),
}
ABILITIES = {
    "channel_wise on a linear layer": (
        of_layer("fc", "arq_quantize { @channel_wise: true }"),
        'layer "fc": channel_wise must be false, Linear has one scale for all weights',
    ),
    "channel_wise on the linear type": (
        of_type("Linear", "arq_quantize { @channel_wise: true }"),
        "type Linear: channel_wise must be false",
    ),
    "channel_wise on average pooling": (
        of_type("AvgPool2d", "arq_quantize { @channel_wise: true }"),
        "type AvgPool2d: channel_wise must be",
    ),
    "channel_wise of ada on a linear layer": (
        of_layer("fc", "ada_quantize { @channel_wise: true }"),
        'layer "fc": channel_wise must be false',
    ),
    "asymmetric on Conv3d": (
        of_type("Conv3d", "hfmg_quantize { @asymmetric: true }"),
        "type Conv3d: asymmetric must be false",
    ),
    "dmq on average pooling": (
        of_layer("pool", "@dmq_balancer { }"),
        'layer "pool": dmq_balancer is not possible for AvgPool2d',
    ),
    "dmq on the LSTM type": (
        of_type("LSTM", "dmq_balancer { @migration_strength: 0.5 }"),
        "type LSTM: dmq_balancer is not possible",
    ),
    "int16 on Conv3d": (
        of_layer("conv3d", "ifmr_quantize { @dst_type: INT16 }"),
        'layer "conv3d": INT16 activations are not possible of type Conv3d',
    ),
    "int16 on linear without bias": (
        of_layer("fcnb", "ifmr_quantize { @dst_type: INT16 }"),
        'layer "fcnb": INT16 activations are not possible without a bias',
    ),
    "ada on LSTM": (
        of_layer("rnn", "@ada_quantize { }"),
        'layer "rnn": ada_quantize is only for Conv2d, Linear, ConvTranspose2d. Use arq_quantize',
    ),
    "6 bits on linear": (
        of_type("Linear", "arq_quantize { @quant_bits: 6 }"),
        "type Linear: weights of 6 or 7 bits are only for Conv2d, not for Linear",
    ),
}
RANGES = {
    "5 bits": (common("arq_quantize { @quant_bits: 5 }"), "weights can have 4, 6, 7, 8 bits, got 5"),
    "migration strength": (
        common("dmq_balancer { @migration_strength: 1.5 }"),
        "migration_strength must be at least 0.2 and at most 0.8, got 1.5",
    ),
    "percentile 1.5": (common("ifmr_quantize { @max_percentile: 1.5 }"), "max_percentile must be at most 1, got 1.5"),
    "percentile 0.5": (common("ifmr_quantize { @min_percentile: 0.5 }"), "min_percentile must be greater than 0.5"),
    "search step 1e-9": (
        common("ifmr_quantize { @search_step: 1e-9 }"),
        "search_step must divide search_range into at most 100000 steps, got 1e-09",
    ),
    "search range 1e30": (
        common("ifmr_quantize { search_range_end: 1e30 @search_step: 0.01 }"),
        "search_step must divide search_range into at most 100000 steps",
    ),
    "search step 0": (common("ifmr_quantize { @search_step: 0 }"), "search_step must be greater than 0"),
    "search range": (
        common("ifmr_quantize { @search_range_start: 2 }"),
        r"search_range needs 0 < start < end, got \[2, 1.3\]",
    ),
    "search step wider than the range": (
        common("ifmr_quantize { @search_step: 0.7 }"),
        "search_step must be at most the width 0.6 of search_range, got 0.7",
    ),
    "num_of_bins": (
        common("hfmg_quantize { @num_of_bins: 1000 }"),
        "num_of_bins must be 1024, 2048, 4096 or 8192, got 1000",
    ),
    "beta range": (common("ada_quantize { @beta_range_end: 30 }"), r"needs start > end > 0, got \[20, 30\]"),
    "reg_param": (common("ada_quantize { @reg_param: 1 }"), "reg_param must be less than 1, got 1"),
    "warm_start": (common("ada_quantize { @warm_start: 0 }"), "warm_start must be greater than 0"),
    "not a number": (common("ifmr_quantize { @search_step: nan }"), "search_step"),
    "in an override": (of_layer("fc", "ifmr_quantize { @max_percentile: 0 }"), "max_percentile must be greater"),
}
ALL = NAMES | ABILITIES | RANGES


@pytest.mark.parametrize("name", ALL)
def test_mistake(name):
    text, places = marked(ALL[name][0])
    with pytest.raises(ConfigError, match=ALL[name][1]) as caught:
        PYTORCH.expand_config(text, "quant.cfg", NETWORK)
    assert places_of(caught.value) == places
    assert caught.value.position.source == "quant.cfg"


def test_all_mistakes_are_reported_together_in_file_order():
    text, places = marked(
        """@batch_num: 0
@skip_layers: "nope"
common_config { arq_quantize { @quant_bits: 5 } ifmr_quantize { @max_percentile: 2 @search_step: -1 } }
override_layer_types { layer_type: "Linear" calibration_config { arq_quantize { @channel_wise: true } } }"""
    )
    with pytest.raises(ConfigError, match="6 mistakes") as caught:
        PYTORCH.expand_config(text, "quant.cfg", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_nums: 1", r'quant\.cfg:1:1.*batch_nums.*Did you mean "batch_num"'),
        ('batch_num: "two"', r"quant\.cfg:1:12"),
        ("common_config { nuq_quantize { } }", r"quant\.cfg:1:17.*nuq_quantize"),
        ('override_layer_configs { layer_name: "fc" }', r"quant\.cfg:1:1.*calibration_config"),
    ],
)
def test_text_that_is_no_simple_config(text, message):
    with pytest.raises(ParseError, match=message):
        PYTORCH.expand_config(text, "quant.cfg", NETWORK)


def test_arguments_of_a_default_config():
    with pytest.raises(ConfigError, match='skip_layers: the layer "nope" is unknown'):
        PYTORCH.default_config(NETWORK, skip_layers=["nope"])
    with pytest.raises(ConfigError, match='"fc" is repeated in skip_layers'):
        PYTORCH.default_config(NETWORK, skip_layers=["fc", "fc"])
    with pytest.raises(ConfigError, match="batch_num must be at least 1, got 0"):
        PYTORCH.default_config(NETWORK, batch_num=0)


def test_models_no_config_can_be_made_for():
    with pytest.raises(ConfigError, match="the model has no layer that can be quantized"):
        PYTORCH.default_config(layers("relu:ReLU"))
    with pytest.raises(ConfigError, match="the model has no layer that can be quantized"):
        PYTORCH.default_config([layer for layer in NETWORK if layer.name == "circ"])
    with pytest.raises(ConfigError, match='"version" has the name of a global field'):
        PYTORCH.default_config(layers("version:Conv2d"))
    with pytest.raises(ModelError, match="layer names must be unique; given more than once: a"):
        PYTORCH.default_config(layers("a:Conv2d", "a:Linear"))
