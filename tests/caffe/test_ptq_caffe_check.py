"""Saved Caffe pairs are run in our engine: numbers, unusable and wrong files, the batch kept beside the record."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from ptq_caffe_flow import batch, forward, text_flow

import amct_caffe
from amct.caffe import pycaffe as caffe
from amct.caffe import quantize
from amct.caffe.model import CaffeModel
from amct.caffe.ptq import save
from amct.errors import ExportError
from amct.export.check.batch import batch_path, read_batch
from amct.extend import CaffeLayer, register_caffe_layer, unregister_caffe_layer
from amct.model.quant_json import read_quant_json

NET = """
name: "checked"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "conv2" type: "Convolution" bottom: "conv1" top: "conv2"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "fc" type: "InnerProduct" bottom: "conv2" top: "fc"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
"""


@pytest.fixture
def flow(tmp_path):
    return text_flow(NET, tmp_path)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="amct")
    return caplog


def checks_of(flow):
    files = read_quant_json(flow.prefix.with_name("net_quant.json")).files
    return {name: entry.check for name, entry in files.items() if entry.check is not None}


def outputs(prototxt, caffemodel, data):
    net = caffe.Net(str(prototxt), str(caffemodel), caffe.TEST)
    return net.forward(**data)["fc"].copy().astype(np.float64)


def test_the_numbers_are_those_of_the_pairs(flow):
    data = batch(flow.original(), 0)
    quantize(flow.model, flow.weights, [data]).save(flow.prefix)
    checks = checks_of(flow)
    assert list(checks) == ["net_fake_quant_model.prototxt", "net_deploy_model.prototxt", "net_qdq_model.onnx"]
    expected = outputs(flow.model, flow.weights, data)
    for kind in ("fake_quant", "deploy"):
        pair = [flow.prefix.with_name(f"net_{kind}_{end}") for end in ("model.prototxt", "weights.caffemodel")]
        got = outputs(*pair, data)
        sqnr = 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum())
        assert checks[pair[0].name].sqnr == pytest.approx(sqnr, abs=0.01)
    assert checks["net_qdq_model.onnx"].speed > 0


def test_a_layer_that_only_the_users_caffe_has(flow, lines):
    """It is unknown here, and the user's Caffe calibrates; a class registered meanwhile stands for that Caffe."""
    flow.model.write_text(NET.replace('"ReLU"', '"OnlyThere"'))
    graph = flow.configure().prepare()

    @register_caffe_layer("OnlyThere")
    class OnlyThere(CaffeLayer):
        """Half of the data."""

        def forward(self, bottoms, _):
            return [bottoms[0] / 2]

    forward(flow.net(*flow.modified), 2)
    unregister_caffe_layer("OnlyThere")
    amct_caffe.save_model(graph, "Both", str(flow.prefix))
    assert checks_of(flow) == {}
    assert "the saved files are not checked: layer types OnlyThere are unknown here" in lines.text
    for kind in ("fake_quant", "deploy"):
        assert "OnlyThere" in flow.result_files(kind)[0].read_text()


def test_a_written_pair_that_is_the_simulation_runs_instead_of_it(flow, monkeypatch):
    def numbers():
        quantized.save(flow.prefix)
        return {name: (check.sqnr, check.simulation_sqnr, check.cosine) for name, check in checks_of(flow).items()}

    def build(model, *options):
        if any(layer.type == "Quant" for layer in model.layers):
            built.append(model)
        return plain(model, *options)

    built, plain = [], CaffeModel.build
    # Of two batches of two both are run: five samples are wanted.
    quantized = quantize(flow.model, flow.weights, [batch(flow.original(), seed) for seed in range(2)])
    monkeypatch.setattr(CaffeModel, "build", build)
    instead = numbers()
    assert len(built) == 2  # the pairs
    monkeypatch.setattr(save, "content_digest", lambda _: b"of another net")
    assert numbers() == instead
    assert len(built) == 2 + 3  # the pairs, and the simulation


def test_the_guides_flow_checks_on_the_batch_kept_beside_the_record(flow, lines):
    flow.configure().run()
    kept = read_batch(flow.record)
    np.testing.assert_array_equal(kept["data"], batch(flow.original(), 0)["data"])
    assert {check.batch for check in checks_of(flow).values()} == {"a calibration batch"}
    assert "checked on the calibration batch in" in lines.text


def test_without_the_kept_batch_inputs_are_random(flow, lines):
    import amct_caffe as amct

    graph = flow.configure().prepare()
    net = flow.net(*flow.modified)
    for seed in range(2):
        net.forward(**batch(net, seed))
    batch_path(flow.record).unlink()
    amct.save_model(graph, "Both", str(flow.prefix))
    assert {check.batch for check in checks_of(flow).values()} == {"random inputs"}
    assert "checked on random inputs, not on calibration data: record.txt.check.npz does not exist" in lines.text
    assert lines.text.count("(random inputs, which say nothing about accuracy)") == len(checks_of(flow))


def change_written_models(monkeypatch, change, kind="deploy"):
    unchanged = save.pair_files

    def changed(name, model):
        if name == kind:
            model = model.copy()
            change(model)
        return unchanged(name, model)

    monkeypatch.setattr(save, "pair_files", changed)


def test_a_pair_that_cannot_be_run_is_not_saved(flow, monkeypatch):
    def change(model):
        model.layer("conv2").bottom[0] = "nothing"

    quantized = quantize(flow.model, flow.weights, [batch(flow.original(), 0)])
    quantized.save(flow.prefix)
    before = {path.name: path.read_bytes() for path in flow.prefix.parent.iterdir()}
    change_written_models(monkeypatch, change)
    with pytest.raises(ExportError, match=r"net_deploy_model\.prototxt.*cannot be loaded or run.*nothing was saved"):
        quantized.save(flow.prefix)
    assert {path.name: path.read_bytes() for path in flow.prefix.parent.iterdir()} == before


@pytest.mark.parametrize("kind", ["deploy", "fake_quant"])
def test_a_wrong_pair_is_reported_with_its_first_wrong_layer(flow, monkeypatch, lines, kind):
    def change(model):
        model.weights["conv2"][0] = model.weights["conv2"][0].flip(0)

    change_written_models(monkeypatch, change, kind)
    quantize(flow.model, flow.weights, [batch(flow.original(), 0)]).save(flow.prefix, formats=[kind])
    assert checks_of(flow)[f"net_{kind}_model.prototxt"].differs_at == "conv2"
    assert "worse than the simulation" in lines.text
    assert 'the first tensor that is worse is "conv2"' in lines.text
