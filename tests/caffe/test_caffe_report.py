"""Comparing and reporting Caffe models: what is told is what the nets do, in memory and from files."""

from __future__ import annotations

import json
import logging
import math
import weakref

import numpy as np
import pytest
from ptq_caffe_flow import cosine, golden_flow, text_flow

import amct.caffe as amct
from amct.caffe.comparing import float_side, measure_nets, watched_layers
from amct.caffe.model import read_quantized_model
from amct.caffe.reporting import files_report
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError, ModelError, ParseError

FOLDED = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 5 } }
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("AMCT_LOG_LEVEL", "error")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def resnet(golden, tmp_path_factory):
    """A residual net with BatchNorm and in-place ReLUs: its files, its data, the quantized model and its files."""
    folder = tmp_path_factory.mktemp("resnet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMCT_LOG_LEVEL", "error")
        patch.chdir(folder)
        flow = golden_flow("mini_resnet", golden, folder)
        flow.data = batches(flow.original(), (1, 3, 2))
        flow.quantized = amct.quantize(flow.model, flow.weights, flow.data)
        flow.quantized.save(flow.prefix)
    flow.pair = (flow.model, flow.weights)
    return flow


def batches(net, sizes):
    random = np.random.default_rng(5)
    shape = net.blobs["data"].shape[1:]
    return [(random.standard_normal((size, *shape)).astype(np.float32), np.arange(size) % 5) for size in sizes]


def blob(net, name, data):
    """The values of a blob over all batches."""
    found = []
    for values, _ in data:
        net.blobs["data"].reshape(*values.shape)
        net.blobs["data"].data[...] = values
        net.forward()
        found.append(net.blobs[name].data.copy().reshape(-1))
    return np.concatenate(found).astype(np.float64)


def content_of(flow, data=None, metric=None):
    return flow.quantized.report_content(flow.data if data is None else data, metric)


# ------------------------------------------------------------------ what is measured


def test_sqnr_and_cosine_are_those_of_the_blobs(resnet):
    found = {layer.name: layer for layer in content_of(resnet).layers}
    assert tuple(found) == resnet.quantized.layers
    x = {name: blob(resnet.original(), name, resnet.data) for name in ("res3a_b1", "res3a_b2b", "pool5", "fc")}
    y = {name: blob(resnet.result("fake_quant"), name, resnet.data) for name in ("pool5", "fc", "res3a_out")}
    # The ReLU behind the sum works in place in the original: what the sum itself makes can only be added up there.
    pairs = {"pool5": (x["pool5"], y["pool5"]), "fc": (x["fc"], y["fc"])}
    pairs["res3a"] = (x["res3a_b1"] + x["res3a_b2b"], y["res3a_out"])
    for name, (one, other) in pairs.items():
        assert found[name].sqnr == pytest.approx(sqnr(one, other), abs=0.01)
        assert found[name].cosine == pytest.approx(cosine(one, other), abs=1e-6)


def sqnr(x, y):
    return 10 * math.log10((x @ x) / ((x - y) @ (x - y)))


def test_the_summary_tells_how_alike_the_outputs_are(resnet):
    x, y = blob(resnet.original(), "prob", resnet.data), blob(resnet.result("fake_quant"), "prob", resnet.data)
    figures = {figure.label: figure for figure in content_of(resnet).figures}
    assert figures["cosine of both outputs"].after == f"{cosine(x, y):.5f}"
    assert figures["SQNR of the output"].after == f"{sqnr(x, y):.1f} dB"
    weights = figures["weights of the quantized layers"]
    number = sum(resnet.original().params[name][0].data.size for name in resnet.quantized.layers if name in WEIGHTED)
    assert (weights.before, weights.after) == (f"{4 * number / 1e3:.3g} kB", f"{number / 1e3:.3g} kB")


WEIGHTED = ("conv1", "res2a_b2a", "res2a_b2b", "res3a_b1", "res3a_b2a", "res3a_b2b", "fc")


def test_inputs_are_those_of_the_float_net(resnet):
    found = {layer.name: layer for layer in content_of(resnet).layers}
    first = found["conv1"]
    x = np.concatenate([values.reshape(-1) for values, _ in resnet.data])
    (factors,) = resnet.quantized.record["conv1"].record_d
    integers = np.rint(x / np.float32(factors.scale)) + factors.offset
    assert first.clipped == pytest.approx(np.mean((integers < -128) | (integers > 127)), abs=1 / x.size)
    given = first.inputs[0]
    assert (given.activation.minimum, given.activation.maximum) == (x.min(), x.max())
    assert (given.scale, given.offset, given.bits, first.weight_bits) == (
        factors.scale,
        factors.offset,
        8,
        8,
    )


