"""Networks written here: shapes that the libraries of architectures lack."""

# ruff: noqa: D102  forward is documented by its class
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  its usual name

from zoo_networks.data import images, sound, spectrum, tokens
from zoo_networks.network import Network
from zoo_networks.torch_subject import Inputs, TorchSubject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def unit(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class CifarResNet(nn.Module):
    """ResNet-20 for 32×32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 16)
        rows = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.first = nn.ModuleList(nn.Sequential(unit(i, o, s), nn.Conv2d(o, o, 3, 1, 1)) for i, o, s in rows)
        self.short = nn.ModuleList(nn.Conv2d(i, o, 1, s) for i, o, s in rows)
        self.second = nn.ModuleList(nn.Sequential(unit(o, o), nn.Conv2d(o, o, 3, 1, 1)) for _, o, _ in rows)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, short, second in zip(self.first, self.short, self.second, strict=True):
            x = F.relu(first(x) + short(x))
            x = F.relu(second(x) + x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Segmentation with skip connections and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(unit(i, o) for i, o in zip((3, *widths), widths, strict=False))
        self.middle = unit(64, 128)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.merge = nn.ModuleList(unit(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(kept), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


class Tagger(nn.Module):
    """Embedding, a recurrent layer, a linear layer per token."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 96)
        self.recurrent = kind(96, 128, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(256 if bidirectional else 128, 20)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(words))[0])


class Siamese(nn.Module):
    """One encoder called on two pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(unit(3, 32, 2), unit(32, 64, 2), unit(64, 64, 2), nn.AdaptiveAvgPool2d(4),
                                     nn.Flatten(), nn.Linear(1024, 64))  # fmt: skip
        self.head = nn.Linear(64, 1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.head((self.encoder(one) - self.encoder(other)).abs())


class Functional(nn.Module):
    """Layers without modules: parameters and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(0.2 * torch.randn(32, 3, 3, 3))
        self.first = nn.Parameter(0.05 * torch.randn(128, 512))
        self.second = nn.Parameter(0.1 * torch.randn(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(F.conv2d(x, self.kernel, padding=1)), 16).flatten(1)
        return torch.relu(F.linear(x, self.first)) @ self.second


class PointNet(nn.Module):
    """Points in space: Conv1d of width 1, a maximum over the points."""

    def __init__(self) -> None:
        super().__init__()
        rows = [(3, 64), (64, 128), (128, 512)]
        self.points = nn.Sequential(*(nn.Sequential(nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU()) for i, o in rows))
        self.head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(2))


