"""Modules called several times in one forward: one observer over all calls, one record entry, one stored weight."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from layer_nets import SharedEncoder, Siamese
from onnx import numpy_helper
from ptq_helpers import Flow, run_onnx, run_torch
from torch import nn

import amct.pytorch as amct
from amct.numerics.ifmr import IfmrObserver


def pairs(count=3):
    """Batches of two pictures, the second with three times the values of the first."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 3, 8, 8, generator=generator), 3 * torch.randn(2, 3, 8, 8, generator=generator))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def siamese(tmp_path_factory):
    torch.manual_seed(0)
    net, data = Siamese().eval(), pairs()
    quantized = amct.quantize(net, data)
    folder = tmp_path_factory.mktemp("siamese")
    quantized.save(folder / "net", formats=["qdq", "fake_quant", "deploy", "record"])
    quantized.save(folder / "exact", formats=["qdq"], placement="exact", target="exact8")
    return net, data, quantized, folder


def test_every_layer_is_quantized_and_its_batch_norm_folded(siamese):
    _, _, quantized, _ = siamese
    assert quantized.layers == ("branch.c1", "branch.c2", "branch.fc", "head")
    assert quantized.prepared.folded_layers == {"branch.c1": ("branch.norm",)}
    assert quantized.skipped == ()


def test_one_observer_sees_all_calls():
    """The range of the input is that of both pictures in all batches, although batch_num counts forwards."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, x, y):
            return self.conv(x) + self.conv(y)

    whole_range = amct.IfmrSettings(search_range=(0.99, 1.01))
    config = amct.QuantConfig(batch_num=2, common=amct.LayerConfig(activations=whole_range))
    data = pairs(2)
    record = amct.quantize(Twice(), data, config).record
    values = torch.cat([tensor.flatten() for pair in data for tensor in pair])
    width = float(values.max() - values.min())
    assert record["conv"].scale_d == pytest.approx(width / 255, rel=0.02)


def test_the_simulation_and_the_files_quantize_each_call(siamese):
    net, data, quantized, folder = siamese
    simulated = run_torch(quantized.model, data[0])[0]
    weight = quantized.prepared.weights["head"].real()["weight"]
    one_step = quantized.record["head"].scale_d * float(weight.abs().max())
    for name in ("net_fake_quant_model", "exact_qdq_model"):
        result = run_onnx(folder / f"{name}.onnx", net, data[0])[0]
        np.testing.assert_allclose(result, simulated, atol=one_step)
    expected = run_torch(net, data[0])[0]
    assert np.abs(run_onnx(folder / "net_qdq_model.onnx", net, data[0])[0] - expected).max() < 0.03


@pytest.mark.parametrize("name", ["net_fake_quant_model", "exact_qdq_model", "net_deploy_model", "net_qdq_model"])
def test_the_nodes_of_a_layer_share_one_stored_weight(siamese, name):
    model = onnx.load(siamese[3] / f"{name}.onnx")
    nodes = {node.name: node for node in model.graph.node}
    assert {"branch.c1", "branch.c1@1", "branch.c2", "branch.c2@1", "branch.fc", "branch.fc@1"} <= set(nodes)
    shapes = [list(numpy_helper.to_array(tensor).shape) for tensor in model.graph.initializer]
    assert shapes.count([8, 3, 3, 3]) == shapes.count([8, 8, 3, 3]) == 1
    assert shapes.count([72, 6]) + shapes.count([6, 72]) == 1


def test_quant_json_has_one_entry_with_the_outputs_of_all_calls(siamese):
    document = json.loads((siamese[3] / "net_quant.json").read_text())
    assert list(document["layers"]) == list(siamese[2].layers)
    entry = document["layers"]["branch.fc"]
    assert len(entry["output"]) == 2
    assert entry["files"]["deploy"]["node"] == "branch.fc"
    assert {"branch.fc.dequant", "branch.fc@1.dequant"} <= set(entry["files"]["deploy"]["inserted"])


def test_compare_measures_all_calls(siamese):
    net, data, quantized, _ = siamese
    found = {each.layer: each for each in amct.compare(net, quantized, data)}
    assert found["branch.fc"].values == 2 * 2 * 6 * len(data)
    assert min(each.sqnr for each in found.values()) > 25


def test_a_transformer_layer_used_three_times(tmp_path):
    torch.manual_seed(0)
    net, x = SharedEncoder().eval(), torch.randn(2, 5, 8)
    quantized = amct.quantize(net, [x])
    assert list(quantized.layers) == [
        "layer.self_attn.in_proj_weight",
        "layer.self_attn.out_proj.weight",
        "layer.linear1",
        "layer.linear2",
    ]
    quantized.save(tmp_path / "net", formats=["fake_quant"])
    model = onnx.load(tmp_path / "net_fake_quant_model.onnx")
    names = {node.name for node in model.graph.node}
    assert {f"{name}{call}" for name in quantized.layers for call in ("", "@1", "@2")} <= names
    simulated = run_torch(quantized.model, x)[0]
    result = run_onnx(tmp_path / "net_fake_quant_model.onnx", net, x)[0]
    np.testing.assert_allclose(result, simulated, atol=quantized.record["layer.linear2"].scale_d)


class NormOnce(nn.Module):
    """The batch norm follows one of two calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_var.fill_(4.0)

    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv(2 * x)