def test_a_layer_with_two_inputs_shows_both(resnet):
    layer = next(layer for layer in content_of(resnet).layers if layer.name == "res3a")
    factors = resnet.quantized.record["res3a"].record_d
    assert [(each.scale, each.offset, each.bits) for each in layer.inputs] == [
        (each.scale, each.offset, each.bits) for each in factors
    ]
    assert layer.weight_bits is None
    for each, name in zip(layer.inputs, ("res3a_b1", "res3a_b2b"), strict=True):
        x = blob(resnet.original(), name, resnet.data)
        assert (each.activation.minimum, each.activation.maximum) == pytest.approx((x.min(), x.max()), rel=1e-4)
    assert layer.clipped == max(each.activation.clipped for each in layer.inputs)


def test_weight_ranges_are_those_of_the_folded_weights(tmp_path):
    flow = text_flow(FOLDED, tmp_path)
    net = flow.original()
    data = batches(net, (2, 2))
    flow.quantized = amct.quantize(flow.model, flow.weights, data)
    (weight, _), (_, variance, count), (gamma, _) = ([part.data for part in net.params[name]] for name in NORMED)
    folded = weight * (gamma / np.sqrt(variance / count + 1e-5))[:, None, None, None]
    rows = folded.reshape(4, -1)
    conv, fc = content_of(flow, data).layers
    assert conv.weights.minimum == pytest.approx(rows.min(1).tolist(), rel=1e-5)
    assert conv.weights.maximum == pytest.approx(rows.max(1).tolist(), rel=1e-5)
    assert fc.weights.maximum == pytest.approx(net.params["fc"][0].data.max(1).tolist())


NORMED = ("conv", "bn", "scale")


def test_the_metric_is_the_mean_over_samples(resnet):
    def top1(outputs, batch):
        return (outputs["prob"].reshape(len(batch[1]), -1).argmax(1) == batch[1]).mean()

    labels = np.concatenate([labels for _, labels in resnet.data])
    expected = [
        np.mean(blob(net, "prob", resnet.data).reshape(len(labels), -1).argmax(1) == labels)
        for net in (resnet.original(), resnet.result("fake_quant"))
    ]
    figure = content_of(resnet, metric=top1).figures[0]
    assert (figure.label, figure.before, figure.after) == (
        "top1",
        f"{expected[0]:.2%}".replace("%", " %"),
        f"{expected[1]:.2%}".replace("%", " %"),
    )


def test_folded_skipped_and_config_are_told(resnet):
    content = content_of(resnet)
    assert ("bn_conv1", 'folded into "conv1"') in [(note.layer, note.text) for note in content.fused]
    assert ("relu_conv1", "ReLU is off by default: switch it on with quant_enable") in [
        (note.layer, note.text) for note in content.skipped
    ]
    assert content.config.startswith("source: defaults\nbatch_num: 3")
    assert content.model == "mini_resnet"


# ------------------------------------------------------------------ from files


def test_files_tell_what_the_model_in_memory_tells(resnet):
    content = content_of(resnet)
    found = files_report(resnet.pair, resnet.result_files("fake_quant"), resnet.data).content
    assert found.figures[:2] == content.figures[:2]
    assert (found.fused, found.skipped, found.config) == (content.fused, content.skipped, content.config)
    for mine, other in zip(found.layers, content.layers, strict=True):
        assert (mine.name, mine.type, mine.inputs[0].scale, mine.weight_bits) == (
            (other.name, other.type, other.inputs[0].scale, other.weight_bits)
        )
        # The float net of the files has its BatchNorm layers still: folding changes outputs by float32 rounding only.
        assert mine.sqnr == pytest.approx(other.sqnr, abs=0.01)
        assert [each.activation.clipped for each in mine.inputs] == pytest.approx(
            [each.activation.clipped for each in other.inputs], abs=1e-4
        )
    assert {"mini_resnet.caffemodel", "net_fake_quant_weights.caffemodel"} <= {file.name for file in found.files}


def test_a_deploy_pair_is_compared_in_integers(resnet):
    found = amct.compare(resnet.pair, resnet.result_files("deploy"), resnet.data)
    assert [layer.layer for layer in found] == list(resnet.quantized.layers)
    for mine, other in zip(found, resnet.quantized.compare(resnet.data, deploy=True), strict=True):
        assert mine.sqnr == pytest.approx(other.sqnr, abs=0.01)
    content = files_report(resnet.pair, resnet.result_files("deploy"), resnet.data).content
    assert all(layer.weights is None for layer in content.layers)  # its weights are integers
    assert content.layers[0].weight_bits == 8


