"""The repair of a QDQ file: what its tensors add to the noise of the outputs, what they cost, which stay float."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import amct.pytorch
from amct.errors import CalibrationError
from amct.export.check import checking, repair
from amct.export.check.repair import Candidate, Damage, FloatGraph, Probe, cheapest, grids, relative_noise
from amct.export.formats import ExportReport, LayerReport, save_model
from amct.model.kinds import LayerKind
from amct.model.quant_json import read_quant_json


class Sums(nn.Module):
    """Convolutions whose sums have an outlier that only the next convolution's zero weights see."""

    def __init__(self, blocks=2, channels=96):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.last = nn.Conv2d(channels, 8, 1)
        with torch.no_grad():
            self.first.bias[0] = 15.0
            for block in self.blocks:
                block.weight[:, 0] = 0
            self.last.weight[:, 0] = 0

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.fixture(scope="module")
def pictures():
    return list(torch.randn(4, 1, 3, 16, 16, generator=torch.Generator().manual_seed(5)))


@pytest.fixture(scope="module")
def files(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("repair")
    quantized = amct.pytorch.quantize(Sums().eval(), pictures)
    quantized.save(folder / "net", ["qdq"], check=False)
    save_model(folder / "float.onnx", quantized.prepared.float_model(None))
    for name, work in (("tiny", np.inf), ("repaired", 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repair, "TINY_WORK", work)
            patch.setattr(checking, "GOOD_COST", repair.MOST_COST)  # as if the verdict were not Good
            quantized.save(folder / name, ["qdq"])
    return folder


def float_graph(files, layers=()):
    """The float model, of which these nodes are layers in the file."""
    tensors = read_quant_json(files / "net_quant.json").files["net_qdq_model.onnx"].tensors
    reports = tuple(
        LayerReport(
            layer=node.name, node=node.name, type="Conv2d", kind=LayerKind.CONV, operator="Conv",
            output=node.output[0], activation_bits=8, weight_bits=8, inserted=(),
        )
        for node in layers
    )  # fmt: skip
    model, file = onnx.load(files / "float.onnx"), onnx.load(files / "net_qdq_model.onnx")
    shapes = {model.graph.input[0].name: (1, 3, 16, 16)}
    return FloatGraph(model, file, ExportReport(tensors=tensors, layers=reports), shapes)


def run(model, feeds, outputs=None):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(outputs, feeds)


def test_what_a_file_does_to_its_tensors_is_read_from_it(files):
    """Against onnxruntime's own QuantizeLinear and DequantizeLinear in the file."""
    file = onnx.load(files / "net_qdq_model.onnx")
    tensors = read_quant_json(files / "net_quant.json").files["net_qdq_model.onnx"].tensors
    found = grids(file, [*tensors, "no such tensor"])
    assert found.keys() == set(tensors)
    values = np.linspace(-60, 60, 1001, dtype=np.float32)
    for name, grid in found.items():
        parameters = [f"{name}.scale", f"{name}.zero_point"]
        nodes = [
            onnx.helper.make_node("QuantizeLinear", ["x", *parameters], ["q"]),
            onnx.helper.make_node("DequantizeLinear", ["q", *parameters], ["y"]),
        ]
        floats = [onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, [1001]) for each in "xy"]
        stored = [tensor for tensor in file.graph.initializer if tensor.name in parameters]
        graph = onnx.helper.make_graph(nodes, "one", floats[:1], floats[1:], stored)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        assert values + grid.error(values) == pytest.approx(run(model, {"x": values})[0], abs=1e-5)


def test_a_probe_adds_errors_to_one_tensor_and_changes_nothing_else(files, pictures):
    floats = float_graph(files)
    model = onnx.load(files / "float.onnx")
    outputs = [value.name for value in model.graph.output]
    names = [name for each in floats.candidates() for name in each.noisy]
    assert set(outputs) <= set(names)
    probe = Probe(floats, names)
    feeds = {model.graph.input[0].name: pictures[0].numpy()}
    exact, values = probe.values(feeds)
    wanted = run(model, feeds)[0]
    zero = {name: np.zeros_like(values[name]) for name in names}
    for same in (exact, values, probe.outputs(feeds, zero)):
        assert same[outputs[0]] == pytest.approx(wanted, abs=1e-5)  # of 0.1 to 40: other kernels add in another order
    error = np.full_like(wanted, 0.25)
    assert probe.outputs(feeds, {outputs[0]: error})[outputs[0]] == pytest.approx(wanted + error, abs=1e-6)
    # An error of the first sum goes through all that is behind it: the float64 sum of both is the wanted one.
    first = next(node.output[0] for node in model.graph.node if node.op_type == "Add")
    error = np.random.default_rng(0).normal(size=values[first].shape).astype(np.float32)
    net = Sums().eval().double()
    with torch.no_grad():
        x = net.first(pictures[0].double())
        for index, block in enumerate(net.blocks):
            x = x + block(x)
            x = x + torch.from_numpy(error) if index == 0 else x
        wanted = net.last(x).numpy()
    assert probe.outputs(feeds, {first: error})[outputs[0]] == pytest.approx(wanted, abs=1e-3)


def test_layers_round_their_input_anyway(files):
    """Only who reads a tensor beside the layers reads other values if it is float."""
    model = onnx.load(files / "float.onnx")
    layers = [node for node in model.graph.node if node.op_type == "Conv"]
    floats = float_graph(files, layers)
    by_tensor = {name: floats.readers(name) for each in floats.candidates() for name in each.noisy}
    assert any(by_tensor.values())
    for name, readers in by_tensor.items():
        assert {node.op_type for node in readers} <= {"Add"}
        assert readers or floats.graph.is_output(name)
    # A tensor that only layers read is no candidate, whatever its range is.
    only = {node.input[0] for node in layers if len(floats.graph.consumers(node.input[0])) == 1}
    assert not only & by_tensor.keys()


def test_the_repair_leaves_sums_float_and_convolutions_integer(files, pictures):
    model = onnx.load(files / "float.onnx")
    check = read_quant_json(files / "repaired_quant.json").files["repaired_qdq_model.onnx"].check
    assert check.left_float
    exact = [Sums().eval()(each).detach().numpy() for each in pictures]
    noise = {}
    for name in ("net", "repaired"):
        file = onnx.load(files / f"{name}_qdq_model.onnx")
        found = [run(file, {file.graph.input[0].name: each.numpy()})[0] for each in pictures]
        pairs = [({"y": one}, {"y": other}) for one, other in zip(exact, found, strict=True)]
        noise[name] = relative_noise(pairs, ["y"])
    assert noise["repaired"] <= noise["net"] * 10 ** (-repair.GOAL / 10)
    floats = float_graph(files, [node for node in model.graph.node if node.op_type == "Conv"])
    lost = sum(each.cost for each in floats.candidates() if set(each.tensors) & set(check.left_float))
    assert lost <= repair.MOST_COST * floats.saved()


def test_a_model_that_takes_no_time_is_repaired_whatever_that_costs(files):
    small, large = (
        read_quant_json(files / f"{name}_quant.json").files[f"{name}_qdq_model.onnx"].check
        for name in ("tiny", "repaired")
    )
    assert set(small.left_float) > set(large.left_float)
    assert small.simulation_sqnr - small.sqnr < checking.WORSE < large.simulation_sqnr - large.sqnr


class InputSum(nn.Module):
    """The input of the model is read by a layer and by a sum; the sum is an output too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        total = x + self.conv(x)
        return total, self.last(total)


@pytest.fixture(scope="module")
def input_sum(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("input_sum")
    quantized = amct.pytorch.quantize(InputSum().eval(), pictures)
    quantized.save(folder / "net", ["qdq"], check=False)
    save_model(folder / "float.onnx", quantized.prepared.float_model(None))
    return quantized, folder


def test_errors_of_inputs_and_of_outputs_that_are_read_too(input_sum, pictures):
    _, folder = input_sum
    model = onnx.load(folder / "float.onnx")
    layers = [node for node in model.graph.node if node.op_type == "Conv"]
    floats = float_graph(folder, layers)
    name, outputs = model.graph.input[0].name, [value.name for value in model.graph.output]
    names = [each for candidate in floats.candidates() for each in candidate.noisy]
    assert {name, outputs[0]} <= set(names)
    probe = Probe(floats, names)
    feeds = {name: pictures[0].numpy()}
    exact, values = probe.values(feeds)
    assert np.array_equal(values[name], feeds[name])
    error = np.full(feeds[name].shape, 0.5, np.float32)
    of_input, of_output = (probe.outputs(feeds, {each: error}) for each in (name, outputs[0]))
    for each in (of_input, of_output):  # the convolutions round what they read anyway: they read it exactly
        assert each[outputs[0]] == pytest.approx(exact[outputs[0]] + 0.5, abs=1e-5)
    assert of_output[outputs[1]] == pytest.approx(exact[outputs[1]], abs=1e-5)
    # The error of the input reaches the last convolution in the sum.
    assert np.abs(of_input[outputs[1]] - exact[outputs[1]]).max() > 0.01


def test_a_save_does_not_fail_with_its_repair(input_sum, monkeypatch):
    quantized, folder = input_sum
    tried = []

    def probe(*_):
        tried.append(1)
        raise CalibrationError("too little memory")

    monkeypatch.setattr(repair, "Probe", probe)
    monkeypatch.setattr(checking, "REPAIRED", -math.inf)
    quantized.save(folder / "failed", ["qdq"])
    check = read_quant_json(folder / "failed_quant.json").files["failed_qdq_model.onnx"].check
    assert tried
    assert check.sqnr > 10
    assert not check.left_float


DAMAGES = st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.1, 100)), max_size=12).map(
    lambda pairs: sorted(
        (
            Damage(candidate=Candidate(tensors=(str(index),), noisy=(str(index),), cost=cost), noise=noise)
            for index, (noise, cost) in enumerate(pairs)
        ),
        key=lambda each: -each.worth,
    )
)


@given(DAMAGES, st.floats(0, 20), st.floats(0, 200))
def test_what_stays_float_costs_no_more_than_allowed(damages, allowed, most):
    chosen = cheapest(damages, allowed, most)
    cost = sum(each.candidate.cost for each in damages if each.candidate.tensors[0] in chosen)
    left = sum(each.noise for each in damages if each.candidate.tensors[0] not in chosen)
    assert cost <= most * (1 + 1e-9)
    if left > allowed * (1 + 1e-9) + 1e-9:  # then nothing else would have fitted
        others = [each.candidate.cost for each in damages if each.candidate.tensors[0] not in chosen]
        assert all(cost + each > most for each in others)


def test_noise_is_that_of_all_batches_relative_to_their_signal():
    exact, got = np.array([3.0, 4.0, np.inf]), np.array([3.0, 5.0, 7.0])
    pairs = [({"y": exact, "z": exact}, {"y": got, "z": exact}), ({"y": exact, "z": exact}, {"y": exact, "z": got})]
    assert relative_noise(pairs, ["y", "z"]) == pytest.approx(1 / 50 + 1 / 50)
    assert relative_noise([({"y": exact}, {"y": got[:1]})], ["y"]) == 0.0  # of another shape: nothing is known
