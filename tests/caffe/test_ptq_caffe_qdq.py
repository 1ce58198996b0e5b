"""The QDQ file of the one-call way: written beside the Caffe files, run by onnxruntime, near to float."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import onnxruntime
import pytest
from ptq_caffe_flow import NETS, batch, cosine, golden_flow, text_flow

from amct.caffe import quantize
from amct.caffe.engine import layer as layers
from amct.caffe.engine.layer import Layer
from amct.calibration import CalibrationSession
from amct.errors import ArgumentError
from amct.numerics.observer import widening

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
layer { name: "conv2" type: "Convolution" bottom: "data" top: "conv2"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
layer { name: "sum" type: "Eltwise" bottom: "conv1" bottom: "conv2" top: "sum" }
layer { name: "relu" type: "ReLU" bottom: "sum" top: "sum" }
layer { name: "fc" type: "InnerProduct" bottom: "sum" top: "fc" inner_product_param { num_output: 5 } }
"""


class _Halves(Layer):
    """A layer that runs in the engine and has no ONNX form."""

    def reshape(self, bottoms):
        return [bottoms[0]]

    def forward(self, bottoms, parameters):
        del parameters
        return [bottoms[0] / 2]


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", NETS)
def test_golden_nets_run_in_onnxruntime(name, golden, tmp_path):
    flow = golden_flow(name, golden, tmp_path)
    net = flow.original()
    model = quantize(flow.model, flow.weights, [batch(net, seed) for seed in range(3)])
    written = model.save(tmp_path / "out" / "net")
    path = tmp_path / "out" / "net_qdq_model.onnx"
    assert written.count(path) == 1
    assert all(each.exists() for each in written)
    assert json.loads((tmp_path / "out" / "net_quant.json").read_text())["files"][path.name]["format"] == "qdq"
    runner = session(path)
    unseen = batch(net, 3)
    net.forward(**unseen)
    names = [each.name for each in runner.get_outputs()]
    given = {each.name: unseen[each.name] for each in runner.get_inputs()}
    assert names
    for blob, got in zip(names, runner.run(None, given), strict=True):
        assert cosine(got, net.blobs[blob].data) > 0.99


def test_fast_quantizes_between_the_layers_and_exact_does_not(tmp_path):
    flow = text_flow(NET, tmp_path)
    model = quantize(flow.model, flow.weights, [batch(flow.original(), seed) for seed in range(2)], skip("sum"))
    model.save(tmp_path / "fast")
    model.save(tmp_path / "exact", placement="exact", target="exact8", opset=17)
    fast, exact = (onnx.load(tmp_path / f"{name}_qdq_model.onnx") for name in ("fast", "exact"))
    assert {name for name in inputs_of(fast, "QuantizeLinear") if name in ("conv1", "conv2")} == {"conv1", "conv2"}
    assert not {"conv1", "conv2"} & set(inputs_of(exact, "QuantizeLinear"))
    assert exact.opset_import[0].version == 17


def skip(layer):
    return {
        "version": 1,
        "batch_num": 2,
        "activation_offset": True,
        "do_fusion": True,
        "skip_fusion_layers": [],
        **{name: {"quant_enable": True} for name in ("conv1", "conv2", "fc")},
        layer: {"quant_enable": False},
    }


def inputs_of(model, kind):
    return [node.input[0] for node in model.graph.node if node.op_type == kind]


def test_observed_ranges_are_those_of_the_data(tmp_path):
    """The sum is not quantized, so no IFMR layer watches what it adds: the ranges come from the forwards."""
    flow = text_flow(NET, tmp_path)
    net = flow.original()
    data = [batch(net, seed) for seed in range(2)]
    model = quantize(flow.model, flow.weights, data, skip("sum"))
    factors = model._tensors
    assert {name for name, each in factors.items() if each.mean is None} == {"conv1", "conv2"}
    # The weights of the calibration net are rounded to 8 bits: a half step of 1/254 of the largest for each product.
    spans = []
    for each in data:
        net.forward(**each)
        spans.append((net.blobs["conv1"].data.min(), net.blobs["conv1"].data.max()))
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    more = widening(len(data) * net.blobs["conv1"].data.size)  # so few values say less of others: the range grows
    assert more > 1.1
    middle, half = (low + high) / 2, (high - low) / 2
    low, high = min(more * low, middle - more * half), max(more * high, middle + more * half)
    assert factors["conv1"].scale == pytest.approx((high - low) / 255, rel=0.02)


