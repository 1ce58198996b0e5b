"""Comparing two ONNX files layer by layer, and the report."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import Residual, exported, graph_model, images, node, normal, products, run, seeded

import amct.onnx_model as amct
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, FileError, ModelError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    model = exported(seeded(Residual), torch.from_numpy(images()))
    onnx.save(model, folder / "float.onnx")
    quantized = amct.quantize(folder / "float.onnx", [images(0), images(1)])
    quantized.save(folder / "q")
    return folder, quantized


def formula(expected, got):
    """Cosine and SQNR in float64."""
    x, y = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    return x @ y / np.sqrt((x @ x) * (y @ y)), 10 * np.log10((x @ x) / ((x - y) @ (x - y)))


@pytest.mark.parametrize("kind", ["fake_quant", "qdq"])
def test_layers_and_outputs_of_two_files(saved, kind):
    folder, quantized = saved
    data = [images(4), images(5)]
    measured = amct.measure(folder / "float.onnx", folder / f"q_{kind}_model.onnx", data)
    assert tuple(measured.layers) == quantized.layers
    assert measured.batches == 2
    outputs = [
        [run(path, {"x": x})[0] for x in data] for path in (folder / "float.onnx", folder / f"q_{kind}_model.onnx")
    ]
    cosine, sqnr = formula(*(np.concatenate(each) for each in outputs))
    (output,) = measured.outputs
    assert (output.layer, output.cosine, output.sqnr) == ("y", pytest.approx(cosine), pytest.approx(sqnr))
    # The last layer makes the output.
    assert measured.layers["/fc/Gemm"].sqnr == pytest.approx(sqnr)
    assert all(20 < layer.sqnr < 60 and layer.cosine > 0.99 for layer in measured.layers.values())
    assert amct.compare(folder / "float.onnx", folder / f"q_{kind}_model.onnx", data) == list(measured.layers.values())


def test_a_layer_with_a_folded_batch_norm_is_compared_behind_it(saved):
    folder, quantized = saved
    stem = next(
        layer for layer in amct.compare(folder / "float.onnx", quantized.model, images(4)) if "stem" in layer.layer
    )
    model = onnx.load(folder / "float.onnx")
    norm = next(each for each in model.graph.node if each.name == "/stem_norm/BatchNormalization")
    model.graph.output.append(onnx.ValueInfoProto(name=norm.output[0]))
    simulated = onnx.ModelProto()
    simulated.CopyFrom(quantized.model)
    simulated.graph.output.append(onnx.ValueInfoProto(name="/stem/Conv.fakedequant.mul.output0"))
    cosine, sqnr = formula(*(run(each, {"x": images(4)})[1] for each in (model, simulated)))
    assert (stem.cosine, stem.sqnr) == (pytest.approx(cosine), pytest.approx(sqnr))


def test_the_models_own_comparison_is_that_of_the_files(saved):
    folder, quantized = saved
    ours = quantized.compare(images(4))
    theirs = amct.compare(folder / "float.onnx", folder / "q_fake_quant_model.onnx", images(4))
    assert amct.compare(folder / "float.onnx", quantized, images(4)) == theirs
    assert [layer.layer for layer in ours] == [layer.layer for layer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.sqnr == pytest.approx(other.sqnr, abs=1e-3)  # the float side is folded in one, not in the other


def test_a_model_beside_itself_has_no_error():
    comparisons = amct.compare(products(), products(), normal(3, 6))
    assert [layer.sqnr for layer in comparisons] == [np.inf, np.inf]


def test_a_damaged_layer_is_the_one_that_stands_out():
    damaged = products()
    weight = normal(8, 4)
    weight[0] *= -1
    damaged.graph.initializer[2].CopyFrom(onnx.numpy_helper.from_array(weight, "v"))
    first, second = amct.compare(products(), damaged, normal(3, 6))
    assert first.sqnr == np.inf
    assert second.sqnr < 30


def test_inputs_and_outputs_of_other_names_are_matched_by_place():
    other = products()
    other.graph.input[0].name = other.graph.node[0].input[0] = "image"
    other.graph.output[0].name = other.graph.node[-1].output[0] = "scores"
    measured = amct.measure(products(), other, normal(3, 6))
    assert measured.outputs[0].sqnr == np.inf
    assert set(measured.layers) == {"MatMul_a"}


def test_what_cannot_be_compared_is_said(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(ModelError, match=r"is a deploy file, which only the chip can run: .*use the fake_quant or qdq"):
        amct.compare(folder / "float.onnx", folder / "q_deploy_model.onnx", images())
    with pytest.raises(ModelError, match="same outputs, got y and a, b"):
        amct.compare(products(), two_outputs(), normal(2, 6))
    unlike = graph_model([node("MatMul", "x k", "z", "other")], {"k": normal(6, 4)}, ("n", 6), outputs=("z",))
    with pytest.raises(ModelError, match="must have layers in common"):
        amct.compare(products(), unlike, normal(2, 6))
    wider = graph_model([node("MatMul", "x w", "a"), node("Relu", "a", "y")], {"w": normal(6, 5)}, ("n", 6))
    with pytest.raises(ArgumentError, match="outputs of different shapes cannot be compared"):
        amct.compare(products(), wider, normal(2, 6))
    with pytest.raises(CalibrationError, match="empty"):
        amct.compare(products(), products(), [])
    with pytest.raises(FileError, match=r"none\.onnx"):
        amct.compare(products(), tmp_path / "none.onnx", normal(2, 6))
    with pytest.raises(ArgumentTypeError, match="quantized_model: expected the path"):
        amct.compare(products(), 3, normal(2, 6))


def two_outputs():
    return graph_model([node("Relu", "x", "a"), node("Relu", "x", "b")], {}, ("n", 6), outputs=("a", "b"))


# -- the report --------------------------------------------------------------------------------------------------------


def top1(output, batch):
    return float((output.argmax(1) == batch[1]).mean())


def test_the_report_tells_what_was_measured(saved, tmp_path):
    folder, quantized = saved
    labelled = [(images(seed), np.arange(4)) for seed in range(2)]
    path = quantized.report(tmp_path / "report.html", labelled, top1, files=[folder / "q_qdq_model.onnx"])
    text = path.read_text()
    for expected in ("/stem/Conv", "top1", "2 batches", "q_qdq_model.onnx", "folded into", "AvgPool2d", "onnxruntime"):
        assert expected in text
    quantized.report(tmp_path / "plain.html")
    assert "the first calibration batch" in (tmp_path / "plain.html").read_text()


def test_the_metric_of_a_report_is_computed(saved, tmp_path):
    folder, quantized = saved
    wanted = run(folder / "float.onnx", {"x": images(6)})[0].argmax(1)
    seen = []

    def agreement(output, batch):
        seen.append(output)
        return (output.argmax(1) == batch[1]).mean()

    quantized.report(tmp_path / "report.html", [(images(6), wanted)], agreement)
    np.testing.assert_array_equal(seen[1], quantized(images(6))["y"])
    assert np.abs(seen[0] - run(folder / "float.onnx", {"x": images(6)})[0]).max() < 1e-5


def test_reports_that_cannot_be_made(saved, tmp_path):
    _, quantized = saved
    with pytest.raises(ArgumentError, match="metric: it needs data"):
        quantized.report(tmp_path / "report.html", metric=top1)
    with pytest.raises(CalibrationError, match="data is empty"):
        quantized.report(tmp_path / "report.html", [])
    with pytest.raises(ArgumentTypeError, match="metric: expected a number"):
        quantized.report(tmp_path / "report.html", images(), lambda *_: "good")
    assert not list(tmp_path.iterdir())
