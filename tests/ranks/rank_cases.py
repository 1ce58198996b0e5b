"""Runs under torchrun: calibrates in all processes together and in one, and compares the files byte for byte.

Usage: torchrun … rank_cases.py FOLDER CASE …
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

from amct.calibration.ranks import LOCAL

BATCHES = 7  # shares of 4 and 3, or 3, 2 and 2


@contextmanager
def alone():
    """Calibration by this process alone."""
    os.environ[LOCAL] = "1"
    try:
        yield
    finally:
        del os.environ[LOCAL]


class Net(nn.Module):
    """Convolution with batch norm, a layer called twice, a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = self.twice(torch.relu(self.twice(x)))
        return self.last(x.mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net().eval()


def batches(size=16, count=BATCHES):
    """Batches of various sizes and spreads."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        made.append(torch.randn(1 + seed % 3, 3, size, size, generator=generator) * (1 + seed / 2))
    return made


def share(items):
    """What this process runs, as the contract says: r, r + n, r + 2n, …"""
    if os.environ.get(LOCAL) == "1":
        return items
    return items[distributed.get_rank() :: distributed.get_world_size()]


def is_first():
    return distributed.get_rank() == 0


def files_of(folder):
    """The content of the files of a record; archives by their arrays, since they have the time of writing inside."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[path.name] = {name: arrays[name].tobytes() for name in arrays.files if name.startswith("input")}
        elif path.is_file() and path.suffix in (".txt", ".json", ".caffemodel", ".prototxt"):
            found[path.name] = path.read_bytes()
    return found