def test_compare_takes_files_or_the_quantized_model(resnet):
    in_memory = amct.compare(resnet.pair, resnet.quantized, iter(resnet.data))
    assert in_memory == amct.compare(resnet.pair, resnet.result_files("fake_quant"), resnet.data)
    for mine, other in zip(in_memory, resnet.quantized.compare(resnet.data), strict=True):
        assert mine.layer == other.layer
        assert mine.sqnr == pytest.approx(other.sqnr, abs=0.01)


def test_without_notes_a_report_says_so(resnet, tmp_path):
    files = [tmp_path / file.name for file in resnet.result_files("fake_quant")]
    for source, target in zip(resnet.result_files("fake_quant"), files, strict=True):
        target.write_bytes(source.read_bytes())
    content = files_report(resnet.pair, files, resnet.data).content
    assert content.config == "not known: there is no net_quant.json beside the model"
    assert {layer.weight_bits for layer in content.layers} == {None}
    (tmp_path / "net_quant.json").write_text('{"layers": 3}')
    with pytest.raises(ParseError, match=r"net_quant\.json: expected what quantization wrote"):
        files_report(resnet.pair, files, resnet.data)


# ------------------------------------------------------------------ pages


def test_the_page_has_all_layers_and_inputs(resnet, tmp_path):
    path = resnet.quantized.report(tmp_path / "report.html", resnet.data, files=[resnet.out("quant.json")])
    text = path.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [layer["name"] for layer in data["layers"]] == list(resnet.quantized.layers)
    assert [len(layer["inputs"]) for layer in data["layers"] if layer["name"] in ("conv1", "res3a")] == [1, 2]
    assert "measured on 3 batches" in text
    assert "net_quant.json" in text


def test_without_data_the_first_calibration_batch_is_measured(resnet, tmp_path):
    text = resnet.quantized.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "measured on the first calibration batch" in text


def test_a_page_from_files(resnet, tmp_path):
    path = amct.report(tmp_path / "r.html", resnet.pair, resnet.result_files("fake_quant"), resnet.data[0][0])
    assert "measured on 1 batch<" in path.read_text(encoding="utf-8")


def test_one_batch_at_a_time_is_in_memory(resnet):
    alive = []

    def stream():
        for size in (2, 2, 2, 2, 2):
            values = np.zeros((size, *resnet.data[0][0].shape[1:]), np.float32)
            alive.append(weakref.ref(values))
            assert sum(each() is not None for each in alive) <= 2  # this one, and the last until it is let go
            yield values

    found = measure_nets(float_side(resnet.pair), read_quantized_model(*resnet.result_files("fake_quant")), stream())
    assert found.batches == 5


def test_recurrent_layers_are_reported(tmp_path):
    text = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 3 dim: 2 dim: 4 } } }
    layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 3 dim: 2 } } }
    layer { name: "rec" type: "LSTM" bottom: "x" bottom: "cont" top: "rec" recurrent_param { num_output: 5 } }
    """
    flow = text_flow(text, tmp_path)
    random = np.random.default_rng(0)
    data = [(random.standard_normal((3, 2, 4)).astype(np.float32), np.ones((3, 2), np.float32))]
    flow.quantized = amct.quantize(flow.model, flow.weights, data)
    (layer,) = content_of(flow, data).layers
    assert (layer.type, len(layer.weights.minimum)) == ("LSTM", 2 * 4 * 5)
    assert layer.sqnr > 10
    flow.quantized.save(tmp_path / "net")
    pair = tmp_path / "net_fake_quant_model.prototxt", tmp_path / "net_fake_quant_weights.caffemodel"
    (compared,) = amct.compare((flow.model, flow.weights), pair, data)
    assert compared.sqnr == pytest.approx(layer.sqnr, abs=0.01)


def test_layers_in_front_of_a_rectifier_are_compared_behind_it(tmp_path):
    """The Concat shares the factors of the convolution behind the ReLU: negative values are cut off in front of it."""
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 9 dim: 9 } } }
    layer { name: "a" type: "Convolution" bottom: "data" top: "a" convolution_param { num_output: 4 kernel_size: 3 } }
    layer { name: "b" type: "Convolution" bottom: "data" top: "b" convolution_param { num_output: 4 kernel_size: 3 } }
    layer { name: "cat" type: "Concat" bottom: "a" bottom: "b" top: "cat" }
    layer { name: "relu" type: "ReLU" bottom: "cat" top: "cat" }
    layer { name: "c" type: "Convolution" bottom: "cat" top: "c" convolution_param { num_output: 4 kernel_size: 3 } }
    """
    flow = text_flow(text, tmp_path)
    data = [np.random.default_rng(0).standard_normal((1, 3, 9, 9)).astype(np.float32)]
    quantized = amct.quantize(flow.model, flow.weights, data)
    quantized.save(tmp_path / "net")
    for kind in ("fake_quant", "deploy"):
        pair = tmp_path / f"net_{kind}_model.prototxt", tmp_path / f"net_{kind}_weights.caffemodel"
        found = {each.layer: each for each in amct.compare((flow.model, flow.weights), pair, data)}
        assert list(found) == ["a", "b", "cat", "c"]
        assert min(each.sqnr for each in found.values()) > 30
        assert found["cat"].sqnr > found["c"].sqnr - 6


