"""Fusion for good and nets without in-place layers: the same outputs to float rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptq_caffe_flow import NETS, batch, forward, golden_flow, prototxt, text_flow

import amct_caffe as amct
from amct.caffe.model import read_model
from amct.caffe.ptq.folding import accelerate, fuse
from amct.errors import FileError, ModelError, ParseError


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def outputs(net, data):
    for name, value in data.items():
        net.blob(name).set_tensor(torch.from_numpy(value.copy()))
    net.forward()
    return {net.graph.blob_names[index]: net.graph.blobs[index].data.copy() for index in net.graph.outputs}


def assert_same(first, second):
    """Each of some 20 layers rounds by 2^-24 relative to its largest terms; cancellation costs a few bits more."""
    assert list(first) == list(second)
    for name, value in first.items():
        assert np.abs(value - second[name]).max() <= 1e-5 * np.abs(value).max()


@pytest.mark.parametrize("name", NETS)
def test_fused_golden_nets_equal_the_original(name, golden, tmp_path):
    flow = golden_flow(name, golden, tmp_path)
    model = read_model(flow.model, flow.weights)
    report = fuse(model)
    original = flow.original()
    data = batch(original, 0)
    assert_same(original.forward(**data), outputs(model.build(), data))
    left = {layer.type for layer in model.layers} & {"BatchNorm", "Scale", "Bias"}
    assert not left, report.skipped


@pytest.mark.parametrize("name", NETS)
def test_uninplaced_nets_have_the_same_blobs(name, golden, tmp_path):
    """Every name a user could look at holds the same values as before."""
    flow = golden_flow(name, golden, tmp_path)
    target = tmp_path / "plain" / "net.prototxt"
    amct.uninplace_model(str(flow.model), str(target))
    net = prototxt(target)
    tops = [top for layer in net.layer for top in layer.top]
    assert len(tops) == len(set(tops))
    assert not any(set(layer.top) & set(layer.bottom) for layer in net.layer)
    before, after = flow.original(), flow.net(target, flow.weights)
    forward(before, 1)
    forward(after, 1)
    assert before.outputs == after.outputs
    for blob, value in before.blobs.items():
        if "_split_" not in blob:
            # the engine folds in-place BatchNorm into the convolution at run time, and rounds otherwise
            largest = np.abs(value.data).max()
            np.testing.assert_allclose(value.data, after.blobs[blob].data, rtol=0, atol=1e-5 * largest)


def test_uninplace_keeps_the_test_phase_only(tmp_path):
    (tmp_path / "net.prototxt").write_text(
        """
        layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 } } include { phase: TRAIN } }
        layer { name: "e" type: "DummyData" top: "x" dummy_data_param { shape { dim: 3 } } include { phase: TEST } }
        layer { name: "r" type: "ReLU" bottom: "x" top: "x" }
        layer { name: "s" type: "Sigmoid" bottom: "x" top: "x" exclude { phase: TEST } }
        layer { name: "t" type: "TanH" bottom: "x" top: "y" }
        """
    )
    amct.uninplace_model(str(tmp_path / "net.prototxt"), str(tmp_path / "out.prototxt"))
    layers = prototxt(tmp_path / "out.prototxt").layer
    assert [layer.name for layer in layers] == ["e", "r", "t"]
    assert [list(layer.top) for layer in layers] == [["x"], ["r_out"], ["y"]]
    assert [list(layer.bottom) for layer in layers] == [[], ["x"], ["r_out"]]


def test_uninplace_mistakes(tmp_path):
    with pytest.raises(TypeError, match="uninplace_model: model_file must be str"):
        amct.uninplace_model(1, "x")
    with pytest.raises(FileError, match=r"nothing\.prototxt"):
        amct.uninplace_model(str(tmp_path / "nothing.prototxt"), str(tmp_path / "x"))
    (tmp_path / "broken").write_text("layer { name: ")
    with pytest.raises(ParseError, match="broken"):
        amct.uninplace_model(str(tmp_path / "broken"), str(tmp_path / "x"))
    (tmp_path / "twice").write_text(
        'layer { name: "a" type: "Input" top: "x" } layer { name: "a" type: "Input" top: "y" }'
    )
    amct.uninplace_model(str(tmp_path / "twice"), str(tmp_path / "x"))
    assert [layer.name for layer in prototxt(tmp_path / "x").layer] == ["a", "a_2"]
    (tmp_path / "empty").write_text('name: "e"')
    with pytest.raises(ModelError, match="no layer"):
        amct.uninplace_model(str(tmp_path / "empty"), str(tmp_path / "x"))


INPUT = 'layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 4 dim: 7 dim: 7 } } }\n'
BN_SCALE_BIAS = """
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "y" }
layer { name: "scale" type: "Scale" bottom: "y" top: "y" scale_param { bias_term: true } }
layer { name: "bias" type: "Bias" bottom: "y" top: "y" }
"""
HEADS = {
    "Convolution": 'type: "Convolution" convolution_param { num_output: 6 kernel_size: 3 group: 2 bias_term: false }',
    "DepthwiseConv": 'type: "DepthwiseConv" convolution_param { num_output: 4 kernel_size: 3 pad: 1 }',
    "Deconvolution": 'type: "Deconvolution" convolution_param { num_output: 6 kernel_size: 3 stride: 2 group: 2 }',
    "InnerProduct": 'type: "InnerProduct" inner_product_param { num_output: 5 }',
    "transposed": 'type: "InnerProduct" inner_product_param { num_output: 5 transpose: true bias_term: false }',
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_takes_what_follows(head, tmp_path):
    flow = text_flow(f'{INPUT} layer {{ name: "h" bottom: "x" top: "y" {HEADS[head]} }} {BN_SCALE_BIAS}', tmp_path)
    model = read_model(flow.model, flow.weights)
    report = fuse(model)
    assert report.folded == {"h": ["bn", "scale", "bias"]}
    assert [layer.name for layer in model.layers] == ["data", "h"]
    data = batch(flow.original(), 0)
    assert_same(flow.original().forward(**data), outputs(model.build(), data))


LEADING = """
layer { name: "bn" type: "BatchNorm" bottom: "x" top: "b" }
layer { name: "scale" type: "Scale" bottom: "b" top: "s" scale_param { bias_term: true } }
layer { name: "conv" type: "Convolution" bottom: "s" top: "y"
  convolution_param { num_output: 6 kernel_size: 3 group: 2 pad: %d } }
