"""How a simple PTQ config of PyTorch is expanded: precedence, inheritance, and what a layer cannot take."""

from __future__ import annotations

import pytest
from config_models import layers

from amct.config.ptq.pytorch import PYTORCH
from amct.config.simple_config import explain

NETWORK = layers(
    "conv:Conv2d", "conv2:Conv2d", "conv3d:Conv3d", "pool:AvgPool2d", "fc:Linear", "fcnb:Linear", "rnn:LSTM",
    "circ:Conv2d",
    conv2={"can_pack_int4": False},
    fcnb={"has_bias": False},
    circ={"refusal": "padding_mode is circular"},
)  # fmt: skip


def expand(text: str) -> dict:
    return PYTORCH.expand_config(text, "quant.cfg", NETWORK).to_dict()


def warnings_of(text: str) -> list[str]:
    return [str(warning) for warning in PYTORCH.expand_config(text, "quant.cfg", NETWORK).warnings]


def of_layer(name: str, block: str) -> str:
    return f'override_layer_configs {{ layer_name: "{name}" calibration_config {{ {block} }} }}\n'


def of_type(name: str, block: str) -> str:
    return f'override_layer_types {{ layer_type: "{name}" calibration_config {{ {block} }} }}\n'


def common(block: str) -> str:
    return f"common_config {{ {block} }}\n"


def activation(text: str, layer: str = "conv") -> dict:
    return expand(text)[layer]["activation_quant_params"]


def test_layer_beats_type_beats_common():
    texts = [
        common("ifmr_quantize { search_step: 0.02 }"),
        of_type("Conv2d", "ifmr_quantize { search_step: 0.03 }"),
        of_layer("conv", "ifmr_quantize { search_step: 0.04 }"),
    ]
    for text in ("".join(texts), "".join(reversed(texts))):
        steps = {name: expand(text)[name]["activation_quant_params"]["search_step"] for name in ("conv", "conv2", "fc")}
        assert steps == {"conv": 0.04, "conv2": 0.03, "fc": 0.02}


def test_an_override_inherits_nothing_from_the_common_block():
    text = common("hfmg_quantize { num_of_bins: 8192 } arq_quantize { channel_wise: false } dmq_balancer { }")
    overridden = expand(text + of_layer("conv", "arq_quantize { }"))["conv"]
    assert overridden["activation_quant_params"]["act_algo"] == "ifmr"
    assert overridden["weight_quant_params"]["channel_wise"] is True
    assert "dmq_balancer_param" not in overridden


ASYMMETRIC = {
    "nothing set": ("", "conv", True),
    "global": ("activation_offset: false", "conv", False),
    "common beats global": (common("ifmr_quantize { asymmetric: true }") + "activation_offset: false", "conv", True),
    "type beats common": (
        common("ifmr_quantize { asymmetric: true }") + of_type("Conv2d", "ifmr_quantize { asymmetric: false }"),
        "conv",
        False,
    ),
    "layer beats type": (
        of_type("Conv2d", "ifmr_quantize { asymmetric: false }")
        + of_layer("conv", "ifmr_quantize { asymmetric: true }"),
        "conv",
        True,
    ),
    "an override with the same algorithm takes it from common": (
        common("ifmr_quantize { asymmetric: false }") + of_layer("conv", "arq_quantize { }"),
        "conv",
        False,
    ),
    "an override with another algorithm does not": (
        common("ifmr_quantize { asymmetric: false }") + of_layer("conv", "hfmg_quantize { }"),
        "conv",
        True,
    ),
    "Conv3d never": (common("ifmr_quantize { asymmetric: true }"), "conv3d", False),
}


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_asymmetric(name):
    text, layer, expected = ASYMMETRIC[name]
    assert activation(text, layer)["asymmetric"] is expected


