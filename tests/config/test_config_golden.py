"""Our full configs against those the reference wrote, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from config_models import GOLDEN, network_of

from amct.config.ptq.kv_cache import KV_CACHE
from amct.config.ptq.pytorch import PYTORCH
from amct.numerics.settings import AdaRoundSettings, ArqSettings, HfmgSettings, IfmrSettings

REFERENCE = GOLDEN / "amct"
WITH_CONFIG = sorted(path.parent.name for path in REFERENCE.glob("*/config.json"))
PTQ = [case for case in WITH_CONFIG if not case.startswith(("kv_", "qat_"))]
KV_CASES = [case for case in WITH_CONFIG if case.startswith("kv_")]
# Without a .cfg the reference was called with batch_num=2, for these cases with its default.
BATCH_NUM_1 = ("small_const", "small_huge", "small_inf", "small_nan", "small_tiny", "small_zeros")


def read(case: str, name: str) -> str:
    return (REFERENCE / case / name).read_text()


def expand_ptq(case: str):
    if (REFERENCE / case / "quant.cfg").exists():
        return PYTORCH.expand_config(read(case, "quant.cfg"), "quant.cfg", network_of(case))
    return PYTORCH.default_config(network_of(case), batch_num=1 if case in BATCH_NUM_1 else 2)


def test_every_case_is_here():
    assert (len(PTQ), len(KV_CASES)) == (45, 3)


@pytest.mark.parametrize("case", PTQ)
def test_expansion_equals_the_reference(case):
    assert expand_ptq(case).to_json() == read(case, "config.json")


@pytest.mark.parametrize("case", PTQ)
def test_a_config_of_the_reference_is_read_and_written_again_unchanged(case):
    text = read(case, "config.json")
    assert PYTORCH.read_config(text, "config.json", network_of(case)).to_json() == text


@pytest.mark.parametrize("case", PTQ)
def test_both_roads_lead_to_one_plan(case):
    network = network_of(case)
    expanded = PYTORCH.make_plan(expand_ptq(case), network)
    read_back = PYTORCH.make_plan(PYTORCH.read_config(read(case, "config.json"), "config.json", network), network)
    assert expanded.layers == read_back.layers
    assert replace(expanded, source="", warnings=(), not_quantized={}) == replace(
        read_back, source="", warnings=(), not_quantized={}
    )
    assert expanded.not_quantized.keys() == read_back.not_quantized.keys()
    assert {layer.name for layer in expanded.layers} | expanded.not_quantized.keys() == {
        layer.name for layer in network
    }


def plan_of(case: str):
    return PYTORCH.make_plan(expand_ptq(case), network_of(case))


def test_the_plan_carries_the_algorithms():
    assert plan_of("small_mix_default").find("conv").activation == IfmrSettings()
    assert plan_of("small_mix_hfmg_sym").find("conv").activation == HfmgSettings(asymmetric=False)
    assert plan_of("r20_hfmg_int16").find("linear").activation.num_bits == 16
    assert plan_of("small_mix_ada").find("fc").weight == AdaRoundSettings(num_iteration=30, channel_wise=False)
    assert plan_of("r20_arq_bits6_linear").find("conv1").weight == ArqSettings(num_bits=6, channel_wise=False)
    assert plan_of("small_mix_ada").find("pool").weight is None
    assert [layer.migration_strength for layer in plan_of("small_mix_dmq").balanced] == [0.5] * 8
    assert all(layer.force_fp16 for layer in plan_of("small_mix_fp16").layers)
    assert not plan_of("r20_no_fusion").do_fusion
    assert plan_of("r20_skip_layers").not_quantized["linear"] == "switched off: global field (quant.cfg:3:1)"


def test_common_channel_wise_on_linear_is_a_warning_where_the_reference_fails():
    config = expand_ptq("r20_arq_cw_true_linear_fail")
    assert [str(warning) for warning in config.warnings] == [
        "quant.cfg:2:51: 4-bit weights need one group and an even number of input channels,"
        " 8 bits are used for these layers: conv1",
        "quant.cfg:2:32: channel_wise does not apply to these layers, they are quantized per tensor: linear",
    ]
    assert config.to_dict()["linear"]["weight_quant_params"] == {
        "num_bits": 4,
        "channel_wise": False,
        "wts_algo": "arq_quantize",
    }


@pytest.mark.parametrize("case", KV_CASES)
def test_kv_cache_configs_equal_the_reference(case):
    text, network = read(case, "config.json"), network_of(case)
    if (REFERENCE / case / "quant.cfg").exists():
        config = KV_CACHE.expand_config(read(case, "quant.cfg"), "quant.cfg", network)
    else:
        config = KV_CACHE.default_config(network, {"kv_cache_quant_layers": ["k", "v"]})
    read_back = KV_CACHE.read_config(text, "config.json", network)
    assert config.to_json() == text
    assert read_back.to_json() == text
    assert KV_CACHE.make_plan(config).layers == KV_CACHE.make_plan(read_back).layers
