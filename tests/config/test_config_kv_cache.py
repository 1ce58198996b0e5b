"""Configs of kv-cache quantization: each mistake with its place (marked by ``@``), and what may be left out."""

from __future__ import annotations

import pytest
from config_models import ATTENTION, layers, marked, places_of

from amct.config.ptq.kv_cache import KV_CACHE
from amct.config.simple_config import explain
from amct.errors import ArgumentError, CalibrationError, ConfigError, ConfigTypeError, ParseError
from amct.numerics.settings import HfmgSettings, IfmrSettings


def listed(*names: str, block: str = "") -> str:
    quant_layers = " ".join(f"quant_layers: '{name}'" for name in names)
    return f"kv_cache_quant_config {{ {quant_layers} {block} }}"


CFG = {
    "batch_num": (f"@batch_num: 0 {listed('k')}", "batch_num must be at least 1, got 0"),
    "unknown layer": (
        "kv_cache_quant_config { @quant_layers: 'x' }",
        'quant_layers: the layer "x" is unknown',
    ),
    "not Linear": ("kv_cache_quant_config { @quant_layers: 'e' }", '"e" is of type Embedding, which cannot be'),
    "repeated": ("kv_cache_quant_config { quant_layers: 'k' @quant_layers: 'k' }", '"k" is repeated in quant_layers'),
    "unknown override": (
        "@override_layers_configs { layer_name: 'kk' }",
        'the layer "kk" is unknown. Did you mean "k"',
    ),
    "override of no Linear": ("@override_layers_configs { layer_name: 'ln' }", "of type LayerNorm, which cannot be"),
    "overridden twice": (
        "override_layers_configs { layer_name: 'k' } override_layers_configs { @layer_name: 'k' }",
        'layer_name "k" is overridden more than once',
    ),
    "percentile": (
        listed("k", block="calibration_config { ifmr_quantize { @max_percentile: 2 } }"),
        "max_percentile must be at most 1",
    ),
    "bins": (
        "override_layers_configs { layer_name: 'k' kv_data_quant_config { hfmg_quantize { @num_of_bins: 5 } } }",
        "num_of_bins must be 1024",
    ),
}


@pytest.mark.parametrize("name", CFG)
def test_mistake_in_a_simple_config(name):
    text, places = marked(CFG[name][0])
    with pytest.raises(ConfigError, match=CFG[name][1]) as caught:
        KV_CACHE.expand_config(text, "kv.cfg", ATTENTION)
    assert places_of(caught.value) == places


JSON = {
    "unknown layer": ('{@"kk": {}}', ConfigError, 'the layer or global field "kk" is unknown'),
    "not Linear": ('{@"e": {"kv_data_quant_config": {}}}', ConfigError, "of type Embedding, which cannot be"),
    "block missing": ('{"k": @{}}', ConfigError, 'the key "kv_data_quant_config" is missing'),
    "unknown block": ('{"k": {"kv_data_quant_config": {}, @"kv": 1}}', ConfigError, 'the key "kv" is unknown'),
    "layer type": ('{"k": @3}', ConfigTypeError, "k must be an object"),
    "block type": ('{"k": {"kv_data_quant_config": @[]}}', ConfigTypeError, "must be an object"),
    "batch_num": ('{"batch_num": @0, "k": {"kv_data_quant_config": {}}}', ConfigError, "at least 1, got 0"),
    "granularity": (
        '{"k": {"kv_data_quant_config": {"quant_granularity": @2}}}',
        ConfigError,
        r"must be 0 \(per tensor\) or 1 \(per channel\), got 2",
    ),
    "granularity type": (
        '{"k": {"kv_data_quant_config": {"quant_granularity": @"per_tensor"}}}',
        ConfigTypeError,
        "must be 0",
    ),
    "num_bits": ('{"k": {"kv_data_quant_config": {@"num_bits": 8}}}', ConfigError, 'the key "num_bits" is unknown'),
    "mixed": (
        '{"k": {"kv_data_quant_config": {"act_algo": "hfmg", @"search_step": 1}}}',
        ConfigError,
        "belongs to ifmr, but the block is of hfmg",
    ),
}


