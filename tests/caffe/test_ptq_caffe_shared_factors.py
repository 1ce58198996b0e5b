"""IFMR layers that see the same values: which one watches, and that nothing is lost by it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from ptq_caffe_flow import batch, forward, prototxt, text_flow

import amct_caffe as amct
from amct.caffe.engine.net import Net
from amct.calibration import make_observer
from amct.errors import ModelError
from amct.numerics.affine import SymmetricScale
from amct.numerics.settings import HfmgSettings
from amct.record import read_caffe_record

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 12 dim: 10 } } }
layer { name: "left" type: "Convolution" bottom: "data" top: "left"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
layer { name: "right" type: "Convolution" bottom: "data" top: "right"
  convolution_param { num_output: 5 kernel_size: 1 } }
layer { name: "join" type: "Concat" bottom: "left" bottom: "right" top: "join" }
layer { name: "pool" type: "Pooling" bottom: "join" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "drop" }
layer { name: "last" type: "Convolution" bottom: "drop" top: "last"
  convolution_param { num_output: 5 kernel_size: 1 } }
layer { name: "again" type: "Convolution" bottom: "last" top: "again"
  convolution_param { num_output: 5 kernel_size: 1 } }
layer { name: "sum" type: "Eltwise" bottom: "again" bottom: "last" top: "sum" }
"""


@pytest.fixture
def flow(tmp_path):
    return text_flow(NET, tmp_path).configure()


def sources(flow):
    """For each IFMR layer the one it takes its factors from; None where it watches."""
    flow.prepare()
    layers = [layer for layer in prototxt(flow.modified[0]).layer if layer.type == "IFMR"]
    return {layer.name: layer.ifmr_param.factors_from or None for layer in layers}


def test_layers_that_only_move_values_follow_the_reader_of_their_result(flow):
    assert sources(flow) == {
        "left_ifmr": None,
        "join_ifmr_0": "last_ifmr",
        "join_ifmr_1": "last_ifmr",
        "pool_ifmr": "last_ifmr",
        "last_ifmr": None,
        "again_ifmr": None,
        "sum_ifmr_0": None,
        "sum_ifmr_1": "again_ifmr",
    }


def test_a_layer_that_makes_new_values_is_watched_itself(tmp_path):
    text = NET.replace("kernel_size: 2 stride: 2", "kernel_size: 2 stride: 2 pool: AVE")
    found = sources(text_flow(text, tmp_path).configure())
    assert {name: found[name] for name in ("join_ifmr_0", "join_ifmr_1", "pool_ifmr", "last_ifmr")} == {
        "join_ifmr_0": "pool_ifmr",
        "join_ifmr_1": "pool_ifmr",
        "pool_ifmr": None,
        "last_ifmr": None,
    }


def test_a_blob_with_another_reader_is_watched_itself(tmp_path):
    """The Silence layer reads the Concat's result unquantized, so that rounding before it would change its input."""
    text = NET.replace('bottom: "again" bottom: "last"', 'bottom: "again" bottom: "last" bottom: "join"')
    text = text.replace('type: "Eltwise"', 'type: "Silence"').replace(' top: "sum"', "")
    found = sources(text_flow(text, tmp_path).configure())
    assert {name: found[name] for name in ("join_ifmr_0", "join_ifmr_1", "pool_ifmr", "last_ifmr")} == {
        "join_ifmr_0": None,
        "join_ifmr_1": None,
        "pool_ifmr": None,
        "last_ifmr": None,
    }


def test_other_settings_are_watched_apart(tmp_path):
    def change(config):
        config["last"]["activation_quant_params"]["num_bits"] = 12

    found = sources(text_flow(NET, tmp_path).configure(change=change))
    assert found["pool_ifmr"] is None
    assert found["join_ifmr_0"] == found["join_ifmr_1"] == "pool_ifmr"
    assert found["last_ifmr"] is None


