"""Simple configs of pruning and of combined compression: what they mean, and each mistake with its place (``@``)."""

from __future__ import annotations

import pytest
from config_models import layers, marked, places_of

from amct.config.prune.dialect import COMPRESSION, PRUNING
from amct.config.simple_config import explain
from amct.errors import ConfigError, ParseError
from amct.numerics.settings import FilterPruneSettings, SelectivePruneSettings

NETWORK = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "dw:Conv2d", "deconv:ConvTranspose2d", "conv1d:Conv1d", "pool:AvgPool2d",
    "twice:Conv2d", "circ:Conv2d", "fc:Linear",
    dw={"depthwise": True, "can_pack_int4": False},
    twice={"refusal": "it is called twice", "prune_refusal": "it is called twice"},
    circ={"refusal": "padding_mode is circular"},
)  # fmt: skip
FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.3 } } }"
SELECTIVE = "prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 2 } } }"
QUANT = "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6 clip_min: -6 } } }"


def of_layer(name: str, blocks: str = "") -> str:
    return f'override_layer_configs {{\n  layer_name: "{name}"\n  {blocks}\n}}'


def of_type(name: str, blocks: str = "") -> str:
    return f'override_layer_types {{\n  layer_type: "{name}"\n  {blocks}\n}}'


def plan_of(text: str, *, quantize: bool = True):
    dialect = COMPRESSION if quantize else PRUNING
    return dialect.compression_plan(dialect.expand_config(text, "c.cfg", NETWORK), NETWORK)


def names(found) -> list[str]:
    return [layer.name for layer in found]


def warnings_of(text: str) -> list[str]:
    return [str(warning) for warning in plan_of(text).warnings]


def quantized(text: str) -> list[str]:
    return names(plan_of(text).quant.enabled)


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prunes", "quantizes"),
    [
        (FILTER, True, False),
        (QUANT, False, True),
        ("retrain_weight_quant_config { }", False, True),
        (FILTER + QUANT, True, True),
        (of_layer("fc", FILTER), True, False),
        (of_type("Linear", QUANT), False, True),
        (of_type("Linear", FILTER) + of_layer("conv", QUANT), True, True),
    ],
)
def test_blocks_tell_what_is_asked_for(text, prunes, quantizes):
    plan = plan_of(text)
    assert (plan.prune is not None, plan.quant is not None) == (prunes, quantizes)


@pytest.mark.parametrize("text", ["", "batch_num: 2", 'skip_layers: "conv"', of_layer("conv")])
def test_a_config_that_asks_for_nothing(text):
    with pytest.raises(
        ConfigError, match=r"c\.cfg:1:1: the config asks for nothing to be done. Add prune_config or re"
    ):
        COMPRESSION.expand_config(text, "c.cfg", NETWORK)


def test_pruning_alone_ignores_quantization_and_needs_a_pruner():
    with pytest.raises(ConfigError, match=r"asks for nothing to be done. Add prune_config\.$"):
        PRUNING.expand_config(QUANT, "c.cfg", NETWORK)
    text = f"{FILTER} {QUANT} quant_skip_layers: 'nobody' {of_layer('bn', QUANT)}"
    plan = plan_of(text, quantize=False)
    assert plan.quant is None
    assert names(plan.prune.filters) == ["conv", "circ", "fc"]


def test_quantization_without_a_global_block_is_only_for_overridden_layers():
    text = FILTER + of_layer("fc", QUANT)
    assert quantized(text) == ["fc"]
    assert plan_of(text).quant.not_quantized["conv"] == "switched off: built-in default"
    assert quantized(FILTER + QUANT) == ["conv", "dw", "deconv", "conv1d", "fc"]


# -- pruning -----------------------------------------------------------------------------------------------------------