def test_skip_lists_are_united():
    config = expand('skip_layers: "conv" skip_layer_types: "Linear" skip_layers: "rnn"')
    off = [name for name, block in config.items() if isinstance(block, dict) and not block["quant_enable"]]
    assert off == ["conv", "fc", "fcnb", "rnn"]


def test_a_skipped_layer_that_is_overridden_stays_skipped():
    assert expand('skip_layers: "conv"' + of_layer("conv", "hfmg_quantize { }"))["conv"]["quant_enable"] is False


def test_the_last_algorithm_of_a_block_wins():
    text = common("ada_quantize { } arq_quantize { } hfmg_quantize { } ifmr_quantize { }")
    assert activation(text)["act_algo"] == "ifmr"
    assert expand(text)["conv"]["weight_quant_params"]["wts_algo"] == "arq_quantize"
    text = common("arq_quantize { } ada_quantize { } ifmr_quantize { } hfmg_quantize { }")
    assert activation(text)["act_algo"] == "hfmg"
    assert expand(text)["conv"]["weight_quant_params"]["wts_algo"] == "ada_quantize"


def test_a_repeated_field_keeps_the_last_value_with_a_warning():
    assert expand("batch_num: 2\nbatch_num: 3")["batch_num"] == 3
    assert any(warning.startswith("quant.cfg:2:1") for warning in warnings_of("batch_num: 2\nbatch_num: 3"))


@pytest.mark.parametrize("bits", [6, 7])
def test_6_and_7_bits_of_the_common_block_are_silently_8_elsewhere(bits):
    text = common(f"arq_quantize {{ quant_bits: {bits} }}")
    found = {name: expand(text)[name]["weight_quant_params"]["num_bits"] for name in ("conv", "fc", "rnn", "pool")}
    assert found == {"conv": bits, "fc": 8, "rnn": 8, "pool": 8}
    assert warnings_of(text) == []


def test_int16_of_the_common_block_is_lowered_where_it_is_not_possible():
    text = common("hfmg_quantize { dst_type: INT16 }")
    found = {name: activation(text, name)["num_bits"] for name in ("conv", "conv3d", "pool", "fc", "fcnb", "rnn")}
    assert found == {"conv": 16, "conv3d": 8, "pool": 8, "fc": 16, "fcnb": 8, "rnn": 16}
    assert warnings_of(text) == [
        "quant.cfg:1:33: INT16 is not possible, 8 bits are used for these layers: conv3d, fcnb, pool"
    ]


def test_int16_for_the_linear_type_spares_layers_without_bias():
    text = of_type("Linear", "hfmg_quantize { dst_type: INT16 }")
    assert (activation(text, "fc")["num_bits"], activation(text, "fcnb")["num_bits"]) == (16, 8)
    assert len(warnings_of(text)) == 1


def test_4_bits_are_lowered_where_they_cannot_be_packed():
    text = common("arq_quantize { quant_bits: 4 }")
    found = {name: expand(text)[name]["weight_quant_params"]["num_bits"] for name in ("conv", "conv2", "pool")}
    assert found == {"conv": 4, "conv2": 8, "pool": 8}
    assert [warning.rpartition(": ")[2] for warning in warnings_of(text)] == ["conv2"]


def test_channel_wise_of_the_common_block_becomes_per_tensor_with_one_warning():
    text = common("arq_quantize { channel_wise: true }")
    found = {name: expand(text)[name]["weight_quant_params"]["channel_wise"] for name in ("conv", "fc", "pool")}
    assert found == {"conv": True, "fc": False, "pool": False}
    assert warnings_of(text) == [
        "quant.cfg:1:32: channel_wise does not apply to these layers, they are quantized per tensor: fc, fcnb, pool"
    ]


def test_nobody_hears_of_layers_that_are_switched_off():
    assert (
        warnings_of(common("arq_quantize { channel_wise: true }") + 'skip_layer_types: "Linear" skip_layers: "pool"')
        == []
    )


