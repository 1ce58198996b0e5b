"""Dialects of Caffe's forks: their fields are read, run, exported to ONNX and quantized."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
from layer_checks import check_gradients, net_of, run
from ptq_caffe_flow import cosine, text_flow

import amct.caffe
import amct_caffe
from amct.caffe import pycaffe as caffe
from amct.errors import ModelError

SEGNET_BN = (
    "bn_param { bn_mode: INFERENCE scale_filler { type: 'constant' value: 1 } shift_filler { type: 'constant' } }"
)
PSPNET_BN = "bn_param { slope_filler { type: 'constant' value: 1 } bias_filler { type: 'constant' } frozen: true }"
INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 11 dim: 9 } } }\n'
CONVOLUTION = """layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def column(blob):
    return blob.data.reshape(1, -1, 1, 1)


def fill(net, seed=0):
    random = np.random.default_rng(seed)
    for name, blobs in net.params.items():
        for index, blob in enumerate(blobs):
            blob.data[...] = random.normal(0, 0.5, blob.data.shape)
            if net.layer_dict[name].type == "BN" and index in (0, 3):
                blob.data[...] = np.abs(blob.data) + 0.2


def onnx_results(model, weights, data):
    amct.caffe.export_onnx(model, weights, "float.onnx")
    session = onnxruntime.InferenceSession("float.onnx")
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, data), strict=True))


# ------------------------------------------------------------------ pooling, boxes, proposals


@pytest.mark.parametrize(("size", "up", "down"), [(7, 4, 3), (8, 4, 4)])
def test_ceil_mode(size, up, down):
    x = values(1, 2, size, size)
    options = "pooling_param {{ pool: {} kernel_size: 2 stride: 2 {} }}"
    for pool in ("MAX", "AVE"):
        assert run("Pooling", options.format(pool, ""), x).shape[2:] == (up, up)
        floor = run("Pooling", options.format(pool, "ceil_mode: false"), x)
        assert floor.shape[2:] == (down, down)
        np.testing.assert_array_equal(floor, run("Pooling", options.format(pool, "round_mode: FLOOR"), x))


def test_clip_limits_detected_boxes():
    locations, scores = np.zeros((1, 8), np.float32), np.array([[0.1, 0.9, 0.2, 0.8]], np.float32)
    priors = np.array([-0.2, 0.1, 0.4, 1.3, 0.5, 0.5, 0.7, 0.8, *[0.1] * 8], np.float32).reshape(1, 2, 8)
    options = "detection_output_param {{ num_classes: 2 code_type: CENTER_SIZE {} nms_param {{ nms_threshold: 0.5 }} }}"
    rows = run("DetectionOutput", options.format(""), locations, scores, priors)[0, 0]
    np.testing.assert_allclose(rows[0, 3:], [-0.2, 0.1, 0.4, 1.3], atol=1e-6)
    rows = run("DetectionOutput", options.format("clip: true"), locations, scores, priors)[0, 0]
    np.testing.assert_allclose(rows[0, 3:], [0, 0.1, 0.4, 1], atol=1e-6)
    np.testing.assert_allclose(rows[1, 3:], [0.5, 0.5, 0.7, 0.8], atol=1e-6)


def test_nms_thresh_is_the_threshold_of_proposals():
    bottoms = [values(1, 18, 4, 4), 0.1 * values(1, 36, 4, 4, seed=1), np.array([[64, 64, 1]], np.float32)]
    options = "proposal_param {{ post_nms_topn: 50 min_size: 1 {}: 0.3 }}"
    one, other = (run("Proposal", options.format(name), *bottoms) for name in ("nms_thresh", "iou_threshold"))
    np.testing.assert_array_equal(one, other)
    assert len(one) < len(run("Proposal", options.format("nms_thresh").replace("0.3", "0.9"), *bottoms))
    with pytest.raises(ModelError, match="two names of one number"):
        net_of("Proposal", "proposal_param { nms_thresh: 0.5 iou_threshold: 0.7 }", [b.shape for b in bottoms])


# ------------------------------------------------------------------ BN


