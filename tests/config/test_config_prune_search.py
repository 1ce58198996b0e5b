"""The config of the pruning search and the file it may name."""

from __future__ import annotations

import pytest
from config_models import RETRAIN, layers, marked, places_of

from amct.config.prune.search import PruneSearchParseError, PruneSearchSettings, read_search_config
from amct.errors import ConfigError, ParseError
from amct.numerics.settings import FilterPruneSettings
from amct.schema import format_text

FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"
SELECTIVE = "prune_config { n_out_of_m_pruner { l1_selective_prune { } } }"
NAMES_A_FILE = "compress_ratio: 1.5\noverride_prune_cfg: 'fixed.cfg'"


def read(text: str, override: str = "", network=RETRAIN):
    return read_search_config(text, "amc.cfg", network, read_file=lambda _: override.encode())


def test_defaults_and_layers():
    config = read("compress_ratio: 1.5")
    assert config.settings == PruneSearchSettings(
        compress_ratio=1.5, ascend_optimized=True, max_prune_ratio=1.0, test_iteration=1
    )
    assert config.search_layers == ("c1", "c2", "c3", "fc1", "fc")
    assert (config.fixed, config.override, config.warnings) == ((), None, ())


def test_all_fields():
    text = "compress_ratio: 2 ascend_optimized: false max_prune_ratio: 0.8 test_iteration: 3"
    assert read(text).settings == PruneSearchSettings(
        compress_ratio=2.0, ascend_optimized=False, max_prune_ratio=0.8, test_iteration=3
    )


def test_a_value_given_twice_keeps_the_last_one_with_a_warning():
    config = read("compress_ratio: 2\ncompress_ratio: 3")
    assert config.settings.compress_ratio == 3.0
    assert [warning.position.line for warning in config.warnings] == [2]


def test_layers_that_the_second_file_decides_about_are_not_searched():
    override = f"""skip_layers: "c1"
regular_prune_skip_layers: "fc1"
override_layer_configs {{ layer_name: "c2" {FILTER} }}
override_layer_types {{ layer_type: "Linear" {FILTER.replace("0.5", "0.2")} }}
"""
    config = read(NAMES_A_FILE, override)
    assert config.search_layers == ("c3",)
    assert [(layer.name, layer.enabled, layer.settings) for layer in config.fixed] == [
        ("c2", True, FilterPruneSettings(prune_ratio=0.5)),
        ("fc1", False, FilterPruneSettings(prune_ratio=0.2)),
        ("fc", True, FilterPruneSettings(prune_ratio=0.2)),
    ]
    assert 'layer_name: "c2"' in format_text(config.override)


def test_the_second_file_is_read_from_disk(tmp_path):
    (tmp_path / "fixed.cfg").write_text('skip_layer_types: "Linear"')
    text = f"compress_ratio: 1.5 override_prune_cfg: '{tmp_path / 'fixed.cfg'}'"
    assert read_search_config(text, "amc.cfg", RETRAIN).search_layers == ("c1", "c2", "c3")
    with pytest.raises(
        ConfigError, match=r'amc.cfg:1:21: override_prune_cfg: the file ".*none" cannot be read: .*No such'
    ):
        read_search_config(text.replace("fixed.cfg", "none"), "amc.cfg", RETRAIN)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_search_config(r"compress_ratio: 1.5 override_prune_cfg: 'a\000b'", "amc.cfg", RETRAIN)


def test_modules_that_cannot_be_pruned_are_not_searched():
    network = layers("a:Conv2d", "b:Conv2d", a={"prune_refusal": "it is called twice"})
    assert read("compress_ratio: 1.5", network=network).search_layers == ("b",)


