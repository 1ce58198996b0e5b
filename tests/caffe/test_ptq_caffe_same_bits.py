"""The fake-quant and the deploy model of one net give the same bits, in every blob that both have."""

from __future__ import annotations

import numpy as np
import pytest
from caffe_real_models import flow_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptq_caffe_flow import prototxt, text_flow
from test_ptq_caffe_recurrent import STATES, net_text

import amct.caffe

INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 4 dim: 9 dim: 9 } } }'
LAYERS = {
    "Convolution": "convolution_param { num_output: 6 kernel_size: 3 pad: 1 group: 2 }",
    "Convolution dilated, no bias": "convolution_param { num_output: 4 kernel_size: 3 dilation: 2 pad: 2 "
    "bias_term: false }",
    "Convolution 1x1": "convolution_param { num_output: 4 kernel_size: 1 stride: 1 }",
    "DepthwiseConv": "convolution_param { kernel_size: 3 pad: 1 }",
    "DepthwiseConv 1x1": "convolution_param { kernel_size: 1 }",
    "Deconvolution": "convolution_param { num_output: 4 kernel_size: 2 stride: 1 group: 2 }",
    "InnerProduct on rows": "inner_product_param { num_output: 7 axis: 3 }",
    "InnerProduct transposed": "inner_product_param { num_output: 5 transpose: true axis: 3 }",
    "BatchNorm": "batch_norm_param { use_global_stats: true }",
    "Scale": "scale_param { bias_term: true }",
    "Pooling average": "pooling_param { pool: AVE kernel_size: 3 stride: 1 pad: 1 }",
    "Pooling max": "pooling_param { pool: MAX kernel_size: 2 stride: 1 }",
    "Eltwise": "eltwise_param { operation: SUM coeff: 1 coeff: 0.5 }",
    "LRN": "lrn_param { local_size: 3 alpha: 0.1 }",
    "ReLU": "relu_param { negative_slope: 0.1 }",
    "Sigmoid": "",
    "Softmax": "",
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def chain_text(kinds):
    lines, before = [INPUT], "data"
    for index, kind in enumerate(kinds):
        extra = f'bottom: "{before}"' if kind == "Eltwise" else ""
        name = f"l{index}"
        lines.append(
            f'layer {{ name: "{name}" type: "{kind.split()[0]}" bottom: "{before}" {extra} top: "{name}" '
            f"{LAYERS[kind]} }}"
        )
        before = name
    return "\n".join(lines)


def random_values(net, random):
    for name, blobs in net.params.items():
        kind = net.layer_dict[name].type
        for index, blob in enumerate(blobs):
            blob.data[...] = random.normal(0, 0.4, blob.data.shape)
            if kind == "BatchNorm":
                blob.data[...] = 1 if index == 2 else np.abs(blob.data) + 0.1


def compared(flow, model, data):
    """The number of blobs that both nets have as real numbers; asserts that their bits are the same."""
    model.save("out/net", formats=("fake_quant", "deploy"))
    pairs = [
        (f"out/net_{kind}_model.prototxt", f"out/net_{kind}_weights.caffemodel") for kind in ("fake_quant", "deploy")
    ]
    fake, deploy = (flow.net(*pair) for pair in pairs)
    fake.forward(**data)
    deploy.forward(**data)
    integers = {top for layer in prototxt(pairs[1][0]).layer if layer.type == "Quant" for top in layer.top}
    shared = [name for name in fake.blobs if name in deploy.blobs and name not in integers]
    for name in shared:
        np.testing.assert_array_equal(fake.blobs[name].data, deploy.blobs[name].data, f'blob "{name}"')
    for name, value in model(data).items():
        np.testing.assert_array_equal(fake.blobs[name].data, value)
    return len(shared)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    bits=st.sampled_from([8, 16]),
    algorithm=st.sampled_from(["arq_quantize", "snq_quantize"]),
)
def test_every_blob_of_random_nets(kinds, seed, bits, algorithm, tmp_path):
    """Layers of every type in a row: one different bit would spread to all layers behind it."""
    random = np.random.default_rng(seed)
    flow = text_flow(chain_text([*kinds, "Convolution 1x1"]), tmp_path)
    net = flow.original()
    random_values(net, random)
    net.save(str(flow.weights))
    common = f"{algorithm} {{ channel_wise: true }} ifmr_quantize {{ num_bits: {bits} }}"
    (tmp_path / "q.cfg").write_text(f"batch_num: 1 common_config {{ {common} }}")
    batch = random.normal(size=(2, 4, 9, 9)).astype(np.float32)
    model = amct.caffe.quantize(flow.model, flow.weights, [batch], tmp_path / "q.cfg")
    compared(flow, model, {"data": 1.5 * random.normal(size=batch.shape).astype(np.float32)})


