"""The networks, inputs and results of AMCT for PyTorch 9.0.0 that the tests compare with (see tests/golden/amct)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_nets import Attention, Conv1d3d, Mix, ResNet, Rnn, RnnBidirectional, RnnWithState, Shared
from torch import Tensor, nn

GOLDEN = Path(__file__).parent.parent / "golden"
AMCT = GOLDEN / "amct"


class Pools(nn.Module):
    """small_const, small_huge, small_inf, small_nan, small_tiny, small_zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(4, 8, 3, padding=1)
        self.c2 = nn.Conv2d(4, 8, 1)
        self.ap1 = nn.AvgPool2d(3, 1, 1)
        self.ap2 = nn.AvgPool2d(2, ceil_mode=True)
        self.ap3 = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)
        self.big = nn.AvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.c1(x) + self.c2(x))
        return self.fc(self.ap3(self.big(self.ap2(self.ap1(x)))).flatten(1))


def _net(case: str) -> tuple[str, nn.Module]:
    name = case.removeprefix("small_")
    kind = "LSTM" if "lstm" in name else "GRU"
    if name.startswith("mix"):
        return "mix", Mix()
    if name in ("const", "huge", "inf", "nan", "tiny", "zeros"):
        return "pools", Pools()
    if "hx" in name:
        return kind.lower(), RnnWithState(kind, "bf" in name)
    special = {
        "conv1d3d_default": ("conv1d3d", Conv1d3d),
        "lstm_bi2_default": ("lstm_bidirectional", RnnBidirectional),
        "matmul_default": ("attention", Attention),
        "rnn_tanh_default": ("rnn", lambda: Rnn("RNN")),
        "shared_default": ("shared", Shared),
    }
    weights, make = special.get(name, (kind.lower(), lambda: Rnn(kind)))
    return weights, make()


def golden_net(case: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The network of a case and its calibration batches, each the arguments of a call."""
    if case.startswith("r20"):
        return resnet20()
    weights, model = _net(case)
    with np.load(AMCT / "nets.npz") as archive:
        prefix = f"weights/{weights}/"
        names = [name for name in archive.files if name.startswith(prefix)]
        state = {name.removeprefix(prefix): torch.from_numpy(archive[name]) for name in names}
        source = "small_mix_default" if case.startswith("small_mix") else case
        given = {name.rpartition("/")[2]: archive[name] for name in archive.files if f"inputs/{source}/" in name}
    model.load_state_dict(state)
    batches: dict[str, list[Any]] = {}
    for name in sorted(given):
        batches.setdefault(name.partition("_")[0], []).append(torch.from_numpy(given[name]))
    return model.eval(), [tuple(tensors) for tensors in batches.values()]


def resnet20() -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The CIFAR-10 ResNet-20 with two batches of 32 images."""
    with np.load(GOLDEN / "numerics" / "resnet20.npz") as archive:
        state = {name: torch.from_numpy(archive[name]) for name in archive.files if name != "images"}
        images = torch.from_numpy(archive["images"])
    model = ResNet()
    model.load_state_dict(state, strict=False)  # the counters of batches are left out
    mean = torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1)
    batches = (images.float() / 255 - mean) / deviation
    return model.eval(), [(batches[:32].contiguous(),), (batches[32:].contiguous(),)]
