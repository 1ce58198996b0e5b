"""The tables: settings agree with the schemas, capabilities with the documents."""

from __future__ import annotations

import dataclasses

import pytest

from amct.config import registry
from amct.config.checks import MAX_SUGGESTIONS, ProblemList, check_settings, show
from amct.config.layers import CAFFE_TYPES, PTQ_TYPES, LayerInfo, LayerList
from amct.errors import ConfigError, ConfigTypeError, Position
from amct.numerics.settings import AdaRoundSettings, BatchNormUpdate, IfmrSettings, SettingsError
from amct.schema import descriptor

SCHEMAS = {
    "pytorch": (
        "AMCTPytorchProto.CalibrationConfig",
        "pytorch",
        registry.activation_algorithms("pytorch") + registry.PYTORCH_WEIGHT,
    ),
    "kv cache": ("AMCTPytorchQuantCaliProto.CalibrationConfig", "pytorch", registry.activation_algorithms("kv_cache")),
    "caffe": (
        "AMCTCaffeProto.CalibrationConfig",
        "caffe_config",
        registry.activation_algorithms("caffe") + registry.CAFFE_WEIGHT,
    ),
}
NOT_IN_THE_SETTINGS = {"quant_granularity"}  # handled by kv_cache itself


def shortest(value):
    return float(f"{value:.7g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_algorithm_and_default_of_the_schema_is_in_the_registry(name):
    full_name, schema, algorithms = SCHEMAS[name]
    fields = descriptor(full_name, schema=schema).fields_by_name
    assert {item.message for item in algorithms} == set(fields) - {"dmq_balancer"}
    for algorithm in algorithms:
        message = fields[algorithm.message].message_type
        known = {field: key for key in algorithm.keys for field in algorithm.cfg_fields.get(key, (key,))}
        for field in message.fields:
            if field.name in NOT_IN_THE_SETTINGS:
                continue
            key = known[field.name]
            default = algorithm.default_of(key)
            if isinstance(default, list):
                default = default[algorithm.cfg_fields[key].index(field.name)]
            if field.has_default_value and field.enum_type is None:
                assert shortest(field.default_value) == default, (algorithm.message, field.name)


def test_defaults_of_the_calibration_layer_are_those_of_ifmr():
    fields = descriptor("caffe.IFMRParameter", schema="caffe").fields_by_name
    defaults = {name: shortest(fields[name].default_value) for name in fields if fields[name].has_default_value}
    layer = {"batch_num": 1, "index": 0, "reports_progress": False}
    settings = dataclasses.asdict(IfmrSettings())
    start, end = settings.pop("search_range")
    renamed = {"asymmetric": "with_offset", "num_bits": "num_bits_d"}
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    assert defaults == {**settings, "search_range_start": start, "search_range_end": end, **layer}


def test_bn_update_defaults_are_the_schemas():
    fields = descriptor("AMCTCaffeProto.BnUpdateConfig", schema="caffe_config").fields_by_name
    assert {name: field.default_value for name, field in fields.items()} == dataclasses.asdict(BatchNormUpdate())


def test_caffe_types_are_those_of_the_guide():
    off = [
        "AbsVal",
        "PReLU",
        "ReLU",
        "Scale",
        "BatchNorm",
        "Bias",
        "Clip",
        "RReLU",
        "ReLU6",
        "Swish",
        "Pad",
        "Equal",
        "Greater",
        "ReduceMax",
        "ReduceMin",
        "Sign",
        "Cos",
        "Sin",
        "TopK",
        "Unpooling",
        "Erf",
    ]
    with_weights = ["Convolution", "DepthwiseConv", "InnerProduct", "Deconvolution", "LSTM", "RNN", "GRU"]
    assert [name for name, item in CAFFE_TYPES.items() if item.weights] == with_weights
    assert len(CAFFE_TYPES) - len(with_weights) == 71
    assert {name for name, item in CAFFE_TYPES.items() if not item.on_by_default} == set(off)
    assert [name for name, item in CAFFE_TYPES.items() if item.snq] == with_weights[:4]
    assert [name for name, item in CAFFE_TYPES.items() if item.channel_wise] == [
        "Convolution", "DepthwiseConv", "Deconvolution",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ability", "types"),
    [
        ("channel_wise", {"Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "LSTM", "GRU"}),
        ("int16", {"Conv1d", "Conv2d", "Linear", "ConvTranspose1d", "ConvTranspose2d", "LSTM", "GRU"}),
        ("int16_needs_bias", {"Linear"}),
        ("ada", {"Conv2d", "ConvTranspose2d", "Linear"}),
        ("odd_bits", {"Conv2d"}),
        ("dmq", set(PTQ_TYPES) - {"AvgPool2d"}),
        ("dmq_by_type", set(PTQ_TYPES) - {"AvgPool2d", "LSTM", "GRU"}),
        ("fusible", set(PTQ_TYPES) - {"AvgPool2d", "LSTM", "GRU"}),
        ("asymmetric", set(PTQ_TYPES) - {"Conv3d"}),
        ("weights", set(PTQ_TYPES) - {"AvgPool2d"}),
    ],
)
def test_pytorch_abilities(ability, types):
    assert {name for name, capability in PTQ_TYPES.items() if getattr(capability, ability)} == types


def test_a_rule_between_two_fields_holds_for_direct_construction_too():
    with pytest.raises(SettingsError, match="search_range needs 0 < start < end"):
        IfmrSettings(search_range=(1.0, 0.5))
    with pytest.raises(SettingsError, match="beta_range needs start > end > 0"):
        AdaRoundSettings(beta_range=(1.0, 2.0))
    # 1.2 - 0.8 is a little less than 0.4 in binary, and the user wrote numbers that fit exactly
    assert IfmrSettings(search_range=(0.8, 1.2), search_step=0.4).search_step == 0.4


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        IfmrSettings().num_bits = 4


def test_checked_settings_have_the_types_of_their_fields():
    problems = ProblemList()
    settings = check_settings(IfmrSettings, {"search_range": [1, 2]}, lambda _: None, problems)
    assert settings == IfmrSettings(search_range=(1.0, 2.0))
    assert not problems


def test_infinity_is_no_setting():
    problems = ProblemList()
    assert check_settings(IfmrSettings, {"search_step": float("inf")}, lambda _: None, problems, block="b") is None
    with pytest.raises(ConfigError, match=r"b\.search_step: .*finite"):
        problems.raise_all()


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (None, "null"), ("x", '"x"'), ({}, "an object"), (1.5, "1.5"), ("y" * 99, "…")]
)
def test_values_are_shown_as_json_has_them(value, text):
    assert text in show(value)


def test_problem_list_reports_in_file_order_and_each_once():
    problems = ProblemList()
    problems.raise_all()
    late, early = Position("f", 9, 1), Position("f", 2, 3)
    problems.add("late", late)
    problems.add("early", early)
    problems.add("late", late)
    with pytest.raises(ConfigError, match="2 mistakes:\n  f:2:3: early\n  f:9:1: late"):
        problems.raise_all()
    problems.add_wrong_type("type", early)
    with pytest.raises(ConfigTypeError, match="3 mistakes"):
        problems.raise_all()


def test_problem_list_suggests_only_for_the_first_unknown_names():
    problems = ProblemList()
    for index in range(MAX_SUGGESTIONS + 5):
        problems.add_unknown("name", f"conv{index}x", [f"conv{index}"])
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert sum("Did you mean" in problem.message for problem in caught.value.problems) == MAX_SUGGESTIONS


def test_a_key_no_settings_have_is_reported_with_the_nearest():
    problems = ProblemList()
    place = Position("f", 3, 4)
    assert check_settings(IfmrSettings, {"search_steps": 1.0}, lambda _: place, problems, block="conv") is None
    with pytest.raises(
        ConfigError, match=r'f:3:4: the key "conv\.search_steps" is unknown\. Did you mean "search_step"'
    ):
        problems.raise_all()


def test_layer_list():
    found = LayerList([LayerInfo(name="a", type="Conv2d"), LayerInfo(name="b", type="Linear")])
    assert (len(found), found.names, found.find("b").type, found.find("c")) == (2, ("a", "b"), "Linear", None)