"""


def test_batch_norm_before_a_convolution(tmp_path):
    flow = text_flow(INPUT + LEADING % 0, tmp_path)
    model = read_model(flow.model, flow.weights)
    assert fuse(model).folded == {"conv": ["bn", "scale"]}
    data = batch(flow.original(), 0)
    assert_same(flow.original().forward(**data), outputs(model.build(), data))


def test_padding_keeps_the_batch_norm_before(tmp_path):
    flow = text_flow(INPUT + LEADING % 1, tmp_path)
    model = read_model(flow.model, flow.weights)
    report = fuse(model)
    assert not report.folded
    assert any("pads with zeros" in skip.reason for skip in report.skipped)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('layer { name: "bn" type: "BatchNorm" bottom: "y" top: "b" } '
         'layer { name: "r" type: "ReLU" bottom: "y" top: "r" }',
         "reads the same tensor"),
        ('layer { name: "bn" type: "Scale" bottom: "y" top: "b" scale_param { axis: 2 } }',
         "does not work along the channels"),
        ('layer { name: "bn" type: "Scale" bottom: "y" top: "b" scale_param { num_axes: 2 } }', "num_axes 2"),
        ('layer { name: "k" type: "Input" top: "k" input_param { shape { dim: 6 } } } '
         'layer { name: "bn" type: "Scale" bottom: "y" bottom: "k" top: "b" scale_param { axis: 1 } }',
         "second bottom"),
    ],
)  # fmt: skip
def test_what_stays_and_why(text, reason, tmp_path):
    head = f'layer {{ name: "h" bottom: "x" top: "y" {HEADS["Convolution"]} }}'
    flow = text_flow(INPUT + head + text, tmp_path)
    model = read_model(flow.model, flow.weights)
    report = fuse(model)
    assert not report.folded
    assert any(skip.layer == "bn" and reason in skip.reason for skip in report.skipped), report.skipped


def test_skip_fusion_layers_and_do_fusion(tmp_path):
    head = f'layer {{ name: "h" bottom: "x" top: "y" {HEADS["Convolution"]} }}'
    flow = text_flow(INPUT + head + BN_SCALE_BIAS, tmp_path)
    for change in ({"do_fusion": False}, {"skip_fusion_layers": ["h"]}):
        flow.configure(change=lambda config, change=change: config.update(change))
        graph = flow.run()
        assert [layer.type for layer in graph.model.layers][1:] == ["Convolution", "BatchNorm", "Scale", "Bias"]
    model = read_model(flow.model, flow.weights)
    assert fuse(model, skip=["scale"]).folded == {"h": ["bn"]}


STANDING = (
    INPUT
    + """
