"""Weights of 4 bits in the QDQ file: two in a byte, opset 21 in such files only, integer kernels in onnxruntime."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import amct.pytorch
from amct.export.onnx.rewrites import can_be_raised

FOUR_BITS = """
retrain_data_quant_config { ulq_quantize { dst_type: INT8 } }
retrain_weight_quant_config { ulq_retrain { dst_type: INT4 channel_wise: true } }
"""
BATCH = torch.rand(4, 8, 12, 12, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 4)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The trained model, and its files."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "four.cfg").write_text(FOUR_BITS)
    trained = amct.pytorch.prepare_qat(network(), [BATCH], folder / "four.cfg").eval()
    trained.save(folder / "net", ("qdq", "fake_quant"))
    amct.pytorch.quantize(network(), BATCH).save(folder / "eight", ("qdq",))
    return trained, folder


def opset(path):
    return onnx.load(path).opset_import[0].version


def test_weights_take_half_a_byte_and_only_such_files_have_opset_21(saved):
    _, folder = saved
    model = onnx.load(folder / "net_qdq_model.onnx")
    weights = [each for each in model.graph.initializer if each.name.endswith("weight.quantized")]
    assert [each.data_type for each in weights] == [TensorProto.INT4] * 3
    assert [len(each.raw_data) for each in weights] == [np.prod(each.dims) // 2 for each in weights]
    assert [opset(folder / f"{name}_model.onnx") for name in ("net_qdq", "net_fake_quant", "eight_qdq")] == [21, 18, 18]
    sizes = [(folder / f"{name}_qdq_model.onnx").stat().st_size for name in ("net", "eight")]
    assert sizes[0] < 0.6 * sizes[1]


def test_onnxruntime_has_integer_kernels_for_it_and_the_same_results(saved, tmp_path):
    trained, folder = saved
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = onnxruntime.InferenceSession(folder / "net_qdq_model.onnx", options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["QLinearConv"] == 2
    assert kinds["QGemm"] == 1
    assert kinds["Cast"] == kinds["Conv"] == 0
    found = session.run(None, {session.get_inputs()[0].name: BATCH.numpy()})[0]
    expected = trained(BATCH).detach().numpy()
    assert np.square(found - expected).sum() < 1e-4 * np.square(expected).sum()


def test_the_integers_are_those_of_the_training(saved):
    trained, folder = saved
    model = onnx.load(folder / "net_qdq_model.onnx")
    arrays = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    integers = arrays["2.weight.quantized"].astype(np.float32)
    scale = arrays["2.weight.scale"].reshape(-1, 1, 1, 1)
    simulated = dict(trained.quantized().model.named_modules())["2"].weight.detach().numpy()
    np.testing.assert_allclose(integers * scale, simulated, rtol=1e-5, atol=1e-7)
    assert set(np.unique(integers)) <= set(range(-8, 8))


def test_the_report_shows_the_size_of_the_file(saved, tmp_path):
    trained, folder = saved
    file = folder / "net_qdq_model.onnx"
    page = trained.report(tmp_path / "report.html", files=[file]).read_text()
    assert f"{file.stat().st_size / 1e3:.3g} kB" in page


@pytest.mark.parametrize(
    ("operator", "version", "same"), [("Conv", 18, True), ("Reshape", 18, True), ("Relu", 17, False)]
)
def test_what_can_be_said_in_opset_21(operator, version, same):
    assert can_be_raised([helper.make_node(operator, ["x"], ["y"])], version, 21) is same
    assert not can_be_raised([helper.make_node("GridSample", ["x", "g"], ["y"], mode="bilinear")], 18, 21)
