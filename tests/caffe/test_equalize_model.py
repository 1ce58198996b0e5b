"""Equalized models: the same results in float, more exact ones in 8 bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ptq_caffe_flow import Flow, golden_flow, text_flow

import amct_caffe as caffe_amct
from amct.caffe import QuantConfig, compare, equalize_model, quantize
from amct.caffe import pycaffe as caffe
from amct.caffe.model import read_model
from amct.caffe.ptq.equalization import free_routes
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError
from amct.record import read_caffe_record

INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 4 dim: 9 dim: 9 } } }'


def conv(name, bottom, outputs, *, kernel=1, group=1, top=None, kind="Convolution"):
    return (
        f'layer {{ name: "{name}" type: "{kind}" bottom: "{bottom}" top: "{top or name}" '
        f"convolution_param {{ num_output: {outputs} kernel_size: {kernel} group: {group} }} }}\n"
    )


def layer(kind, name, bottoms, options="", top=None):
    bottom = " ".join(f'bottom: "{each}"' for each in bottoms)
    return f'layer {{ name: "{name}" type: "{kind}" {bottom} top: "{top or name}" {options} }}\n'


WHOLE = (
    INPUT
    + conv("a", "data", 6, kernel=3)
    + layer("BatchNorm", "a_norm", ["a"])
    + layer("Scale", "a_scale", ["a_norm"], "scale_param { bias_term: true }")
    + layer("ReLU", "a_relu", ["a_scale"], "relu_param { negative_slope: 0.1 }")
    + conv("b", "data", 2, kernel=3)
    + layer("PReLU", "b_prelu", ["b"], top="b")  # in place
    + layer("Concat", "join", ["b", "a_relu"])
    + layer("Pooling", "pool", ["join"], "pooling_param { pool: MAX kernel_size: 2 stride: 1 }")
    + layer("Pooling", "mean", ["join"], "pooling_param { pool: AVE kernel_size: 3 stride: 3 }")
    + conv("grouped", "pool", 4, kernel=2, group=2)
    + layer("Dropout", "drop", ["grouped"], top="grouped")
    + conv("depthwise", "join", 8, kernel=3, group=8, kind="DepthwiseConv")
    + conv("last", "depthwise", 3)
    + layer("InnerProduct", "fc", ["mean"], "inner_product_param { num_output: 5 transpose: true }")
    + layer("InnerProduct", "fc2", ["grouped"], "inner_product_param { num_output: 5 }")
)


def uneven(flow, spread=3.0):
    """Give the channels of all convolutions sizes that differ by powers of ten."""
    net = flow.original()
    random = np.random.default_rng(1)
    for name, blobs in net.params.items():
        if net.layer_dict[name].type in ("Convolution", "DepthwiseConv"):
            factors = 10 ** random.uniform(-spread / 2, spread / 2, blobs[0].shape[0])
            blobs[0].data[...] *= factors.reshape(-1, 1, 1, 1)
            blobs[1].data[...] *= factors
    net.save(str(flow.weights))
    return flow


def equalized(flow, data, folder):
    files = folder / "equal.prototxt", folder / "equal.caffemodel"
    changed = equalize_model(flow.model, flow.weights, data, *files)
    return Flow(folder, *files), changed


def batches(flow, count=3):
    net = flow.original()
    (name,) = net.inputs
    return [
        np.random.default_rng(seed).standard_normal(net.blobs[name].shape).astype(np.float32) for seed in range(count)
    ]


def outputs(flow, batch):
    net = flow.original()
    return {name: value.copy() for name, value in net.forward(**{net.inputs[0]: batch}).items()}


def check_same_results(flow, other, batch):
    """A factor and its inverse are rounded once each, in every weight: a few roundings of sums of sizes."""
    for name, value in outputs(flow, batch).items():
        np.testing.assert_allclose(outputs(other, batch)[name], value, rtol=0, atol=2e-5 * np.abs(value).max())


@pytest.mark.parametrize("name", ["mini_caffenet", "mini_inception", "mini_mobilenet", "mini_resnet", "mini_fcn"])
def test_golden_nets_keep_their_results(name, golden, tmp_path):
    flow = golden_flow(name, golden, tmp_path)
    data = batches(flow)
    other, changed = equalized(flow, data, tmp_path)
    assert changed
    check_same_results(flow, other, data[0])
    before, after = read_model(flow.model, flow.weights), read_model(other.model, other.weights)
    for layer_name in changed:
        assert not torch.equal(before.weights[layer_name][0], after.weights[layer_name][0])


def test_every_kind_of_layer_in_between(tmp_path):
    flow = uneven(text_flow(WHOLE, tmp_path))
    data = batches(flow)
    routes = {route.layer: route for route in free_routes(read_model(flow.model, flow.weights))}
    assert set(routes) == {"b", "grouped", "depthwise"}  # a: BatchNorm reads it; equalize_model folds that first
    assert {(use.layer, use.first) for use in routes["b"].uses} == {("grouped", 0), ("depthwise", 0), ("fc", 0)}
    other, changed = equalized(flow, data, tmp_path)
    assert set(changed) == {"a", "b", "grouped", "depthwise"}
    check_same_results(flow, other, data[0])
    kinds = [each.type for each in read_model(other.model, other.weights).layers]
    assert "BatchNorm" not in kinds
    assert kinds.count("Pooling") == 2


BARRIERS = {
    "a sum": conv("a", "data", 4) + conv("b", "a", 4) + layer("Eltwise", "sum", ["a", "b"]),
    "a function that is not linear": conv("a", "data", 4) + layer("Sigmoid", "s", ["a"]) + conv("b", "s", 4),
    "ReLU6": conv("a", "data", 4) + layer("ReLU6", "s", ["a"]) + conv("b", "s", 4),
    "an output": conv("a", "data", 4) + layer("ReLU", "s", ["a"]),
    "one reader of two": conv("a", "data", 4) + conv("b", "a", 4) + layer("Softmax", "s", ["a"]),
    "another axis": conv("a", "data", 4)
    + layer("Concat", "j", ["a", "data"], "concat_param { axis: 2 }")
    + conv("b", "j", 4),
    "another axis, as old nets say it": conv("a", "data", 4)
    + layer("Concat", "j", ["a", "data"], "concat_param { concat_dim: 2 }")
    + conv("b", "j", 4),
    "twice in a Concat": conv("a", "data", 4) + layer("Concat", "j", ["a", "a"]) + conv("b", "j", 4),
    "all axes in one": conv("a", "data", 4)
    + layer("InnerProduct", "f", ["a"], "inner_product_param { num_output: 3 axis: 2 }"),
    "weights shared by bottoms": conv("a", "data", 4)
    + conv("c", "data", 4)
    + 'layer { name: "b" type: "Convolution" bottom: "a" bottom: "c" top: "b" top: "d" '
    "convolution_param { num_output: 4 kernel_size: 1 } }",
}


@pytest.mark.parametrize("case", BARRIERS)
def test_channels_that_are_not_free(case, tmp_path):
    flow = uneven(text_flow(INPUT + BARRIERS[case], tmp_path))
    assert list(free_routes(read_model(flow.model, flow.weights))) == []
    other, changed = equalized(flow, batches(flow), tmp_path)
    assert changed == []
    check_same_results(flow, other, batches(flow)[0])


NARROW = (
    INPUT
    + conv("a", "data", 16, kernel=3)
    + layer("ReLU", "a_relu", ["a"], top="a")
    + conv("b", "a", 16, kernel=3, group=16, kind="DepthwiseConv")
    + layer("ReLU", "b_relu", ["b"], top="b")
    + conv("c", "b", 5)
)


def error_of(model, flow, data):
    real = np.concatenate([outputs(flow, each)["c"] for each in data])
    found = np.concatenate([model(each)["c"] for each in data])
    return float(np.square(found - real).sum() / np.square(real).sum())


def test_eight_bits_lose_less(tmp_path):
    """Channels a hundred times smaller than others still count, when the weights behind them are larger."""
    flow = text_flow(NARROW, tmp_path)
    net = flow.original()
    factors = 10.0 ** np.linspace(-1, 1, 16).reshape(-1, 1, 1, 1)
    net.params["a"][0].data[...] *= factors
    net.params["a"][1].data[...] *= factors.reshape(-1)
    net.params["b"][0].data[...] /= factors
    net.save(str(flow.weights))
    data = batches(flow, 4)
    plain = error_of(quantize(flow.model, flow.weights, data), flow, data)
    equal = quantize(flow.model, flow.weights, data, equalize=True)
    assert error_of(equal, flow, data) < 0.2 * plain
    assert equal.record["b"].record_d[0].scale < equal.record["a"].record_d[0].scale * 10


def test_one_call_is_the_flow_on_the_equalized_files(tmp_path, caplog):
    caplog.set_level("WARNING")
    flow = uneven(text_flow(WHOLE, tmp_path))
    data = batches(flow)
    (tmp_path / "one").mkdir()
    other, changed = equalized(flow, data, tmp_path / "one")
    other.configure(batch_num=len(data))
    graph = other.prepare()
    net = other.net(*other.modified)
    for batch in data:
        net.forward(data=batch)
    caffe_amct.save_model(graph, "Both", str(other.prefix))
    as_amct = QuantConfig(bias_correction=False)  # AMCT's functions leave biases
    model = quantize(flow.model, flow.weights, iter(data), as_amct, equalize=True)
    written = model.save(tmp_path / "out" / "net")
    assert read_caffe_record(other.out("quant_param_record.txt")) == model.record
    ours = tmp_path / "out" / "net_deploy_weights.caffemodel"
    assert ours.read_bytes() == other.out("deploy_weights.caffemodel").read_bytes()
    assert json.loads((tmp_path / "out" / "net_quant.json").read_text())["equalized"] == changed
    pair = tmp_path / "out" / "net_equalized_model.prototxt", tmp_path / "out" / "net_equalized_weights.caffemodel"
    assert set(pair) <= set(written)
    check_same_results(flow, Flow(tmp_path, *pair), data[0])
    deploy = tmp_path / "out" / "net_deploy_model.prototxt", ours
    caplog.clear()
    for found in compare(pair, deploy, data):
        assert found.cosine > 0.99, found.layer
    assert not caplog.records
    least = min(found.cosine for found in compare((flow.model, flow.weights), deploy, data))
    assert least < 0.99
    assert "net_equalized_model.prototxt and its caffemodel as the float model" in caplog.text


def test_without_equalization_nothing_is_written_of_it(tmp_path):
    flow = text_flow(NARROW, tmp_path)
    written = quantize(flow.model, flow.weights, batches(flow)).save(tmp_path / "out" / "net")
    assert not [path for path in written if "equalized" in path.name]
    assert "equalized" not in json.loads((tmp_path / "out" / "net_quant.json").read_text())


def test_layers_with_one_scale_for_all_weights_keep_theirs(tmp_path):
    """Dividing single channels would make such a scale too coarse for the others."""
    flow = uneven(text_flow(NARROW, tmp_path))
    (tmp_path / "quant.cfg").write_text(
        "batch_num: 2 override_layer_configs { layer_name: 'a' "
        "calibration_config { arq_quantize { channel_wise: false } } }"
    )
    model = quantize(flow.model, flow.weights, batches(flow, 2), tmp_path / "quant.cfg", equalize=True)
    model.save(tmp_path / "net")
    assert json.loads((tmp_path / "net_quant.json").read_text())["equalized"] == ["b"]


def test_the_config_decides_how_many_batches_count(tmp_path):
    flow = text_flow(NARROW, tmp_path)
    data = batches(flow, 3)
    (tmp_path / "quant.cfg").write_text("batch_num: 2")
    two = quantize(flow.model, flow.weights, data, tmp_path / "quant.cfg", equalize=True)
    assert two.record == quantize(flow.model, flow.weights, data[:2], equalize=True).record


def test_mistakes(tmp_path):
    flow = text_flow(NARROW, tmp_path)
    files = tmp_path / "e.prototxt", tmp_path / "e.caffemodel"
    data = batches(flow, 1)
    with pytest.raises(ArgumentTypeError, match="equalize_model: equalized_weights_file"):
        equalize_model(flow.model, flow.weights, data, files[0], 3)
    with pytest.raises(ArgumentTypeError, match="data: expected an array or an iterable of batches, got int"):
        equalize_model(flow.model, flow.weights, 3, *files)
    with pytest.raises(CalibrationError, match="data has no batch"):
        equalize_model(flow.model, flow.weights, [], *files)
    with pytest.raises(ArgumentError, match="inputs"):
        equalize_model(flow.model, flow.weights, [{"other": data[0]}], *files)
    with pytest.raises(FileError, match=r"none\.prototxt"):
        equalize_model(tmp_path / "none.prototxt", flow.weights, data, *files)
    assert not files[0].exists()
    assert not files[1].exists()


def test_a_picker_of_inputs(tmp_path):
    flow = uneven(text_flow(NARROW, tmp_path))
    data = batches(flow)
    files = [tmp_path / f"{name}.caffemodel" for name in ("one", "two")]
    equalize_model(flow.model, flow.weights, data, tmp_path / "one.prototxt", files[0])
    wrapped = [{"picture": each} for each in data]
    equalize_model(
        flow.model, flow.weights, wrapped, tmp_path / "two.prototxt", files[1], inputs=lambda batch: batch["picture"]
    )
    assert files[0].read_bytes() == files[1].read_bytes()
    caffe.Net(str(tmp_path / "two.prototxt"), str(files[1]), caffe.TEST)
