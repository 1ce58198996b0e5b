"""Decomposition: AMCT's functions by AMCT's rules, and our own call that fits pairs of layers to data."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import amct.pytorch as amct
import amct_pytorch
from amct.errors import ArgumentError, ConfigError, ParseError
from amct.pytorch.decomposition.amct_api import _rank
from amct.pytorch.decomposition.pairs import SEPARATIONS, separation_mode

GOLDEN = Path(__file__).parents[1] / "golden" / "amct" / "decomposition" / "ranks.json"


class Net(nn.Module):
    """Layers of every mode, one under two names, and one that shares its weight."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.same = nn.Conv2d(64, 64, 3, padding="same")
        self.wide = nn.Conv2d(64, 80, (3, 5), (2, 1), (1, 2), padding_mode="reflect", bias=False)
        self.tall = nn.Conv2d(80, 64, (5, 3), padding=(2, 1))
        self.alias = self.same
        self.tied = nn.Conv2d(64, 64, 3, padding=1)
        self.tied.weight = self.same.weight
        self.small = nn.Conv2d(64, 8, 3)

    def forward(self, x):
        return self.small(self.tied(self.alias(self.tall(self.wide(self.same(self.stem(x)))))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_layers_become_pairs_in_place_under_all_their_names(net, tmp_path):
    whole = copy.deepcopy(net)

    model, changes = amct_pytorch.tensor_decompose.auto_decomposition(net, str(tmp_path / "new" / "info.json"))

    assert model is net
    assert changes == {name: [f"{name}.0", f"{name}.1"] for name in ("stem", "same", "wide", "tall", "tied")}
    assert net.alias is net.same
    assert net.tied[0].weight is net.same[0].weight
    assert isinstance(net.small, nn.Conv2d)
    x = torch.randn(1, 3, 40, 40)
    assert model(x).shape == whole(x).shape

    again, same = amct_pytorch.tensor_decompose.decompose_network(whole, str(tmp_path / "new" / "info.json"))
    again.load_state_dict(model.state_dict())
    assert same == changes
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_a_pair_is_the_best_of_its_rank(net):
    weight = net.same.weight.detach().double()

    amct_pytorch.tensor_decompose.auto_decomposition(net)

    first, last = net.same
    assert first.padding == last.padding == "same"
    product = torch.einsum("rikx,orxl->oikl", first.weight.double(), last.weight.double())
    values = torch.linalg.svdvals(SEPARATIONS["SCFK"].matrix(weight))
    expected = values[first.out_channels :].square().sum()
    # The stored weights are float32: each of the products is off by a few of its units.
    torch.testing.assert_close((product - weight).square().sum(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: f"{case['weight']}-{case['decay']:g}")
def test_ranks_are_those_of_amct(case):
    outputs, inputs, height, width = case["weight"]
    layer = nn.Conv2d(inputs, outputs, (height, width), bias=False)
    separation = SEPARATIONS[separation_mode(layer)]
    rows, columns = separation.matrix(layer.weight).shape
    values = case["scale"] * (np.exp(-case["decay"] * np.arange(rows) / rows) + case["floor"])
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    matrix[range(rows), range(rows)] = torch.from_numpy(values)
    channel, kernel = separation._axes()
    axes = [channel, kernel, 1 - channel, 5 - kernel]
    moved = matrix.reshape([layer.weight.shape[axis] for axis in axes])
    layer.weight.data = moved.permute(*np.argsort(axes).tolist()).contiguous()

    assert _rank("layer", layer) == case["rank"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 1),
        nn.Conv2d(63, 64, 3),
        nn.Conv2d(64, 64, 3, groups=2),
        nn.Conv2d(64, 64, 3, dilation=2),
        nn.Conv2d(64, 64, 3, stride=3),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3)),
        nn.ConvTranspose2d(64, 64, 3),
    ],
    ids=["small kernel", "few channels", "groups", "dilated", "stride", "weight norm", "transposed"],
)
def test_other_layers_stay(layer, tmp_path):
    model = nn.Sequential(layer)
    model, changes = amct_pytorch.tensor_decompose.auto_decomposition(model, str(tmp_path / "info.json"))
    assert model[0] is layer
    assert changes == {}
    assert not (tmp_path / "info.json").exists()


def test_a_model_that_is_a_convolution_is_not_changed():
    layer = nn.Conv2d(64, 64, 3)
    model, changes = amct_pytorch.tensor_decompose.auto_decomposition(layer)
    assert changes == {"": ["0", "1"]}
    assert model[1].bias is layer.bias


def test_nan_is_refused_before_anything_is_changed(net):
    net.tall.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match='the weight of layer "tall" holds NaN'):
        amct_pytorch.tensor_decompose.auto_decomposition(net)
    assert isinstance(net.stem, nn.Conv2d)


