"""Any bytes into any reader of retraining configs: our error or success, never another exception."""

from __future__ import annotations

import json

import pytest
from config_models import RETRAIN, SAMPLES, layers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amct.config.prune import search as prune_search
from amct.config.prune.dialect import COMPRESSION
from amct.config.qat.dialect import CAFFE_QAT, PYTORCH_QAT
from amct.config.simple_config import explain
from amct.errors import AmctError

CAFFE = layers("data:Data", "conv1:Convolution", "relu1:ReLU", "fc:InnerProduct")


def again(kind, network):
    """A check that a config written by us is read back to the same text and gives the same plan."""

    def check(config) -> None:
        plan = kind.make_plan(config, network)
        assert plan.enabled
        read = kind.read_config(config.to_json(), "again", network)
        assert read.to_json() == config.to_json()
        assert kind.make_plan(read, network).layers == plan.layers
        assert explain(read)

    return check


def plan_of(config) -> None:
    plan = COMPRESSION.compression_plan(config, RETRAIN)
    assert plan.prune or plan.quant
    assert explain(config)


def search(text: str | bytes, source: str, network) -> prune_search.PruneSearchConfig:
    return prune_search.read_search_config(text, source, network, read_file=lambda path: path.encode("utf-8"))


CFG = {
    "qat": (PYTORCH_QAT.expand_config, RETRAIN, again(PYTORCH_QAT, RETRAIN)),
    "caffe": (CAFFE_QAT.expand_config, CAFFE, again(CAFFE_QAT, CAFFE)),
    "compress": (COMPRESSION.expand_config, RETRAIN, plan_of),
    "search": (search, RETRAIN, lambda config: config.search_layers[0]),
}
JSON = {
    "qat": (PYTORCH_QAT.read_config, RETRAIN, again(PYTORCH_QAT, RETRAIN)),
    "caffe": (CAFFE_QAT.read_config, CAFFE, again(CAFFE_QAT, CAFFE)),
}
READERS = {("cfg", name): reader for name, reader in CFG.items()} | {
    ("json", name): reader for name, reader in JSON.items()
}
COMBINED = (SAMPLES / "pytorch_retrain_compressed1.cfg").read_text()
SAMPLE_TEXTS = {
    ("cfg", "qat"): (SAMPLES / "pytorch_retrain_quant.cfg").read_text(),
    ("cfg", "compress"): COMBINED,
    ("cfg", "caffe"): (SAMPLES / "pytorch_retrain_quant.cfg").read_text().replace("INT4", "INT8"),
    (
        "cfg",
        "search",
    ): "compress_ratio: 1.5\nmax_prune_ratio: 0.8 test_iteration: 2 override_prune_cfg: 'skip_layers: \"c1\"'",
    ("json", "qat"): PYTORCH_QAT.default_config(RETRAIN).to_json(),
    ("json", "caffe"): CAFFE_QAT.default_config(CAFFE).to_json(),
}
NAMES = {"caffe": ("conv1", "InnerProduct"), "qat": ("c2", "Linear"), "compress": ("c2", "Linear")}


def feed(kind: str, name: str, data: str | bytes) -> bool:
    reader, network, check = READERS[kind, name]
    try:
        config = reader(data, "fuzz", network)
    except AmctError:
        return False  # anything else fails the test
    check(config)
    return True


def text_of(kind: str, name: str) -> str:
    layer, layer_type = NAMES.get(name, ("", ""))
    return SAMPLE_TEXTS[kind, name].replace("Opname", layer).replace("Optype", layer_type)


@pytest.mark.parametrize(("kind", "name"), READERS)
def test_the_samples_themselves_are_accepted(kind, name):
    assert feed(kind, name, text_of(kind, name))


@pytest.mark.parametrize(("kind", "name"), READERS)
@given(data=st.binary(max_size=200))
@example(data=b"\xff\xfe{\x00")
@example(data=b"\xef\xbb\xbf")
def test_random_bytes(kind, name, data):
    feed(kind, name, data)


SPOILED = ["", "{", "}", '"', ",", ":", "1e999", "nan", "-5", "true", "9" * 500, "\x00", "é", "INT4", "INT16"]


@pytest.mark.parametrize(("kind", "name"), READERS)
@given(data=st.data())
@settings(max_examples=60)
def test_truncated_and_spoiled_files(kind, name, data):
    text = text_of(kind, name)
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 30))
    feed(kind, name, text[:start] + data.draw(st.sampled_from(SPOILED)) + text[start + length :])
    feed(kind, name, text[:start])


KEYS = st.sampled_from(
    [
        *("version", "batch_num", "fakequant_precision_mode", "c1", "dw", "fc", "pool", "conv1", "relu1"),
        *("retrain_enable", "retrain_data_config", "retrain_weight_config", "algo", "channel_wise", "dst_type"),
        *("num_bits", "clip_max", "clip_min", "fixed_min", "fixed_clip"),
    ]
)
WORDS = st.sampled_from(["INT4", "INT8", "INT16", "ulq_quantize", "arq_retrain", "ulq_retrain", "FORCE_FP16_QUANT"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 20) | st.integers() | st.floats() | st.text(max_size=5) | WORDS
JSON_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)


