"""Caffe nets that learn after calibration: run in parts, AdaRound, reconstruction by blocks, resuming, files."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import onnxruntime
import pytest
import torch
from ptq_caffe_flow import golden_flow, text_flow

import amct.caffe as amct
from amct.caffe import pycaffe as caffe
from amct.caffe.model import caffe_batches, read_model, run_net
from amct.caffe.ptq.blocks import NetProgram, _constants
from amct.errors import ArgumentError, ArgumentTypeError
from amct.numerics.arq import channels_first
from amct.numerics.settings import SnqSettings
from amct.pipeline import flow
from amct.pipeline.blocks import reconstruction
from amct.pipeline.blocks.reconstruction import Reconstruction

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 10 dim: 10 } } }
layer { name: "stem" type: "Convolution" bottom: "data" top: "a" convolution_param { num_output: 8 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "res/one" type: "Convolution" bottom: "a" top: "b"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 } }
layer { name: "res/relu" type: "ReLU" bottom: "b" top: "b" }
layer { name: "res/two" type: "Convolution" bottom: "b" top: "c"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 group: 2 bias_term: false } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "c" top: "d" }
layer { name: "left" type: "Convolution" bottom: "d" top: "e" convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "right" type: "Deconvolution" bottom: "d" top: "f" convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "both" type: "Concat" bottom: "e" bottom: "f" top: "g" }
layer { name: "pool" type: "Pooling" bottom: "g" top: "h" pooling_param { pool: AVE kernel_size: 4 stride: 4 } }
layer { name: "fc" type: "InnerProduct" bottom: "h" top: "fc" inner_product_param { num_output: 5 } }
"""
SIXTEEN_VALUES = amct.QuantConfig(common=amct.LayerConfig(weights=SnqSettings()))


MIXED = np.random.default_rng(99).standard_normal((6, 300))
"""Pictures have few degrees of freedom: neighbouring values depend on each other, so that errors can cancel."""


def images(count=32, seed=0):
    shares = np.random.default_rng(seed).standard_normal((count, 6)) + 0.5
    return (shares @ MIXED).reshape(count, 3, 10, 10).astype(np.float32)


def batches(count=32):
    return list(images(count).reshape(-1, 4, 3, 10, 10))


@pytest.fixture(scope="module", autouse=True)
def _few_iterations():
    with pytest.MonkeyPatch.context() as patch:
        settings = dataclasses.replace(reconstruction.SETTINGS, num_iteration=100, learning_rate=0.03, batch_size=16)
        patch.setattr(reconstruction, "SETTINGS", settings)
        patch.setattr(reconstruction, "ALONE", dataclasses.replace(reconstruction.ALONE, num_iteration=300))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = text_flow(NET, tmp_path_factory.mktemp("net"))
    return str(made.model), str(made.weights)


@pytest.fixture(scope="module")
def plain(files):
    return amct.quantize(*files, batches(), SIXTEEN_VALUES)


@pytest.fixture(scope="module")
def learned(files):
    return amct.quantize(*files, batches(), SIXTEEN_VALUES, reconstruct="blocks")


def output_of(quantized, data):
    return np.concatenate([np.asarray(next(iter(quantized(part).values()))) for part in data])


def harm(quantized, files):
    """The squared error of the outputs, on other data than that of calibration, in parts of the outputs' squares."""
    data = list(images(64, seed=9).reshape(-1, 4, 3, 10, 10))
    net = read_model(*files).build(())
    wanted = np.concatenate([np.asarray(run_net(net, part)["fc"]) for part in data])
    return float(np.square(output_of(quantized, data) - wanted).mean() / np.square(wanted).mean())


# -- a net in parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["mini_caffenet", "mini_fcn", "mini_inception", "mini_mobilenet", "mini_resnet"])
def test_parts_one_after_the_other_are_the_net(golden, tmp_path, name, alone):
    made = golden_flow(name, golden, tmp_path)
    model = read_model(made.model, made.weights)
    net = model.build()
    program = NetProgram(net, [layer.name for layer in model.layers if layer.name in model.weights])
    random = np.random.default_rng(1)
    given = {
        net.graph.blob_names[index]: random.standard_normal(net.graph.blobs[index].shape).astype(np.float32)
        for index in net.graph.inputs
    }
    values, constants = program.given(given), _constants(net)
    with torch.no_grad():
        for region in program.regions(alone=alone):
            values |= dict(zip(region.outputs, program.run(region, constants, values), strict=True))
    wanted = run_net(model.build(()), given)
    assert {net.graph.blob_names[index] for index in net.graph.outputs} == set(wanted)
    for index, name_of_blob in zip(program.outputs, wanted, strict=True):
        assert values[index].numpy() == pytest.approx(np.asarray(wanted[name_of_blob]), rel=1e-3, abs=1e-5)
    if alone:
        assert max(sum(step.is_layer for step in region.steps) for region in program.regions(alone=True)) == 1