@pytest.mark.parametrize("bad", [{"model": 3}, {"decompose_info_path": 3}])
def test_arguments_of_another_type(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        amct_pytorch.tensor_decompose.auto_decomposition(**{"model": nn.Conv2d(1, 1, 1), **bad})


def _changed(entries, change):
    change(entries)
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda e: e[0]["ori_layer_info"].update(name="gone"), ConfigError, "no layer of this name"),
        (lambda e: e[0]["ori_layer_info"].update(name="small"), ConfigError, "in_channels is 3 in the file and 64"),
        (lambda e: e[0]["ori_layer_info"].update(stride=[1, 1]), ConfigError, "stride is"),
        (lambda e: e[0].update(mode="FCFK"), ConfigError, "expected the shapes"),
        (lambda e: e[0].update(mode="other"), ParseError, "0.mode"),
        (lambda e: e[0]["decom_nodes"]["first"].update(weight_shape=[]), ConfigError, "0 outputs in between"),
        (
            lambda e: e[0]["decom_nodes"]["first"].update(weight_shape=[10**9, 3, 7, 1]),
            ConfigError,
            "outputs in between",
        ),
        (lambda e: e[0]["decom_nodes"].pop("last"), ParseError, "0.decom_nodes.last"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(net, tmp_path, change, error, message):
    whole, file = copy.deepcopy(net), tmp_path / "info.json"
    amct_pytorch.tensor_decompose.auto_decomposition(net, str(file))
    file.write_text(_changed(json.loads(file.read_text()), change))

    with pytest.raises(error, match=message):
        amct_pytorch.tensor_decompose.decompose_network(whole, str(file))
    assert isinstance(whole.stem, nn.Conv2d)


def test_a_file_that_is_none(net, tmp_path):
    (tmp_path / "info.json").write_text("{")
    with pytest.raises(ValueError, match="expected the file that auto_decomposition wrote"):
        amct_pytorch.tensor_decompose.decompose_network(net, str(tmp_path / "info.json"))
    with pytest.raises(OSError, match="does not exist"):
        amct_pytorch.tensor_decompose.decompose_network(net, str(tmp_path / "gone.json"))


DATA = torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(5))


def _low_rank_net():
    """Layers whose responses have few directions, so that a pair loses nearly nothing."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1, bias=False),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 40),
    )
    with torch.no_grad():
        rows = model[3].weight.flatten(1)
        model[3].weight.copy_((torch.randn(64, 6) @ rows[:6] / 2.5).reshape_as(model[3].weight))
        model[1].momentum = None  # the statistics of the batch norm are those of the data, as in a trained model
        model(DATA)
    return model.eval()


@pytest.fixture(scope="module")
def decomposed():
    model = _low_rank_net()
    return model, DATA, amct.decompose(model, DATA.split(8), flops=0.55, skip_slower=False)


def test_the_budget_is_met_where_it_costs_least(decomposed):
    model, data, result = decomposed

    assert result.channels["3"] == (64, 8)
    assert result.after.macs <= 0.55 * result.before.macs
    assert isinstance(model[3], nn.Conv2d)
    assert not result.model.training
    with torch.no_grad():
        error = (result.model(data) - model(data)).square().mean() / model(data).square().mean()
    assert error < 1e-4
    kept = {skip.layer: skip.reason for skip in result.skipped}
    assert kept["5"] == "it has groups"
    assert set(kept) | set(result.channels) == {"0", "3", "5", "8"}


def test_the_operations_are_counted_exactly(decomposed):
    _, _, result = decomposed
    positions = 8 * 12 * 12
    assert result.before.macs - result.after.macs == positions * (64 * 48 * 9 - 8 * (48 * 9 + 64))


def test_it_is_saved_restored_and_goes_on(decomposed, tmp_path):
    model, data, result = decomposed
    files = {path.name for path in result.save(tmp_path / "net")}
    assert files == {"net_float_model.onnx", "net_decomposition.json", "net_state.pth", "net_quant.json"}

    session = onnxruntime.InferenceSession(tmp_path / "net_float_model.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: data[:8].numpy()})
    with torch.no_grad():
        expected = result.model(data[:8]).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)

    again, _ = amct_pytorch.tensor_decompose.decompose_network(
        copy.deepcopy(model), str(tmp_path / "net_decomposition.json")
    )
    again.load_state_dict(torch.load(tmp_path / "net_state.pth"))
    torch.testing.assert_close(again(data), result.model(data), rtol=0, atol=0)

    quantized = amct.quantize(again, data.split(8))
    assert {"3.0", "3.1"} <= {layer.layer for layer in quantized.compare(data[:8])}


def test_summary_and_report_say_rank(decomposed, tmp_path):
    _, _, result = decomposed
    assert "1 of 4 layers decomposed" in result.summary()
    assert "64 → 8 rank" in result.summary()
    assert "Decomposition report" in result.report(tmp_path / "report.html").read_text()


def test_pairs_that_are_slower_are_not_put_in(monkeypatch):
    model = _low_rank_net()

    def slower(runs, **_):
        return dict(zip(runs, (1.0, 1.5), strict=True))

    monkeypatch.setattr("amct.pytorch.decomposition.ranks.median_seconds", slower)
    with pytest.raises(ArgumentError, match=r"flops: 0.6 of the operations cannot be reached .* left whole"):
        amct.decompose(model, torch.randn(4, 3, 12, 12), flops=0.6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flops": 0.001}, "flops: 0.001 of the operations cannot be reached"),
        ({"flops": 1.5}, "flops: expected a number between 0 and 1"),
        ({"align": 0}, "align: expected a whole number from 1"),
    ],
)
def test_goals_that_are_impossible(settings, message):
    with pytest.raises(ArgumentError, match=message):
        amct.decompose(_low_rank_net(), torch.randn(4, 3, 12, 12), skip_slower=False, **settings)


def test_data_that_is_not_finite():
    data = torch.randn(4, 3, 12, 12)
    data[0, 0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match='what layer "0" computes holds NaN or infinite values'):
        amct.decompose(_low_rank_net(), data)
