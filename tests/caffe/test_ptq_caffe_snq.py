"""Non-uniform quantization with refreshed BatchNorm statistics, end to end."""

from __future__ import annotations

import numpy as np
import pytest
from ptq_caffe_flow import batch, cosine, forward, prototxt, text_flow

import amct_caffe as amct
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import CalibrationError
from amct.record import read_caffe_record

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 8 dim: 3 dim: 12 dim: 12 } } }
layer { name: "first" type: "Convolution" bottom: "data" top: "a"
  convolution_param { num_output: 8 kernel_size: 3 bias_term: false } }
layer { name: "bn1" type: "BatchNorm" bottom: "a" top: "a" batch_norm_param { moving_average_fraction: 0.25 } }
layer { name: "scale1" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "relu1" type: "ReLU" bottom: "a" top: "a" }
layer { name: "group/conv" type: "Convolution" bottom: "a" top: "b"
  convolution_param { num_output: 12 kernel_size: 3 group: 2 } }
layer { name: "bn2" type: "BatchNorm" bottom: "b" top: "b" batch_norm_param { use_global_stats: true } }
layer { name: "scale2" type: "Scale" bottom: "b" top: "b" scale_param { bias_term: true } }
layer { name: "up" type: "Deconvolution" bottom: "b" top: "c"
  convolution_param { num_output: 6 kernel_size: 3 stride: 2 bias_term: false } }
