"""QDQ files of Caffe nets: what the record says is what onnxruntime computes, in integers where that is asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from caffe_cases import NET_CASES
from onnx_records import Ranges, fake_quantized_outputs, fused_net, quantized_onnx
from onnx_running import feed, session

from amct.caffe.engine.messages import parse_message
from amct.caffe.engine.net import Net
from amct.caffe.onnx.graph import float_onnx
from amct.caffe.onnx.quant import tensors_to_observe
from amct.errors import ArgumentError, RecordError
from amct.export.onnx.runtimes import count_integer_kernels
from amct.record import CaffeLayerRecord, CaffeRecord, DataFactors

NETS = [case for case in NET_CASES if case.name.startswith("mini_")]
LAYERS = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 dim: 9 dim: 9 } } }
layer { name: "it" type: "%s" bottom: "x" top: "y" %s }
"""
FILLED = "weight_filler { type: 'gaussian' std: 0.5 } bias_filler { type: 'gaussian' std: 0.5 }"
SINGLE = {
    "convolution": ("Convolution", f"convolution_param {{ num_output: 8 kernel_size: 3 pad: 1 {FILLED} }}"),
    "group": ("Convolution", f"convolution_param {{ num_output: 8 kernel_size: 3 group: 2 {FILLED} }}"),
    "no bias": ("Convolution", f"convolution_param {{ num_output: 4 kernel_size: 1 bias_term: false {FILLED} }}"),
    "depthwise": ("DepthwiseConv", f"convolution_param {{ kernel_size: 3 stride: 2 {FILLED} }}"),
    "deconvolution": ("Deconvolution", f"convolution_param {{ num_output: 4 kernel_size: 4 stride: 2 {FILLED} }}"),
    "deconvolution group": ("Deconvolution", f"convolution_param {{ num_output: 4 kernel_size: 2 group: 2 {FILLED} }}"),
    "inner product": ("InnerProduct", f"inner_product_param {{ num_output: 5 {FILLED} }}"),
    "inner product axis": ("InnerProduct", f"inner_product_param {{ num_output: 5 axis: 2 {FILLED} }}"),
    "average": ("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 }"),
    "average pad": ("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }"),
    "average both": ("Pooling", "pooling_param { pool: AVE kernel_size: 4 stride: 3 pad: 1 }"),
    "softmax": ("Softmax", ""),
    "lrn": ("LRN", ""),
    "mvn": ("MVN", ""),
    "maximum": ("Pooling", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }"),
}  # fmt: skip


