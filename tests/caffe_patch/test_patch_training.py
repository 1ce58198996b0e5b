"""Training for quantization with the layers of the patch: the steps, clips and records of the engine."""

from __future__ import annotations

import numpy as np
import pytest
from patch_flow import Flow, assert_same_record, batch
from small_net import TEST, TRAIN

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.record import read_caffe_record

pytestmark = pytest.mark.usefixtures("quiet")

TRAINED = {"conv1": 2, "up": 2, "conv2": 1, "fc1": 2, "fc2": 2}


def retraining(flow, text=None):
    """Write the model that is trained."""
    if text is not None:
        flow.path("retrain.cfg").write_text(text)
    config = flow.text("retrain.cfg") if text else []
    amct.create_quant_retrain_config(*flow.text("config.json", "net.prototxt", "net.caffemodel"), *config)
    amct.create_quant_retrain_model(
        *flow.text(
            "net.prototxt", "net.caffemodel", "config.json", "trained.prototxt", "trained.caffemodel", "record.txt"
        )
    )
    path = flow.path("trained.prototxt")
    path.write_text("force_backward: true\n" + path.read_text())
    return flow


def clips(net, layer, index):
    return net.get(layer, index) if hasattr(net, "put") else net.params[layer][index].data.reshape(-1)


def test_training_steps_are_those_of_the_engine(small_caffe, tmp_path):
    flow = retraining(Flow(tmp_path))
    mine = small_caffe.net(*flow.files("trained"), phase=TRAIN)
    other = flow.engine("trained", caffe.TRAIN)
    rounding = [name for name in other.params if other.layer_dict[name].type == "RetrainDataQuant"]
    assert len(rounding) == 5
    for seed in range(4):
        upstream = batch(seed + 50, (2, 5))
        mine.forward(data=batch(seed))
        mine.backward(fc2=upstream)
        other.clear_param_diffs()
        other.forward(data=batch(seed))
        wanted = other.backward(fc2=upstream)["data"].reshape(-1)
        np.testing.assert_allclose(mine.get("data", gradient=True), wanted, atol=2e-5 * np.abs(wanted).max())
        for layer, blobs in other.params.items():
            for index, blob in enumerate(blobs):
                gradient, wanted = mine.get(layer, index, gradient=True), blob.diff.reshape(-1)
                np.testing.assert_allclose(gradient, wanted, atol=1e-4 * max(1e-3, np.abs(wanted).max()))
                mine.put(layer, mine.get(layer, index) - 0.01 * gradient, index)
                blob.data[...] -= 0.01 * blob.diff
                np.testing.assert_allclose(mine.get(layer, index), blob.data.reshape(-1), rtol=1e-4, atol=1e-4)
    assert all(clips(other, name, 2).any() for name in rounding)


def test_the_record_of_the_test_phase(small_caffe, tmp_path):
    flow = retraining(Flow(tmp_path))
    records = []
    for kind in ("mine", "engine"):
        if kind == "mine":
            net = small_caffe.net(*flow.files("trained"), phase=TRAIN)
            tested = small_caffe.net(*flow.files("trained"), phase=TEST)
            net.forward(data=batch(0))
            tested.share(net)
        else:
            net, tested = (flow.engine("trained", phase) for phase in (caffe.TRAIN, caffe.TEST))
            net.forward(data=batch(0))
            tested.share_with(net)
        tested.forward(data=batch(1))
        records.append(flow.path("record.txt").read_text())
        flow.path("record.txt").write_text("")
    assert_same_record(*records)
    assert len(read_caffe_record_text(records[0], flow)) == 5
    assert [line for line in small_caffe.log() if "wrote" in line] == [
        f"wrote the factors of 5 retrained layers to {flow.path('record.txt')}"
    ]


def read_caffe_record_text(text, flow):
    flow.path("copy.txt").write_text(text)
    return read_caffe_record(flow.path("copy.txt")).layers


def test_clips_that_an_update_made_illegal(small_caffe, tmp_path):
    flow = retraining(Flow(tmp_path))
    net, other = small_caffe.net(*flow.files("trained"), phase=TRAIN), flow.engine("trained", caffe.TRAIN)
    name = next(layer for layer in other.params if other.layer_dict[layer].type == "RetrainDataQuant")
    net.forward(data=batch(0))
    other.forward(data=batch(0))
    net.put(name, [-1.0], 0)
    other.params[name][0].data[...] = -1.0
    net.forward(data=batch(1))
    wanted = other.forward(data=batch(1))["fc2"].reshape(-1)
    np.testing.assert_allclose(net.get("fc2"), wanted, atol=1e-5)
    for index in range(3):
        np.testing.assert_allclose(net.get(name, index), clips(other, name, index), rtol=1e-6)


def test_trained_nets_that_are_wrong(small_caffe, tmp_path):
    flow = retraining(Flow(tmp_path))
    text = flow.path("trained.prototxt").read_text()

    def build(old, new, phase=TRAIN):
        assert old in text
        flow.path("changed.prototxt").write_text(text.replace(old, new, 1))
        return small_caffe.net(flow.path("changed.prototxt"), flow.path("trained.caffemodel"), phase)

    with pytest.raises(ValueError, match="Set test_initialization: false"):
        build('"conv1"', '"conv1"', TEST).forward(data=batch(0))
    with pytest.raises(ValueError, match="retrain_data_quant_param needs object_layer"):
        build('retrain_data_quant_param {\n    object_layer: "conv1"', "retrain_data_quant_param {")
    with pytest.raises(ValueError, match='object_layer: "nothing" is no layer with weights'):
        build(
            'retrain_weight_quant_param {\n    object_layer: "conv1"',
            'retrain_weight_quant_param { object_layer: "nothing"',
        )
    with pytest.raises(ValueError, match="it has no weights that a RetrainWeightQuant could round"):
        build(
            'retrain_weight_quant_param {\n    object_layer: "conv1"',
            'retrain_weight_quant_param { object_layer: "relu1"',
        )
    with pytest.raises(ValueError, match=r"num_bits_w: bits: expected 2\.\.16, got 1"):
        build("num_bits_w: 8", "num_bits_w: 1")
    wrong = batch(0)
    wrong[0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"IfmrQuantWithOffset scale is illegal: .*1 NaN"):
        build('"conv1"', '"conv1"').forward(data=wrong)


def test_a_trained_net_is_saved_with_the_weights_that_are_trained(small_caffe, tmp_path):
    flow = retraining(Flow(tmp_path))
    net = small_caffe.net(*flow.files("trained"), phase=TRAIN)
    net.forward(data=batch(0))
    saved = net.saved()
    assert "with rounded weights" not in saved
    assert 'type: "RetrainWeightQuant"' in saved
    weight = flow.engine("trained").params["fc2"][0].data.reshape(-1)
    np.testing.assert_allclose(net.get("fc2", 0), weight, rtol=1e-6)
