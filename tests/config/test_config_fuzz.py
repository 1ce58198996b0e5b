"""Any bytes into any reader: our error or success, never another exception."""

from __future__ import annotations

import json

import pytest
from config_models import ATTENTION, CAFFE_RESNET, MIX, SAMPLES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amct.config.ptq.caffe import CAFFE
from amct.config.ptq.kv_cache import KV_CACHE
from amct.config.ptq.pytorch import PYTORCH
from amct.errors import AmctError

CFG_READERS = {
    "pytorch": (PYTORCH.expand_config, MIX),
    "kv cache": (KV_CACHE.expand_config, ATTENTION),
    "caffe": (CAFFE.expand_config, CAFFE_RESNET),
}
JSON_READERS = {
    "pytorch": (PYTORCH.read_config, MIX),
    "kv cache": (KV_CACHE.read_config, ATTENTION),
    "caffe": (CAFFE.read_config, CAFFE_RESNET),
}
PLANS = {
    "pytorch": lambda config: PYTORCH.make_plan(config, MIX),
    "kv cache": KV_CACHE.make_plan,
    "caffe": lambda config: CAFFE.make_plan(config, CAFFE_RESNET),
}
BOTH = [(kind, name) for kind in ("cfg", "json") for name in CFG_READERS]

SAMPLE_TEXTS = {
    "cfg": {
        "pytorch": (SAMPLES / "pytorch_quant.cfg").read_text().replace("Opname", "conv").replace("Optype", "Linear"),
        "kv cache": "batch_num: 2 kv_cache_quant_config { quant_layers: 'k' calibration_config { ifmr_quantize { } } }",
        "caffe": (SAMPLES / "caffe_snq_quant.cfg").read_text(),
    },
    "json": {
        "pytorch": PYTORCH.default_config(MIX).to_json(),
        "kv cache": KV_CACHE.default_config(ATTENTION, {"kv_cache_quant_layers": ["k", "v"]}).to_json(),
        "caffe": CAFFE.default_config(CAFFE_RESNET).to_json(),
    },
}


SPOILED = ["", "{", "}", '"', ",", ":", "1e999", "nan", "-5", "true", "9" * 500, "\x00", "é"]


def feed(kind: str, name: str, data: str | bytes) -> None:
    reader, network = (CFG_READERS if kind == "cfg" else JSON_READERS)[name]
    try:
        config = reader(data, "fuzz", network)
    except AmctError:
        pass  # anything else fails the test
    else:
        PLANS[name](config)
        again = JSON_READERS[name][0](config.to_json(), "again", network)
        assert again.to_json() == config.to_json()


@pytest.mark.parametrize(("kind", "name"), BOTH)
@given(data=st.binary(max_size=200))
@example(data=b"\xff\xfe{\x00")
@example(data=b"\x00" * 50)
def test_random_bytes(kind, name, data):
    feed(kind, name, data)


@pytest.mark.parametrize(("kind", "name"), BOTH)
@given(data=st.data())
@settings(max_examples=40)
def test_truncated_and_spoiled_files(kind, name, data):
    text = SAMPLE_TEXTS[kind][name]
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 30))
    spoiled = data.draw(
        st.sampled_from(["", "{", "}", '"', ",", ":", "1e999", "nan", "-5", "true", "9" * 500, "\x00", "é"])
    )
    feed(kind, name, text[:start] + spoiled + text[start + length :])
    feed(kind, name, text[:start])


SCALARS = st.none() | st.booleans() | st.integers(-3, 20) | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(
    [
        *("version", "batch_num", "activation_offset", "do_fusion", "skip_fusion_layers", "fakequant_precision_mode"),
        *("joint_quant", "update_bn", "bn_update_config", "bn_update_iterations", "bn_dump_dir", "quant_granularity"),
        *("conv", "circ", "fc", "pool", "k", "e", "conv1", "res2a", "pool5", "lstm1"),
        *(
            "quant_enable",
            "dmq_balancer_param",
            "activation_quant_params",
            "weight_quant_params",
            "kv_data_quant_config",
        ),
        *(
            "num_bits",
            "search_range",
            "act_algo",
            "asymmetric",
            "with_offset",
            "wts_algo",
            "channel_wise",
            "num_of_bins",
        ),
    ]
)
NAMES = st.sampled_from(["ifmr", "hfmg", "arq_quantize", "ada_quantize", "snq_quantize", "conv", "conv1", "DEFAULT"])
JSON_VALUES = st.recursive(
    SCALARS | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


@pytest.mark.parametrize("name", JSON_READERS)
@given(value=st.dictionaries(KEYS, JSON_VALUES, max_size=5))
@settings(max_examples=150)
def test_json_of_the_right_words_in_any_shape(name, value):
    feed("json", name, json.dumps(value))


CFG_WORDS = st.sampled_from(
    [
        *("batch_num:", "activation_offset:", "skip_layers:", "skip_layer_types:", "common_config {", "do_fusion:"),
        *("override_layer_types {", "override_layer_configs {", "layer_name:", "layer_type:", "calibration_config {"),
        *("arq_quantize {", "ada_quantize {", "snq_quantize {", "ifmr_quantize {", "hfmg_quantize {", "dmq_balancer {"),
        *("quant_bits:", "num_bits:", "channel_wise:", "search_step:", "dst_type:", "num_of_bins:", "}", "}", "}"),
        *("kv_cache_quant_config {", "quant_layers:", "override_layers_configs {", "bn_update_config {", "update_bn:"),
        *("1", "0", "8", "16", "0.5", "true", "INT16", '"conv"', '"fc"', '"Linear"', "'k'", "'conv1'", "nan", "1e999"),
    ]
)


@pytest.mark.parametrize("name", CFG_READERS)
@given(words=st.lists(CFG_WORDS, max_size=25))
@settings(max_examples=150)
def test_text_of_the_right_words_in_any_order(name, words):
    feed("cfg", name, " ".join(words))


@pytest.mark.parametrize(("kind", "name"), BOTH)
@pytest.mark.parametrize(
    "data",
    [
        b"{" * 10_000,
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"common_config { " * 10_000,
        b'{"batch_num": ' + b"9" * 100_000 + b"}",
        b"batch_num: " + b"9" * 100_000,
        b'{"' + b"x" * 100_000 + b'": {}}',
        b'"' + b"\\" * 100_001,
        ("{" + ",".join(f'"layer{index}": {{"num_bit": 1}}' for index in range(3000)) + "}").encode(),
        "\n".join(f'skip_layers: "layer{index}"' for index in range(3000)).encode(),
    ],
    ids=["braces", "brackets", "objects", "blocks", "number", "cfg number", "name", "escapes", "keys", "names"],
)
def test_hostile_files(kind, name, data):
    feed(kind, name, data)