layer { name: "relu" type: "ReLU" bottom: "x" top: "y" }
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "y" }
layer { name: "scale" type: "Scale" bottom: "y" top: "y" scale_param { bias_term: true } }
layer { name: "tail" type: "Pooling" bottom: "y" top: "z" pooling_param { kernel_size: 2 } }
"""
)


def test_standing_batch_norm_becomes_a_depthwise_convolution(tmp_path):
    def change(config):
        for name in ("bn", "scale"):
            config[name]["quant_enable"] = True

    flow = text_flow(STANDING, tmp_path).configure(change=change)
    graph = flow.run()
    assert graph.fusion.accelerated == ["bn"]
    assert [layer.type for layer in graph.model.layers] == ["Input", "ReLU", "DepthwiseConv", "Pooling"]
    data = batch(flow.original(), 0)
    real = flow.original().forward(**data)
    assert_same(real, outputs(graph.model.build(), data))
    deploy = flow.result("deploy").forward(**data)
    # two rounding steps of 8 bits each
    assert np.abs(real["z"] - deploy["z"]).max() < 0.03 * np.abs(real["z"]).max()


def test_without_fusion_norms_that_are_switched_on_become_depthwise_convolutions_too(tmp_path):
    """The guide's acceleration is for what stands after fusion, and without fusion everything stands."""

    def change(config):
        config["do_fusion"] = False
        for name in ("bn", "scale"):
            config[name]["quant_enable"] = True

    flow = text_flow(CONV_AND_NORMS, tmp_path).configure(change=change)
    graph = flow.run()
    assert (graph.fusion.folded, graph.fusion.accelerated) == ({"bn": ["bn", "scale"]}, ["bn"])
    assert [layer.type for layer in graph.model.layers] == ["Input", "Convolution", "DepthwiseConv"]
    data = batch(flow.original(), 0)
    real = flow.original().forward(**data)
    assert_same(real, outputs(graph.model.build(), data))
    fake, deploy = (flow.result(kind).forward(**data) for kind in ("fake_quant", "deploy"))
    np.testing.assert_array_equal(fake["z"], deploy["z"])
    assert np.abs(real["z"] - deploy["z"]).max() < 0.05 * np.abs(real["z"]).max()

    text_flow(CONV_AND_NORMS, tmp_path).configure(change=lambda config: config.update(do_fusion=False))
    assert flow.prepare().fusion.accelerated == []  # off by default


CONV_AND_NORMS = (
    INPUT
    + """
layer { name: "conv" type: "Convolution" bottom: "x" top: "y"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "y" }
layer { name: "scale" type: "Scale" bottom: "y" top: "z" scale_param { bias_term: true } }
"""
)


def test_acceleration_needs_images(tmp_path):
    text = """
    layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 3 dim: 4 } } }
    layer { name: "relu" type: "ReLU" bottom: "x" top: "y" }
    layer { name: "bn" type: "BatchNorm" bottom: "y" top: "z" }
    """
    flow = text_flow(text, tmp_path)
    model = read_model(flow.model, flow.weights)
    report = fuse(model)
    accelerate(model, {"bn"}, report, skip=())
    assert not report.accelerated
    assert any("no image" in skip.reason for skip in report.skipped)


def test_folding_that_is_not_finite_names_the_layer(tmp_path):
    head = f'layer {{ name: "h" bottom: "x" top: "y" {HEADS["Convolution"]} }}'
    flow = text_flow(INPUT + head + BN_SCALE_BIAS, tmp_path)
    net = flow.original()
    net.params["bn"][1].data[...] = -1
    net.save(str(flow.weights))
    with pytest.raises(ModelError, match=r'layer "h" .*variance'):
        fuse(read_model(flow.model, flow.weights))


def test_weights_from_hdf5_with_shared_parameters(golden, tmp_path):
    flow = golden_flow("siamese", golden, tmp_path)
    stored = read_model(flow.model, flow.weights)
    hdf5 = read_model(flow.model, flow.weights.with_suffix(".caffemodel.h5"))
    assert stored.weights.keys() == hdf5.weights.keys()
    for name, blobs in stored.weights.items():
        for one, other in zip(blobs, hdf5.weights[name], strict=True):
            torch.testing.assert_close(one, other)