MISTAKES = {
    "ratio 1": ("@compress_ratio: 1", "compress_ratio must be greater than 1, got 1.0"),
    "ratio below 1": ("@compress_ratio: 0.5", "compress_ratio must be greater than 1, got 0.5"),
    "max ratio 0": ("compress_ratio: 2 @max_prune_ratio: 0", "max_prune_ratio must be greater than 0, got 0.0"),
    "max ratio above 1": ("compress_ratio: 2 @max_prune_ratio: 1.5", "max_prune_ratio must be at most 1, got 1.5"),
    "no batch": ("compress_ratio: 2 @test_iteration: 0", "test_iteration must be at least 1, got 0"),
    "negative": ("compress_ratio: 2 @test_iteration: -4", "test_iteration must be at least 1, got -4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    text, places = marked(MISTAKES[name][0])
    with pytest.raises(ConfigError, match=MISTAKES[name][1]) as caught:
        read(text)
    assert places_of(caught.value) == places


OVERRIDE_MISTAKES = {
    "a global pruner": (f"@{FILTER}", "prune_config is not possible in override_prune_cfg. It may have: skip_layers"),
    "batches": ("@batch_num: 2", "batch_num is not possible in override_prune_cfg"),
    "quantization": ("@retrain_data_quant_config { }", "retrain_data_quant_config is not possible in override_prune"),
    "quant skips": ('@quant_skip_layers: "c1"', "quant_skip_layers is not possible in override_prune_cfg"),
    "quantization in an override": (
        f'override_layer_configs {{ layer_name: "c1" @retrain_weight_quant_config {{ }} {FILTER} }}',
        "retrain_weight_quant_config is not possible in override_prune_cfg: its overrides may only have filter_pruner",
    ),
    "another pruner": (
        f'override_layer_types {{ layer_type: "Conv2d" @{SELECTIVE} }}',
        "n_out_of_m_pruner is not possible in override_prune_cfg: the search is for filter_pruner only",
    ),
    "unknown skip": ('@skip_layers: "c11"', 'skip_layers: the layer "c11" is unknown. Did you mean "c1"'),
    "skip type": ('@skip_layer_types: "Dropout"', 'the layer type "Dropout" cannot be compressed'),
    "unknown prune skip": ('@regular_prune_skip_layers: "c11"', 'the layer "c11" is unknown'),
    "unknown override": (f'@override_layer_configs {{ layer_name: "c11" {FILTER} }}', 'the layer "c11" is unknown'),
    "depthwise": (f'override_layer_configs {{ layer_name: "dw" @{FILTER} }}', 'layer "dw": a depthwise convolution'),
}


@pytest.mark.parametrize("name", OVERRIDE_MISTAKES)
def test_mistake_in_the_second_file(name):
    text, places = marked(OVERRIDE_MISTAKES[name][0])
    with pytest.raises(ConfigError, match=OVERRIDE_MISTAKES[name][1]) as caught:
        read(NAMES_A_FILE, text)
    assert places_of(caught.value) == places
    assert caught.value.position.source == "fixed.cfg"


def test_nothing_left_to_search():
    skip_all = 'skip_layer_types: "Conv2d" skip_layer_types: "Linear"'
    with pytest.raises(ConfigError, match=r"amc.cfg:2:1: override_prune_cfg skips or overrides every layer"):
        read(NAMES_A_FILE, skip_all)
    with pytest.raises(ConfigError, match=r"amc.cfg:1:1: the model has no layer that can be pruned by filters"):
        read("compress_ratio: 2", network=layers("a:Conv3d", "b:ReLU"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "needs compress_ratio"), ("compress: 2", 'Did you mean "compress_ratio"'), ("compress_ratio: x", "1:17")],
)
def test_text_that_is_no_search_config_is_a_runtime_error_too(text, message):
    for kind in (PruneSearchParseError, ParseError, RuntimeError, ValueError):
        with pytest.raises(kind, match=message):
            read(text)


def test_a_second_file_that_cannot_be_parsed():
    with pytest.raises(ParseError, match=r"fixed\.cfg:1:1"):
        read(NAMES_A_FILE, "skip_layer: 'c1'")
