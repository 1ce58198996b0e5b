"""A goal is reached through each of the three doors, and its certificate is in the files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from three_doors import caffe_pair, onnx_file, torch_network, uneven_network

import amct.caffe
import amct.onnx_model
import amct.pytorch
from amct.errors import ArgumentError
from amct.model.quant_json import read_quant_json
from amct.search.sequential import upper_bound

CALIBRATION = [np.random.default_rng(seed).normal(0.2, 1.0, (4, 3, 8, 8)).astype(np.float32) for seed in (1, 2, 3)]
PICTURES = np.random.default_rng(9).normal(0.2, 1.0, (600, 3, 8, 8)).astype(np.float32)


def labels():
    with torch.no_grad():
        return torch_network()(torch.from_numpy(PICTURES)).argmax(1).numpy()


def quantize_to(door, folder, labelled, model=None, **options):
    """The same search through one of the doors."""
    model = model or torch_network()
    if door == "pytorch":
        tensors = [torch.from_numpy(batch) for batch in CALIBRATION]
        if isinstance(labelled[0], tuple):
            labelled = [tuple(map(torch.from_numpy, each)) for each in labelled]
        else:
            labelled = [torch.as_tensor(each) for each in labelled]
        return amct.pytorch.quantize_to(model, tensors, labelled, **options)
    if door == "onnx":
        return amct.onnx_model.quantize_to(onnx_file(model, folder), CALIBRATION, labelled, **options)
    return amct.caffe.quantize_to(*caffe_pair(model, folder), CALIBRATION, labelled, **options)


def batches(size=4):
    wanted = labels()
    return [(PICTURES[i : i + size], wanted[i : i + size]) for i in range(0, len(PICTURES), size)]


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_the_goal_is_reached_with_a_certificate(door, tmp_path):
    found = quantize_to(door, tmp_path, batches(), max_drop=3.0, seed=4)
    certificate = found.certificate
    assert certificate.met
    assert certificate.loss <= 0.03
    assert certificate.samples == 300
    assert certificate.searched == 300
    chosen = next(point for point in found.history if point.chosen)
    assert chosen.cost < 4 * sum(each.values for each in found.prepared.freedom().values())
    assert "never used in the search" in found.summary()
    saved = found.save(tmp_path / "net")
    document = read_quant_json(next(path for path in saved if path.name.endswith("quant.json")))
    assert document.certificate == certificate
    assert document.curve == found.history
    losses = np.repeat([loss for loss, _ in certificate.losses], [count for _, count in certificate.losses])
    assert losses.mean() == pytest.approx(certificate.loss)
    again = upper_bound(losses, certificate.smallest, certificate.largest, certificate.error)
    assert again == pytest.approx(certificate.bound)


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_the_certificate_is_about_the_file(door, tmp_path):
    """The saved QDQ file loses on each sample of the certificate what the certificate says; another file is told."""
    found = quantize_to(door, tmp_path, batches(4), max_drop=5.0, choices=("float", "int8", "int4"))
    saved = found.save(tmp_path / "net", formats=["qdq"])
    session = InferenceSession(str(saved[0]))
    name = session.get_inputs()[0].name
    hits = np.concatenate([session.run(None, {name: x})[0].argmax(1) == y for x, y in batches(4)])
    order = np.random.default_rng(0).permutation(len(PICTURES))[300:]
    assert found.certificate.losses
    certified = np.repeat(*map(np.array, zip(*found.certificate.losses, strict=True)))
    assert (certified != 1 - hits[order]).sum() <= 1  # a picture between two classes
    assert "saved with" not in read_quant_json(tmp_path / "net_quant.json").certificate.remark
    found.save(tmp_path / "exact", formats=["qdq"], placement="exact")
    remark = read_quant_json(tmp_path / "exact_quant.json").certificate.remark
    assert remark.endswith("saved with placement exact, target portable")


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_a_search_begins_with_equalized_channels(door, tmp_path):
    model, pictures = uneven_network(), [PICTURES[i : i + 4] for i in range(0, 64, 4)]
    losses = [
        quantize_to(
            door, tmp_path, pictures, model=model, min_sqnr=1.0, choices=("int8",), equalize=equalize
        ).certificate.loss
        for equalize in (False, True)
    ]
    assert losses[1] < losses[0] / 4  # 6 dB


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_the_config_of_a_point_gives_the_same_settings(door, tmp_path):
    found = quantize_to(door, tmp_path, batches(), max_drop=3.0)
    config = tmp_path / "point.json"
    config.write_text(json.dumps(next(point for point in found.history if point.chosen).config))
    model = torch_network()
    if door == "pytorch":
        again = amct.pytorch.quantize(model, [torch.from_numpy(batch) for batch in CALIBRATION], config)
    elif door == "onnx":
        again = amct.onnx_model.quantize(onnx_file(model, tmp_path), CALIBRATION, config)
    else:
        again = amct.caffe.quantize(*caffe_pair(model, tmp_path), CALIBRATION, config)
    assert again.layers == found.layers
    for name in found.layers:
        assert again.qparams[name].weight == found.qparams[name].weight
        inputs, before = again.qparams[name].inputs, found.qparams[name].inputs  # observed behind other weights
        assert {each: one.bits for each, one in inputs.items()} == {each: one.bits for each, one in before.items()}
        assert [float(one.scale) for one in inputs.values()] == pytest.approx(
            [float(one.scale) for one in before.values()], rel=0.1
        )


@pytest.mark.parametrize("goal", [{"min_agreement": 97.0}, {"min_sqnr": 20.0}])
@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_goals_without_labels(door, goal, tmp_path):
    data = torch.from_numpy(PICTURES) if door == "pytorch" else PICTURES
    size = 100 if door == "pytorch" else 4
    found = quantize_to(door, tmp_path, [data[i : i + size] for i in range(0, 400, size)], **goal)
    assert found.certificate.met


def config_with(settings):
    return amct.pytorch.QuantConfig(common=amct.pytorch.LayerConfig(activations=settings))


WHOLE = amct.pytorch.IfmrSettings(
    max_percentile=1.0, min_percentile=1.0, search_range=(1.0, 1.01), search_step=0.01
)  # fmt: skip


HFMG = amct.pytorch.HfmgSettings()
RANGES = [("pytorch", "hfmg8", HFMG), ("onnx", "hfmg8", HFMG)]
RANGES += [(door, "minmax8", WHOLE) for door in ("pytorch", "onnx", "caffe")]


@pytest.mark.parametrize(("door", "choice", "settings"), RANGES)
def test_one_calibration_finds_the_ranges_of_other_algorithms(door, choice, settings, tmp_path):
    """The same scales as a calibration with these settings alone."""
    found = quantize_to(door, tmp_path, batches(), max_drop=100.0, choices=["float", choice])
    model, config = torch_network(), config_with(settings)
    if door == "pytorch":
        alone = amct.pytorch.quantize(model, [torch.from_numpy(batch) for batch in CALIBRATION], config)
    elif door == "onnx":
        alone = amct.onnx_model.quantize(onnx_file(model, tmp_path), CALIBRATION, config)
    else:
        alone = amct.caffe.quantize(*caffe_pair(model, tmp_path), CALIBRATION, config)
    assert set(next(point for point in found.history if point.chosen).choices.values()) == {choice}
    assert found.layers == alone.layers
    for name in found.layers:
        for number, one in found.qparams[name].inputs.items():
            other = alone.qparams[name].inputs[number]
            assert (float(one.scale), int(one.offset)) == (float(other.scale), int(other.offset)), name
    if choice == "minmax8":
        width = max(map(np.max, CALIBRATION)) - min(map(np.min, CALIBRATION))
        assert float(found.qparams[found.layers[0]].input.scale) == pytest.approx(width / 255)


def test_twelve_bits_are_a_choice_in_caffe(tmp_path):
    found = quantize_to("caffe", tmp_path, batches(), max_drop=100.0, choices=["float", "int12"])
    assert {each.input.bits for each in found.qparams.values()} == {12}
    again = amct.caffe.quantize(*caffe_pair(torch_network(), tmp_path), CALIBRATION, dict(found.history[0].config))
    assert {name: each.input.bits for name, each in again.qparams.items()} == dict.fromkeys(found.layers, 12)
    with pytest.raises(ArgumentError, match='"int12" is unknown'):
        quantize_to("onnx", tmp_path, batches(), max_drop=1.0, choices=["float", "int12"])


def test_a_caffe_model_with_another_rounding_of_weights_gets_other_weights(tmp_path):
    """Ranges of inputs stay those of the calibration; the weights are those of a new one with this rounding."""
    pair = caffe_pair(torch_network(), tmp_path)
    base, expected = (
        amct.caffe.quantize(*pair, CALIBRATION, amct.caffe.QuantConfig(weight_rounding=each))
        for each in ("error_cancelling", "nearest")
    )
    made = base.variant(expected.prepared.plan)
    before, found, wanted = (each.prepared.caffe_model(each.qparams).weights for each in (base, made, expected))
    assert all(torch.equal(found[name][0], blobs[0]) for name, blobs in wanted.items())
    assert any(not torch.equal(found[name][0], blobs[0]) for name, blobs in before.items())
