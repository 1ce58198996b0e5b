"""Quantized LSTM, RNN and GRU: the deploy layers against a NumPy executor on integers, and against fake-quant."""

from __future__ import annotations

import numpy as np
import pytest
from ptq_caffe_flow import prototxt, text_flow

import amct_caffe as amct
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ModelError
from amct.record import read_caffe_record

STREAMS, HIDDEN = 2, 4
KINDS = ("LSTM", "RNN", "GRU")
STATES = {"LSTM": 2, "RNN": 1, "GRU": 1}
ROUNDING = 2.0**-24
NET = """
layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: {steps} dim: 2 dim: 5 }} }} }}
layer {{ name: "cont" type: "Input" top: "cont" input_param {{ shape {{ dim: {steps} dim: 2 }} }} }}
{inputs}
layer {{ name: "rec" type: "{kind}" bottom: "x" bottom: "cont" {bottoms} top: "h" {tops}
  recurrent_param {{ num_output: 4 {options} }} }}
"""
MORE = 'layer {{ name: "{0}" type: "Input" top: "{0}" input_param {{ shape {{ {1} }} }} }}'


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


def net_text(kind, *, steps=3, static=False, exposed=False):
    extra = {"static": "dim: 2 dim: 3"} if static else {}
    if exposed:
        extra |= {f"s{index}": "dim: 1 dim: 2 dim: 4" for index in range(STATES[kind])}
    return NET.format(
        kind=kind,
        steps=steps,
        inputs="\n".join(MORE.format(name, shape) for name, shape in extra.items()),
        bottoms=" ".join(f'bottom: "{name}"' for name in extra),
        tops=" ".join(f'top: "t{index}"' for index in range(STATES[kind])) if exposed else "",
        options="expose_hidden: true" if exposed else "",
    )


def inputs_of(net, seed):
    random = np.random.default_rng(seed)
    data = {name: random.standard_normal(net.blobs[name].shape).astype(np.float32) for name in net.inputs}
    for name in data:
        if name == "cont":
            data[name] = np.ones_like(data[name])
            data[name][-1, 1] = 0
        elif name.startswith("s") and name != "static":
            data[name] = np.tanh(data[name])
    return data


def calibrated(kind, folder, *, bits=8, **form):
    def widen(config):
        for block in config["rec"]["activation_quant_params"]:
            block["num_bits"] = bits

    flow = text_flow(net_text(kind, **form), folder).configure(batch_num=1, change=widen)
    graph = flow.prepare()
    flow.net(*flow.modified).forward(**inputs_of(flow.original(), 0))
    amct.save_model(graph, "Both", str(flow.prefix))
    return flow