def test_filters_of_layers_that_can_start_it():
    plan = plan_of(FILTER).prune
    assert names(plan.filters) == ["conv", "circ", "fc"]
    assert {layer.settings for layer in plan.layers} == {FilterPruneSettings(prune_ratio=0.3, ascend_optimized=True)}
    assert plan.not_pruned == {
        "bn": "BatchNorm2d cannot be pruned",
        "dw": "a depthwise convolution cannot be pruned by filters, it follows the layer before it, and the config has"
        " no other pruner for it",
        "deconv": "ConvTranspose2d cannot be pruned by filters, and the config has no other pruner for it",
        "conv1d": "Conv1d cannot be pruned",
        "pool": "AvgPool2d cannot be pruned",
        "twice": "it is called twice",
    }


def test_2_of_4_weights():
    plan = plan_of(SELECTIVE).prune
    assert names(plan.selective) == ["conv", "dw", "deconv", "circ", "fc"]
    assert plan.find("dw").settings == SelectivePruneSettings(update_freq=2)
    assert plan.find("bn") is None


def test_layer_beats_type_beats_global_and_kinds_may_mix():
    by_type = FILTER.replace("0.3", "0.5")
    by_layer = (
        "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.7 ascend_optimized: 0 } } }"
    )
    text = SELECTIVE + of_type("Conv2d", by_type) + of_layer("circ", by_layer)
    plan = plan_of(text).prune
    assert plan.find("conv").settings == FilterPruneSettings(prune_ratio=0.5)
    assert plan.find("circ").settings == FilterPruneSettings(prune_ratio=0.7, ascend_optimized=False)
    assert names(plan.selective) == ["deconv", "fc"]
    assert names(plan.filters) == ["conv", "circ"]
    assert "dw" in plan.not_pruned  # its type is overridden with what it cannot have


def test_only_overridden_layers_are_pruned_without_a_global_pruner():
    plan = plan_of(of_layer("fc", FILTER)).prune
    assert names(plan.filters) == ["fc"]
    assert plan.not_pruned["conv"] == "the config has no pruner for it"


def test_skip_lists_are_united_and_overrides_do_not_switch_on_again():
    text = f"""{FILTER}
skip_layers: "conv"
regular_prune_skip_types: "Linear"
{of_layer("conv", FILTER)}"""
    plan = plan_of(text).prune
    assert names(plan.filters) == ["circ"]
    assert plan.not_pruned["conv"] == "switched off: global field (c.cfg:2:1)"
    assert plan.not_pruned["fc"] == "switched off: global field (c.cfg:3:1)"
    assert warnings_of(text) == ["c.cfg:2:1: not pruned although overridden: a skipped layer stays as it is: conv"]


def test_a_global_skip_may_name_what_can_be_quantized_or_pruned():
    text = FILTER + QUANT + 'skip_layers: "conv1d" skip_layers: "dw" skip_layer_types: "ConvTranspose2d"'
    assert quantized(text) == ["conv", "fc"]


def test_prune_and_quant_skips_do_not_touch_each_other():
    text = f'{FILTER} {QUANT} quant_skip_layers: "conv" regular_prune_skip_layers: "fc"'
    plan = plan_of(text)
    assert "conv" not in names(plan.quant.enabled)
    assert names(plan.prune.filters) == ["conv", "circ"]
    assert "fc" in names(plan.quant.enabled)


def test_an_override_of_pruning_leaves_quantization_alone():
    text = f"{FILTER}\n{QUANT}\nquant_skip_layers: 'conv'\n{of_layer('conv', FILTER)}\n{of_layer('fc', FILTER)}"
    plan = plan_of(text)
    assert not plan.quant.find("conv").enabled
    assert plan.quant.find("fc").activation.clip_max == 6.0
    assert [str(warning) for warning in plan.warnings] == [
        "c.cfg:4:1: overrides with prune_config alone leave quantization as it is"
        " (AMCT resets it to the defaults): conv, fc"
    ]


def test_an_override_of_quantization_leaves_pruning_alone():
    plan = plan_of(FILTER + QUANT + of_layer("conv", "retrain_weight_quant_config { ulq_retrain { } }"))
    assert plan.prune.find("conv").settings.prune_ratio == 0.3
    assert plan.quant.find("conv").activation.clip_max is None


