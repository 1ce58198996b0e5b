"""Pruning to a budget: the search, its ladder, its files, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_nets import RandomNet
from test_prune_random_nets import zeroed
from torch import nn
from torch.nn import functional

import amct.pytorch as amct
import amct_pytorch
from amct.errors import ArgumentError, EvaluatorError, SearchError
from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.budget.allocation import Allocation, Curve
from amct.pytorch.pruning.cutting import chain_records, cut_channels
from amct.pytorch.pruning.full_reach import Wanted, cut_chosen
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.removal import Removal, RemovalCosts, cost_of
from amct.pytorch.pruning.selection import choose, find_cells
from amct.pytorch.user_model import copy_model
from amct.search.journal import Journal


def block(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def network():
    torch.manual_seed(0)
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(*block(2, 16), *block(16, 32), *block(32, 24), *end).eval()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 2, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator))
        for _ in range(2)
    ]


def cross_entropy(output, batch):
    return functional.cross_entropy(output, batch[1])


@pytest.fixture(scope="module")
def pruned(data):
    return amct.prune_to(network(), data, flops=0.5, loss=cross_entropy)


def macs(model, x):
    """Multiply-accumulate operations counted by hooks on the model that runs."""
    counted = []

    def hook(module, _, output):
        counted.append(output[0].numel() * module.weight[0].numel())

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    model.eval()(x[:1])
    for handle in handles:
        handle.remove()
    return sum(counted)


def test_the_budget_is_met_exactly_counted(pruned, data):
    x = data[0][0]
    share = macs(pruned.model, x) / macs(network(), x)
    assert 0.4 < share <= 0.5
    assert pruned.ladder[-1].share == pytest.approx(share)
    assert pruned.after.macs == pruned.ladder[-1].cost.macs == macs(pruned.model, x)
    assert all(count % 8 == 0 for name, (_, count) in pruned.channels.items() if name != "11")


def test_the_ladder_goes_down(pruned):
    shares = [rung.share for rung in pruned.ladder]
    assert shares == sorted(shares, reverse=True)
    assert [rung.lost for rung in pruned.ladder] == sorted(rung.lost for rung in pruned.ladder)
    assert "ladder to flops 0.5" in pruned.summary()
    assert pruned.ladder_text().count("\n") == len(shares)


def test_parameters_as_a_budget(data):
    result = amct.prune_to(network(), data, params=0.4, align=1)
    assert result.after.parameters == sum(each.numel() for each in result.model.parameters())
    assert 0.35 < result.after.parameters / result.before.parameters <= 0.4


def test_layers_that_are_kept(data):
    result = amct.prune_to(network(), data[:1], flops=0.7, keep=["3"])
    assert result.channels["3"] == (32, 32)
    assert {skip.layer: skip.reason for skip in result.skipped}["3"] == "named in keep"


def test_time_as_a_budget_is_measured(data):
    wide = nn.Sequential(*block(2, 64), *block(64, 128), *block(128, 64), nn.Flatten(), nn.Linear(64 * 256, 4)).eval()
    pictures = functional.interpolate(data[0][0], size=(16, 16))
    result = amct.prune_to(wide, [pictures], latency=0.6)
    assert result.ladder[-1].share <= 0.6
    whole, smaller = result.latency()
    assert smaller < 0.75 * whole  # timed anew, on a busy machine


def test_amct_functions_read_the_config(pruned, data, tmp_path):
    pruned.save(tmp_path / "net")
    small = amct_pytorch.create_prune_retrain_model(
        network(), data[0][0], tmp_path / "net_prune.cfg", tmp_path / "record.txt"
    )
    assert {name: small.get_submodule(name).out_channels for name in ("0", "3", "6")} == {
        name: pruned.model.get_submodule(name).out_channels for name in ("0", "3", "6")
    }


def test_the_record_restores_the_model_in_another_process(pruned, data, tmp_path):
    pruned.save(tmp_path / "net")
    torch.save((network(), data[0][0]), tmp_path / "whole.pt")
    script = (
        "import sys, torch, amct.pytorch as amct\n"
        "model, x = torch.load(sys.argv[1] + '/whole.pt', weights_only=False)\n"
        "again = amct.restore_pruned(model, sys.argv[1] + '/net_record.txt', sys.argv[1] + '/net_state.pth')\n"
        "torch.save(again.eval()(x), sys.argv[1] + '/out.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), pruned.model.eval()(data[0][0]))


def test_what_is_lost_is_less_than_with_equal_ratios(data):
    """A layer that the output hardly needs goes first, where equal ratios take as much from all."""
    model = network()
    with torch.no_grad():
        model[3].weight[8:] *= 1e-3  # 24 of its 32 channels hardly vary
        model[4].weight[8:] *= 1e-3
    batches = [batch[0] for batch in data]
    searched = amct.prune_to(model, batches, flops=0.45, align=1)
    uniform = amct.prune(model, batches[0][:1], flops=0.45, align=1, batches=batches)
    with torch.no_grad():
        wanted = model(batches[0])
        lost = [float((each.model.eval()(batches[0]) - wanted).square().mean()) for each in (searched, uniform)]
    assert searched.channels["3"][1] < uniform.channels["3"][1]
    assert lost[0] < lost[1]


# -------------------------------------------------------------------------------------------------- several means


@pytest.fixture(scope="module")
def trained(data):
    """A network with measured batch norms, and weights that 8 bits hardly change."""
    model = network().train()
    with torch.no_grad():
        for _ in range(30):
            model(data[0][0])
    return model.eval()


def test_one_budget_for_channels_sparsity_low_rank_and_bits(trained, data, tmp_path):
    found = amct.prune_to(trained, data, flops=0.05, align=1, loss=cross_entropy, quantize=True)
    names = {each.name: each for each in found.combinations}
    assert {"channels", "channels + 2:4", "channels + INT8", "2:4 + INT8"} <= set(names)
    assert all(each.share <= 0.05 for each in found.combinations)
    assert names["2:4 + INT8"].share == pytest.approx(0.5 / 16)
    lost = [each.lost for each in found.combinations]
    assert lost == sorted(lost)
    best = found.combinations[0]
    assert f"fine-tune first: {best.name} ({best.advice})" in found.summary()
    x = data[0][0]
    assert macs(names["channels"].result.model, x) / macs(trained, x) <= 0.05
    sparse = names["channels + 2:4"].result
    sparse.save(tmp_path / "net")
    weights = torch.load(tmp_path / "net_state.pth")
    masked = weights["3.weight"] * weights["3.weight_mask"]
    rows = masked.movedim(1, -1).flatten(0, -2)
    rows = functional.pad(rows, (0, -rows.shape[1] % 4))
    assert (rows.unflatten(1, (-1, 4)) != 0).sum(-1).max() <= 2
    assert amct.prepare_qat(found.model, [x])(x).isfinite().all()


def test_bits_alone_may_be_enough(trained, data):
    found = amct.prune_to(trained, [batch[0] for batch in data], params=0.3, quantize=True)
    whole = next(each for each in found.combinations if each.name == "INT8")
    assert whole.share == 0.25
    assert whole.result.channels["3"] == (32, 32)
    quantized = amct.quantize(trained, [batch[0] for batch in data]).model
    with torch.no_grad():
        wanted, got = (torch.cat([model(batch[0]) for batch in data]) for model in (trained, quantized))
    means = wanted.reshape(2, 16, -1).mean(1).repeat_interleave(16, 0)
    noise = (got - wanted).square().sum() / (wanted - means).square().sum()
    assert found.combinations[0].name == "INT8"
    assert whole.lost == pytest.approx(float(noise), rel=1e-3)


# ------------------------------------------------------------------------------------------------------- the parts


@given(st.integers(0, 2**31))
@settings(max_examples=8)
def test_every_cell_alone_is_cut_as_it_is_masked(seed):
    """For each chain that a search measures, the cut model computes what the masked one does."""
    torch.manual_seed(seed)
    model, x = RandomNet(seed).double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    traced, half = trace(model, x), Wanted(ratio=lambda _: 0.5, align=lambda _: 1, kept={})
    sizes = cut_chosen(traced, half, lambda found: choose(found.channel_map, found.cells, half.ratio, half.align))[
        1
    ]  # as the search finds out before it measures
    channel_map = map_channels(traced, sizes=sizes)
    cells = find_cells(channel_map)
    for number, cell in enumerate(cells):
        removal = Removal(channel_map, frozenset(cell.roots[: len(cell.roots) // 2]))
        chains = chain_records(removal, [cell])
        small = copy_model(model)
        cut_channels(small, chains)
        torch.testing.assert_close(small(x), zeroed(model, removal)(x), rtol=1e-5, atol=1e-5)
        shares = np.zeros(len(cells))
        shares[number] = (len(cell.roots) // 2) / len(cell.roots)
        counter = RemovalCosts(channel_map, [each.roots for each in cells])
        assert counter.macs(shares) == pytest.approx(cost_of(removal).macs)
        assert counter.parameters(np.stack([shares, shares], axis=1)) == pytest.approx(cost_of(removal).parameters)


@given(st.integers(0, 2**31))
@settings(max_examples=20)
def test_the_choice_is_nearly_the_best_of_all(seed):
    """Against all combinations; costs are products of neighbours, as of layers one behind the other."""
    random = np.random.default_rng(seed)
    sizes = np.array([6, 6, 6])
    steps = [np.sort(random.random(6)) ** 2 * random.uniform(0.2, 5) for _ in sizes]
    curves = [Curve.through(range(6), range(6), [0.0, *each[1:]]) for each in steps]

    def costs(counts):
        left = (sizes - counts).astype(np.float64)
        return 3 * left[:, 0] + left[:, 0] * left[:, 1] + left[:, 1] * left[:, 2]

    limit = random.uniform(0.2, 0.9) * costs(np.zeros((1, 3), int))[0]
    everything = np.stack(np.meshgrid(*[range(6)] * 3), axis=-1).reshape(-1, 3)
    allowed = everything[costs(everything) <= limit]
    losses = sum(curve.losses[allowed[:, place]] for place, curve in enumerate(curves))
    allocation = Allocation(curves, costs)
    found = allocation.reach(limit)
    assert allocation.cost(found) <= limit
    assert allocation.loss(found) <= 1.15 * losses.min() + 1e-9


def test_an_impossible_limit_has_no_choice():
    curve = Curve.through([0, 1, 2], [0, 2], [0.0, 1.0])
    assert Allocation([curve], lambda counts: 3.0 - counts[:, 0]).reach(0.5) is None


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ArgumentError, "one budget of flops, latency, params, got none"),
        ({"flops": 0.5, "params": 0.5}, ArgumentError, "got flops and params"),
        ({"flops": 1.5}, ArgumentError, "flops: expected a number between 0 and 1"),
        ({"flops": 0.5, "align": 0}, ArgumentError, "align: expected a whole number from 1"),
        ({"flops": 0.5, "loss": 3}, ArgumentError, "loss: expected a function of (output, batch), got int"),
        ({"flops": 0.5, "resume": 3}, ArgumentError, "resume: expected the path of a file"),
        ({"flops": 0.5, "keep": ["33"]}, ArgumentError, 'keep: there is no layer "33"'),
        ({"flops": 0.001}, SearchError, "flops: expected at least 0."),
        ({"params": 0.001}, SearchError, "so much of the parameters is left"),
        ({"flops": 0.5, "align": 64}, SearchError, "no channel can be removed with align=64"),
        ({"flops": 0.5, "loss": lambda output, _: output.sum() * float("nan")}, EvaluatorError, "loss returned nan"),
        ({"flops": 0.5, "loss": lambda *_: None}, EvaluatorError, "loss returned None"),
        ({"flops": 0.5, "loss": lambda *_: 1 / 0}, EvaluatorError, "loss raised ZeroDivisionError"),
        ({"flops": 0.5, "loss": lambda output, _: output.sum().item()}, EvaluatorError, "without a gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(given, error, message, data):
    with pytest.raises(error) as caught:
        amct.prune_to(network(), data[:1], **given)
    assert message in str(caught.value)


class Branches(nn.Module):
    """Two outputs, of which a loss may forget one."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.other = nn.Conv2d(2, 16, 3), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.one(x), self.other(x)