# ------------------------------------------------------------------ mistakes


def test_models_that_do_not_belong_together_are_told(resnet, tmp_path, caplog):
    flow = text_flow(FOLDED, tmp_path)
    pair, data = (flow.model, flow.weights), batches(flow.original(), (2,))
    amct.quantize(*pair, data).save(tmp_path / "net")
    files = [tmp_path / f"net_fake_quant_{part}" for part in ("model.prototxt", "weights.caffemodel")]
    with pytest.raises(ModelError, match='layer "conv1" of the quantized one works on blob'):
        amct.compare(pair, resnet.result_files("fake_quant"), data)
    with pytest.raises(ModelError, match="has no Quant layer"):
        amct.compare(pair, pair, data)
    with pytest.raises(ModelError, match="quantized already"):
        amct.compare(files, files, data)
    other = tmp_path / "other"
    other.mkdir()
    wider = text_flow(FOLDED.replace("num_output: 5", "num_output: 6"), other)
    with caplog.at_level(logging.WARNING, "amct"):
        found = amct.compare((wider.model, wider.weights), files, [*data, *data])
    assert [layer.layer for layer in found] == ["conv"]
    told = [record.message for record in caplog.records if "different shapes" in record.message]
    assert told == [
        'the output of layer "fc" has different shapes in both nets, [2, 6] and [2, 5]; such batches are not compared'
    ]
    taller = text_flow(
        FOLDED.replace("num_output: 5", "num_output: 6").replace("num_output: 4", "num_output: 8"), other
    )
    with pytest.raises(ModelError, match="no layer makes outputs of one shape"):
        amct.compare((taller.model, taller.weights), files, data)


def test_mistakes_write_nothing(resnet, tmp_path):
    target, quantized = tmp_path / "report.html", resnet.quantized
    with pytest.raises(ArgumentError, match="metric: it needs data"):
        quantized.report(target, metric=lambda *_: 1.0)
    with pytest.raises(ArgumentTypeError, match="metric: expected a number for each batch, got str"):
        quantized.report(target, resnet.data, lambda *_: "good")
    with pytest.raises(CalibrationError, match="data is empty"):
        quantized.report(target, [])
    with pytest.raises(ArgumentTypeError, match="data: expected an array or an iterable of batches, got int"):
        quantized.report(target, 5)
    with pytest.raises(ArgumentError, match=r"inputs \['data'\], got \['x'\]"):
        quantized.compare({"x": resnet.data[0][0]})
    with pytest.raises(ArgumentError, match="arrays of numbers, got str"):
        quantized.compare(["pictures"])
    with pytest.raises(FileError, match="cannot be read"):
        quantized.report(target, resnet.data, files=[tmp_path / "missing.onnx"])
    with pytest.raises(FileError, match="is a folder"):
        quantized.report(tmp_path, resnet.data)
    with pytest.raises(
        ArgumentTypeError, match=r"float_model: expected a pair of files \(prototxt, caffemodel\), got str"
    ):
        amct.report(target, "net.prototxt", resnet.pair, resnet.data)
    with pytest.raises(FileError, match='quantized_model: "nothing" does not exist'):
        amct.compare(resnet.pair, (resnet.model, "nothing"), resnet.data)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "amct_log"] == []


def test_inputs_makes_of_a_batch_what_the_net_takes(resnet):
    dicts = [{"image": values, "label": labels} for values, labels in resnet.data]
    assert resnet.quantized.compare(dicts, inputs=lambda each: each["image"]) == resnet.quantized.compare(resnet.data)


def test_watched_layers_name_every_result(golden, tmp_path):
    flow = golden_flow("siamese", golden, tmp_path).configure()
    flow.run()
    for kind in ("fake_quant", "deploy"):
        layers = {layer.name: layer for layer in watched_layers(read_quantized_model(*flow.result_files(kind)).net)}
        assert len(layers["slice"].outputs) == 2
        assert layers["conv"].outputs == ("conv_out",)  # a ReLU in place followed, which has a blob of its own now