layer { name: "bn/3" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "fc" type: "InnerProduct" bottom: "c" top: "fc" inner_product_param { num_output: 5 } }
"""
CONFIG = """
batch_num: 2
update_bn: true
bn_update_config: { bn_update_iterations: 4 bn_moving_average_fraction: 0.5 bn_dump_dir: 'bn_data' }
common_config: { snq_quantize: { channel_wise: true init_algo: 'gaussian' } }
override_layer_types: { layer_type: "InnerProduct" calibration_config: { arq_quantize: { channel_wise: false } } }
override_layer_configs: { layer_name: "first" calibration_config: { arq_quantize: { channel_wise: true } } }
"""
CLUSTERED = ("group/conv", "up")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flow(tmp_path):
    made = text_flow(NET, tmp_path)
    net = made.original()
    net.params["scale2"][0].data[::3] *= -1  # negative factors must not double the number of values
    net.save(str(made.weights))
    return made.configure(text=CONFIG)


def calibrate(flow, save=True):
    graph = flow.init()
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    modified = prototxt(flow.modified[0]), flow.net(*flow.modified)
    forward(flow.net(*flow.modified), 4)
    amct.activation_quantize_model(graph, str(flow.folder / "act.prototxt"), str(flow.folder / "act.caffemodel"))
    forward(flow.net(flow.folder / "act.prototxt", flow.folder / "act.caffemodel"), 2)
    if save:
        amct.save_model(graph, "Both", str(flow.prefix))
    return graph, modified


def rows(weight, name):
    """One row per output channel; a Deconvolution without groups has them on its second axis."""
    return (
        weight.transpose(1, 0, 2, 3).reshape(weight.shape[1], -1) if name == "up" else weight.reshape(len(weight), -1)
    )


def test_weights_have_sixteen_values_per_channel_after_folding(flow):
    graph, (_, modified) = calibrate(flow)
    kinds = {layer.type for layer in prototxt(flow.result_files("fake_quant")[0]).layer}
    assert not kinds & {"BatchNorm", "Scale"}
    fake = flow.result("fake_quant")
    for name in CLUSTERED:
        for weights in (modified.params[name][0].data, fake.params[name][0].data):
            assert max(len(np.unique(row)) for row in rows(weights, name)) <= 16
    assert max(len(np.unique(row)) for row in rows(fake.params["first"][0].data, "first")) > 16
    deploy = flow.result("deploy")
    data = batch(deploy, 0)
    assert cosine(deploy.forward(**data)["fc"], fake.forward(**data)["fc"]) > 0.99999
    assert set(graph.fusion.folded) == {"first", "group/conv", "up"}


def test_refreshed_statistics_are_those_of_caffe(flow):
    """After 4 batches: Σ fraction^k x_k, as Caffe's moving average; a layer's own fraction beats the config's."""
    _, (net, _) = calibrate(flow, save=False)
    layers = {layer.name: layer for layer in net.layer}
    assert layers["bn1"].batch_norm_param.moving_average_fraction == 0.25
    assert layers["bn2"].batch_norm_param.moving_average_fraction == 0.5
    assert layers["bn2"].batch_norm_param.use_global_stats is False
    assert layers["bn2"].batch_norm_param.update_iterations == 4
    stored = caffe_pb2.NetParameter()
    stored.ParseFromString((flow.folder / "bn_data" / "bn1.caffemodel").read_bytes())
    mean, variance, weight = (np.array(blob.data) for blob in stored.layer[0].blobs)
    start = [blob.data.copy() for blob in flow.original().params["bn1"]]
    modified = flow.net(*flow.modified)
    kernel = modified.params["first"][0].data.astype(np.float64)
    expected = [part.astype(np.float64) for part in start]
    for seed in range(4):
        x = batch(modified, seed)["data"].astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        y = np.einsum("nchwij,ocij->nohw", windows, kernel)
        count = y.size // y.shape[1]
        news = (y.mean((0, 2, 3)), y.var((0, 2, 3)) * count / (count - 1), np.ones(1))
        expected = [0.25 * old + new for old, new in zip(expected, news, strict=True)]
    for found, wanted in zip((mean, variance, weight), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_both_records(flow):
    graph, _ = calibrate(flow)
    before = read_caffe_record(flow.record)
    after = read_caffe_record(flow.record.with_name("record_update.txt"))
    assert set(before) == {"first", "group/conv", "up", "fc"}
    assert not any(entry.record_d for entry in before.values())
    assert all(entry.record_d for entry in after.values())
    assert before["fc"].scale_w == after["fc"].scale_w
    assert [before[name].num_bits_w for name in ("first", "group/conv", "up")] == [8, 4, 4]
    factors = graph.original.weights["scale2"][0].numpy()
    statistics = caffe_pb2.NetParameter()
    statistics.ParseFromString((flow.folder / "bn_data" / "bn2.caffemodel").read_bytes())
    _, variance, weight = (np.array(blob.data) for blob in statistics.layer[0].blobs)
    expected = np.array(before["group/conv"].scale_w) * np.abs(factors / np.sqrt(variance / weight + 1e-5))
    np.testing.assert_allclose(after["group/conv"].scale_w, expected, rtol=1e-6)


def test_forgotten_updates(flow):
    graph = flow.init()
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    forward(flow.net(*flow.modified), 3)
    with pytest.raises(CalibrationError, match=r'layer "bn1" .*run the modified model .* for 4 batches'):
        amct.activation_quantize_model(graph, "a.prototxt", "a.caffemodel")


def test_statistics_of_an_earlier_run_do_not_count(flow):
    calibrate(flow, save=False)
    assert len(list((flow.folder / "bn_data").glob("*.caffemodel"))) == 3
    test_forgotten_updates(flow)


def test_statistics_of_another_layer(flow):
    graph = flow.init()
    amct.weights_quantize_model(graph, *map(str, flow.modified))
    forward(flow.net(*flow.modified), 4)
    folder = flow.folder / "bn_data"
    (folder / "bn1.caffemodel").write_bytes((folder / "bn2.caffemodel").read_bytes())
    with pytest.raises(CalibrationError, match='not the statistics of layer "bn1"'):
        amct.activation_quantize_model(graph, "a.prototxt", "a.caffemodel")


def test_quantized_inner_product_keeps_its_batch_norm(tmp_path):
    text = """
    layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 6 dim: 5 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 4 } }
    layer { name: "bn" type: "BatchNorm" bottom: "y" top: "z" }
    """
    config = CONFIG[: CONFIG.index("override_layer_configs")]
    flow = text_flow(text, tmp_path).configure(text=config)
    graph, _ = calibrate(flow)
    assert not graph.fusion.folded
    assert "one scale for all outputs" in graph.fusion.skipped[0].reason
    data = batch(flow.original(), 0)
    assert flow.result("deploy").forward(**data)["z"].shape == (6, 4)