def test_a_repeated_skip_and_a_refused_override_are_warned_of():
    text = f'{FILTER}\nregular_prune_skip_layers: "fc"\nregular_prune_skip_layers: "fc"\n{of_layer("twice", FILTER)}'
    assert warnings_of(text) == [
        'c.cfg:3:1: "fc" is repeated in regular_prune_skip_layers. Name it once.',
        'c.cfg:4:1: the override of "twice" has no effect: the layer cannot be pruned (it is called twice)',
    ]


def test_one_half_with_nothing_to_do_is_a_warning():
    text = f'{FILTER}\n{QUANT}\nregular_prune_skip_types: "Conv2d" regular_prune_skip_types: "Linear"'
    assert warnings_of(text) == [
        "c.cfg:1:1: there is no layer left to prune. Look at the skip lists and the types of overrides."
    ]


def test_a_prune_ratio_is_the_number_that_was_written():
    # As in the reference, a float32 is shown by its shortest text.
    assert plan_of(FILTER.replace("0.3", "0.7")).prune.find("fc").settings.prune_ratio == 0.7


def test_explain_tells_the_line_of_each_setting():
    text = f"{FILTER}\n{QUANT}\nregular_prune_skip_layers: 'fc'\n{of_layer('conv', SELECTIVE)}"
    rows = {(row.layer, row.key): row for row in explain(COMPRESSION.expand_config(text, "c.cfg", NETWORK))}
    ratio = rows["circ", "regular_prune_config.prune_ratio"]
    assert (ratio.value, str(ratio.origin)) == (0.3, "common block (c.cfg:1:64)")
    assert str(rows["circ", "regular_prune_config.ascend_optimized"].origin) == "built-in default"
    assert str(rows["circ", "regular_prune_config.ascend_optimized"].block) == "common block (c.cfg:1:1)"
    assert str(rows["fc", "regular_prune_enable"].origin) == "global field (c.cfg:3:1)"
    frequency = rows["conv", "regular_prune_config.update_freq"]
    assert (frequency.value, str(frequency.origin)) == (2, "override of this layer (c.cfg:6:59)")
    assert str(rows["conv", "retrain_data_config.clip_max"].origin) == "common block (c.cfg:2:59)"
    assert str(rows["conv", "retrain_data_config.clip_max"].block) == "common block (c.cfg:2:1)"


# -- mistakes ----------------------------------------------------------------------------------------------------------


def ratio(value: str) -> str:
    return f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ @prune_ratio: {value} }} }} }}"