def test_residual_sums_and_branches_are_blocks(plain):
    parts = plain.prepared.parts()
    layers = [region.layers for region in parts.program.regions()]
    assert layers == [["stem"], ["res/one", "res/two", "sum"], ["left", "right", "both", "pool"], ["fc"]]


FIXED = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "one" type: "InnerProduct" bottom: "data" top: "a" inner_product_param { num_output: 6 } }
layer { name: "turn" type: "Reshape" bottom: "a" top: "b" reshape_param { shape { dim: 6 dim: 4 } } }
layer { name: "two" type: "InnerProduct" bottom: "b" top: "c" inner_product_param { num_output: 5 } }
"""


def test_samples_are_drawn_only_where_they_do_not_depend_on_each_other(tmp_path):
    made = text_flow(FIXED, tmp_path)
    data = [np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32) for seed in range(3)]
    quantized = amct.quantize(made.model, made.weights, data, SIXTEEN_VALUES, reconstruct="blocks")
    assert quantized.prepared.weights["two"].custom_rounding
    parts = quantized.prepared.parts()
    values, found = parts.program.given(data[0]), {}
    for region in parts.program.regions():
        given = {key: values[key] for key in region.inputs}
        found |= {step.module: parts.program.is_by_sample(region, parts.exact, given) for step in region.steps}
        values |= dict(zip(region.outputs, parts.program.run(region, parts.exact, values), strict=True))
    assert found["turn"] is False  # it wants batches of four


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_no_block_ends_with_a_larger_error_and_some_with_a_smaller_one(plain):
    found = Reconstruction.of(plain.prepared, plain.qparams)
    found.run(flow.Passes(caffe_batches(batches()), None, None))
    assert len(found.errors) == 4
    assert all(after <= before for before, after in found.errors.values())
    assert sum(after < before for before, after in found.errors.values()) >= 3
    assert any(after < 0.98 * before for before, after in found.errors.values())


def test_weights_are_values_of_their_table_next_to_the_float_weight(plain, learned):
    moved = 0
    for name, weights in learned.prepared.graph.weights.items():
        (weight,), (before,) = weights.weights, plain.prepared.graph.weights[name].weights
        if weight.clusters is None:
            continue
        assert torch.equal(weight.clusters.table, before.clusters.table)
        steps = weight.source.rows().double() / weight.qparams.scale.double().reshape(-1, 1)
        values = channels_first(weight.integers, weight.source.kind, weight.source.groups)
        for row, (exact, own) in enumerate(zip(steps.tolist(), values.tolist(), strict=True)):
            table = weight.clusters.table[row % len(weight.clusters.table)].tolist()
            for one, value in zip(exact, own, strict=True):
                below = max((each for each in table if each <= one), default=table[0])
                above = min((each for each in table if each > one), default=table[-1])
                assert value in (below, above)
        moved += int((weight.integers != before.integers).sum())
    assert moved > 10


@pytest.mark.parametrize("options", [{"adaround": "plain"}, {"adaround": "fast"}, {"reconstruct": "blocks"}])
def test_what_is_learned_helps_on_other_data_too(files, plain, learned, options):
    quantized = learned if "reconstruct" in options else amct.quantize(*files, batches(), SIXTEEN_VALUES, **options)
    assert harm(quantized, files) < 0.95 * harm(plain, files)


def test_only_layers_that_have_weights_to_learn_are_counted(files, caplog):
    with caplog.at_level(logging.INFO):
        amct.quantize(*files, batches(), SIXTEEN_VALUES, adaround="fast")
    assert "6 layers learned: the error is" in caplog.text  # of 9 that are quantized: the others have no weights


def test_weights_of_eight_bits_learn_too(files):
    before, after = (amct.quantize(*files, batches(), **options) for options in ({}, {"adaround": "fast"}))
    for name, weights in after.prepared.graph.weights.items():
        assert weights.weights[0].integers.dtype is torch.int8
        error = (weights.weights[0].real() - weights.weights[0].source.tensor).abs().amax()
        assert float(error) <= 1.01 * float(weights.weights[0].qparams.scale.max()), name
    assert harm(after, files) < 1.5 * harm(before, files)


def test_the_same_data_give_the_same_bytes(files, learned, tmp_path):
    again = amct.quantize(*files, batches(), SIXTEEN_VALUES, reconstruct="blocks")
    for quantized, name in ((learned, "a"), (again, "b")):
        quantized.save(tmp_path / name / "net", ["qdq", "deploy", "fake_quant", "record"], check=False)
    for file in sorted((tmp_path / "a").iterdir()):
        if file.suffix != ".json":  # which tells the time
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize("config", [SIXTEEN_VALUES, None])
def test_the_four_files_agree(files, tmp_path, config):
    learned = amct.quantize(*files, batches(), config, reconstruct="blocks")
    learned.save(tmp_path / "net", ["qdq", "deploy", "fake_quant"], target="exact8", check=False)
    data = images(4, seed=4)
    expected = np.asarray(learned(data)["fc"])
    for kind in ("deploy", "fake_quant"):
        net = caffe.Net(
            str(tmp_path / f"net_{kind}_model.prototxt"), str(tmp_path / f"net_{kind}_weights.caffemodel"), caffe.TEST
        )
        assert net.forward(data=data)["fc"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    session = onnxruntime.InferenceSession(str(tmp_path / "net_qdq_model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: data})
    step = float(np.abs(expected).max()) / 64
    assert np.abs(found - expected).max() < step


class Killed(BaseException):
    """Ends a run."""


def test_it_goes_on_after_a_kill_with_the_same_result(files, learned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(flow, "SECONDS", 0.0)
    monkeypatch.setattr(flow, "MOST_SHARE", float("inf"))
    learn, runs = Reconstruction._learn, []

    def killed(self, network, number):
        runs.append(number)
        if runs == [0, 1, 2]:
            raise Killed
        learn(self, network, number)

    monkeypatch.setattr(Reconstruction, "_learn", killed)
    options = {"reconstruct": "blocks", "resume": tmp_path / "net.calibration.npz"}
    with pytest.raises(Killed):
        amct.quantize(*files, batches(), SIXTEEN_VALUES, **options)
    with caplog.at_level(logging.INFO, logger="amct"):
        again = amct.quantize(*files, batches(), SIXTEEN_VALUES, **options)
    assert runs == [0, 1, 2, 2, 3]
    assert "reconstruction goes on after 2 blocks" in caplog.text
    assert again.record == learned.record
    for quantized, name in ((learned, "a"), (again, "b")):
        quantized.save(tmp_path / name, ["deploy"], check=False)
    assert (tmp_path / "a_deploy_weights.caffemodel").read_bytes() == (
        tmp_path / "b_deploy_weights.caffemodel"
    ).read_bytes()


RECURRENT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 3 dim: 2 dim: 4 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 3 dim: 2 } } }
layer { name: "lstm" type: "LSTM" bottom: "data" bottom: "cont" top: "a" recurrent_param { num_output: 5 } }
layer { name: "fc" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 5 axis: 2 } }
"""


def test_a_recurrent_net_stays_as_it_is_where_it_cannot_learn(tmp_path):
    made = text_flow(RECURRENT, tmp_path)
    given = {"data": np.random.default_rng(2).standard_normal((3, 2, 4)).astype(np.float32), "cont": np.ones((3, 2))}
    quantized = amct.quantize(made.model, made.weights, [given], reconstruct="blocks")
    learned = {name: weights.custom_rounding for name, weights in quantized.prepared.weights.items()}
    assert not learned["lstm"]
    assert np.isfinite(np.asarray(quantized(given)["b"])).all()


def test_bad_requests_are_refused(files):
    for error, options, expected in (
        (ArgumentError, {"adaround": "slow"}, 'adaround: expected "plain", "fast" or None'),
        (ArgumentError, {"reconstruct": "layers"}, 'reconstruct: expected "blocks"'),
        (ArgumentError, {"reconstruct_seconds": 3.0}, "nothing is reconstructed"),
        (ArgumentTypeError, {"reconstruct": "blocks", "reconstruct_seconds": "3"}, "expected a number"),
    ):
        with pytest.raises(error, match=expected):
            amct.quantize(*files, batches(), **options)
