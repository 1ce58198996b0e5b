"""The layers of retraining and the model that holds them: sharing, phases, clips, solver settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from qat_caffe_flow import BODY, Retraining, write_digits

import amct_caffe as amct
from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import read_net_message
from amct.errors import ConfigError, ModelError
from amct.numerics.affine import SymmetricScale
from amct.numerics.arq import arq
from amct.numerics.settings import WeightKind
from amct.record import read_caffe_record

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 2 dim: 5 dim: 5 } } }
layer { name: "quant" type: "RetrainDataQuant" bottom: "data" top: "rounded"
  retrain_data_quant_param { object_layer: "conv" %s } }
layer { name: "weights" type: "RetrainWeightQuant" retrain_weight_quant_param { object_layer: "conv" %s } }
layer { name: "conv" type: "Convolution" bottom: "rounded" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "Reduction" bottom: "conv" top: "loss" loss_weight: 1 }
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def float_net(tmp_path_factory, digits):
    """A small net that has learned digits a little."""
    run = Retraining(tmp_path_factory.mktemp("float"), digits)
    run.train_float(30)
    return run


@pytest.fixture
def run(tmp_path, digits, float_net, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Retraining(tmp_path, digits)
    run.model.write_text(float_net.model.read_text())
    run.weights.write_bytes(float_net.weights.read_bytes())
    return run


def make(write, data="", weights="", phase=caffe.TRAIN):
    caffe.set_random_seed(1)
    return caffe.Net(write(NET % (data, weights)), phase)


def rounded(x, clip_min, clip_max, bits=8):
    """Quantize and dequantize by the formula, in float64."""
    scale = np.float32((clip_max - clip_min) / (2**bits - 1))
    offset = -(2 ** (bits - 1)) - np.round(clip_min / np.float64(scale))
    q = np.clip(np.round(np.float32(x) * (np.float32(1) / scale)) + offset, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (q - offset) * scale


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_given_clips_round_in_both_phases(write, bits):
    x = np.random.default_rng(0).normal(0, 1, (4, 2, 5, 5)).astype(np.float32)
    for phase in (caffe.TRAIN, caffe.TEST):
        net = make(write, f"clip_max: 1.5 clip_min: -0.5 num_bits_d: {bits}", phase=phase)
        net.blobs["data"].data[...] = x
        net.forward()
        np.testing.assert_allclose(net.blobs["rounded"].data, rounded(x, -0.5, 1.5, bits), rtol=0, atol=1e-6)
        assert not np.array_equal(net.blobs["rounded"].data, x)


def test_gradients_of_clips_and_weights(write):
    """Beyond a clip the gradient belongs to the clip; the rounding of weights lets it through."""
    net = make(write, "clip_max: 1 clip_min: -1")
    x = np.zeros((4, 2, 5, 5), np.float32)
    x[0, 0, 2, 2], x[1, 1, 2, 2] = 3, -3
    net.blobs["data"].data[...] = x
    net.forward()
    net.backward()
    weight = net.params["conv"][0].data
    # every kernel position meets the pixel in the middle once, in each output
    scale = np.abs(weight).reshape(3, -1).max(1) / 127
    steps = np.round(weight / scale[:, None, None, None]) * scale[:, None, None, None]
    above, below = steps[:, 0].sum(), steps[:, 1].sum()
    bound = 0.5 / 255 * (abs(above) + abs(below))  # a rounding error is at most half a step of 255
    assert abs(net.params["quant"][0].diff[0] - above) <= bound
    assert abs(net.params["quant"][1].diff[0] - below) <= bound
    np.testing.assert_allclose(net.params["conv"][0].diff[:, 0], net.blobs["rounded"].data[:, 0].sum(), rtol=1e-5)


@pytest.mark.parametrize("channel_wise", [True, False])
def test_weights_are_rounded_as_arq_rounds_them(write, channel_wise):
    net = make(write, "clip_max: 4 clip_min: -4", f"channel_wise: {str(channel_wise).lower()}")
    x = np.zeros((4, 2, 5, 5), np.float32)
    x[0, 0, 1, 1] = 1
    net.blobs["data"].data[...] = x
    net.forward()
    weight = torch.from_numpy(net.params["conv"][0].data)
    factors = arq(weight, kind=WeightKind.CONV, channel_wise=channel_wise, symmetric_scale=SymmetricScale.FULL_RANGE)
    scale = factors.scale.reshape(-1, 1, 1, 1)
    expected = (weight / scale).round() * scale
    pixel = net.blobs["rounded"].data[0, 0, 1, 1]
    np.testing.assert_allclose(
        net.blobs["conv"].data[0, :, :2, :2], expected[:, 0].flip(1, 2)[:, 1:, 1:] * pixel, rtol=1e-5, atol=1e-6
    )


def test_ifmr_finds_clips_in_the_first_batches(write):
    net = make(write, "batch_num: 2")
    random = np.random.default_rng(0)
    for number in range(3):
        net.blobs["data"].data[...] = x = random.normal(0, 1, (4, 2, 5, 5))
        net.forward()
        passed = np.array_equal(net.blobs["rounded"].data, x.astype(np.float32))
        assert passed == (number == 0)
    high, low, legal = (blob.data for blob in net.params["quant"])
    assert 1 < high[0] < 4
    assert -4 < low[0] < -1
    np.testing.assert_array_equal(legal, [high[0], low[0]])


def test_a_test_net_without_clips_says_what_to_do(write):
    net = make(write, phase=caffe.TEST)
    with pytest.raises(ModelError, match=r'"quant" .*clips are not known.*test_initialization: false'):
        net.forward()


def test_one_given_clip(write):
    net = make(write, "clip_max: 0.75")
    net.blobs["data"].data[...] = np.random.default_rng(0).normal(0, 1, (4, 2, 5, 5))
    net.forward()
    assert net.params["quant"][0].data[0] == 0.75
    assert net.params["quant"][1].data[0] < -1


def test_an_update_that_makes_clips_illegal_is_taken_back(write):
    net = make(write, "clip_max: 1 clip_min: -1")
    net.blobs["data"].data[...] = 0.5
    net.forward()
    net.params["quant"][0].data[...] = -0.25
    net.forward()
    assert net.params["quant"][0].data[0] == 1
    assert net.params["quant"][1].data[0] == -1


def test_fixed_min_has_no_gradient(write):
    net = make(write, "clip_max: 1 fixed_min: true")
    net.blobs["data"].data[...] = -1
    net.forward()
    net.backward()
    assert not net.blobs["rounded"].data.any()
    assert net.params["quant"][1].diff[0] == 0


def test_nan_names_the_layer(write):
    net = make(write)
    net.blobs["data"].data[...] = np.nan
    with pytest.raises(ModelError, match=r'layer "quant" .*scale is illegal'):
        net.forward()


def test_object_layer_must_have_weights(write):
    with pytest.raises(ModelError, match=r'object_layer: "data" is no layer with weights'):
        caffe.Net(
            write(
                NET.replace(
                    'quant_param { object_layer: "conv" %s } }\nlayer { name: "conv"',
                    'quant_param { object_layer: "data" %s } }\nlayer { name: "conv"',
                )
                % ("", "")
            ),
            caffe.TRAIN,
        )


# ------------------------------------------------------------------ the model of create_quant_retrain_model


def modified(run):
    return {layer.name: layer for layer in read_net_message(run.modified[0]).layer}


def test_inputs_with_the_same_values_share_their_clips(run, caplog):
    caplog.set_level("INFO", "amct")
    run.create()
    (line,) = [record.message for record in caplog.records if record.message.startswith("fixed_min")]
    assert line.startswith('fixed_min: the lower clip of "pool1", "conv2", "sum", "fc" stays at 0')
    layers = modified(run)
    names = {name: [spec.name for spec in layers[name].param] for name in layers if "dataquant" in name}
    assert names["pool1_retraindataquant"] == names["conv2_retraindataquant"] == names["sum_retraindataquant_0"]
    assert names["pool1_retraindataquant"][0] == "conv2_0_clip_max"
    assert names["conv1_retraindataquant"] == names["fc_retraindataquant"] == ["", "", ""]
    fixed = {name: layers[name].retrain_data_quant_param.fixed_min for name in names}
    assert fixed == {
        "conv1_retraindataquant": False,
        "pool1_retraindataquant": True,
        "conv2_retraindataquant": True,
        "sum_retraindataquant_0": True,
        "sum_retraindataquant_1": False,
        "fc_retraindataquant": True,
    }
    run.retrain(4)
    entry = read_caffe_record(run.record)
    assert entry["pool1"].record_d[0].scale == entry["conv2"].record_d[0].scale == entry["sum"].record_d[0].scale
    assert [data.index for data in entry["sum"].record_d] == [0, 1]


@pytest.mark.parametrize(("given", "rates"), [({}, [0, 0, 0]), ({"fixed_clip": False}, [1, 1, 0])])
def test_given_clips_are_fixed_unless_the_config_says_otherwise(run, given, rates):
    def change(text):
        content = json.loads(text)
        for name in ("conv1", "conv2"):  # the second reads what a ReLU made
            content[name]["retrain_data_config"] |= {"clip_max": 1.0, "clip_min": -1.0, **given}
        return json.dumps(content)

    run.create(change=change)
    for name in ("conv1", "conv2"):
        layer = modified(run)[f"{name}_retraindataquant"]
        assert [spec.lr_mult for spec in layer.param] == rates
        assert layer.retrain_data_quant_param.clip_min == -1
        assert not layer.retrain_data_quant_param.fixed_min


def test_settings_of_the_config_reach_the_layers(run):
    def change(text):
        content = json.loads(text)
        content["conv1"]["retrain_data_config"] |= {
            "clip_max": 1.0,
            "clip_min": -1.0,
            "fixed_clip": True,
            "num_bits": 12,
        }
        content["conv2"]["retrain_weight_config"]["channel_wise"] = False
        content["fc"]["retrain_enable"] = False
        del content["sum"]
        return json.dumps(content)

    run.create(change=change)
    layers = modified(run)
    options = layers["conv1_retraindataquant"].retrain_data_quant_param
    assert (options.clip_max, options.clip_min, options.num_bits_d) == (1, -1, 12)
    assert [spec.lr_mult for spec in layers["conv1_retraindataquant"].param] == [0, 0, 0]
    assert not layers["conv2_retrainweightquant"].retrain_weight_quant_param.channel_wise
    assert not [name for name in layers if name.startswith(("fc_", "sum_"))]
    solver = run.retrain(4)
    assert solver.net.params["conv1_retraindataquant"][0].data[0] == 1
    record = read_caffe_record(run.record)
    assert list(record.layers) == ["conv1", "pool1", "conv2"]
    assert record["conv1"].record_d[0].bits == 12
    assert len(record["conv2"].scale_w) == 1


def test_a_layer_that_will_be_folded_gets_no_quantizer(run):
    run.create(change=lambda text: json.dumps({**json.loads(text), "scale1": {"retrain_enable": True}}))
    assert "scale1_retraindataquant" not in modified(run)


def test_both_phases_have_their_layers_and_rules(run):
    body = BODY.replace('bottom: "pool1" top: "conv2"', 'bottom: "pool1" top: "conv2" include { phase: TEST }')
    twin = body[body.index('layer { name: "conv2"') : body.index('layer { name: "sum"')].replace("TEST", "TRAIN")
    run.body = body.replace('layer { name: "sum"', twin + 'layer { name: "sum"')
    run.write_net()
    run.create()
    both = [layer for layer in read_net_message(run.modified[0]).layer if layer.name.startswith("conv2_")]
    assert [(layer.type, [rule.phase for rule in layer.include]) for layer in both] == [
        ("RetrainDataQuant", [1]), ("RetrainWeightQuant", [1]), ("RetrainDataQuant", [0]), ("RetrainWeightQuant", [0]),
    ]  # fmt: skip
    run.retrain(2)
    assert "conv2" in read_caffe_record(run.record).layers


# ------------------------------------------------------------------ the solver

SOLVERS = {
    "train_net": (lambda text: text.replace("net:", "train_net:", 1) + 'test_net: "{net}"', "use net: one prototxt"),
    "test_interval 0": (
        lambda text: text.replace("test_iter: 2 test_interval: 4", ""),
        "set test_iter and test_interval above 0: the record is written in the TEST phase",
    ),
    "test_initialization": (
        lambda text: text.replace("test_initialization: false", ""),
        "set test_initialization: false, the factors are found in the first training batches",
    ),
}


@pytest.mark.parametrize("mistake", SOLVERS)
def test_wrong_solver_settings_are_explained(run, mistake):
    run.create()
    change, message = SOLVERS[mistake]
    path = run.folder / "wrong.prototxt"
    text = Path(run.solver(run.modified[0], 4)).read_text()
    path.write_text(change(text).replace("{net}", run.modified[0]))
    with pytest.raises(ConfigError, match=message):
        caffe.SGDSolver(str(path))


def test_the_test_phase_writes_the_record_only_when_something_changed(run):
    run.create()
    solver = run.retrain(4)
    before = run.record.stat().st_mtime_ns
    solver.test_nets[0].forward()
    assert run.record.stat().st_mtime_ns == before
    solver.step(1)
    solver.test_nets[0].share_with(solver.net)
    solver.test_nets[0].forward()
    assert run.record.stat().st_mtime_ns > before


def test_num_bits_by_the_simple_config(run):
    run.create("retrain_data_quant_config { ulq_quantize { num_bits: 12 } } batch_num: 3")
    run.retrain(4)
    record = read_caffe_record(run.record)
    assert {data.bits for entry in record.layers.values() for data in entry.record_d} == {12}


def test_the_names_are_in_amct_and_hotwheels():
    import hotwheels.amct_caffe

    for name in ("create_quant_retrain_config", "create_quant_retrain_model", "save_quant_retrain_model"):
        assert getattr(hotwheels.amct_caffe, name) is getattr(amct, name)


@pytest.mark.parametrize(("kernel", "stride", "pad", "dilation"), [(3, 1, 0, 1), (5, 2, 2, 1), (3, 1, 1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradient_of_a_picture_with_one_channel(write, kernel, stride, pad, dilation, bias):
    text = f"""force_backward: true
    layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: 2 dim: 1 dim: 9 dim: 8 }} }} }}
    layer {{ name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param {{ num_output: 3
      kernel_size: {kernel} stride: {stride} pad: {pad} dilation: {dilation} bias_term: {str(bias).lower()}
      weight_filler {{ type: "gaussian" std: 1 }} }} }}"""
    net = caffe.Net(write(text), caffe.TRAIN)
    random = np.random.default_rng(0)
    net.blobs["data"].data[...] = random.normal(size=(2, 1, 9, 8))
    net.forward()
    net.blobs["conv"].diff[...] = random.normal(size=net.blobs["conv"].shape)
    net.backward()
    tensors = [net.blobs["data"].data, *(blob.data for blob in net.params["conv"])]
    tensors = [torch.from_numpy(values.astype(np.float64)).requires_grad_() for values in tensors]
    top = torch.nn.functional.conv2d(tensors[0], *tensors[1:], stride=stride, padding=pad, dilation=dilation)
    top.backward(torch.from_numpy(net.blobs["conv"].diff.astype(np.float64)))
    found = [net.blobs["data"].diff, *(blob.diff for blob in net.params["conv"])]
    for ours, exact in zip(found, tensors, strict=True):
        np.testing.assert_allclose(ours, exact.grad, rtol=1e-4, atol=1e-4)