def literally(model, feeds):
    """Every node as it stands: quantizers round, layers compute in float."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    running = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in running.get_outputs()]
    return dict(zip(names, running.run(None, feeds), strict=True))


def net_of(text):
    torch.manual_seed(2)
    return Net(parse_message(text, "NetParameter", "test"), with_gradients=False)


def fed(net, seed=3):
    random = np.random.default_rng(seed)
    feeds = {}
    for index in net.graph.inputs:
        feeds[net.graph.blob_names[index]] = random.standard_normal(net.graph.blobs[index].shape).astype(np.float32)
    feed(net, feeds)
    net.forward()
    return feeds


def observed(net, types=None):
    ranges = Ranges(net, tensors_to_observe(float_onnx(net)), types)
    feeds = fed(net)
    ranges.observe()
    return ranges, feeds


def golden(case):
    net = fused_net(case.stem.with_suffix(".prototxt"), case.stem.with_suffix(".caffemodel"))
    ranges, feeds = observed(net)
    return net, ranges.record(), ranges.tensors(), feeds


@pytest.fixture
def conv():
    net = net_of(LAYERS % SINGLE["convolution"])
    ranges, _ = observed(net)
    return net, ranges.record()


def changed(record, name, **fields):
    return CaffeRecord({**record.layers, name: replace(record[name], **fields)})


@pytest.mark.parametrize("name", SINGLE)
def test_exact_is_what_the_record_says(name):
    """Random values: none lies so near to a tie that float rounding decides it."""
    net = net_of(LAYERS % SINGLE[name])
    ranges, feeds = observed(net)
    record = ranges.record()
    want = fake_quantized_outputs(net, record)
    assert not np.allclose(want["y"], net.blob("y").data, rtol=1e-4, atol=1e-5)  # rounding does something
    exported = quantized_onnx(net, record, placement="exact", target="vnni")
    got = literally(exported.model, feeds)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", NETS, ids=str)
def test_exact_nets(case):
    """Sums in another order tip some values over to the next step; that is little beside the error of quantization."""
    net, record, _, feeds = golden(case)
    want = fake_quantized_outputs(net, record)
    exported = quantized_onnx(net, record, placement="exact", target="vnni")
    got = literally(exported.model, feeds)
    for name, value in want.items():
        if np.array_equal(value, np.round(value)):  # ArgMax: places
            assert np.mean(got[name] == value) > 0.95
            continue
        loss = np.linalg.norm(value - net.blob(name).data)
        assert loss > 0
        assert np.linalg.norm(got[name] - value) < 0.05 * loss


@pytest.mark.parametrize("target", ["portable", "vnni", "exact8"])
@pytest.mark.parametrize("case", NETS, ids=str)
def test_fast_nets_run_in_integers(case, target, tmp_path):
    net, record, tensors, feeds = golden(case)
    exported = quantized_onnx(net, record, tensors, target=target)
    path = tmp_path / "net.onnx"
    path.write_bytes(exported.model.SerializeToString())
    kernels = count_integer_kernels(path)
    assert kernels.total > 0
    assert kernels.share >= 0.95
    assert {report.layer for report in exported.layers} >= {
        layer.name for layer in net.layers if layer.type in ("Convolution", "InnerProduct")
    }
    # onnxruntime has no integer kernel for ConvTranspose
    float_layers = {layer.name for layer in net.layers if layer.type == "Deconvolution"}
    assert float_layers <= {skip.layer for skip in exported.skipped}
    running = session(exported.model)
    for value, result in zip(running.get_outputs(), running.run(None, feeds), strict=True):
        want = net.blob(value.name).data.ravel()
        if not np.array_equal(want, np.round(want)):
            assert np.dot(result.ravel(), want) >= 0.98 * np.linalg.norm(result) * np.linalg.norm(want)


def test_without_observed_tensors_it_is_exact():
    net, record, _, feeds = golden(NETS[0])
    fallen_back = quantized_onnx(net, record)
    assert any('"exact" instead of "fast"' in note for note in fallen_back.notes)
    one, two = (literally(each.model, feeds) for each in (fallen_back, quantized_onnx(net, record, placement="exact")))
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])


def test_observed_tensors_are_blobs_that_are_not_layer_inputs_alone():
    (case,) = [case for case in NETS if case.name == "mini_resnet"]
    net = fused_net(case.stem.with_suffix(".prototxt"), case.stem.with_suffix(".caffemodel"))
    names = tensors_to_observe(float_onnx(net))
    assert names
    assert set(names) <= set(net.graph.blob_names)
    weighted = [layer.name for layer in net.layers if layer.type in ("Convolution", "InnerProduct")]
    assert tensors_to_observe(float_onnx(net), weighted[:1], other_bits=weighted[:1]) == ()


def test_record_beats_observed_tensors():
    """An Add reads what the record says for Eltwise, not what was observed for its blob."""
    text = (
        LAYERS % ("Convolution", f"convolution_param {{ num_output: 6 kernel_size: 1 {FILLED} }}")
        + 'layer { name: "two" type: "Convolution" bottom: "x" top: "z" '
        + f"convolution_param {{ num_output: 6 kernel_size: 1 {FILLED} }} }}"
        + 'layer { name: "sum" type: "Eltwise" bottom: "y" bottom: "z" top: "sum" }'
    )
    net = net_of(text)
    ranges, _ = observed(net)
    record = changed(
        ranges.record(),
        "sum",
        record_d=(DataFactors(index=0, scale=0.125, offset=3), DataFactors(index=1, scale=0.25, offset=0)),
    )
    exported = quantized_onnx(net, record, ranges.tensors())
    scales = {tensor.name: tensor for tensor in exported.model.graph.initializer}
    assert np.frombuffer(scales["y.scale"].raw_data, np.float32) == 0.125
    assert np.frombuffer(scales["z.scale"].raw_data, np.float32) == 0.25
    assert {"y", "z"} <= set(exported.tensors)


def test_convolution_of_two_bottoms():
    text = """
    layer { name: "in" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
    layer { name: "it" type: "Convolution" bottom: "a" bottom: "b" top: "c" top: "d" convolution_param {
      num_output: 4 kernel_size: 3 weight_filler { type: 'gaussian' std: 0.5 } } }
    """
    net = net_of(text)
    ranges, feeds = observed(net)
    record = ranges.record()
    exported = quantized_onnx(net, record, placement="exact", target="vnni")
    got = literally(exported.model, feeds)
    for name, value in fake_quantized_outputs(net, record).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)
    assert [report.layer for report in exported.layers] == ["it", "it.1"]


def test_sixteen_bits(conv):
    net, record = conv
    wide = changed(record, "it", record_d=(DataFactors(scale=0.001, offset=0, num_bits=16),))
    assert "16-bit activations need opset 21" in quantized_onnx(net, wide).skipped[0].reason
    feeds = fed(net)
    got = literally(quantized_onnx(net, wide, opset=21, target="vnni").model, feeds)
    np.testing.assert_allclose(got["y"], fake_quantized_outputs(net, wide)["y"], rtol=1e-4, atol=1e-4)
    twelve = changed(record, "it", record_d=(DataFactors(scale=0.01, offset=0, num_bits=12),))
    assert any("12 bits is written as 16 bits" in note for note in quantized_onnx(net, twelve, opset=21).notes)


def test_weights_of_a_table_keep_their_integers(conv):
    """SNQ: 16 values on the grid of 8 bits; the file has just them."""
    net, record = conv
    layer = net.layers[1]
    scales = torch.tensor(record["it"].scale_w).reshape(-1, 1, 1, 1)
    table = torch.arange(-112, 128, 15)[torch.randint(16, layer.blobs[0].shape)]
    layer.blobs[0].set_tensor(table * scales)
    exported = quantized_onnx(net, changed(record, "it", num_bits_w=4), placement="exact", target="vnni")
    stored = next(tensor for tensor in exported.model.graph.initializer if tensor.name.endswith("weight.quantized"))
    integers = np.frombuffer(stored.raw_data, np.int8).reshape(tuple(stored.dims))
    np.testing.assert_array_equal(integers, table.numpy())


def test_data_of_other_bits_stays_float():
    net = net_of(LAYERS % SINGLE["softmax"])
    record = CaffeRecord({"it": CaffeLayerRecord(record_d=(DataFactors(scale=0.1, offset=0, num_bits=12),))})
    exported = quantized_onnx(net, record, placement="exact")
    assert exported.skipped[0].layer == "it"
    assert "12 bits stays float" in exported.skipped[0].reason
    assert all(node.op_type == "Softmax" for node in exported.model.graph.node)


def test_recurrent_layers_stay_float():
    text = """
    layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 2 dim: 3 } } }
    layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 4 dim: 2 } } }
    layer { name: "it" type: "LSTM" bottom: "x" bottom: "cont" top: "y" recurrent_param { num_output: 3 } }
    """
    record = CaffeRecord({"it": CaffeLayerRecord(scale_w=(0.1,), record_d=(DataFactors(scale=0.1, offset=0),))})
    exported = quantized_onnx(net_of(text), record)
    assert [(skip.layer, skip.reason) for skip in exported.skipped] == [("it", "LSTM layers stay float in QDQ files")]


def test_a_record_of_another_model(conv):
    net, record = conv
    other = CaffeRecord({"its": record["it"]})
    with pytest.raises(RecordError, match=r'has a layer "its" that net .* does not have\. Did you mean "it"'):
        quantized_onnx(net, other)


def test_missing_factors(conv):
    net, record = conv
    with pytest.raises(RecordError, match=r"Cannot find scale_d of layer 'it' \(input 0\)"):
        quantized_onnx(net, changed(record, "it", record_d=()))
    with pytest.raises(RecordError, match="Cannot find scale_w of layer 'it'"):
        quantized_onnx(net, changed(record, "it", scale_w=()))


def test_factors_of_an_input_that_is_not_there():
    net = net_of(LAYERS % SINGLE["softmax"])
    record = CaffeRecord({"it": CaffeLayerRecord(record_d=(DataFactors(index=2, scale=0.1, offset=0),))})
    with pytest.raises(RecordError, match="factors of input 2, the layer has 1"):
        quantized_onnx(net, record)


@pytest.mark.parametrize("wrong", [{"placement": "slow"}, {"target": "gpu"}, {"opset": 9}])
def test_wrong_choices(conv, wrong):
    net, record = conv
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        quantized_onnx(net, record, **wrong)