def test_values_at_ties(tmp_path):
    """The data lies in the middle between two integers, or one float32 step beside it."""
    flow = text_flow(chain_text(["Convolution", "DepthwiseConv", "Convolution 1x1", "InnerProduct on rows"]), tmp_path)
    random = np.random.default_rng(0)
    batch = random.normal(size=(2, 4, 9, 9)).astype(np.float32)
    model = amct.caffe.quantize(flow.model, flow.weights, [batch])
    scale = np.float32(model.record["l0"].record_d[0].scale)
    ties = ((random.integers(-90, 90, batch.shape) + 0.5) * scale).astype(np.float32)
    beside = np.nextafter(ties, ties * random.choice([0, 1, 2], ties.shape).astype(np.float32))
    assert compared(flow, model, {"data": beside}) >= 5


@pytest.mark.parametrize("kind", sorted(STATES))
@pytest.mark.parametrize("static", [False, True])
def test_recurrent_layers(kind, static, tmp_path):
    flow = text_flow(net_text(kind, static=static), tmp_path)
    net = flow.original()
    random = np.random.default_rng(0)
    random_values(net, random)
    net.save(str(flow.weights))

    def data():
        made = {name: random.normal(size=net.blobs[name].shape).astype(np.float32) for name in net.inputs}
        return made | {"cont": np.ones(net.blobs["cont"].shape, np.float32)}

    compared(flow, amct.caffe.quantize(flow.model, flow.weights, [data()]), data())


def test_dead_channels_and_large_biases(tmp_path):
    """Channels without weights, with one weight, and biases of more steps than float32 has bits."""
    flow = text_flow(chain_text(["Convolution 1x1", "Convolution"]), tmp_path)
    net = flow.original()
    random = np.random.default_rng(0)
    random_values(net, random)
    weight, bias = (blob.data for blob in net.params["l0"])
    weight[0] = 0
    weight[1] = [[[0.1]], [[0]], [[0]], [[0]]]
    weight[2] *= 1e-5
    bias[...] = [0.3, 0.2, 3.7, -0.1]
    net.save(str(flow.weights))
    model = amct.caffe.quantize(flow.model, flow.weights, [random.normal(size=(2, 4, 9, 9)).astype(np.float32)])
    compared(flow, model, {"data": random.normal(size=(2, 4, 9, 9)).astype(np.float32)})


def test_gradients_of_fake_quant_nets_are_those_of_float_layers(tmp_path):
    """The value comes from integers, the gradient from the float layer; weights on no grid run in float."""
    flow = text_flow(chain_text(["Convolution", "InnerProduct on rows"]), tmp_path)
    batch = np.random.default_rng(0).normal(size=(2, 4, 9, 9)).astype(np.float32)
    amct.caffe.quantize(flow.model, flow.weights, [batch]).save("net", formats=("fake_quant",))
    text = "force_backward: true\n" + (tmp_path / "net_fake_quant_model.prototxt").read_text()
    (tmp_path / "train.prototxt").write_text(text)
    net = flow.net(tmp_path / "train.prototxt", tmp_path / "net_fake_quant_weights.caffemodel")
    exact = net.forward(data=batch)["l1"].copy()
    net.blobs["l1"].diff[...] = 1
    gradient = net.backward()["data"].copy()
    assert np.abs(gradient).max() > 0
    for blob in net.params["l0"]:
        blob.data[...] *= 1 + 1e-6 * np.random.default_rng(1).random(blob.data.shape)
    np.testing.assert_allclose(net.forward(data=batch)["l1"], exact, rtol=1e-4, atol=0.1)
    net.blobs["l1"].diff[...] = 1
    np.testing.assert_allclose(net.backward()["data"], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.assets
@pytest.mark.parametrize("name", ["det1", "det2", "det3", "det4"])
def test_mtcnn(name, assets, tmp_path):
    flow = flow_of(assets, "caffe_mtcnn", tmp_path, f"{name}.prototxt", f"{name}.caffemodel")
    net = flow.original()
    random = np.random.default_rng(0)
    batches = [
        {name: random.normal(0, 0.6, net.blobs[name].shape).astype(np.float32) for name in net.inputs} for _ in range(4)
    ]
    assert compared(flow, amct.caffe.quantize(flow.model, flow.weights, batches[:3]), batches[3]) > 5
