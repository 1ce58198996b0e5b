"""Functional calls on parameters are layers: named by module and parameter, quantized in every file."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from layer_nets import AllChildren, Attention, Conv1D, Convolutions, OneLinear, Tied, WindowAttention
from ptq_helpers import Flow, run_onnx, run_torch
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
from amct.errors import ConfigError

EXACT = {"placement": "exact", "target": "exact8"}


def batches(shapes, count=3):
    """Batches of random numbers; of token numbers for a shape that is a list."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(
            torch.randint(0, 11, shape, generator=generator)
            if isinstance(shape, list)
            else torch.randn(shape, generator=generator)
            for shape in shapes
        )
        for _ in range(count)
    ]


def quantized_net(make, shapes, config=None):
    torch.manual_seed(0)
    net = make().eval()
    data = batches(shapes)
    return net, data, amct.quantize(net, data, config)


def one_step(quantized):
    """The most that one step of one input of a layer can change its output, of all layers."""
    sizes = []
    for name, weights in quantized.prepared.weights.items():
        sizes.append(quantized.record[name].scale_d * max(float(part.abs().max()) for part in weights.real().values()))
    return max(sizes)


CASES = {
    "linear": (OneLinear, [(4, 5)], ["weight"]),
    "window attention": (WindowAttention, [(2, 4, 8)], ["qkv.weight", "proj.weight"]),
    "conv1d of GPT-2": (
        lambda: nn.Sequential(Conv1D(12, 8), nn.GELU(), Conv1D(8, 12)),
        [(2, 4, 8)],
        ["0.weight", "2.weight"],
    ),
    "self attention": (
        lambda: Attention(batch_first=True),
        [(2, 4, 8)],
        ["attn.in_proj_weight", "attn.out_proj.weight"],
    ),
    "cross attention": (
        Attention,
        [(4, 2, 8), (5, 2, 8)],
        ["attn.in_proj_weight[0:8]", "attn.in_proj_weight[8:24]", "attn.out_proj.weight"],
    ),
    "three inputs": (
        lambda: Attention(bias=False),
        [(4, 2, 8), (5, 2, 8), (5, 2, 8)],
        [*(f"attn.in_proj_weight[{start}:{start + 8}]" for start in (0, 8, 16)), "attn.out_proj.weight"],
    ),
    "other sizes of key and value": (
        lambda: Attention(kdim=6, vdim=5, batch_first=True),
        [(2, 4, 8), (2, 5, 6), (2, 5, 5)],
        ["attn.q_proj_weight", "attn.k_proj_weight", "attn.v_proj_weight", "attn.out_proj.weight"],
    ),
    "tied": (Tied, [[2, 5]], ["matrix[transposed]", "matrix", "embedding.weight"]),
    "convolutions": (Convolutions, [(2, 3, 8), (2, 4, 7, 7), (2, 2, 4, 4, 4)], ["k2", "k1", "up1", "up2", "k3"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_call_is_a_layer_and_the_files_compute_what_the_simulation_computes(case, tmp_path):
    net, data, quantized = quantized_net(*CASES[case][:2])
    assert list(quantized.layers) == CASES[case][2]
    assert set(quantized.record.layers) == set(CASES[case][2])
    quantized.save(tmp_path / "net", formats=["qdq", "fake_quant", "deploy"], **EXACT)
    simulated, original = run_torch(quantized.model, data[0]), run_torch(net, data[0])
    for name in ("qdq", "fake_quant"):
        results = run_onnx(tmp_path / f"net_{name}_model.onnx", net, data[0])
        for result, expected, exact in zip(results, simulated, original, strict=True):
            np.testing.assert_allclose(result, expected, atol=one_step(quantized))
            assert not np.array_equal(result, exact)  # something was quantized
    assert len(amct.compare(net, quantized, data)) == len(quantized.layers)


def test_a_functional_linear_layer_is_the_formula_in_float64():
    as_amct = amct.QuantConfig(weight_rounding="nearest", bias_correction=False)
    net, data, quantized = quantized_net(OneLinear, [(4, 5)], as_amct)
    entry = quantized.record["weight"]
    scale_w = np.array(entry.scale_w, dtype=np.float64)[:, None]
    x, weight, bias = (tensor.detach().double().numpy() for tensor in (data[0][0], net.weight, net.bias))
    x = np.clip(np.rint(x / entry.scale_d) + entry.offset_d, -128, 127) - entry.offset_d
    weight = np.clip(np.rint(weight / scale_w), -128, 127) * scale_w
    step = entry.scale_d * scale_w[:, 0]
    expected = x * entry.scale_d @ weight.T + np.rint(bias / step) * step
    np.testing.assert_allclose(run_torch(quantized.model, data[0])[0], expected, rtol=1e-5, atol=1e-5)


def test_a_functional_layer_is_switched_off_and_set_by_its_name(tmp_path):
    """In a simple config and in Python: by layer, by type."""
    net = CASES["conv1d of GPT-2"][:2]
    config = tmp_path / "quant.cfg"
    config.write_text('skip_layers: "0.weight"')
    assert quantized_net(*net, config)[2].layers == ("2.weight",)
    config.write_text('skip_layer_types: "Linear"')
    with pytest.raises(ConfigError, match=r"switch off every layer that can be quantized \(2\)"):
        quantized_net(*net, config)
    settings = amct.LayerConfig(activations=amct.IfmrSettings(num_bits=16))
    record = quantized_net(*net, amct.QuantConfig(layers={"2.weight": settings}))[2].record
    assert {name: entry.activation_type for name, entry in record.items()} == {"0.weight": "INT8", "2.weight": "INT16"}


def test_the_simulated_model_can_be_copied_and_pickled():
    _, data, quantized = quantized_net(WindowAttention, [(2, 4, 8)])
    expected = quantized.model(*data[0])
    for copied in (copy.deepcopy(quantized.model), pickle.loads(pickle.dumps(quantized.model))):
        assert type(copied) is WindowAttention
        assert torch.equal(copied(*data[0]), expected)
        copied.double()  # a copy has its own layers
    assert torch.equal(quantized.model(*data[0]), expected)


def test_attention_takes_its_ordinary_path_without_a_global_switch(monkeypatch):
    """torch's fused kernels would leave out the layers, and pack sequences with padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    data = [{"src": torch.randn(2, 4, 8), "src_key_padding_mask": mask}]
    quantized = amct.quantize(net, data)
    assert len(quantized.layers) == 4

    def fused(*_, **__):
        raise AssertionError("the fused kernel is called")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)
    monkeypatch.setattr(torch, "_native_multi_head_attention", fused)
    with torch.no_grad():
        quantized.model(**data[0])
        with pytest.raises(AssertionError, match="fused kernel"):
            net(data[0]["src"])
    assert torch.backends.mha.get_fastpath_enabled()


class Refused(nn.Module):
    """Functional calls that cannot be layers."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.by_input = nn.Parameter(torch.randn(8, 8))
        self.settings = nn.Parameter(torch.randn(8, 8, 3))
        self.scaled = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = functional.linear(self.own(x), self.own.weight[:, :8] * 2)
        x = functional.linear(x, self.by_input, x.mean((0, 1)))
        x = functional.conv1d(x, self.settings, padding=1) + functional.conv1d(x, self.settings, padding=2, dilation=2)
        return functional.linear(x, self.scaled * 2)


def test_calls_that_cannot_be_layers_are_told_with_their_reasons():
    _, _, quantized = quantized_net(Refused, [(2, 8, 8)])
    assert quantized.layers == ("own",)
    reasons = {skip.layer: skip.reason for skip in quantized.skipped}
    expected = {
        "by_input": "its bias is computed from the input",
        "settings": "its calls differ in their settings",
        "linear_1": "a computed weight",  # made of that of a module that is quantized
        "linear_3": "a computed weight",
    }
    assert {name: word for name, word in expected.items() if word not in reasons.get(name, "")} == {}


class Beside(nn.Module):
    """A module that is called, and functional calls with its weight."""

    def __init__(self, bias):
        super().__init__()
        self.fc = nn.Linear(8, 6, bias=bias)
        self.norm = nn.BatchNorm1d(6)
        nn.init.uniform_(self.norm.running_var, 0.1, 0.2)

    def forward(self, x):
        y = torch.relu(self.norm(self.fc(x)) + functional.linear(x.sin(), self.fc.weight))
        return functional.linear(y, self.fc.weight.t())


@pytest.mark.parametrize("bias", [True, False])
def test_functional_calls_beside_the_module_are_layers_with_the_weight_that_the_user_gave(bias, tmp_path):
    """The module's batch norm is folded into its own weight alone; without bias both calls look alike."""
    net, data, quantized = quantized_net(lambda: Beside(bias), [(4, 8)])
    assert quantized.layers == ("fc", "fc.weight", "fc.weight[transposed]")
    assert quantized.skipped == ()  # so the batch norm is folded
    quantized.save(tmp_path / "net", formats=["qdq", "fake_quant"], **EXACT)
    simulated, original = run_torch(quantized.model, data[0])[0], run_torch(net, data[0])[0]
    for name in ("qdq", "fake_quant"):
        result = run_onnx(tmp_path / f"net_{name}_model.onnx", net, data[0])[0]
        np.testing.assert_allclose(result, simulated, atol=one_step(quantized))
    assert 0 < np.abs(simulated - original).max() < 0.03 * np.abs(original).max()
    copied = pickle.loads(pickle.dumps(quantized.model))
    assert torch.equal(copied(*data[0]), quantized.model(*data[0]))


def test_a_module_that_calls_all_its_children_keeps_its_functional_calls():
    """The children that compute functional layers would be called too."""
    net, data, quantized = quantized_net(AllChildren, [(2, 8)])
    assert quantized.layers == ("a", "b")
    assert any("functional call of linear" in skip.reason for skip in quantized.skipped)
    expected = net(*data[0])
    assert (quantized.model(*data[0]) - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_layer_in_a_model_that_cannot_be_captured_is_calibrated():
    class Fork(OneLinear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    _, data, quantized = quantized_net(Fork, [(4, 5)])
    assert quantized.layers == ("weight",)
    assert not torch.equal(quantized.model(*data[0]), Fork()(*data[0]))


def test_amct_functions_leave_functional_calls_float_and_say_so(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(Conv1D(12, 8), nn.Linear(12, 8)).eval()
    flow = Flow(tmp_path, net, torch.randn(4, 8)).configure()
    assert [name for name, block in json.loads(flow.config.read_text()).items() if isinstance(block, dict)] == ["1"]
    flow.quantize()(flow.example)
    flow.save()
    document = json.loads((tmp_path / "out" / "q_quant.json").read_text())
    assert list(document["layers"]) == ["1"]
    assert any("functional call of addmm" in skip["reason"] for skip in document["skipped"])
