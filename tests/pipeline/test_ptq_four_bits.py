"""Activations of 4 bits: what each file stores, and that all of them compute what the simulation does."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import amct.onnx_model
import amct.pytorch as amct_torch
from amct.numerics.settings import WIDE_SEARCH

IMAGES = np.random.default_rng(5).normal(0.3, 1.0, size=(16, 3, 8, 8)).astype(np.float32)
FOUR = amct_torch.LayerConfig(
    activations=amct_torch.IfmrSettings(num_bits=4), weights=amct_torch.ArqSettings(num_bits=4)
)
CONFIG = amct_torch.QuantConfig(common=FOUR, layers={"conv": amct_torch.LayerConfig()})


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.inner, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(96, 5)

    def forward(self, x):
        return self.fc(self.inner(self.conv(x).relu()).tanh().flatten(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The quantized model and the folder of its files."""
    folder = tmp_path_factory.mktemp("four")
    quantized = amct_torch.quantize(Network().eval(), [torch.from_numpy(IMAGES)], CONFIG)
    quantized.save(folder / "net", target="exact8", check=False)
    return quantized, folder


def run(path, images=IMAGES):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def test_files_compute_what_the_simulation_does(saved):
    quantized, folder = saved
    with torch.no_grad():
        expected = quantized(torch.from_numpy(IMAGES)).numpy()
    step = float(quantized.qparams["fc"].input.scale * quantized.qparams["fc"].weight.scale.max())
    for name in ("net_qdq_model.onnx", "net_fake_quant_model.onnx"):
        # A value between two integers may be rounded either way; times the largest integer of a weight that is this.
        assert np.abs(run(folder / name) - expected).max() <= 8 * step


def test_every_file_says_four_bits(saved):
    quantized, folder = saved
    assert {name: each.input.bits for name, each in quantized.qparams.items()} == {"conv": 8, "inner": 4, "fc": 4}
    record = (folder / "net_record.txt").read_text()
    assert record.count('act_type: "INT4"') == 2
    deploy = onnx.load(folder / "net_deploy_model.onnx")
    types = {
        node.name: onnx.helper.get_attribute_value(next(a for a in node.attribute if a.name == "dst_type"))
        for node in deploy.graph.node
        if node.op_type == "AscendQuant"
    }
    assert types == {"conv.quant": b"INT8", "inner.quant": b"INT4", "fc.quant": b"INT4"}


def test_the_qdq_file_keeps_sixteen_values_in_uint8_behind_a_clip(saved):
    _, folder = saved
    model = onnx.load(folder / "net_qdq_model.onnx")
    clips = [node for node in model.graph.node if node.op_type == "Clip"]
    assert len(clips) == 2
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    behind = [node.output[0] for node in model.graph.node for clip in clips if node.input[0] == clip.output[0]]
    extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in behind)
    session = onnxruntime.InferenceSession(extended.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(behind, {session.get_inputs()[0].name: IMAGES * 3})
    for integers in found:
        assert integers.dtype == np.uint8
        assert int(integers.max()) - int(integers.min()) <= 15


def test_few_bits_search_a_wider_range_unless_the_config_says_one():
    plans = amct_torch.quantize(Network().eval(), [torch.from_numpy(IMAGES)], CONFIG).prepared.plan
    assert plans.find("inner").activation.search_range == WIDE_SEARCH
    assert plans.find("conv").activation.search_range == amct_torch.IfmrSettings().search_range
    own = amct_torch.IfmrSettings(num_bits=4, search_range=(0.5, 1.0))
    config = amct_torch.QuantConfig(layers={"fc": amct_torch.LayerConfig(activations=own)})
    found = amct_torch.quantize(Network().eval(), [torch.from_numpy(IMAGES)], config).prepared.plan
    assert found.find("fc").activation.search_range == (0.5, 1.0)


def test_a_json_asks_for_four_bits_too(saved):
    quantized, _ = saved
    config = quantized.prepared.config_of(quantized.prepared.plan)
    assert config["fc"]["activation_quant_params"]["num_bits"] == 4
    again = amct_torch.quantize(Network().eval(), [torch.from_numpy(IMAGES)], config)
    assert again.record == quantized.record


def test_an_onnx_model_can_have_four_bits_too(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.onnx itself
        options = {"dynamo": True, "opset_version": 18, "verbose": False}
        torch.onnx.export(Network().eval(), (torch.from_numpy(IMAGES),), tmp_path / "net.onnx", **options)
    found = amct.onnx_model.quantize(tmp_path / "net.onnx", [IMAGES], amct_torch.QuantConfig(common=FOUR))
    found.save(tmp_path / "q", target="exact8", check=False)
    assert {each.input.bits for each in found.qparams.values()} == {4}
    assert np.isfinite(run(tmp_path / "q_qdq_model.onnx")).all()
    assert np.allclose(run(tmp_path / "q_qdq_model.onnx"), run(tmp_path / "q_fake_quant_model.onnx"), atol=1e-4)