def test_a_loss_that_forgets_a_layer(data):
    with pytest.raises(SearchError, match='does not depend on layer "other"'):
        amct.prune_to(Branches(), [data[0][0]], flops=0.5, loss=lambda output, _: output[0].square().mean())


def test_no_batches():
    with pytest.raises(ArgumentError, match="batches: there are none"):
        amct.prune_to(network(), [], flops=0.5)


def test_a_model_without_chains(data):
    with pytest.raises(SearchError, match="no channel can be removed"):
        amct.prune_to(nn.Sequential(nn.Conv2d(2, 4, 3)), [data[0][0]], flops=0.5)


# ------------------------------------------------------------------------------------------------------- resuming


def test_an_interrupted_search_goes_on(pruned, data, tmp_path, monkeypatch):
    journal, add, left = tmp_path / "net.search.jsonl", Journal.add, [5]

    def killed(self, name, losses):
        add(self, name, losses)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        amct.prune_to(network(), data, flops=0.5, loss=cross_entropy, resume=journal)
    assert journal.read_bytes().count(b"\n") == 6  # the header and five measurements
    monkeypatch.setattr(Journal, "add", add)
    result = amct.prune_to(network(), data, flops=0.5, loss=cross_entropy, resume=journal)
    assert result.measured == pruned.measured - 5
    assert result.channels == pruned.channels
    assert not journal.exists()


def test_another_budget_does_not_go_on(data, tmp_path, monkeypatch):
    journal = tmp_path / "net.search.jsonl"
    monkeypatch.setattr(Journal, "remove", lambda _: None)
    amct.prune_to(network(), data[:1], flops=0.7, resume=journal)
    with pytest.raises(SearchError, match="another budget"):
        amct.prune_to(network(), data[:1], flops=0.5, resume=journal)
    with pytest.raises(SearchError, match="another data"):
        amct.prune_to(network(), [(data[0][0], data[0][1].flip(0))], flops=0.7, resume=journal)


class Recurrent(nn.Module):
    """An LSTM between linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(8, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.after(self.lstm(torch.relu(self.before(x)))[0])))


def test_a_recurrent_layer_keeps_its_size_and_says_why():
    generator = torch.Generator().manual_seed(0)
    result = amct.prune_to(Recurrent(), [torch.randn(16, 5, 8, generator=generator)], params=0.98)
    assert result.channels == {"before": (16, 16), "after": (16, 8), "last": (4, 4)}
    reasons = {skip.layer: skip.reason for skip in result.skipped}
    assert "hidden values feed all gates of the next step" in reasons["before"]