class Attention(nn.Module):
    """nn.MultiheadAttention between two sets of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 12)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        return self.head(self.norm(query + self.attention(query, memory, memory, need_weights=False)[0]))


class WideAndDeep(nn.Module):
    """Categories and numbers: embeddings, batch norm on the numbers, a linear and a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(10)
        self.deep = nn.Sequential(nn.Linear(58, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64 + 58, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        columns = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        x = torch.cat([*columns, self.norm(numbers)], 1)
        return torch.sigmoid(self.head(torch.cat([self.deep(x), x], 1)))


class ThreeOutputs(nn.Module):
    """A number and a class index beside the scores: an int among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(unit(3, 32, 2), unit(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.scores, self.age = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        scores = self.scores(x)
        return {"scores": scores, "age": self.age(x), "best": scores.argmax(1)}


def separable(width: int) -> nn.Sequential:
    """Depthwise and pointwise convolution of a keyword spotter."""
    return nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, groups=width), nn.BatchNorm2d(width), nn.ReLU(),
                         nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU())  # fmt: skip


def causal(width: int, dilation: int) -> nn.Sequential:
    """A block of a temporal convolutional network."""
    return nn.Sequential(
        nn.ConstantPad1d((2 * dilation, 0), 0.0), nn.Conv1d(width, width, 3, dilation=dilation), nn.PReLU()
    )


def _pictures(size: int, copies: int, count: int, seed: int) -> Inputs:
    return tuple(images(count, size, seed + 50 * copy) for copy in range(copies))


def _gauss(*shapes: tuple[int, ...]) -> Callable[[int, int], Inputs]:
    def make(count: int, seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        return tuple(rng.normal(size=(count, *shape)).astype(np.float32) for shape in shapes)

    return make


def _words(count: int, seed: int) -> Inputs:
    return (tokens((count, 64), 512, seed),)


def _waves(count: int, seed: int) -> Inputs:
    return (sound(count, 4096, seed)[:, None],)


def _spectra(count: int, seed: int) -> Inputs:
    return (spectrum((count, 1, 49, 40), seed),)


def _rows(count: int, seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, (count, 6)), rng.normal(size=(count, 10)).astype(np.float32)


def _generator() -> nn.Module:
    rows = [(64, 256, 1, 0), (256, 128, 2, 1), (128, 64, 2, 1), (64, 32, 2, 1)]
    blocks = [nn.Sequential(nn.ConvTranspose2d(i, o, 4, s, p), nn.BatchNorm2d(o), nn.ReLU()) for i, o, s, p in rows]
    return nn.Sequential(*blocks, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())


def _weight_norm() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Conv1d(1, 32, 9, 4, 4)), nn.ELU(), norm(nn.Conv1d(32, 64, 9, 4, 4)), nn.ELU(),
                         norm(nn.Conv1d(64, 1, 3, 1, 1)))  # fmt: skip


def _volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 16, 3, 1, 1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2),
                         nn.Conv3d(16, 32, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(),
                         nn.Linear(256, 5))  # fmt: skip


def _super_resolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(),
                         nn.Conv2d(32, 12, 3, 1, 1), nn.PixelShuffle(2))  # fmt: skip


def _lenet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 5), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Sigmoid(),
                         nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 120), nn.Linear(120, 10))  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def _keywords() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 64, (10, 4), 2, (5, 1)), nn.BatchNorm2d(64), nn.ReLU(),
                         *(separable(64) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 12))  # fmt: skip


def _temporal() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 48, 16, 8), *(causal(48, 2**k) for k in range(5)), nn.Conv1d(48, 4, 1))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _seq2seq() -> nn.Module:
    return nn.Transformer(96, 4, 1, 1, 192, batch_first=True, dropout=0.0)


def _circular() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, padding_mode="circular"), nn.ReLU(),
                         nn.Conv2d(32, 32, 1, padding=0, padding_mode="circular"), nn.ReLU(),
                         nn.Conv2d(32, 8, 3, padding=1, padding_mode="reflect"))  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]] = {
    "mlp": (_mlp, _gauss((256,))),
    "lenet": (_lenet, _gauss((1, 28, 28))),
    "cifar_resnet": (CifarResNet, partial(_pictures, 32, 1)),
    "unet": (UNet, partial(_pictures, 96, 1)),
    "dcgan_generator": (_generator, _gauss((64, 1, 1))),
    "super_resolution": (_super_resolution, partial(_pictures, 64, 1)),
    "lstm_tagger": (partial(Tagger, nn.LSTM), _words),
    "gru_tagger": (partial(Tagger, nn.GRU), _words),
    "lstm_both_directions": (partial(Tagger, nn.LSTM, bidirectional=True), _words),
    "siamese": (Siamese, partial(_pictures, 64, 2)),
    "functional": (Functional, partial(_pictures, 64, 1)),
    "pointnet": (PointNet, _gauss((3, 256))),
    "attention": (Attention, _gauss((16, 96), (32, 96))),
    "transformer_encoder": (_encoder, _gauss((48, 96))),
    "transformer": (_seq2seq, _gauss((32, 96), (16, 96))),
    "wide_and_deep": (WideAndDeep, _rows),
    "keyword_spotter": (_keywords, _spectra),
    "temporal_convolutions": (_temporal, _waves),
    "weight_norm": (_weight_norm, _waves),
    "volume": (_volume, _gauss((1, 16, 16, 16))),
    "circular_padding": (_circular, partial(_pictures, 48, 1)),
    "three_outputs": (ThreeOutputs, partial(_pictures, 64, 1)),
}


def networks() -> list[Network]:
    """All of them."""
    found = [Network(f"own/{name}", partial(_build, *row)) for name, row in NETS.items()]
    return [*found, Network("own/zero_head", _zero_head)]


def _build(build: Callable[[], nn.Module], make: Callable[[int, int], Inputs], _: Path) -> TorchSubject:
    torch.manual_seed(0)
    return TorchSubject(build().eval(), make)


def _zero_head(_: Path) -> TorchSubject:
    """A last layer that is zero, as vision transformers start with."""
    torch.manual_seed(0)
    model = nn.Sequential(unit(3, 32, 2), unit(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    subject = TorchSubject(model.eval(), partial(_pictures, 64, 1))
    nn.init.zeros_(model[-1].weight)
    return subject