class NormOutOfOrder(NormOnce):
    """The batch norm follows both calls, but in the other order."""

    def forward(self, x):
        first, second = self.conv(x), self.conv(2 * x)
        second = self.norm(second)
        return 3 * self.norm(first) + second


@pytest.mark.parametrize("make", [NormOnce, NormOutOfOrder])
def test_a_batch_norm_that_does_not_follow_each_call_is_not_folded(make):
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(2, 3, 4, 4)
    quantized = amct.quantize(net, [x])
    assert quantized.layers == ("conv",)
    assert quantized.prepared.folded_layers == {}
    assert any('"conv" is called 2 times' in skip.reason for skip in quantized.skipped)
    np.testing.assert_allclose(run_torch(quantized.model, x)[0], run_torch(net, x)[0], atol=0.1)


@pytest.mark.parametrize("weights", [amct.AdaRoundSettings(num_iteration=20), None])
def test_learned_rounding_and_balancing_work_on_repeated_layers(weights, tmp_path):
    torch.manual_seed(0)
    net, data = Siamese().eval(), pairs()
    layer = amct.LayerConfig(migration_strength=0.5) if weights is None else amct.LayerConfig(weights=weights)
    quantized = amct.quantize(net, data, amct.QuantConfig(layers={"branch.c2": layer}))
    quantized.save(tmp_path / "net", formats=["fake_quant", "deploy"])
    simulated = run_torch(quantized.model, data[0])[0]
    np.testing.assert_allclose(run_onnx(tmp_path / "net_fake_quant_model.onnx", net, data[0])[0], simulated, atol=0.01)
    np.testing.assert_allclose(simulated, run_torch(net, data[0])[0], atol=0.05)


def test_amct_functions_leave_repeated_modules_float_and_say_so(tmp_path):
    torch.manual_seed(0)
    flow = Flow(tmp_path, Siamese().eval(), pairs(1)[0]).configure()
    blocks = json.loads(flow.config.read_text())
    assert [name for name, block in blocks.items() if isinstance(block, dict)] == ["head"]
    flow.quantize()(*flow.example)
    flow.save()
    skipped = json.loads((tmp_path / "out" / "q_quant.json").read_text())["skipped"]
    assert {skip["layer"] for skip in skipped if "called 2 times" in skip["reason"]} >= {"branch.c1", "branch.c2"}


class ByLength(nn.Module):
    """Calls a layer once for a short input, once for each part of a long one; another layer always twice."""

    def __init__(self):
        super().__init__()
        self.once, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        parts = x.split(2, dim=1)
        return self.twice(self.twice(torch.cat([self.once(part) for part in parts], dim=1)))


def test_a_layer_is_searched_early_only_where_it_is_certainly_called_once():
    torch.manual_seed(0)
    model, short, long = ByLength().eval(), torch.randn(2, 2, 4), torch.randn(2, 6, 4)
    expected = torch.cat([short.reshape(-1), long.reshape(-1)])
    quantized = amct.quantize(model, [short, long])

    prepared = quantized.prepared
    assert prepared.layers_called_once(((short,), {})) == {"once"}
    assert not prepared.layers_called_once(((long,), {}))
    assert not prepared.layers_called_once(((short, 1), {}))
    assert not prepared.layers_called_once(((short.double(),), {}))
    observer = IfmrObserver()
    observer.observe(expected)
    assert quantized.record["once"].scale_d == float(observer.result().scale)


class TwoNames(nn.Module):
    """A block whose layer has two names and is called by both; the block has two names as well."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 16), nn.ModuleDict({"one": nn.Linear(16, 16)})
        self.block["two"] = self.block["one"]
        self.again, self.last = self.block, nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.again["two"](torch.relu(self.block["one"](x)))
        return self.last(torch.relu(self.again["one"](x)))


@pytest.mark.parametrize("start", [amct.quantize, amct.prepare_qat])
def test_a_module_under_several_names_is_one_layer(start, tmp_path):
    torch.manual_seed(0)
    net, data = TwoNames().eval(), [torch.randn(4, 8) for _ in range(3)]
    quantized = start(net, data)
    quantized.save(tmp_path / "net", ["qdq"], placement="exact", target="exact8")
    layers = json.loads((tmp_path / "net_quant.json").read_text())["layers"]
    assert list(layers) == ["first", "block.one", "last"]
    simulation = quantized if isinstance(quantized, nn.Module) else quantized.model
    written = run_onnx(tmp_path / "net_qdq_model.onnx", net, data[0])[0]
    np.testing.assert_allclose(run_torch(simulation, data[0])[0], written, atol=1e-4)


def test_channels_of_a_module_under_several_names_are_removed():
    torch.manual_seed(0)
    net, x = TwoNames().eval(), torch.randn(4, 8)
    pruned = amct.prune(net, x, ratio=0.5)
    assert pruned.channels == {"first": (16, 8), "block.one": (16, 8), "last": (3, 3)}
    assert pruned.model.again["two"] is pruned.model.block["one"]
    assert pruned.model(x).shape == (4, 3)


def test_amct_functions_leave_a_module_under_several_names_float(tmp_path):
    flow = Flow(tmp_path, TwoNames().eval(), torch.randn(4, 8)).configure()
    blocks = json.loads(flow.config.read_text())
    assert [name for name, block in blocks.items() if isinstance(block, dict)] == ["first", "last"]