@pytest.mark.parametrize(
    ("placement", "target", "same"),
    [
        ("exact", "exact8", {"conv1", "conv2", "fc"}),
        ("exact", "vnni", {"conv1", "conv2", "fc"}),
        ("fast", "exact8", {"conv1", "conv2", "fc"}),
        ("fast", "vnni", {"conv1", "conv2"}),  # fc has a scale for each output there
        ("fast", "portable", set()),  # rounded again, with bounded pairs
    ],
)
def test_the_integers_are_those_of_the_deploy_model(placement, target, same, tmp_path):
    flow = text_flow(NET, tmp_path)
    model = quantize(flow.model, flow.weights, [batch(flow.original(), seed) for seed in range(2)])
    model.save(tmp_path / "net", placement=placement, target=target)
    file = onnx.load(tmp_path / "net_qdq_model.onnx")
    stored = [onnx.numpy_helper.to_array(each) for each in file.graph.initializer]
    stored = [each.astype(int) - (128 if each.dtype == np.uint8 else 0) for each in stored if each.dtype.itemsize == 1]
    deploy = flow.net(tmp_path / "net_deploy_model.prototxt", tmp_path / "net_deploy_weights.caffemodel")
    found = set()
    for name in ("conv1", "conv2", "fc"):
        weight = deploy.params[name][0].data.astype(int)
        forms = [weight] if weight.ndim > 2 else [weight, weight.T]
        if any(np.array_equal(form, each) for form in forms for each in stored):
            found.add(name)
    assert found == same


def test_clustered_weights_are_in_the_file(tmp_path):
    flow = text_flow(NET, tmp_path)
    (tmp_path / "q.cfg").write_text(
        "batch_num: 2 override_layer_types { layer_type: 'Convolution' "
        "calibration_config { snq_quantize { channel_wise: true } } }"
    )
    data = [batch(flow.original(), seed) for seed in range(2)]
    model = quantize(flow.model, flow.weights, data, tmp_path / "q.cfg")
    assert model.record["conv1"].weight_bits == 4
    model.save(tmp_path / "net", target="exact8", placement="exact")
    file = onnx.load(tmp_path / "net_qdq_model.onnx")
    weights = [onnx.numpy_helper.to_array(each) for each in file.graph.initializer if list(each.dims) == [4, 3, 3, 3]]
    assert len(weights) == 2
    for weight in weights:
        assert all(len(np.unique(channel)) <= 16 for channel in weight)
    got = session(tmp_path / "net_qdq_model.onnx").run(["fc"], {"data": data[0]["data"]})[0]
    assert cosine(got, model(data[0])["fc"]) > 0.999


def test_a_net_without_an_onnx_form_has_the_other_files(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(layers._registered, "TestHalvesForQdq", _Halves)  # gone after the test
    flow = text_flow(NET + 'layer { name: "own" type: "TestHalvesForQdq" bottom: "fc" top: "own" }', tmp_path)
    model = quantize(flow.model, flow.weights, [batch(flow.original(), 0)])
    written = model.save(tmp_path / "out" / "net")
    assert not [path for path in written if path.suffix == ".onnx"]
    assert not (tmp_path / "out" / "net_qdq_model.onnx").exists()
    assert (tmp_path / "out" / "net_deploy_model.prototxt") in written
    report = json.loads((tmp_path / "out" / "net_quant.json").read_text())["not_written"]
    assert '"own"' in report["qdq"]
    assert "no QDQ file is written" in caplog.text


@pytest.mark.parametrize("formats", ["qdq", ("fake_quant", "qdq"), "record"], ids=str)
def test_the_log_names_the_written_files(tmp_path, caplog, formats):
    flow = text_flow(NET, tmp_path)
    model = quantize(flow.model, flow.weights, [batch(flow.original(), 0)])
    with caplog.at_level(logging.INFO, logger="amct"):
        written = model.save(tmp_path / "net", formats=formats)
    assert written
    assert f"wrote {', '.join(map(str, written))}" in caplog.text


def test_wrong_choices_write_nothing(tmp_path):
    flow = text_flow(NET, tmp_path)
    model = quantize(flow.model, flow.weights, [batch(flow.original(), 0)])
    for wrong in ({"placement": "fastest"}, {"target": "gpu"}, {"opset": 9}, {"formats": "both"}):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
            model.save(tmp_path / "out" / "net", **wrong)
    assert not (tmp_path / "out").exists()


def test_a_blob_that_cannot_be_quantized_stays_float(tmp_path, caplog, monkeypatch):
    flow = text_flow(NET, tmp_path)
    data = [batch(flow.original(), seed) for seed in range(2)]
    observe = CalibrationSession.observe_tensor
    monkeypatch.setattr(
        CalibrationSession,
        "observe_tensor",
        lambda session, name, x: observe(session, name, x * float("nan") if name == "conv1" else x),
    )
    with caplog.at_level(logging.INFO, "amct"):
        model = quantize(flow.model, flow.weights, data, skip("sum"))
    model.save(tmp_path / "net")
    assert 'tensor "conv1" is not observed: the activation holds' in caplog.text
    quantized = inputs_of(onnx.load(tmp_path / "net_qdq_model.onnx"), "QuantizeLinear")
    assert "conv1" not in quantized
    assert "conv2" in quantized