@pytest.mark.parametrize("name", JSON)
@given(value=st.dictionaries(KEYS, JSON_VALUES, max_size=5))
@settings(max_examples=150)
def test_json_of_the_right_words_in_any_shape(name, value):
    feed("json", name, json.dumps(value))


@st.composite
def layer_blocks(draw, data_types, weights):
    """A block of one layer that is nearly always right."""
    clips = draw(st.sampled_from([{}, {"clip_max": 6.5, "clip_min": -0.25}, {"clip_max": 1.5}]))
    fixed = draw(st.sampled_from([{}, {"fixed_min": True}, {"fixed_min": False}]))
    return {
        "retrain_enable": draw(st.booleans()),
        "retrain_data_config": {**clips, **fixed, **draw(st.sampled_from(data_types))},
        "retrain_weight_config": draw(st.sampled_from(weights)),
    }


NEARLY = {
    "qat": layer_blocks(
        [{}, {"dst_type": "INT4"}, {"dst_type": "INT16"}],
        [{}, {"dst_type": "INT4"}, {"algo": "ulq_retrain", "channel_wise": False}],
    ),
    "caffe": layer_blocks([{}, {"num_bits": 12}, {"num_bits": 16}], [{}, {"channel_wise": False}, {"num_bits": 8}]),
}


@pytest.mark.parametrize("name", JSON)
@given(data=st.data())
@settings(max_examples=100)
def test_nearly_right_configs_survive_writing_and_reading(name, data):
    names = [layer.name for layer in JSON[name][1]]
    blocks = data.draw(st.dictionaries(st.sampled_from(names), NEARLY[name], min_size=1, max_size=4))
    feed("json", name, json.dumps({"version": 1, "batch_num": 2, **blocks}))


CFG_WORDS = st.sampled_from(
    [
        *("batch_num:", "skip_layers:", "quant_skip_types:", "regular_prune_skip_layers:", "fakequant_precision_mode:"),
        *("retrain_data_quant_config {", "retrain_weight_quant_config {", "prune_config {", "ulq_quantize {"),
        *("override_layer_types {", "override_layer_configs {", "layer_name:", "layer_type:", "arq_retrain {"),
        *("ulq_retrain {", "clip_max_min {", "clip_max:", "clip_min:", "fixed_min:", "dst_type:", "channel_wise:"),
        *("filter_pruner {", "balanced_l2_norm_filter_prune {", "prune_ratio:", "n_out_of_m_pruner {", "num_bits:"),
        *("l1_selective_prune {", "update_freq:", "compress_ratio:", "override_prune_cfg:", "}", "}", "}", "}", "}"),
        *("1", "0", "8", "0.5", "-1.5", "true", "INT4", "INT8", "INT16", '"c1"', '"fc"', '"Linear"', "'conv1'", "nan"),
    ]
)


@pytest.mark.parametrize("name", CFG)
@given(words=st.lists(CFG_WORDS, max_size=25))
@settings(max_examples=150)
def test_text_of_the_right_words_in_any_order(name, words):
    feed("cfg", name, " ".join(words))


OPTIONAL_BLOCKS = [
    "batch_num: 2",
    "skip_layers: 'c1'",
    "quant_skip_types: 'Linear'",
    "regular_prune_skip_layers: 'c2'",
    "regular_prune_skip_types: 'Conv2d'",
    "retrain_data_quant_config { ulq_quantize { dst_type: INT4 } }",
    "retrain_weight_quant_config { ulq_retrain { dst_type: INT4 channel_wise: true } }",
    "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }",
    "prune_config { n_out_of_m_pruner { l1_selective_prune { } } }",
    "override_layer_configs { layer_name: 'fc' retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }",
    "override_layer_configs { layer_name: 'c3' prune_config { n_out_of_m_pruner { l1_selective_prune { } } } }",
    "override_layer_types { layer_type: 'Conv2d' retrain_weight_quant_config { arq_retrain { } } }",
    "override_layer_types { layer_type: 'Linear' }",
]


@pytest.mark.parametrize("name", ["qat", "compress"])
@given(blocks=st.lists(st.sampled_from(OPTIONAL_BLOCKS), max_size=8))
@settings(max_examples=100)
def test_blocks_in_any_combination(name, blocks):
    feed("cfg", name, "\n".join(blocks))


@pytest.mark.parametrize(("kind", "name"), READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"{" * 10_000,
        b'{"c1":' * 10_000,
        b"prune_config { " * 10_000,
        b'{"batch_num": ' + b"9" * 100_000 + b"}",
        b"batch_num: " + b"9" * 100_000,
        ("{" + ",".join(f'"layer{index}": {{"num_bit": 1}}' for index in range(3000)) + "}").encode(),
        "\n".join(f'skip_layers: "layer{index}"' for index in range(3000)).encode(),
        "\n".join(f'override_layer_configs {{ layer_name: "layer{index}" }}' for index in range(3000)).encode(),
    ],
    ids=["braces", "objects", "blocks", "number", "cfg number", "keys", "names", "overrides"],
)
def test_hostile_files(kind, name, data):
    assert not feed(kind, name, data)
