"""More networks written here: speech, diffusion, graphs, detection, and layers in unusual forms."""

# ruff: noqa: D102  forward is documented by its class
from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from zoo_networks.data import images, sound, spectrum, text_images
from zoo_networks.network import Network
from zoo_networks.own import unit
from zoo_networks.torch_subject import Inputs, TorchSubject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class ConformerBlock(nn.Module):
    """Half a feed-forward step, attention, a gated convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.middle = nn.LayerNorm(width)
        self.wide = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.norm = nn.BatchNorm1d(width)
        self.narrow = nn.Conv1d(width, width, 1)
        self.last = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed(x)
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.wide(self.middle(x).mT), 1)
        return self.last(x + self.narrow(F.silu(self.norm(self.depth(y)))).mT)


class Conformer(nn.Module):
    """Speech recognition on log spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(40, 96)
        self.blocks = nn.Sequential(*(ConformerBlock(96) for _ in range(2)))
        self.head = nn.Linear(96, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x))).log_softmax(-1)


class ResidualStep(nn.Module):
    """A residual block of a diffusion network, which also gets the embedded time."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.first, self.second = (nn.Conv2d(i, outputs, 3, padding=1) for i in (inputs, outputs))
        self.time = nn.Linear(times, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.second(F.silu(self.second_norm(y))) + self.short(x)


class DiffusionUNet(nn.Module):
    """Predicts noise from a picture and a time, with attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.down, self.middle, self.up = (ResidualStep(i, o, 64) for i, o in ((32, 64), (64, 64), (128, 32)))
        self.smaller = nn.Conv2d(64, 64, 3, 2, 1)
        self.norm, self.qkv, self.out = nn.GroupNorm(8, 64), nn.Conv2d(64, 192, 1), nn.Conv2d(64, 64, 1)
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(32) / 32)
        angles = time[:, None].float() * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skip = self.down(self.stem(x), embedded)
        y = self.middle(self.smaller(skip), embedded)
        batch, width, rows, columns = y.shape
        query, key, value = self.qkv(self.norm(y)).reshape(batch, 3, width, rows * columns).unbind(1)
        found = F.scaled_dot_product_attention(query.mT, key.mT, value.mT).mT
        y = y + self.out(found.reshape(batch, width, rows, columns))
        return self.head(self.up(torch.cat([F.interpolate(y, scale_factor=2.0), skip], 1), embedded))


class WaveNet(nn.Module):
    """Gated dilated convolutions with sums of skips."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 32, 1)
        self.gates = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=2**k) for k in range(6))
        self.mixes = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(6))
        self.head = nn.Conv1d(32, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = torch.zeros_like(x)
        for step, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            one, other = gate(F.pad(x, (2**step, 0))).chunk(2, 1)
            y = torch.tanh(one) * torch.sigmoid(other)
            skips, x = skips + y, x + mix(y)
        return self.head(F.relu(skips + x))


class TextReader(nn.Module):
    """A CRNN for CTC: convolutions, two layers of LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        pools = [nn.MaxPool2d(2), nn.MaxPool2d((2, 1)), nn.MaxPool2d((8, 1))]
        units = [unit(1, 32), unit(32, 64), unit(64, 64)]
        self.features = nn.Sequential(*(part for pair in zip(units, pools, strict=True) for part in pair))
        self.recurrent = nn.LSTM(64, 64, 2, bidirectional=True)
        self.head = nn.Linear(128, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.features(x).squeeze(2).permute(2, 0, 1))[0]).log_softmax(2)


class GraphConvolution(nn.Module):
    """Sums messages along edges by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((16, 64), (64, 64)))
        self.head = nn.Linear(64, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        nodes, (source, target) = nodes[0], edges[0]
        degree = torch.ones(nodes.shape[0]).index_add(0, target, torch.ones(source.shape[0]))
        for layer in self.layers:
            found = layer(nodes)
            nodes = F.relu((found + torch.zeros_like(found).index_add(0, target, found[source])) / degree[:, None])
        return self.head(nodes)


class StandardizedConv(nn.Conv2d):
    """Weight standardization."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        spread, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (spread + 1e-5), self.bias, self.stride, self.padding)


def _standardized() -> nn.Module:
    blocks = [
        nn.Sequential(StandardizedConv(i, o, 3, 2, 1), nn.GroupNorm(8, o), nn.ReLU()) for i, o in ((3, 32), (32, 64))
    ]
    return nn.Sequential(*blocks, StandardizedConv(64, 64, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 10))  # fmt: skip


def _noisy(count: int, seed: int) -> Inputs:
    times = np.random.default_rng(seed).integers(0, 1000, count)
    return images(count, 32, seed), times


def _graph(count: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 40, 16)).astype(np.float32), rng.integers(0, 40, (count, 2, 160))


def _pictures(size: int, count: int, seed: int) -> Inputs:
    return (images(count, size, seed),)


def _speech(count: int, seed: int) -> Inputs:
    return (spectrum((count, 80, 40), seed) / 4,)


def _waves(count: int, seed: int) -> Inputs:
    return (sound(count, 2000, seed)[:, None],)


def _printed(count: int, seed: int) -> Inputs:
    return (text_images(count, (32, 100), seed, channels=1),)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]] = {
    "conformer": (Conformer, _speech),
    "diffusion_unet": (DiffusionUNet, _noisy),
    "wavenet": (WaveNet, _waves),
    "crnn": (TextReader, _printed),
    "graph_convolution": (GraphConvolution, _graph),
    "weight_standardization": (_standardized, partial(_pictures, 64)),
}


def networks() -> list[Network]:
    """All of them."""
    return [Network(f"own/{name}", partial(_build, *row)) for name, row in NETS.items()]


def _build(build: Callable[[], nn.Module], make: Callable[[int, int], Inputs], _: Path) -> TorchSubject:
    torch.manual_seed(0)
    return TorchSubject(build().eval(), make)