# ------------------------------------------------------------------ an executor of its own: NumPy, int64


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Executor:
    """One recurrent layer from the two files of a deploy model, read with protobuf alone."""

    def __init__(self, model, weights):
        (self.layer,) = [layer for layer in prototxt(model).layer if layer.name == "rec"]
        self.quants = {layer.top[0]: layer.quant_param for layer in prototxt(model).layer if layer.type == "Quant"}
        stored = caffe_pb2.NetParameter()
        stored.ParseFromString(weights.read_bytes())
        self.blobs = []
        for blob in next(layer.blobs for layer in stored.layer if layer.name == "rec"):
            assert not blob.data
            assert not blob.double_data
            values = np.frombuffer(blob.int8_data, np.int8) if blob.int8_data else np.array(blob.int32_data)
            self.blobs.append(values.astype(np.int64).reshape(list(blob.shape.dim)))
        matrices = [index for index, blob in enumerate(self.blobs) if blob.ndim == 2]
        self.scales = dict(zip(matrices, self.layer.lstm_quant_param.scale_w, strict=True))
        self.bits = self.layer.lstm_quant_param.num_bits_d
        self.largest = 2 ** (self.bits - 1) - 1
        self.ties = 0
        self.size = 0.0

    def allowed(self, steps):
        """How far the float32 engines may be off after so many steps, as the test below derives it."""
        longest = max(blob.shape[1] for blob in self.blobs if blob.ndim == 2)
        gate = (3 * (longest + 5) + 4) * ROUNDING * self.size
        return steps * (steps + 4) * (gate + 8 * ROUNDING)

    def integers(self, blob, x):
        p = self.quants[blob]
        q = np.rint(x * (np.float32(1) / np.float32(p.scale))) + p.offset
        low, high = -(2 ** (p.num_bits_d - 1)), 2 ** (p.num_bits_d - 1) - 1
        return np.clip(q, low, high).astype(np.int64) - p.offset, np.float32(p.scale)

    def product(self, x, scale, blob, rows=slice(None), bias=None):
        """Exact sums, made real; the largest sum of the sizes of products is noted."""
        blob %= len(self.blobs)
        matrix = self.blobs[blob][rows]
        step = np.float64(np.float32(np.float64(scale) * np.float64(np.float32(self.scales[blob]))))
        added = self.blobs[bias] if bias is not None else np.int64(0)
        self.size = max(self.size, ((np.abs(x) @ np.abs(matrix).T + np.abs(added)) * step).max())
        return (x @ matrix.T + added) * step

    def hidden(self, h, blob, steps, rows=slice(None), bias=None):
        """A state after so many steps, rounded, times a matrix; counts what float32 may round the other way."""
        scaled = h * self.largest
        error = self.allowed(steps) if steps else 4 * ROUNDING
        self.ties += int((np.abs(scaled - np.floor(scaled) - 0.5) <= error * self.largest).sum())
        q = np.clip(np.rint(scaled), -self.largest - 1, self.largest).astype(np.int64)
        return self.product(q, np.float32(1 / self.largest), blob, rows, bias)

    def run(self, data):
        bottoms = list(self.layer.bottom)
        kind = self.layer.type.removesuffix("Quant")
        marks, mark_scale = self.integers(bottoms[1], data["cont"])
        cont = marks * mark_scale.astype(np.float64)
        drive = self.product(*self.integers(bottoms[0], data["x"]), 0, bias=1)
        if "static" in data:
            drive = drive + self.product(*self.integers(bottoms[2], data["static"]), 2)
        states = [np.zeros((STREAMS, HIDDEN)) for _ in range(STATES[kind])]
        if "s0" in data:
            for index in range(len(states)):
                integers, scale = self.integers(bottoms[index - len(states)], data[f"s{index}"])
                states[index] = integers.reshape(STREAMS, HIDDEN) * np.float64(scale)
        outputs = []
        for step in range(len(drive)):
            output, states = getattr(self, kind.lower())(drive[step], cont[step][:, None], states, step)
            outputs.append(output)
        return np.stack(outputs), states

    def lstm(self, drive, cont, states, step):
        i, f, o, g = np.split(drive + self.hidden(cont * states[0], -1, step), 4, axis=1)
        cell = cont * sigmoid(f) * states[1] + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        return hidden, [hidden, cell]

    def rnn(self, drive, cont, states, step):
        hidden = np.tanh(drive + self.hidden(cont * states[0], -3, step))
        return np.tanh(self.hidden(hidden, -2, step + 1, bias=-1)), [hidden]

    def gru(self, drive, cont, states, step):
        before = cont * states[0]
        first, last = slice(0, 2 * HIDDEN), slice(2 * HIDDEN, None)
        z, r = np.split(sigmoid(drive[:, : 2 * HIDDEN] + self.hidden(before, -1, step, first)), 2, axis=1)
        new = np.tanh(drive[:, 2 * HIDDEN :] + self.hidden(r * before, -1, step + 1, last))
        hidden = (1 - z) * new + z * before
        return hidden, [hidden]


ONE_STEP = {"steps": 1, "exposed": True}
FORMS = [
    *((kind, {}) for kind in KINDS),
    *((kind, {"static": True, "exposed": True}) for kind in KINDS),
    *((kind, {"bits": 12, **ONE_STEP}) for kind in KINDS),
    ("LSTM", {"bits": 16, "static": True, **ONE_STEP}),
]


def without_ties(flow, net):
    """Data for which no hidden state lies so near to a tie that float32 could round it the other way."""
    for seed in range(1, 200):
        executor = Executor(*flow.result_files("deploy"))
        data = inputs_of(net, seed)
        result = executor.run(data)
        if not executor.ties:
            return data, executor, result
    raise AssertionError("no data without ties")