def test_bn_of_segnet():
    """INFERENCE: scale * x + shift. LEARN: the statistics of the batch, at test time too; tops give them."""
    x = values(2, 3, 4, 5)
    net = net_of("BN", SEGNET_BN, [x.shape])
    (name,) = net.params
    assert [blob.data.shape for blob in net.params[name]] == [(1, 3, 1, 1)] * 2
    fill(net)
    scale, shift = map(column, net.params[name])
    (found,) = net.forward(**dict(zip(net.inputs, [x], strict=True))).values()
    np.testing.assert_allclose(found, scale * x + shift, rtol=1e-6, atol=1e-6)
    learn = "bn_param { scale_filler { type: 'constant' value: 2 } shift_filler { type: 'constant' value: 0.5 } }"
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    wanted = 2 * (x - mean) / np.sqrt(variance + 1e-9) + 0.5
    np.testing.assert_allclose(run("BN", learn, x), wanted, rtol=1e-4, atol=1e-5)
    check_gradients("BN", learn, x[:, :, :2, :2])
    check_gradients("BN", SEGNET_BN, x[:, :, :2, :2])


def test_bn_of_pspnet():
    x = values(2, 3, 4, 5)
    net = net_of("BN", PSPNET_BN.replace("frozen: true", "eps: 0.01 frozen: true"), [x.shape])
    (name,) = net.params
    assert len(net.params[name]) == 4
    fill(net)
    slope, bias, mean, variance = map(column, net.params[name])
    (found,) = net.forward(**dict(zip(net.inputs, [x], strict=True))).values()
    np.testing.assert_allclose(found, slope * (x - mean) / np.sqrt(variance + 0.01) + bias, rtol=1e-5, atol=1e-5)