MISTAKES = {
    "ratio 0": (ratio("0"), "balanced_l2_norm_filter_prune.prune_ratio must be greater than 0, got 0.0"),
    "ratio 1": (ratio("1.0"), "prune_ratio must be less than 1, got 1.0"),
    "ratio negative": (of_layer("fc", ratio("-0.5")), "prune_ratio must be greater than 0, got -0.5"),
    "ratio that is no number": (ratio("nan"), "prune_ratio"),
    "no pruner": ("@prune_config { }", "prune_config names no pruner. Put filter_pruner or n_out_of_m_pruner into it"),
    "no pruner in an override": (FILTER + of_type("Linear", "@prune_config { }"), "prune_config names no pruner"),
    "no filter algorithm": (
        "prune_config { @filter_pruner { } }",
        "filter_pruner names no algorithm. Put balanced_l2_norm_filter_prune into it",
    ),
    "no selective algorithm": (
        "prune_config { @n_out_of_m_pruner { } }",
        "n_out_of_m_pruner names no algorithm. Put l1_selective_prune into it",
    ),
    "unknown global skip": (f'{FILTER} @skip_layers: "convv"', 'skip_layers: the layer "convv" is unknown.*"conv"'),
    "global skip of no use": (f'{FILTER} @skip_layers: "bn"', "of type BatchNorm2d, which cannot be compressed"),
    "global skip type": (f'{FILTER} @skip_layer_types: "AvgPool2d"', 'type "AvgPool2d" cannot be compressed'),
    "unknown quant skip": (f'{FILTER} @quant_skip_layers: "fcc"', 'quant_skip_layers: the layer "fcc" is unknown'),
    "quant skip type": (f'{QUANT} @quant_skip_types: "Pool"', 'the layer type "Pool" cannot be quantized'),
    "unknown prune skip": (
        f'{FILTER} @regular_prune_skip_layers: "fcc"',
        'regular_prune_skip_layers: the layer "fcc" is unknown. Did you mean "fc"',
    ),
    "prune skip of another kind": (
        f'{FILTER} @regular_prune_skip_layers: "deconv"',
        "of type ConvTranspose2d, which cannot be pruned. Types that can: Conv2d, Linear",
    ),
    "prune skip of a follower": (
        f'{FILTER} @regular_prune_skip_layers: "dw"',
        'the layer "dw" needs no skipping: a depthwise convolution cannot be pruned by filters',
    ),
    "prune skip type": (
        f'{FILTER} @regular_prune_skip_types: "ConvTranspose2d"',
        'regular_prune_skip_types: the layer type "ConvTranspose2d" cannot be pruned. Types that can: Conv2d, Linear',
    ),
    "unknown override": (f"@{of_layer('fcc', FILTER)}", 'override_layer_configs: the layer "fcc" is unknown'),
    "override of a layer that cannot be pruned": (f"@{of_layer('bn', FILTER)}", "BatchNorm2d, which cannot be pruned"),
    "override of a type that cannot be pruned": (f"@{of_type('Conv1d', FILTER)}", '"Conv1d" cannot be pruned'),
    "filters of a depthwise convolution": (
        of_layer("dw", f"@{FILTER}"),
        'layer "dw": a depthwise convolution cannot be pruned by filters, it follows',
    ),
    "filters of a transposed convolution": (
        of_type("ConvTranspose2d", f"@{FILTER}"),
        "type ConvTranspose2d: ConvTranspose2d cannot be pruned by filters",
    ),
    "layer overridden twice": (
        of_layer("fc", FILTER) + of_layer("fc", QUANT).replace("layer_name", "@layer_name"),
        'layer_name "fc" is overridden more than once',
    ),
    "quantization that cannot be": (
        FILTER + of_layer("fc", "retrain_weight_quant_config { arq_retrain { @channel_wise: true } }"),
        'layer "fc": channel_wise must be false',
    ),
    "quantization of what can only be pruned": (f"@{of_layer('pool', QUANT)}", "AvgPool2d, which cannot be quantized"),
    "nothing left to prune": (
        f'@{FILTER} regular_prune_skip_types: "Conv2d" regular_prune_skip_types: "Linear"',
        "there is no layer left to prune",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    text, places = marked(MISTAKES[name][0])
    with pytest.raises(ConfigError, match=MISTAKES[name][1]) as caught:
        COMPRESSION.expand_config(text, "c.cfg", NETWORK)
    assert places_of(caught.value) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILTER.replace("prune_ratio: 0.3", ""), r"c\.cfg:1:32: BalancedL2NormFilterPruner needs prune_ratio"),
        (SELECTIVE.replace("2 }", "-1 }"), r"c\.cfg:1:70: update_freq takes an integer \(uint32\), got -1"),
        (
            "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M8N4 } } }",
            "one of M4N2; got M8N4",
        ),
        ("prune_config { filter_prune { } }", 'Did you mean "filter_pruner"'),
    ],
)
def test_text_that_is_no_simple_config(text, message):
    with pytest.raises(ParseError, match=message):
        COMPRESSION.expand_config(text, "c.cfg", NETWORK)


def test_a_model_with_nothing_to_compress():
    for text in (FILTER, QUANT):
        with pytest.raises(ConfigError, match="there is no layer left to"):
            COMPRESSION.expand_config(text, "c.cfg", layers("relu:ReLU"))


def test_all_mistakes_are_reported_together_in_file_order():
    text, places = marked(
        f"""{ratio("2")}
@skip_layers: "bn"
@regular_prune_skip_layers: "nope"
{of_layer("dw", f"@{FILTER}")}
retrain_weight_quant_config {{ arq_retrain {{ @dst_type: INT16 }} }}"""
    )
    with pytest.raises(ConfigError, match="5 mistakes") as caught:
        COMPRESSION.expand_config(text, "c.cfg", NETWORK)
    assert places_of(caught.value) == places
