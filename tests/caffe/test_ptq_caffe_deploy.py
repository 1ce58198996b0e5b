"""Deploy models: equal to an integer executor written in NumPy, and to the fake-quant model within float rounding."""

from __future__ import annotations

import numpy as np
import pytest
from ptq_caffe_flow import NETS, Flow, batch, golden_flow, prototxt, text_flow
from ptq_caffe_layers import check_every_layer
from test_ptq_caffe_flow import BRANCHES

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.record import read_caffe_record

WEIGHTED = ("Convolution", "DepthwiseConv", "Deconvolution", "InnerProduct")


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ an executor of its own: NumPy, int64, plain loops


class Executor:
    """Runs a deploy model from its two files, read with protobuf alone; no part of the engine takes part."""

    def __init__(self, model, weights):
        self.net = prototxt(model)
        quants = sorted(
            (each for each in self.net.layer if each.type == "Quant"), key=lambda each: each.quant_param.index
        )
        self.inputs = {}
        for each in quants:
            self.inputs.setdefault(each.quant_param.object_layer, []).append(each.quant_param)
        stored = caffe_pb2.NetParameter()
        stored.ParseFromString(weights.read_bytes())
        self.blobs = {layer.name: [self.numbers(blob) for blob in layer.blobs] for layer in stored.layer}

    @staticmethod
    def numbers(blob):
        shape = list(blob.shape.dim)
        if blob.int8_data:
            return np.frombuffer(blob.int8_data, np.int8).reshape(shape).astype(np.int64)
        if blob.int32_data:
            return np.array(blob.int32_data, np.int64).reshape(shape)
        return np.array(blob.data, np.float32).reshape(shape)

    def run(self, **inputs):
        self.values = dict(inputs)
        for layer in self.net.layer:
            if layer.type == "Input":
                continue
            bottoms = [self.values[name] for name in layer.bottom]
            tops = getattr(self, f"run_{layer.type.lower()}")(layer, *bottoms)
            self.values.update(zip(layer.top, tops if isinstance(tops, list) else [tops], strict=True))
        return self.values

    def run_quant(self, layer, x):
        p = layer.quant_param
        q = np.rint(x * (np.float32(1) / np.float32(p.scale))) + p.offset
        return np.clip(q, -(2 ** (p.num_bits_d - 1)), 2 ** (p.num_bits_d - 1) - 1).astype(np.int64)

    def weights(self, layer):
        blobs = self.blobs[layer.name]
        options = layer.inner_product_param if layer.type == "InnerProduct" else layer.convolution_param
        if len(blobs) == 2 + options.bias_term:
            packed, *bias, table = blobs
            nibbles = np.stack([packed & 15, (packed >> 4) & 15], axis=2).reshape(len(packed), -1)
            table = np.broadcast_to(table, (len(packed), 16))
            return np.take_along_axis(table, nibbles, axis=1), (bias[0] if bias else 0)
        return blobs[0], (blobs[1] if len(blobs) > 1 else 0)

    def run_convolution(self, layer, x):
        p = layer.convolution_param
        kernel = list(p.kernel_size) * 2
        k, s, d = kernel[0], (list(p.stride) or [1])[0], (list(p.dilation) or [1])[0]
        pad = (list(p.pad) or [0])[0]
        weight, bias = self.weights(layer)
        inputs = x.shape[1] // p.group
        weight = weight[:, : inputs * k * k].reshape(p.num_output, inputs, k, k)
        x = np.pad(x - self.inputs[layer.name][0].offset, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        height, width = ((size - d * (k - 1) - 1) // s + 1 for size in x.shape[2:])
        result = np.zeros((len(x), p.num_output, height, width), np.int64)
        per_group = p.num_output // p.group
        for channel in range(p.num_output):
            group = channel // per_group
            part = x[:, group * inputs : (group + 1) * inputs]
            for i in range(k):
                for j in range(k):
                    window = part[:, :, i * d : i * d + s * height : s, j * d : j * d + s * width : s]
                    window = window[:, :, :height, :width]
                    result[:, channel] += (window * weight[channel, :, i, j][None, :, None, None]).sum(1)
        return result + np.reshape(bias, (1, -1, 1, 1))

    def run_deconvolution(self, layer, x):
        p = layer.convolution_param
        k, s, pad = p.kernel_size[0], (list(p.stride) or [1])[0], (list(p.pad) or [0])[0]
        weight, bias = self.weights(layer)
        x = x - self.inputs[layer.name][0].offset
        full = np.zeros((len(x), p.num_output, *(s * (size - 1) + k for size in x.shape[2:])), np.int64)
        inputs, per_group = x.shape[1] // p.group, p.num_output // p.group
        for channel in range(x.shape[1]):
            group = channel // inputs
            for out in range(per_group):
                for i in range(k):
                    for j in range(k):
                        target = full[
                            :, group * per_group + out, i : i + s * x.shape[2] : s, j : j + s * x.shape[3] : s
                        ]
                        target += x[:, channel] * weight[channel, out, i, j]
        cut = full[:, :, pad : full.shape[2] - pad, pad : full.shape[3] - pad]
        return cut + np.reshape(bias, (1, -1, 1, 1))

    def run_innerproduct(self, layer, x):
        weight, bias = self.weights(layer)
        x = (x - self.inputs[layer.name][0].offset).reshape(len(x), -1)
        weight = weight.T if layer.inner_product_param.transpose else weight[:, : x.shape[1]]
        return x @ weight.T + bias

    def run_dequant(self, layer, x):
        scale = self.blobs[layer.name][0].astype(np.float64)
        return (x * scale.reshape(1, -1, *[1] * (x.ndim - 2))).astype(np.float32)

    def real(self, layer, xs):
        return [
            (x - p.offset).astype(np.float32) * np.float32(p.scale)
            for x, p in zip(xs, self.inputs[layer.name], strict=True)
        ]

    def run_antiquant(self, layer, x):
        p = layer.antiquant_param
        return (x - p.offset).astype(np.float32) * np.float32(p.scale) if p.HasField("scale") else x

    def run_relu(self, _, x):
        return np.maximum(x, 0)

    def run_eltwise(self, layer, *xs):
        first, second = self.real(layer, xs)
        return first + second

    def run_pooling(self, layer, x):
        p = layer.pooling_param
        if p.global_pooling:
            return self.real(layer, [x])[0].mean((2, 3), keepdims=True, dtype=np.float64).astype(np.float32)
        assert p.pool == p.MAX
        k, s, pad = p.kernel_size, p.stride, p.pad
        size = -(-(x.shape[2] + 2 * pad - k) // s) + 1
        result = np.full((*x.shape[:2], size, size), np.iinfo(np.int64).min)
        for i in range(size):
            for j in range(size):
                top, left = max(i * s - pad, 0), max(j * s - pad, 0)
                window = x[:, :, top : i * s - pad + k, left : j * s - pad + k]
                if window.size:
                    result[:, :, i, j] = window.max((2, 3))
        return result

    def run_concat(self, layer, *xs):
        same = len({(p.scale, p.offset) for p in self.inputs[layer.name]}) == 1
        return np.concatenate(xs if same else self.real(layer, xs), axis=1)

    def run_slice(self, layer, x):
        return np.split(x, list(layer.slice_param.slice_point), axis=1)

    def run_softmax(self, layer, x):
        x = self.real(layer, [x])[0].astype(np.float64)
        e = np.exp(x - x.max(1, keepdims=True))
        return (e / e.sum(1, keepdims=True)).astype(np.float32)


SNQ = """
common_config: { snq_quantize: { channel_wise: %s init_algo: 'gaussian' } }
override_layer_types: { layer_type: "InnerProduct" calibration_config: { arq_quantize: { channel_wise: false } } }
"""


def resnet(golden, folder):
    return golden_flow("mini_resnet", golden, folder).configure()


def branches(_, folder):
    return text_flow(BRANCHES, folder).configure()


def branches_16(_, folder):
    def widen(config):
        for value in config.values():
            blocks = value.get("activation_quant_params", []) if isinstance(value, dict) else []
            for block in blocks if isinstance(blocks, list) else [blocks]:
                block["num_bits"] = 16

    return text_flow(BRANCHES, folder).configure(change=widen)


def clustered(golden, folder):
    return golden_flow("mini_resnet", golden, folder).configure(text=SNQ % "true")


def clustered_per_layer(golden, folder):
    return golden_flow("mini_resnet", golden, folder).configure(text=SNQ % "false")


@pytest.mark.parametrize("make", [resnet, branches, branches_16, clustered, clustered_per_layer])
def test_deploy_equals_an_independent_executor(make, golden, tmp_path):
    flow = make(golden, tmp_path)
    flow.run()
    net = flow.result("deploy")
    data = batch(net, 11)
    outputs = net.forward(**data)
    mine = Executor(*flow.result_files("deploy")).run(**data)
    for layer in flow_layers(flow):
        if layer.type in WEIGHTED and any(each.dequant_param.object_layer == layer.name for each in flow_layers(flow)):
            np.testing.assert_array_equal(net.blobs[layer.top[0]].data, mine[layer.top[0]].astype(np.float32))
    for name, value in outputs.items():
        # the exponentials of Softmax differ in their last bits
        np.testing.assert_allclose(value, mine[name], rtol=2e-6, atol=1e-7)


def flow_layers(flow):
    return prototxt(flow.result_files("deploy")[0]).layer


@pytest.mark.parametrize("name", NETS)
def test_deploy_equals_fake_quant_within_float_rounding(name, golden, tmp_path):
    flow = golden_flow(name, golden, tmp_path).configure()
    flow.run()
    deploy, fake = flow.result("deploy"), flow.result("fake_quant")
    fake.forward(**batch(fake, 3))
    checked = check_every_layer(fake, deploy, flow.result_files("deploy")[0])
    assert sum(checked.values()) == len(read_caffe_record(flow.out("quant_param_record.txt")))


def test_no_float_weights_remain(golden, tmp_path):
    flow = golden_flow("mini_mobilenet", golden, tmp_path).configure()
    flow.run()
    stored = caffe_pb2.NetParameter()
    stored.ParseFromString(flow.result_files("deploy")[1].read_bytes())
    floats = {layer.type: sum(len(blob.data) + len(blob.double_data) for blob in layer.blobs) for layer in stored.layer}
    assert {kind for kind, count in floats.items() if count} == {"DeQuant"}
    weighted = [layer for layer in stored.layer if layer.type in WEIGHTED]
    assert weighted
    for layer in weighted:
        assert layer.blobs[0].int8_data
        assert len(layer.blobs[1].int32_data) == layer.blobs[1].shape.dim[0]


@pytest.mark.parametrize("text", [None, SNQ % "true"], ids=["int8", "4 bits"])
def test_flipping_one_weight_bit_changes_the_output(text, golden, tmp_path):
    flow = golden_flow("mini_resnet", golden, tmp_path).configure(text=text)
    flow.run()
    model, weights = flow.result_files("deploy")
    net = flow.net(model, weights)
    data = batch(net, 1)
    before = net.forward(**data)["prob"].copy()
    stored = caffe_pb2.NetParameter()
    stored.ParseFromString(weights.read_bytes())
    changed = 0
    for layer in stored.layer:
        if layer.type not in WEIGHTED:
            continue
        content = bytearray(layer.blobs[0].int8_data)
        content[len(content) // 2] ^= 64
        original, layer.blobs[0].int8_data = layer.blobs[0].int8_data, bytes(content)
        other = tmp_path / "flipped.caffemodel"
        other.write_bytes(stored.SerializeToString())
        layer.blobs[0].int8_data = original
        after = flow.net(model, other).forward(**data)["prob"]
        changed += not np.array_equal(before, after)
    layers = sum(layer.type in WEIGHTED for layer in stored.layer)
    # a single flip deep inside may be rounded away by the next Quant; most are not, those of the last layer never
    assert changed >= layers * 0.7
    assert not np.array_equal(before, after)


def test_wrong_integer_models_are_refused(golden, tmp_path):
    flow = golden_flow("legacy_v0", golden, tmp_path).configure()
    flow.run()
    model, weights = flow.result_files("deploy")
    text = model.read_text()
    for wrong, message in (
        (text.replace("num_bits_d: 8", "num_bits_d: 99", 1), "bits"),
        (text.replace("scale: ", "scale: -", 1), "scale is illegal"),
    ):
        model.write_text(wrong)
        with pytest.raises(RuntimeError, match=message):
            flow.net(model, weights)


def test_someone_may_look_at_integer_blobs(golden, tmp_path):
    """A NumPy view of a blob of integers holds them as floats; results stay the same."""
    flow = golden_flow("mini_resnet", golden, tmp_path).configure()
    flow.run()
    net = flow.result("deploy")
    data = batch(net, 2)
    before = net.forward(**data)["prob"].copy()
    views = [blob.data for blob in net.blobs.values()] + [blob.data for blobs in net.params.values() for blob in blobs]
    np.testing.assert_array_equal(net.forward(**data)["prob"], before)
    assert len(views) > 10
    assert isinstance(flow, Flow)


def with_old_fields(flow):
    """The deploy prototxt as older versions wrote it: what follows from the pair stood in fields of their own."""
    net = prototxt(flow.result_files("deploy")[0])
    layers = {layer.name: layer for layer in net.layer}
    for layer in net.layer:
        if layer.type == "Quant":
            layer.quant_param.integers = True
            layers[layer.quant_param.object_layer].integer_param.input.add().CopyFrom(layer.quant_param)
    for layer in net.layer:
        if layer.type in WEIGHTED and layer.HasField("integer_param"):
            layer.integer_param.num_bits_w = 4
    path = flow.folder / "old.prototxt"
    path.write_text(str(net))
    return path


@pytest.mark.parametrize("make", [branches, clustered])
def test_deploy_models_of_older_versions_run(make, golden, tmp_path):
    flow = make(golden, tmp_path)
    flow.run()
    model, weights = flow.result_files("deploy")
    new, old = flow.net(model, weights), flow.net(with_old_fields(flow), weights)
    data = batch(new, 5)
    for name, value in new.forward(**data).items():
        np.testing.assert_array_equal(old.forward(**data)[name], value)


def test_four_bit_weights_are_known_by_their_blobs(golden, tmp_path):
    flow = clustered(golden, tmp_path)
    flow.run()
    model, weights = flow.result_files("deploy")
    net = flow.net(model, weights)
    data = batch(net, 5)
    wanted = net.forward(**data)["prob"].copy()
    net.save_hdf5(str(tmp_path / "deploy.h5"))
    from_hdf5, shared = flow.net(model, tmp_path / "deploy.h5"), caffe.Net(str(model), caffe.TEST)
    shared.share_with(net)
    for other in (from_hdf5, shared):
        np.testing.assert_array_equal(other.forward(**data)["prob"], wanted)
    (tmp_path / "8").mkdir()
    eight = golden_flow("mini_resnet", golden, tmp_path / "8").configure()
    eight.run()
    other = eight.net(model, eight.result_files("deploy")[1])
    wanted = other.forward(**data)["prob"].copy()
    net.copy_from(str(eight.result_files("deploy")[1]))  # and back to eight bits
    np.testing.assert_array_equal(net.forward(**data)["prob"], wanted)
