"""Random networks of the operations through which channels are followed."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional


class Gate(nn.Module):
    """A squeeze-and-excitation block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, 5, 1)
        self.excite = nn.Conv2d(5, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(functional.silu(self.squeeze(functional.adaptive_avg_pool2d(x, 1)))))


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class GatedHalves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return a * torch.tanh(b)


class FrontHalf(nn.Module):
    """A slice whose end is computed."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return x[:, :half] + x[:, half:]


class LiteralParts(nn.Module):
    """A split by literal sizes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.sizes = [channels // 2, channels - channels // 2]

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, self.sizes, 1)
        return torch.cat([b, a], 1)


class ChannelPad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, 0, 1, 2))


class LastMlp(nn.Module):
    """A transformer's MLP along the last axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(channels, 9), nn.Linear(9, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return (x + self.down(functional.gelu(self.up(x)))).permute(0, 3, 1, 2)


class NormedMlp(LastMlp):
    """The same behind a LayerNorm over the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = nn.LayerNorm(channels)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return (x + self.down(functional.gelu(self.up(self.norm(x))))).permute(0, 3, 1, 2)


class Heads(nn.Module):
    """Attention of three heads between all positions, in two styles."""

    def __init__(self, channels: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.width, self.fused = 3, 4, fused
        self.qkv, self.proj = nn.Linear(channels, 36), nn.Linear(12, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        parts = self.qkv(tokens).reshape(*tokens.shape[:2], 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.fused:
            found = functional.scaled_dot_product_attention(q, k, v)
        else:
            found = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return x + self.proj(found.transpose(1, 2).flatten(2)).transpose(1, 2).unflatten(2, x.shape[2:])


class ComputedParts(nn.Module):
    """A split by sizes that follow the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        a, b = torch.split(x, [half, x.shape[1] - half], 1)
        return torch.cat([b, functional.hardswish(a)], 1)


class Flat(nn.Module):
    """The end of a network: all channels and positions to a linear layer."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(channels * size * size, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(x.flatten(1))))


class Scale(nn.Module):
    """A parameter of the user's own, one value per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.ELU, nn.Sigmoid, nn.LeakyReLU, nn.Mish)


class RandomNet(nn.Module):
    """Layers on a growing list of tensors with pictures of 4 by 4."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self.channels = [3]
        for _ in range(self.random.randint(3, 9)):
            self.add_step()
        used = {place for _, places in self.steps for place in places}
        loose = [place for place in range(1, len(self.channels)) if place not in used]
        self.steps.append(("cat", tuple(loose)))
        self.channels.append(sum(self.channels[place] for place in loose))
        self.layers.append(nn.Identity())
        self.end = Flat(self.channels[-1], 4)

    def add_step(self) -> None:
        place = self.random.randrange(max(len(self.channels) - 3, 0), len(self.channels))
        made = getattr(self, self.random.choice(KINDS))(place, self.channels[place])
        if made is None:
            made = self.convolution(place, self.channels[place])
        kind, places, layer, channels = made
        self.steps.append((kind, places))
        self.layers.append(layer)
        self.channels.append(channels)

    def convolution(self, place, channels):
        made = self.random.choice([4, 6, 8])
        options = {"padding": 1} if self.random.random() < 0.5 else {"kernel_size": 1}
        layers = [nn.Conv2d(channels, made, options.pop("kernel_size", 3), **options, bias=self.random.random() < 0.5)]
        if self.random.random() < 0.6:
            layers.append(nn.BatchNorm2d(made))
            layers[-1].running_mean.normal_()
            layers[-1].running_var.uniform_(0.5, 2)
            nn.init.normal_(layers[-1].weight)
        layers.append(self.random.choice(ACTIVATIONS)())
        return "one", (place,), nn.Sequential(*layers), made

    def transposed(self, place, channels):
        return "one", (place,), nn.ConvTranspose2d(channels, 6, 3, padding=1), 6

    def grouped_transposed(self, place, channels):
        return ("one", (place,), nn.ConvTranspose2d(channels, 6, 1, groups=2), 6) if channels % 2 == 0 else None

    def depthwise(self, place, channels):
        times = self.random.choice([1, 1, 2])
        layer = nn.Conv2d(channels, channels * times, 3, padding=1, groups=channels)
        return "one", (place,), layer, channels * times

    def grouped(self, place, channels):
        return ("one", (place,), nn.Conv2d(channels, 8, 1, groups=2), 8) if channels % 2 == 0 else None

    def many_groups(self, place, channels):
        inner = nn.Conv2d(channels, 16, 1)
        groups = self.random.choice([nn.Conv2d(16, 24, 1, groups=8), nn.ConvTranspose2d(16, 24, 1, groups=8)])
        return "one", (place,), nn.Sequential(inner, groups), 24

    def same_size(self, place, channels):
        kind = self.random.choice([Gate, LastMlp, NormedMlp, Scale, LiteralParts, nn.PReLU, nn.MaxPool2d])
        layer = nn.MaxPool2d(3, 1, 1) if kind is nn.MaxPool2d else kind(channels)
        return "one", (place,), layer, channels

    def attention(self, place, channels):
        return "one", (place,), Heads(channels, fused=self.random.random() < 0.5), channels

    def group_norm(self, place, channels):
        if channels % 2 or channels == 2:
            return None
        norm = nn.GroupNorm(2, channels)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        return "one", (place,), norm, channels

    def shuffled(self, place, channels):
        return ("one", (place,), Shuffle(), channels) if channels % 2 == 0 else None

    def halves(self, place, channels):
        if channels % 2:
            return None
        layer = self.random.choice([GatedHalves, FrontHalf, ComputedParts])()
        return "one", (place,), layer, channels if isinstance(layer, ComputedParts) else channels // 2

    def padded(self, place, channels):
        return "one", (place,), ChannelPad(), channels + 3

    def added(self, place, channels):
        others = [other for other, count in enumerate(self.channels) if count == channels and other != place]
        return ("add", (place, self.random.choice(others)), nn.Identity(), channels) if others else None

    def joined(self, place, channels):
        other = self.random.randrange(len(self.channels))
        return "cat", (place, other), nn.Identity(), channels + self.channels[other]

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x]
        for (kind, places), layer in zip(self.steps, self.layers, strict=True):
            given = [tensors[place] for place in places]
            if kind == "add":
                tensors.append(given[0] + given[1])
            else:
                tensors.append(layer(given[0] if kind == "one" else torch.cat(given, 1)))
        return self.end(tensors[-1])


KINDS = (
    "convolution", "convolution", "convolution", "transposed", "grouped_transposed", "depthwise", "grouped",
    "many_groups", "attention", "group_norm",
    "same_size", "same_size", "shuffled", "halves", "padded", "added", "added", "joined",
)  # fmt: skip
