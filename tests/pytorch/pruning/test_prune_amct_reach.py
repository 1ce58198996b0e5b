"""Which layers AMCT's functions prune, and by how many channels: its rules, one network each."""

from __future__ import annotations

import pytest
import torch
from prune_nets import filters
from torch import nn
from torch.nn import functional

import amct_pytorch
from amct.config.prune.dialect import FILTER
from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.amct_chains import prunable_layers
from amct.record import read_record


class Net(nn.Module):
    """Two convolutions with a function of the test in between, then one more."""

    def __init__(self, between, *, channels=8, after=8, groups=1):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.other = nn.Conv2d(3, channels, 1)
        self.last = nn.Conv2d(after, 4, 1, groups=groups)
        self.norm = nn.BatchNorm2d(channels)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, x))


def channels_after(between, tmp_path, more="", example=None, **options):
    """The output channels of every convolution after pruning half of them."""
    torch.manual_seed(0)
    model = Net(between, **options)
    (tmp_path / "prune.cfg").write_text(filters(0.5, more=more))
    example = torch.randn(2, 3, 8, 8) if example is None else example
    pruned = amct_pytorch.create_prune_retrain_model(
        model, example, str(tmp_path / "prune.cfg"), str(tmp_path / "record.txt")
    )
    pruned(example)
    return {name: m.out_channels for name, m in pruned.named_modules() if isinstance(m, nn.Conv2d)}


PASSING = {
    "relu": lambda net, x: torch.relu(net.first(x)),
    "norm and relu6": lambda net, x: functional.relu6(net.norm(net.first(x))),
    "leaky": lambda net, x: functional.leaky_relu(net.first(x)),
    "pooling": lambda net, x: functional.avg_pool2d(functional.max_pool2d(net.first(x), 2), 2),
    "padding": lambda net, x: functional.pad(net.first(x), (1, 1, 1, 1)),
    "clamp and abs": lambda net, x: net.first(x).clamp(-1, 1).abs(),
    "resize by factor": lambda net, x: functional.interpolate(net.first(x), scale_factor=2),
}


@pytest.mark.parametrize("name", PASSING)
def test_operations_that_pass_a_chain_on(name, tmp_path):
    assert channels_after(PASSING[name], tmp_path) == {"first": 4, "other": 8, "last": 4}


ENDING = {
    "sigmoid": lambda net, x: torch.sigmoid(net.first(x)),
    "silu": lambda net, x: functional.silu(net.first(x)),
    "product": lambda net, x: net.first(x) * net.other(x),
    "slice": lambda net, x: net.first(x)[:, :, ::2, ::2],
    "reshape": lambda net, x: net.first(x).reshape(-1, 8, 64).unsqueeze(-1),
    "sum with a constant": lambda net, x: net.first(x) + 1,
    "sum with an unpruned tensor": lambda net, x: net.first(x) + x.repeat(1, 3, 1, 1)[:, :8],
    "resize to a size": lambda net, x: functional.interpolate(net.first(x), size=(5, 5)),
    "transpose": lambda net, x: net.first(x).transpose(2, 3),
    "another branch that ends it": lambda net, x: torch.relu(y := net.first(x)) * torch.tanh(y.mean()),
}


@pytest.mark.parametrize("name", ENDING)
def test_operations_that_end_a_chain(name, tmp_path):
    assert channels_after(ENDING[name], tmp_path)["first"] == 8


def test_a_sum_merges_its_producers(tmp_path):
    found = channels_after(lambda net, x: torch.relu(net.first(x) + net.norm(net.other(x))), tmp_path)
    assert found == {"first": 4, "other": 4, "last": 4}
    chains = read_record(tmp_path / "record.txt").prune
    assert [node.name for node in chains[0].producers] == ["first", "other"]
    assert [node.name for node in chains[0].consumers] == ["norm", "last"]


def test_a_merged_chain_has_the_smallest_ratio(tmp_path):
    more = f'override_layer_configs {{ layer_name: "other" {filters(0.25)} }}'
    found = channels_after(lambda net, x: net.first(x) + net.other(x), tmp_path, more)
    assert found == {"first": 6, "other": 6, "last": 4}


def test_a_skipped_layer_in_a_sum_ends_the_chain(tmp_path):
    found = channels_after(lambda net, x: net.first(x) + net.other(x), tmp_path, 'skip_layers: "other"')
    assert found == {"first": 8, "other": 8, "last": 4}