def test_record_has_every_input_with_its_own_size_and_moving_layers_cost_nothing(flow):
    flow.run()
    record = read_caffe_record(flow.out("quant_param_record.txt"))
    inputs = {name: [(each.channels, each.height, each.width) for each in record[name].record_d] for name in record}
    assert inputs["join"] == [(4, 12, 10), (5, 12, 10)]
    assert inputs["pool"] == [(9, 12, 10)]
    assert inputs["last"] == [(9, 6, 5)]
    assert inputs["sum"] == [(5, 6, 5), (5, 6, 5)]
    same = [record["last"].record_d[0], record["pool"].record_d[0], *record["join"].record_d]
    assert len({(each.scale, each.offset) for each in same}) == 1
    assert record["sum"].record_d[1].scale == record["again"].record_d[0].scale
    # Without the Quant layers of Concat and Pooling the result is the same, bit for bit.
    fake = flow.result("fake_quant")
    data = batch(fake, 5)
    fake.forward(**data)
    joined = [fake.blobs[name].data for name in ("left", "right")]
    values = np.concatenate(joined, axis=1).reshape(2, 9, 6, 2, 5, 2).max((3, 5))
    each = same[0]
    steps = np.rint(values * (np.float32(1) / np.float32(each.scale)))
    expected = np.clip(steps, -128 - each.offset, 127 - each.offset) * np.float32(each.scale)
    np.testing.assert_array_equal(fake.blobs["last_quant"].data, expected)


def test_record_is_written_at_once_even_when_the_end_of_the_net_is_not_run(flow, caplog):
    flow.prepare()
    net = flow.net(*flow.modified)
    for seed in range(2):
        net.blobs["data"].data[...] = batch(net, seed)["data"]
        net.forward(end="last")
    assert not read_caffe_record(flow.record)["last"].record_d
    with caplog.at_level(logging.INFO):
        net.forward(end="last")
    assert read_caffe_record(flow.record)["last"].record_d
    assert "Do layer join activation calibration success!" in caplog.text
    assert not read_caffe_record(flow.record)["again"].record_d


def test_factors_from_must_name_a_layer_that_watches(flow):
    flow.prepare()
    text = flow.modified[0].read_text()
    (flow.folder / "wrong.prototxt").write_text(text.replace('factors_from: "last_ifmr"', 'factors_from: "last"'))
    with pytest.raises(ModelError, match='factors_from: "last" is no IFMR layer that watches its bottom'):
        Net.from_file(flow.folder / "wrong.prototxt")


def test_two_nets_do_not_mix_their_findings(flow):
    graph = flow.prepare()
    first, second = flow.net(*flow.modified), flow.net(*flow.modified)
    forward(first, 1)
    forward(second, 1, first_seed=7)
    assert not read_caffe_record(flow.record)["last"].record_d
    forward(first, 1, first_seed=1)
    amct.save_model(graph, "Fakequant", str(flow.prefix))


def test_a_layer_may_be_calibrated_by_another_algorithm(flow):
    """The algorithm and its settings travel in the modified prototxt, which calibrates in any process."""
    graph = flow.init()
    settings = HfmgSettings(num_of_bins=1024, asymmetric=False)
    layers = [replace(plan, activations=(settings,) * len(plan.activations)) for plan in graph.plan.layers]
    graph.plan = replace(graph.plan, layers=tuple(layers))
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    amct.activation_quantize_model(graph, *map(str, flow.modified))
    options = next(layer for layer in prototxt(flow.modified[0]).layer if layer.name == "left_ifmr").ifmr_param
    assert json.loads(options.settings) == {
        "act_algo": "hfmg", "num_bits": 8, "num_of_bins": 1024, "asymmetric": False
    }  # fmt: skip
    net = flow.net(*flow.modified)
    forward(net, 2)
    expected = make_observer(settings, symmetric_scale=SymmetricScale.FULL_RANGE)
    for seed in range(2):
        expected.observe(torch.from_numpy(batch(net, seed)["data"]))
    found = read_caffe_record(flow.record)["left"].record_d[0]
    assert (found.scale, found.offset) == (float(expected.result().scale), 0)
    text = flow.modified[0].read_text()
    for wrong, says in (("hfng", 'settings: act_algo: no algorithm "hfng"'), ("hfmg, {", "settings: ")):
        (flow.folder / "wrong.prototxt").write_text(text.replace("hfmg", wrong.replace('"', "")))
        with pytest.raises(ModelError, match=says):
            Net.from_file(flow.folder / "wrong.prototxt")