def test_ada_of_the_common_block_falls_back_to_arq():
    config = PYTORCH.expand_config(common("ada_quantize { }"), "quant.cfg", NETWORK)
    assert "weight_quant_params" not in config.to_dict()["rnn"]
    plan = PYTORCH.make_plan(config, NETWORK)
    assert (type(plan.find("rnn").weight).__name__, plan.find("rnn").weight.channel_wise) == ("ArqSettings", True)
    rows = {row.key: row for row in explain(config) if row.layer == "rnn"}
    assert rows["weight_quant_params.wts_algo"].value == "arq_quantize"


def test_dmq_of_the_common_block_reaches_lstm_but_not_pooling():
    config = expand(common("dmq_balancer { migration_strength: 0.3 }"))
    assert config["rnn"]["dmq_balancer_param"] == 0.3
    assert "dmq_balancer_param" not in config["pool"]


def test_an_override_of_a_refused_layer_is_a_warning():
    assert warnings_of(of_layer("circ", "hfmg_quantize { }")) == [
        'quant.cfg:1:1: the override of "circ" has no effect: the layer cannot be quantized (padding_mode is circular)'
    ]


def test_explain_names_the_line_of_every_effective_setting():
    text = """batch_num: 2
skip_layers: "fc"
common_config {
  arq_quantize { channel_wise: true }
  ifmr_quantize { asymmetric: false search_step: 0.02 }
}
override_layer_configs {
  layer_name: "conv"
  calibration_config { arq_quantize { quant_bits: 6 } }
}"""
    rows = {(row.layer, row.key): row for row in explain(PYTORCH.expand_config(text, "q.cfg", NETWORK))}
    expected = {
        ("", "batch_num"): (2, "global field (q.cfg:1:1)"),
        ("", "do_fusion"): (True, "built-in default"),
        ("fc", "quant_enable"): (False, "global field (q.cfg:2:1)"),
        ("fc", "activation_quant_params.search_step"): (0.02, "common block (q.cfg:5:37)"),
        ("fc", "weight_quant_params.channel_wise"): (False, "rule of the layer type (q.cfg:4:18)"),
        ("conv", "weight_quant_params.num_bits"): (6, "override of this layer (q.cfg:9:39)"),
        ("conv", "weight_quant_params.wts_algo"): ("arq_quantize", "override of this layer (q.cfg:9:24)"),
        ("conv", "activation_quant_params.search_step"): (0.01, "built-in default"),
        ("conv", "activation_quant_params.asymmetric"): (False, "common block (q.cfg:5:19)"),
        ("conv3d", "activation_quant_params.asymmetric"): (False, "rule of the layer type"),
    }
    assert {key: (rows[key].value, str(rows[key].origin)) for key in expected} == expected
    assert str(rows["conv", "activation_quant_params.search_step"].block) == "override of this layer (q.cfg:7:1)"


def test_explain_of_a_json_points_into_the_json():
    text = '{"conv": {\n "activation_quant_params": {"act_algo": "hfmg",\n  "num_of_bins": 2048}}}'
    rows = {row.key: row for row in explain(PYTORCH.read_config(text, "c.json", NETWORK)) if row.layer == "conv"}
    assert str(rows["activation_quant_params.num_of_bins"].origin) == "config file (c.json:3:18)"
    assert str(rows["activation_quant_params.asymmetric"].origin) == "built-in default"
    assert rows["weight_quant_params.num_bits"].value == 8


def test_a_default_config_remembers_its_arguments():
    config = PYTORCH.default_config(NETWORK, batch_num=4, activation_offset=False, skip_layers=["conv"])
    rows = {(row.layer, row.key): row for row in explain(config)}
    assert (rows["", "batch_num"].value, str(rows["", "batch_num"].origin)) == (4, "argument of the call")
    assert str(rows["conv", "quant_enable"].origin) == "argument of the call"
    assert rows["fc", "activation_quant_params.asymmetric"].value is False