def test_bn_of_pspnet_learns_its_statistics(tmp_path):
    text = INPUT + 'layer { name: "bn" type: "BN" bottom: "data" top: "bn" bn_param { momentum: 0.75 eps: 1e-5 } }'
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    x = values(1, 3, 11, 9)
    net = caffe.Net(str(path), caffe.TRAIN)
    found = net.forward(data=x)["bn"]
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(found, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(net.params["bn"][2].data, 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(net.params["bn"][3].data, 0.75 + 0.25 * variance, rtol=1e-5)


@pytest.mark.parametrize("options", [SEGNET_BN, PSPNET_BN], ids=["SegNet", "PSPNet"])
@pytest.mark.parametrize("in_front", [False, True])
def test_bn_is_folded_and_has_an_onnx_form(options, in_front, tmp_path):
    bn = f'layer {{ name: "bn" type: "BN" bottom: "conv" top: "conv" {options} }}\n'
    relu = 'layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }\n'
    if in_front:
        bn = bn.replace('"conv"', '"data"')
    text = INPUT + (bn + CONVOLUTION.replace("pad: 1", "") if in_front else CONVOLUTION + bn) + relu
    flow = text_flow(text, tmp_path)
    net = flow.original()
    fill(net)
    net.save(str(flow.weights))
    x = values(1, 3, 11, 9, seed=1)
    wanted = flow.original().forward(data=x)["conv"].copy()
    (found,) = onnx_results(flow.model, flow.weights, {"data": x}).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert quantized.prepared.folded_layers == {"conv": ["bn"]}
    assert cosine(quantized(x)["conv"], wanted) > 0.999
    quantized.save(tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out_qdq_model.onnx"))
    assert cosine(session.run(None, {"data": x})[0], wanted) > 0.999


def test_bn_with_batch_statistics_stays_float_with_the_reason(tmp_path):
    options = SEGNET_BN.replace("bn_mode: INFERENCE", "")
    flow = text_flow(
        INPUT + CONVOLUTION + f'layer {{ name: "bn" type: "BN" bottom: "conv" top: "bn" {options} }}', tmp_path
    )
    x = values(1, 3, 11, 9, seed=1)
    wanted = flow.original().forward(data=x)["bn"].copy()
    np.testing.assert_allclose(onnx_results(flow.model, flow.weights, {"data": x})["bn"], wanted, rtol=1e-3, atol=1e-3)
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert any("bn_mode: INFERENCE" in skip.reason for skip in quantized.prepared.skips if skip.layer == "bn")
    assert cosine(quantized(x)["bn"], wanted) > 0.999


# ------------------------------------------------------------------ SegNet's Upsample, DeconvNet's old layers


def test_pad_out_restores_odd_sizes(tmp_path):
    """Pooled 11 x 9 to 6 x 5, and back to 11 x 9: each maximum at its place."""
    text = INPUT + (
        'layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" top: "mask" '
        "pooling_param { pool: MAX kernel_size: 2 stride: 2 } }\n"
        'layer { name: "up" type: "Upsample" bottom: "pool" bottom: "mask" top: "up" '
        "upsample_param { scale: 2 pad_out_h: true pad_out_w: true } }"
    )
    flow = text_flow(text, tmp_path)
    x = values(1, 3, 11, 9)
    net = flow.original()
    found = net.forward(data=x)["up"]
    assert found.shape == x.shape
    assert net.blobs["pool"].data.shape[2:] == (6, 5)
    assert set(np.unique(found[found != 0])) == set(np.unique(net.blobs["pool"].data))
    np.testing.assert_array_equal(found[found != 0], x[found != 0])
    np.testing.assert_array_equal(onnx_results(flow.model, flow.weights, {"data": x})["up"], found)
    flow.model.write_text(text.replace("scale: 2", "scale_h: 2 scale_w: 2"))
    np.testing.assert_array_equal(flow.original().forward(data=x)["up"], found)
    flow.model.write_text(text.replace("scale: 2", "scale: 3"))
    with pytest.raises(
        ModelError, match=r'layer "up" \(Upsample\): pad_out_h and pad_out_w need a factor of size of 2'
    ):
        flow.original()


def test_positions_of_a_pooling_are_not_quantized(tmp_path):
    """Eight bits cannot hold the positions, and rounded values have other ones: both layers stay float."""
    text = INPUT.replace("dim: 11 dim: 9", "dim: 40 dim: 40") + (
        'layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" top: "mask" '
        "pooling_param { pool: MAX kernel_size: 2 stride: 2 } }\n"
        'layer { name: "up" type: "Upsample" bottom: "pool" bottom: "mask" top: "up" upsample_param { scale: 2 } }\n'
    )
    flow = text_flow(text + CONVOLUTION.replace('"data"', '"up"'), tmp_path)
    x = values(1, 3, 40, 40)
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert set(quantized.record) == {"conv"}
    assert {skip.layer for skip in quantized.prepared.skips if "positions" in skip.reason} == {"pool", "up"}
    assert cosine(quantized(x)["conv"], flow.original().forward(data=x)["conv"]) > 0.999


def test_interp_behind_a_convolution_loads_in_onnxruntime(tmp_path):
    """PSPNet's pyramid: a Resize of integers between convolutions, which onnxruntime moves to another layout."""
    text = (
        INPUT
        + CONVOLUTION
        + (
            'layer { name: "interp" type: "Interp" bottom: "conv" top: "interp" '
            "interp_param { height: 17 width: 23 } }\n"
            'layer { name: "cat" type: "Concat" bottom: "interp" bottom: "interp" top: "cat" }\n'
            'layer { name: "last" type: "Convolution" bottom: "cat" top: "last" '
            "convolution_param { num_output: 4 kernel_size: 1 } }"
        )
    )
    flow = text_flow(text, tmp_path)
    x = values(1, 3, 11, 9)
    wanted = flow.original().forward(data=x)["last"].copy()
    np.testing.assert_allclose(
        onnx_results(flow.model, flow.weights, {"data": x})["last"], wanted, rtol=1e-3, atol=1e-4
    )
    amct.caffe.quantize(flow.model, flow.weights, [x]).save(tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out_qdq_model.onnx"))
    assert cosine(session.run(None, {"data": x})[0], wanted) > 0.999


def test_old_layers_of_deconvnet(tmp_path):
    text = """
    input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
    layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv"
      convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
    layers { name: "bn" type: BN bottom: "conv" top: "conv" bn_param { bn_mode: INFERENCE
      scale_filler { type: 'constant' value: 1 } shift_filler { type: 'constant' value: 0.001 } } }
    layers { name: "pool" type: POOLING bottom: "conv" top: "pool" top: "mask"
      pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
    layers { name: "unpool" type: UNPOOLING bottom: "pool" bottom: "mask" top: "unpool"
      unpooling_param { unpool: MAX kernel_size: 2 stride: 2 unpool_size: 8 } }
    """
    flow = text_flow(text, tmp_path)
    x = values(1, 3, 8, 8)
    wanted = flow.original().forward(data=x)["unpool"].copy()
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert "conv" in quantized.record
    assert wanted.shape == (1, 4, 8, 8)


def test_dropout_of_bayesian_segnet(tmp_path):
    text = INPUT + 'layer { name: "d" type: "Dropout" bottom: "data" top: "d" dropout_param { %s } }'
    x = np.abs(values(1, 3, 11, 9)) + 1
    flow = text_flow(text % "sample_weights_test: false", tmp_path)
    np.testing.assert_array_equal(flow.original().forward(data=x)["d"], x)
    flow.model.write_text(text % "sample_weights_test: true")
    found = flow.original().forward(data=x)["d"]
    assert 0.3 < (found == 0).mean() < 0.7


# ------------------------------------------------------------------ YOLO


def yolo_reference(maps, sizes, classes, *, strides=None, threshold, nms):
    """Loops after the published layers, for one picture; sizes by map: width, height of each box."""
    found = []
    for level, data in enumerate(maps):
        side = data.shape[-1]
        for row, column_, box in np.ndindex(side, side, len(sizes[level])):
            out = data[0].reshape(len(sizes[level]), 5 + classes, side, side)[box, :, row, column_].astype(np.float64)
            x, y = (column_ + 1 / (1 + np.exp(-out[0]))) / side, (row + 1 / (1 + np.exp(-out[1]))) / side
            divisor = side if strides is None else side * strides[level]
            w, h = np.exp(out[2:4]) * sizes[level][box] / divisor
            thing = 1 / (1 + np.exp(-out[4]))
            if strides is None:
                probabilities = np.exp(out[5:]) / np.exp(out[5:]).sum()
                label = int(probabilities.argmax())
                scores = [(label, thing * probabilities[label])]
            else:
                scores = list(enumerate(thing / (1 + np.exp(-out[5:]))))
            found += [(score, label, x, y, w, h) for label, score in scores if score > threshold]
    found.sort(key=lambda each: -each[0])
    kept = []
    for each in found:
        if all(iou(each[2:], other[2:]) < nms for other in kept):
            kept.append(each)
    return [[0, label + 1, score, x - w / 2, y - h / 2, x + w / 2, y + h / 2] for score, label, x, y, w, h in kept]


def iou(a, b):
    across = min(a[0] + a[2] / 2, b[0] + b[2] / 2) - max(a[0] - a[2] / 2, b[0] - b[2] / 2)
    down = min(a[1] + a[3] / 2, b[1] + b[3] / 2) - max(a[1] - a[3] / 2, b[1] - b[3] / 2)
    common = max(across, 0) * max(down, 0)
    return common / (a[2] * a[3] + b[2] * b[3] - common)


def test_yolo_output_of_version_2():
    x = values(1, 2 * 8, 4, 4)
    options = (
        "yolo_detection_output_param { num_classes: 3 num_box: 2 confidence_threshold: 0.3 nms_threshold: 0.4 "
        "biases: 1.5 biases: 2 biases: 3 biases: 1 }"
    )
    wanted = yolo_reference([x], [[(1.5, 2), (3, 1)]], 3, threshold=0.3, nms=0.4)
    assert len(wanted) > 3
    np.testing.assert_allclose(run("YoloDetectionOutput", options, x)[0, 0], wanted, rtol=1e-4, atol=1e-5)
    nothing = run("YoloDetectionOutput", options.replace("0.3", "1.5"), np.concatenate([x, x]))[0, 0]
    np.testing.assert_array_equal(nothing, [[0] + [-1] * 6, [1] + [-1] * 6])


YOLO_V3 = (
    "yolov3_detection_output_param { num_classes: 2 num_box: 2 confidence_threshold: 0.3 nms_threshold: 0.45 "
    "biases: 20 biases: 37 biases: 49 biases: 94 biases: 73 biases: 201 biases: 143 biases: 265 "
    "mask: 2 mask: 3 mask: 0 mask: 1 anchors_scale: 32 anchors_scale: 16 mask_group_num: 2 }"
)


def test_yolo_output_of_version_3():
    maps = [values(1, 14, 3, 3), values(1, 14, 6, 6, seed=1)]
    sizes = [[(73, 201), (143, 265)], [(20, 37), (49, 94)]]
    wanted = yolo_reference(maps, sizes, 2, strides=(32, 16), threshold=0.3, nms=0.45)
    assert len(wanted) > 5
    np.testing.assert_allclose(run("Yolov3DetectionOutput", YOLO_V3, *maps)[0, 0], wanted, rtol=1e-4, atol=1e-5)
    for change in (("mask: 3", "mask: 9"), ("mask_group_num: 2", "mask_group_num: 3"), ("num_box: 2", "num_box: 3")):
        with pytest.raises(ModelError, match="Yolov3DetectionOutput"):
            net_of("Yolov3DetectionOutput", YOLO_V3.replace(*change), [each.shape for each in maps])


def test_a_net_that_ends_with_a_yolo_layer_is_quantized_and_exported_up_to_it(tmp_path):
    text = INPUT.replace("dim: 11 dim: 9", "dim: 8 dim: 8") + (
        CONVOLUTION.replace("num_output: 4", "num_output: 16")
        + 'layer { name: "out" type: "YoloDetectionOutput" bottom: "conv" top: "out" yolo_detection_output_param { '
        "num_classes: 3 num_box: 2 biases: 1 biases: 1 biases: 2 biases: 2 } }"
    )
    flow = text_flow(text, tmp_path)
    x = values(1, 3, 8, 8)
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert quantized(x)["out"].shape[-1] == 7
    quantized.save(tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out_qdq_model.onnx"))
    assert [each.name for each in session.get_outputs()] == ["conv"]
    document = json.loads((tmp_path / "out_quant.json").read_text())
    assert document["files"]["out_qdq_model.onnx"]["check"]["output"] == "conv"  # compared although the net has it not


# ------------------------------------------------------------------ names


TWICE = (
    INPUT
    + CONVOLUTION
    + """
layer { name: "act" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 5 } }
layer { name: "act" type: "Sigmoid" bottom: "fc" top: "out" }
layer { name: "act" type: "Power" bottom: "fc" top: "more" power_param { scale: 2 } }
"""
)


def test_equal_names_are_quantized_in_one_call(tmp_path):
    flow = text_flow(TWICE, tmp_path)
    x = values(1, 3, 11, 9)
    wanted = {name: value.copy() for name, value in flow.original().forward(data=x).items()}
    for name, value in onnx_results(flow.model, flow.weights, {"data": x}).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-5)
    quantized = amct.caffe.quantize(flow.model, flow.weights, [x])
    assert set(quantized.record) == {"conv", "fc", "act_2", "act_3"}
    quantized.save(tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out_qdq_model.onnx"))
    for output, value in zip(session.get_outputs(), session.run(None, {"data": x}), strict=True):
        assert cosine(value, wanted[output.name]) > 0.999
    compared = amct.caffe.compare(
        (flow.model, flow.weights),
        (tmp_path / "out_deploy_model.prototxt", tmp_path / "out_deploy_weights.caffemodel"),
        x,
    )
    assert min(each.sqnr for each in compared) > 25


def test_equal_names_in_the_guides_flow(tmp_path):
    flow = text_flow(TWICE, tmp_path).configure(batch_num=1)
    graph = flow.prepare()
    flow.net(*flow.modified).forward(data=values(1, 3, 11, 9))
    amct_caffe.save_model(graph, "Both", str(flow.prefix))
    assert '"act_2"' in flow.config.read_text()
    for kind in ("fake_quant", "deploy"):
        assert set(flow.result(kind).forward(data=values(1, 3, 11, 9))) == {"out", "more"}