@pytest.mark.parametrize(("kind", "form"), FORMS, ids=str)
def test_deploy_equals_an_independent_executor_and_fake_quant(kind, form, tmp_path):
    """The same integers meet every matrix, so only float32 sums and functions differ.

    With s the largest sum of the sizes of products: fake-quant adds K of them in float32, off by (K + 5) roundings of
    s, in at most three matrices, and adds the results, off by 4 more; deploy has only these last. Sigmoid and tanh have
    slopes of at most 1 and are right to 4 of their roundings. In each step a cell (of size up to the number of steps)
    takes in the errors of three gates and keeps its own, a GRU's state likewise, and the output adds one.
    """
    flow = calibrated(kind, tmp_path, **form)
    fake, deploy = flow.result("fake_quant"), flow.result("deploy")
    data, executor, (wanted, states) = without_ties(flow, deploy)
    bound = executor.allowed(len(data["x"]))
    assert bound < 2e-4
    outputs, simulated = deploy.forward(**data), fake.forward(**data)
    for results in (outputs, simulated):
        np.testing.assert_allclose(results["h"], wanted, rtol=0, atol=bound)
        for index in range(STATES[kind] if form.get("exposed") else 0):
            np.testing.assert_allclose(results[f"t{index}"][0], states[index], rtol=0, atol=bound)
    entry = read_caffe_record(flow.out("quant_param_record.txt"))["rec"]
    assert len(entry.record_d) == len(data)
    assert len(entry.scale_w) == len(executor.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_is_near_float(kind, tmp_path):
    flow = calibrated(kind, tmp_path, static=True)
    data = inputs_of(flow.original(), 0)
    real, deploy = flow.original().forward(**data)["h"], flow.result("deploy").forward(**data)["h"]
    # 8 bits: half a step of 1/127 of every factor of a dozen products of numbers around 1
    assert np.abs(real - deploy).max() < 0.1
    assert np.abs(real - deploy).mean() < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_flipping_one_bit_of_any_matrix_or_bias_changes_the_output(kind, tmp_path):
    flow = calibrated(kind, tmp_path, static=True)
    model, weights = flow.result_files("deploy")
    net = flow.net(model, weights)
    data = inputs_of(net, 1)
    before = net.forward(**data)["h"].copy()
    stored = caffe_pb2.NetParameter()
    stored.ParseFromString(weights.read_bytes())
    (layer,) = [layer for layer in stored.layer if layer.name == "rec"]
    assert len(layer.blobs) == {"LSTM": 4, "RNN": 6, "GRU": 4}[kind]
    for blob in layer.blobs:
        kept = caffe_pb2.BlobProto()
        kept.CopyFrom(blob)
        if blob.int8_data:
            content = bytearray(blob.int8_data)
            content[len(content) // 2] ^= 0x20
            blob.int8_data = bytes(content)
        else:
            blob.int32_data[0] ^= 1 << 12
        (tmp_path / "flipped.caffemodel").write_bytes(stored.SerializeToString())
        blob.CopyFrom(kept)
        after = flow.net(model, tmp_path / "flipped.caffemodel").forward(**data)["h"]
        assert not np.array_equal(before, after)


def test_products_are_of_integers(tmp_path, monkeypatch):
    """What reaches the matrix product: int8 or int16 data and states, int8 weights, int32 biases."""
    from amct.caffe.engine.layers import integer

    seen = []
    real = integer.integer_linear

    def watching(x, weight, bias=None, **options):
        seen.append((str(x.dtype), str(weight.dtype), None if bias is None else str(bias.dtype)))
        return real(x, weight, bias, **options)

    monkeypatch.setattr(integer, "integer_linear", watching)
    for bits, kind in ((8, "torch.int8"), (12, "torch.int16")):
        (tmp_path / str(bits)).mkdir()
        deploy = calibrated("RNN", tmp_path / str(bits), bits=bits).result("deploy")
        seen.clear()
        deploy.forward(**inputs_of(deploy, 0))
        assert {(x, weight) for x, weight, _ in seen} == {(kind, "torch.int8")}
        assert {bias for *_, bias in seen} == {None, "torch.int32"}


def test_bias_that_does_not_fit_raises_the_matrix_scale(tmp_path, caplog):
    flow = text_flow(net_text("LSTM"), tmp_path)
    net = flow.original()
    net.params["rec"][0].data[...] *= 1e-4
    net.params["rec"][1].data[0] = 100.0
    net.save(str(flow.weights))
    flow.configure(batch_num=1)
    graph = flow.prepare()
    data = inputs_of(net, 0)
    flow.net(*flow.modified).forward(**data)
    amct.save_model(graph, "Both", str(flow.prefix))
    assert 'layer "rec": the bias does not fit int32; the weight scale of 1 channel(s) is raised: 0' in caplog.text
    raised = read_caffe_record(flow.out("quant_param_record.txt"))["rec"]
    assert raised.scale_w[0] > read_caffe_record(flow.record)["rec"].scale_w[0]
    assert 100.0 / (raised.scale_w[0] * raised.record_d[0].scale) <= 2**31 - 1
    bound = 3e-2  # as above: 8 bits
    np.testing.assert_allclose(flow.result("deploy").forward(**data)["h"], net.forward(**data)["h"], atol=bound)


def test_wide_sums_are_reported(tmp_path, caplog):
    text = net_text("GRU").replace("dim: 2 dim: 5 }", "dim: 2 dim: 600 }")

    def widen(config):
        for block in config["rec"]["activation_quant_params"]:
            block["num_bits"] = 16

    flow = text_flow(text, tmp_path)
    net = flow.original()
    net.params["rec"][0].data[...] = 1.0
    net.save(str(flow.weights))
    graph = flow.configure(batch_num=1, change=widen).prepare()
    flow.net(*flow.modified).forward(**inputs_of(net, 0))
    amct.save_model(graph, "Deploy", str(flow.prefix))
    assert 'layer "rec": with 16-bit data its sums could leave int32' in caplog.text


def test_wrong_integer_layers_are_refused(tmp_path):
    flow = calibrated("LSTM", tmp_path)
    model, weights = flow.result_files("deploy")
    text = model.read_text()
    start = text.index("scale_w:")
    model.write_text(text[:start] + text[text.index("\n", start) :])
    with pytest.raises(ModelError, match=r'layer "rec".* 1 scale_w for 2 matrices'):
        flow.net(model, weights)
    net = prototxt(flow.result_files("fake_quant")[0])
    (layer,) = [layer for layer in net.layer if layer.name == "rec"]
    layer.lstm_quant_param.scale_w.extend([0.1, 0.1])
    next(each for each in net.layer if each.type == "Quant").quant_param.ClearField("object_layer")
    model.write_text(str(net))
    with pytest.raises(ModelError, match=r'layer "rec".*expected Quant layers of index \[0, 1\], there are \[1\]'):
        flow.net(model, weights)
