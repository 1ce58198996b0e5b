"""Rounding of the numbers of channels that are left: multiples that kernels are fast with, over the whole model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_nets import RandomNet
from torch import nn
from torch.nn import functional

import amct.pytorch
from amct.pytorch.capture.trace import trace
from amct.pytorch.pruning.propagation import map_channels
from amct.pytorch.pruning.removal import Removal, RemovalCosts, cost_of
from amct.pytorch.pruning.selection import ChannelCell, find_cells


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Residual(nn.Module):
    """Narrow stages of residual blocks, as the CIFAR ResNets have."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stage1 = nn.Sequential(Block(16), Block(16))
        self.wider = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.stage2 = nn.Sequential(Block(32), Block(32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stage2(self.wider(self.stage1(self.stem(x))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.fixture(scope="module")
def residual():
    torch.manual_seed(0)
    return Residual().eval(), torch.randn(1, 3, 16, 16)


def blocks(model, size):
    """MACs per position of the convolutions as a kernel computes them, that makes ``size`` channels at once."""
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            area = 256 if name.startswith(("stem", "stage1")) else 64
            inputs, outputs = module.in_channels, module.out_channels
            read = inputs if inputs < size else math.ceil(inputs / size) * size
            total += area * math.prod(module.kernel_size) * read * math.ceil(outputs / size) * size
    return total


@pytest.mark.parametrize("size", [8, 16])
def test_fewer_operations_are_also_less_work(residual, size):
    """A complaint about Torch-Pruning (#382): 30 % pruned, half of the operations, but slower."""
    model, x = residual
    aligned, plain = (amct.pytorch.prune(model, x, 0.3, align=align) for align in (8, 1))
    assert all(after % 8 == 0 for name, (_, after) in aligned.channels.items() if name != "fc")
    share = blocks(aligned.model, size) / blocks(model, size)
    assert share < 0.75
    assert share < blocks(plain.model, size) / blocks(model, size)


def test_the_whole_model_reaches_the_ratio(residual):
    model, x = residual
    aligned, exact = (amct.pytorch.prune(model, x, 0.3, align=align) for align in (8, 1))
    assert abs(aligned.after.macs - exact.after.macs) < 0.1 * exact.before.macs
    inner = {name: after for name, (_, after) in aligned.channels.items() if name.startswith("stage")}
    assert {inner[name] for name in inner if name.startswith("stage2") and name.endswith("conv1")} <= {16, 24}


def test_wide_layers_lose_the_ratio_to_one_multiple():
    model = nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 512, 3), nn.ReLU(), nn.Conv2d(512, 8, 1))
    found = amct.pytorch.prune(model, torch.randn(1, 3, 8, 8), 0.3).channels
    assert abs(found["0"][1] - 0.7 * 256) <= 8
    assert abs(found["2"][1] - 0.7 * 512) <= 8


@given(st.integers(0, 2**31), st.floats(0.1, 0.9))
@settings(max_examples=8)
def test_costs_of_cells_are_those_of_the_removal(seed, ratio):
    model = RandomNet(seed).eval()
    channel_map = map_channels(trace(model, torch.randn(1, 3, 4, 4)))
    cells = find_cells(channel_map)
    costs = RemovalCosts(channel_map, [cell.roots for cell in cells])
    counts = [round(len(cell.roots) * ratio) for cell in cells]
    roots = frozenset(root for cell, count in zip(cells, counts, strict=True) for root in cell.roots[:count])
    exact = cost_of(Removal(channel_map, roots)).macs
    shares = np.array([count / len(cell.roots) for cell, count in zip(cells, counts, strict=True)])
    assert costs.macs(np.zeros(len(cells))) == cost_of(Removal(channel_map)).macs
    assert costs.macs(shares) == pytest.approx(exact, rel=1e-9)
    assert costs.work(shares) >= costs.macs(shares) * (1 - 1e-12)


def test_losses_are_shares_of_the_filters_power(residual):
    model, x = residual
    cells = find_cells(map_channels(trace(model, x)))
    for cell in cells:
        assert sum(cell.losses) == pytest.approx(len(cell.makers))
        assert len(cell.losses) == len(cell.roots)


def cell(channels, each=1):
    return ChannelCell(makers=(), roots=tuple(range(channels // each)), sizes=((channels, each),), losses=())


@pytest.mark.parametrize(
    ("channels", "each", "ratio", "align", "left"),
    [
        (32, 1, 0.5, 8, {16}),  # the ratio itself
        (32, 1, 0.3, 8, {24, 16}),
        (16, 1, 0.3, 8, {16, 8}),
        (64, 1, 0.3, 8, {48, 40}),
        (64, 1, 0.3, 16, {48, 32}),
        (20, 1, 0.25, 1, {15}),
        (8, 1, 0.3, 16, {8}),  # nothing is possible
        (104, 8, 0.3, 8, {72}),  # 13 groups of 8
        (104, 13, 0.3, 8, {104, 52}),  # 13 groups that lose the same channels of 8: to a multiple of 4
        (58, 29, 0.3, 8, {29}),
        (5, 1, 0.99, 1, {1}),
    ],
)
def test_options(channels, each, ratio, align, left):
    assert {channels - count * each for count in cell(channels, each).options(ratio, align)} == left
