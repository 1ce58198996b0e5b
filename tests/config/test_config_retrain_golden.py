"""Configs of retraining against what the reference wrote: JSON byte for byte, layers and types by its records."""

from __future__ import annotations

import re

import pytest
from config_models import GOLDEN, RETRAIN, network_of

from amct.config.prune.dialect import COMPRESSION
from amct.config.qat.dialect import PYTORCH_QAT
from amct.numerics.settings import (
    ArqRetrainSettings,
    FilterPruneSettings,
    SelectivePruneSettings,
    UlqRetrainSettings,
    UlqSettings,
)

REFERENCE = GOLDEN / "amct"
KINDS = ("qat_", "prune_", "sparse_", "compressed_")
CASES = sorted(path.name for path in REFERENCE.iterdir() if path.name.startswith(KINDS))
QAT = [case for case in CASES if (REFERENCE / case / "config.json").exists()]
PRUNE = [case for case in CASES if not case.startswith("qat_")]


def read(case: str, name: str) -> str:
    return (REFERENCE / case / name).read_text()


def expand(case: str):
    if not (REFERENCE / case / "quant.cfg").exists():
        return PYTORCH_QAT.default_config(network_of(case))
    kind = PYTORCH_QAT if case.startswith("qat_") else COMPRESSION
    return kind.expand_config(read(case, "quant.cfg"), "quant.cfg", network_of(case))


def test_every_case_is_here():
    assert CASES == [
        "compressed_42_int8", "prune_03_ascend", "prune_03_plain", "qat_default", "qat_int4_arq", "qat_int4_w",
        "sparse_42",
    ]  # fmt: skip
    assert (len(QAT), len(PRUNE)) == (2, 4)


@pytest.mark.parametrize("case", QAT)
def test_expansion_equals_the_reference(case):
    assert expand(case).to_json() == read(case, "config.json")


@pytest.mark.parametrize("case", QAT)
def test_a_config_of_the_reference_is_read_and_written_again_unchanged(case):
    text = read(case, "config.json")
    config = PYTORCH_QAT.read_config(text, "config.json", network_of(case))
    assert config.to_json() == text
    assert config.warnings == ()


@pytest.mark.parametrize("case", QAT)
def test_both_roads_lead_to_one_plan(case):
    network = network_of(case)
    expanded = PYTORCH_QAT.make_plan(expand(case), network)
    read_back = PYTORCH_QAT.make_plan(PYTORCH_QAT.read_config(read(case, "config.json"), "c.json", network), network)
    assert expanded.layers == read_back.layers
    assert expanded.batch_num == read_back.batch_num == 1
    assert expanded.not_quantized == read_back.not_quantized


@pytest.mark.parametrize("case", QAT)
def test_the_plan_has_the_layers_and_types_of_the_record(case):
    recorded = re.findall(r'key: "(.+?)".*?act_type: "(.+?)".*?wts_type: "(.+?)"', read(case, "record.txt"), re.DOTALL)
    plan = PYTORCH_QAT.make_plan(expand(case), network_of(case))
    planned = [(layer.name, layer.activation.dst_type, layer.weight.dst_type) for layer in plan.enabled]
    assert sorted(planned) == sorted(recorded)


def test_the_plan_carries_the_algorithms():
    default = PYTORCH_QAT.make_plan(expand("qat_default"), RETRAIN)
    assert default.find("c1").activation == UlqSettings()
    assert default.find("c1").weight == ArqRetrainSettings()
    assert default.find("fc").weight == ArqRetrainSettings(channel_wise=False)
    int4 = PYTORCH_QAT.make_plan(expand("qat_int4_w"), RETRAIN)
    assert int4.find("c2").weight == UlqRetrainSettings(dst_type="INT4", channel_wise=False)
    assert (int4.find("c2").weight.num_bits, int4.find("c2").activation.num_bits) == (4, 8)
    assert int4.find("dw").weight.num_bits == 8
    assert int4.find("b1") is None
    assert default.not_quantized == {
        "b1": "BatchNorm2d cannot be quantized",
        "b2": "BatchNorm2d cannot be quantized",
        "pool": "AvgPool2d cannot be quantized",
    }


def test_4_bit_weights_that_cannot_be_packed_are_told_of_like_the_reference_does():
    assert [str(warning) for warning in expand("qat_int4_w").warnings] == [
        "quant.cfg:1:45: 4-bit weights need one group and an even number of input channels,"
        " INT8 is used for these layers: c1, dw"
    ]


def test_4_bit_activations_work_where_the_reference_fails():
    config = expand("qat_int4_arq")
    assert [str(warning) for warning in config.warnings] == [
        "quant.cfg:2:45: 4-bit weights need one group and an even number of input channels,"
        " INT8 is used for these layers: c1, dw",
        "quant.cfg:1:44: AMCT does not train INT4 activations with INT8 weights, here they are trained: c1, dw",
    ]
    plan = PYTORCH_QAT.make_plan(config, RETRAIN)
    types = {layer.name: (layer.activation.dst_type, layer.weight.dst_type) for layer in plan.layers}
    assert types == {name: ("INT4", "INT8" if name in ("c1", "dw") else "INT4") for name in types}


def compression(case: str):
    return COMPRESSION.compression_plan(expand(case), RETRAIN)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("prune_03_ascend", FilterPruneSettings(prune_ratio=0.3)),
        ("prune_03_plain", FilterPruneSettings(prune_ratio=0.3, ascend_optimized=False)),
        ("sparse_42", SelectivePruneSettings()),
        ("compressed_42_int8", SelectivePruneSettings()),
    ],
)
def test_the_pruners_of_each_case(case, settings):
    plan = compression(case).prune
    assert {layer.settings for layer in plan.layers} == {settings}
    assert all(layer.enabled for layer in plan.layers)
    assert {layer.name for layer in plan.layers} | plan.not_pruned.keys() == {layer.name for layer in RETRAIN}


def test_filters_are_pruned_where_the_reference_did_and_followers_only_follow():
    plan = compression("prune_03_plain").prune
    producers = re.findall(r'producer \{\s+name: "(.+?)"', read("prune_03_plain", "record.txt"))
    # Whether a layer has followers that can shrink with it is told by the topology, not by the config.
    assert producers == ["c1", "c2", "fc1"]
    assert [layer.name for layer in plan.filters] == ["c1", "c2", "c3", "fc1", "fc"]
    assert plan.selective == ()
    assert plan.not_pruned["dw"].startswith("a depthwise convolution cannot be pruned by filters")


@pytest.mark.parametrize("case", ["sparse_42", "compressed_42_int8"])
def test_4_to_2_pruning_has_the_layers_of_the_record(case):
    recorded = re.findall(r'selective_prune \{\s+name: "(.+?)"', read(case, "record.txt"))
    plan = compression(case).prune
    assert [layer.name for layer in plan.selective] == recorded
    assert plan.filters == ()


def test_the_combined_case_quantizes_the_layers_of_the_record():
    plan = compression("compressed_42_int8").quant
    recorded = re.findall(r'key: "(.+?)"', read("compressed_42_int8", "record.txt"))
    assert [layer.name for layer in plan.enabled] == recorded
    assert {layer.weight for layer in plan.layers} == {ArqRetrainSettings(channel_wise=False)}
    assert compression("prune_03_plain").quant is None
    assert compression("sparse_42").quant is None