def test_concatenation_has_a_range_for_each_chain(tmp_path):
    found = channels_after(lambda net, x: torch.cat([net.first(x), net.other(x)], 1), tmp_path, after=16)
    assert found == {"first": 4, "other": 4, "last": 4}
    chains = read_record(tmp_path / "record.txt").prune
    ranges = [[(node.begin, node.end) for node in (*chain.producers, *chain.consumers)] for chain in chains]
    assert ranges == [[(0, 8), (0, 8)], [(0, 8), (8, 16)]]
    assert all(8 <= index < 16 for index in chains[1].consumers[0].prune_index)


def test_concatenation_with_the_input_ends_the_chain(tmp_path):
    found = channels_after(lambda net, x: torch.cat([net.first(x), x], 1), tmp_path, after=11)
    assert found["first"] == 8


def test_grouped_readers_lose_as_many_channels_in_each_group(tmp_path):
    assert channels_after(lambda net, x: net.first(x), tmp_path, groups=2)["first"] == 4
    node = read_record(tmp_path / "record.txt").prune[0].producers[0]
    assert node.get("prune_group") == 2
    assert sorted(index // 4 for index in node.prune_index) == [0, 0, 1, 1]


def test_a_depthwise_reader_passes_the_chain_on(tmp_path):
    class Depthwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)

        def forward(self, x):
            return self.last(torch.relu(self.depthwise(self.first(x))))

    (tmp_path / "prune.cfg").write_text(filters(0.5))
    pruned = amct_pytorch.create_prune_retrain_model(
        Depthwise(), torch.randn(1, 3, 8, 8), str(tmp_path / "prune.cfg"), str(tmp_path / "record.txt")
    )
    assert (pruned.depthwise.groups, pruned.depthwise.in_channels, pruned.last.in_channels) == (4, 4, 4)
    assert pruned(torch.randn(1, 3, 8, 8)).shape == (1, 4, 6, 6)


class Classifier(nn.Module):
    def __init__(self, flatten, *, bias=True):
        super().__init__()
        self.first, self.hidden, self.last = nn.Conv2d(3, 8, 1), nn.Linear(8, 6, bias=bias), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.flatten = flatten

    def forward(self, x):
        return self.last(
            self.norm(self.hidden(self.flatten(functional.adaptive_avg_pool2d(torch.relu(self.first(x)), 1))))
        )


@pytest.mark.parametrize(
    ("flatten", "bias", "expected"),
    [
        (lambda x: x.flatten(1), True, (4, 3)),
        (lambda x: x.view(x.size(0), -1), True, (4, 3)),
        (lambda x: x.mean((2, 3)), True, (8, 3)),  # not global average pooling to AMCT
        (lambda x: x.flatten(1), False, (4, 6)),  # MatMul and BatchNorm1d end a chain
    ],
)
def test_convolution_to_linear_only_through_global_pooling(flatten, bias, expected, tmp_path):
    (tmp_path / "prune.cfg").write_text(filters(0.5))
    pruned = amct_pytorch.create_prune_retrain_model(
        Classifier(flatten, bias=bias), torch.randn(2, 3, 8, 8), str(tmp_path / "prune.cfg"), str(tmp_path / "r.txt")
    )
    assert (pruned.first.out_channels, pruned.hidden.out_features) == expected


def test_a_layer_called_twice_is_not_pruned(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.last(self.again(self.again(self.first(x))))

    (tmp_path / "prune.cfg").write_text(filters(0.5))
    pruned = amct_pytorch.create_prune_retrain_model(
        Twice(), torch.randn(1, 3, 8, 8), str(tmp_path / "prune.cfg"), str(tmp_path / "record.txt")
    )
    assert [pruned.first.out_channels, pruned.again.out_channels] == [8, 8]


def test_a_convolution_of_one_input_channel_is_not_called_depthwise():
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 4, 1))
    layers = {layer.name: layer for layer in prunable_layers(trace(model, torch.rand(1, 1, 9, 9)))}
    assert FILTER.refusal(layers["0"]).startswith("a convolution with one input channel cannot be pruned by filters")
    assert FILTER.refusal(layers["1"]).startswith("a depthwise convolution cannot be pruned by filters")
    assert FILTER.refusal(layers["2"]) is None