@pytest.mark.parametrize("name", JSON)
def test_mistake_in_a_json_config(name):
    text, places = marked(JSON[name][0])
    with pytest.raises(JSON[name][1], match=JSON[name][2]) as caught:
        KV_CACHE.read_config(text, "kv.json", ATTENTION)
    assert places_of(caught.value) == places


def test_no_layer_at_all():
    for call in (
        lambda: KV_CACHE.expand_config("batch_num: 2", "kv.cfg", ATTENTION),
        lambda: KV_CACHE.read_config("{}", "kv.json", ATTENTION),
        lambda: KV_CACHE.default_config(ATTENTION, {}),
    ):
        with pytest.raises(CalibrationError, match="no layer is named for kv-cache quantization"):
            call()


def test_arguments():
    with pytest.raises(ArgumentError, match=r'the key "kv_cache_quant_layer" is unknown.*Did you mean'):
        KV_CACHE.default_config(ATTENTION, {"kv_cache_quant_layer": ["k"]})
    with pytest.raises(ConfigError, match='the layer "nope" is unknown'):
        KV_CACHE.default_config(ATTENTION, {"kv_cache_quant_layers": ["nope"]})
    with pytest.raises(ConfigError, match='"k" is repeated in quant_layers'):
        KV_CACHE.default_config(ATTENTION, {"kv_cache_quant_layers": ["k", "k"]})
    with pytest.raises(ConfigError, match='"batch_num" has the name of a global field'):
        KV_CACHE.default_config(layers("batch_num:Linear"), {"kv_cache_quant_layers": ["batch_num"]})
    with pytest.raises(ParseError, match=r"kv\.cfg:1:1"):
        KV_CACHE.expand_config("skip_layers: 'k'", "kv.cfg", ATTENTION)


def test_what_is_left_out_takes_its_default():
    text = '{"activation_offset": false, "k": {"kv_data_quant_config": {}},'
    text += ' "v": {"kv_data_quant_config": {"act_algo": "hfmg", "asymmetric": true, "quant_granularity": 1}}}'
    plan = KV_CACHE.make_plan(KV_CACHE.read_config(text, "kv.json", ATTENTION))
    assert [(layer.name, layer.activation, layer.per_channel) for layer in plan.layers] == [
        ("k", IfmrSettings(asymmetric=False), False),
        ("v", HfmgSettings(), True),
    ]
    assert (plan.batch_num, plan.layers[0].batch_num) == (1, 1)


def test_an_override_replaces_the_block_and_adds_its_layer():
    block = "calibration_config { hfmg_quantize { quant_granularity: per_channel } }"
    override = "override_layers_configs { layer_name: 'v' } override_layers_configs { layer_name: 'q' }"
    plan = KV_CACHE.make_plan(KV_CACHE.expand_config(listed("v", "k", block=block) + override, "kv.cfg", ATTENTION))
    assert [(layer.name, type(layer.activation).__name__, layer.per_channel) for layer in plan.layers] == [
        ("v", "IfmrSettings", False),
        ("k", "HfmgSettings", True),
        ("q", "IfmrSettings", False),
    ]


def test_explain_says_where_the_offset_comes_from():
    rows = {
        row.key: row
        for row in explain(KV_CACHE.expand_config(f"activation_offset: false {listed('k')}", "q", ATTENTION))
    }
    assert rows["kv_data_quant_config.asymmetric"].value is False
    assert str(rows["kv_data_quant_config.asymmetric"].origin) == "global field (q:1:1)"


def test_a_repeated_field_keeps_the_last_value_with_a_warning():
    plan = KV_CACHE.make_plan(KV_CACHE.expand_config(f"batch_num: 2\nbatch_num: 3 {listed('k')}", "kv.cfg", ATTENTION))
    assert plan.batch_num == 3
    assert [warning.position.line for warning in plan.warnings] == [2]
