"""Torch-Pruning as an oracle: the same channels go together, and the cut models are equal bit by bit.

It is asked where it is right: it fails on chunk, grouped convolutions, channel padding and strided slices.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_pruning
from random_nets import Gate
from torch import nn
from torch.nn import functional

from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.cutting import chain_records, cut_channels
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.removal import Removal
from amct.pytorch.pruning.selection import find_cells


class Squeezed(nn.Module):
    """A squeeze-and-excitation block between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Gate(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.gate(functional.hardswish(self.norm(self.first(x)))))


class Inverted(nn.Module):
    """An inverted residual block: expansion, depthwise convolution, projection, addition."""

    def __init__(self):
        super().__init__()
        self.stem, self.expand = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 12, 1)
        self.norm, self.depth = nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.project, self.last = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.last(x + self.project(functional.relu6(self.depth(functional.relu6(self.norm(self.expand(x)))))))


class Residual(nn.Module):
    """A residual block with a projected shortcut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.shortcut, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.last(torch.relu(self.shortcut(x) + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))))


class Upwards(nn.Module):
    """A transposed convolution, and the skip connection of a U-net."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.ConvTranspose2d(6, 5, 2, stride=2)
        self.side, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(9, 2, 1)

    def forward(self, x):
        deep = self.up(functional.max_pool2d(torch.relu(self.down(x)), 2))
        return self.last(torch.cat([deep, self.side(x)], 1))


class Flattened(nn.Module):
    """All positions of all channels to a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5 * 16, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = functional.avg_pool2d(torch.relu(self.first(x)), 2)
        return self.last(torch.relu(self.hidden(torch.flatten(x, 1))))


NETS = (Squeezed, Inverted, Residual, Upwards, Flattened)


def cut_by_the_oracle(model, x, layer, channel):
    """A copy without an output channel of a layer and all that Torch-Pruning couples with it."""
    duplicate = copy.deepcopy(model)
    module = duplicate.get_submodule(layer)
    function = (
        torch_pruning.prune_linear_out_channels
        if isinstance(module, nn.Linear)
        else torch_pruning.prune_conv_out_channels
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations
        graph = torch_pruning.DependencyGraph().build_dependency(duplicate, example_inputs=x)
        graph.get_pruning_group(module, function, idxs=[channel]).prune()
    return duplicate


@pytest.mark.parametrize("kind", NETS)
def test_every_channel_takes_the_same_others_with_it(kind):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(2, 3, 8, 8)
    channel_map = map_channels(trace(model, x))
    cells = find_cells(channel_map)
    compared = 0
    for cell in cells:
        for root in cell.roots:
            removal = Removal(channel_map, frozenset({root}))
            ours = copy.deepcopy(model)
            cut_channels(ours, chain_records(removal, cells))
            maker = cell.makers[0]
            theirs = cut_by_the_oracle(model, x, maker.name, int(removal.removed(maker.outputs)[0]))
            expected, found = theirs.state_dict(), ours.state_dict()
            assert {name: tuple(t.shape) for name, t in found.items()} == {
                n: tuple(t.shape) for n, t in expected.items()
            }
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
            compared += 1
    last = channel_map.producers[-1]
    assert compared == len(
        {root for maker in channel_map.producers[:-1] for root in channel_map.sets.roots(maker.outputs)}
    )
    assert last.name in ("last",)
