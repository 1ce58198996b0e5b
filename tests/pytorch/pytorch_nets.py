"""Small networks that between them use every kind of layer, call and input; ``CASES`` has an input for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

# -- the nets behind the reference results, their layer names and sizes are those of the stored weights ---------


class Mix(nn.Module):
    """Most layer kinds in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.grp = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.dw = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.dil = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.circ = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.pool = nn.AvgPool2d(2)
        self.deconv = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.deconvg = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.fc = nn.Linear(8 * 8 * 8, 16)
        self.fcnb = nn.Linear(16, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        for layer in (self.grp, self.dw, self.dil):
            x = torch.relu(layer(x))
        x = torch.relu(self.deconv(self.pool(self.circ(x))))
        x = self.deconvg(x)[:, :, ::4, ::4]
        return self.fcnb(torch.relu(self.fc(x.flatten(1))))


class Conv1d3d(nn.Module):
    """One and three dimensions, two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv1d(4, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm1d(6)
        self.d1 = nn.ConvTranspose1d(6, 4, 2, stride=2)
        self.c3 = nn.Conv3d(2, 4, 3, padding=1)
        self.bn3 = nn.BatchNorm3d(4)
        self.d3 = nn.ConvTranspose3d(4, 2, 2, stride=2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.d1(torch.relu(self.bn1(self.c1(a)))), self.d3(torch.relu(self.bn3(self.c3(b))))


class Rnn(nn.Module):
    """A recurrent layer (LSTM, GRU or RNN) without initial state."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 12, **settings)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.fc(out[:, -1] if self.rnn.batch_first else out[-1])


class RnnBidirectional(nn.Module):
    """Two layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


class RnnWithState(nn.Module):
    """A recurrent layer that is given its state and returns it."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.kind, self.batch_first = kind, batch_first
        self.rnn = getattr(nn, kind)(8, 12, batch_first=batch_first)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor | None = None) -> Any:
        out, state = self.rnn(x, (h, c) if self.kind == "LSTM" else h)
        return self.fc(out[:, -1] if self.batch_first else out[-1]), state


class Shared(nn.Module):
    """A module called twice, an alias, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.alias = self.a
        self.c = nn.Conv2d(4, 4, 1)
        self.t1 = nn.Linear(4, 4)
        self.t2 = nn.Linear(4, 4)
        self.t2.weight = self.t1.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(self.a(x))
        x = self.c(self.b(x)).mean((2, 3))
        return self.t2(torch.relu(self.t1(x)))


class Attention(nn.Module):
    """Attention written out, with a layer norm and an embedding that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)
        self.e = nn.Embedding(10, 8)
        self.ln = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        attention = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1)
        return self.o(self.ln(attention @ v))


# -- ResNet for CIFAR-10 ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a shortcut that takes every second pixel and pads the channels with zeros."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grown = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if self.grown else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.grown:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.grown // 2, self.grown - self.grown // 2))
        return functional.relu(y + x)


class ResNet(nn.Module):
    """ResNet-20 with three blocks a stage, ResNet-56 with nine."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Block(16 if i == 0 else 32, 32) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(Block(32 if i == 0 else 64, 64) for i in range(blocks)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = functional.avg_pool2d(x, x.size()[3])
        return self.linear(x.view(x.size(0), -1))


# -- more shapes of networks ------------------------------------------------------------------------------------


class SameConv(nn.Conv2d):
    """A subclass that pads by itself, as many mobile networks do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Conv2d's name
        return super().forward(functional.pad(input, (0, 1, 0, 1)))


class Mobile(nn.Module):
    """Depthwise separable block with squeeze-and-excitation and a residual, in-place activations, in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SameConv(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.expand = nn.Conv2d(8, 16, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding="same", groups=16, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.squeeze = nn.Conv2d(16, 4, 1)
        self.excite = nn.Conv2d(4, 16, 1)
        self.project = nn.Conv2d(16, 8, 1)
        self.norm3 = nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = functional.silu(self.norm1(self.expand(x)), inplace=True)
        y = functional.hardswish(self.norm2(self.depthwise(y)))
        gate = torch.sigmoid(self.excite(functional.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1)))))
        y = self.norm3(self.project(y * gate))
        y += x
        return self.head(y.mean((2, 3)))


class Variants(nn.Module):
    """Settings of layers that exporters get wrong: padding by name, ceil mode, output padding, more dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, (5, 3), padding="same", dilation=(1, 2))
        self.valid = nn.Conv2d(4, 4, 3, padding="valid", stride=(2, 1), dilation=(1, 2))
        self.pool = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.ceiling = nn.AvgPool2d((2, 3), stride=2, ceil_mode=True)
        self.plane = nn.Linear(2, 5)
        self.lines = nn.Linear(5, 4, bias=False)
        self.up = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2)
        self.down = nn.Conv1d(6, 2, 3, dilation=2, padding=(2,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ceiling(self.pool(self.valid(self.same(x))))
        x = self.lines(self.plane(x).flatten(1, 2))
        return self.down(self.up(x.transpose(1, 2)))


class Folds(nn.Module):
    """Every layer a batch norm can be folded into, grouped and transposed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, groups=2)
        self.norm1 = nn.BatchNorm1d(6)
        self.deconv1 = nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False)
        self.norm2 = nn.BatchNorm1d(4)
        self.conv2 = nn.Conv2d(1, 6, 3, bias=False)
        self.norm3 = nn.SyncBatchNorm(6)
        self.deconv2 = nn.ConvTranspose2d(6, 4, 3, groups=2, output_padding=1, stride=2)
        self.norm4 = nn.BatchNorm2d(4)
        self.conv3 = nn.Conv3d(1, 4, (1, 2, 2), groups=1)
        self.norm5 = nn.BatchNorm3d(4)
        self.deconv3 = nn.ConvTranspose3d(4, 2, 2, bias=False)
        self.norm6 = nn.BatchNorm3d(2)
        self.linear = nn.Linear(6, 5)
        self.norm7 = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.deconv1(torch.tanh(self.norm1(self.conv1(x))))).unsqueeze(1)
        x = self.norm4(self.deconv2(torch.tanh(self.norm3(self.conv2(x))))).unsqueeze(1)
        x = self.norm6(self.deconv3(torch.tanh(self.norm5(self.conv3(x)))))
        return self.norm7(self.linear(x.flatten(2).mean(1)[:, :6]))


class Keywords(nn.Module):
    """Keyword arguments, a nested dict and several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3)
        self.text = nn.Linear(6, 4)

    def forward(self, image: Tensor, extra: dict[str, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        features = functional.relu(self.image(image)).mean((2, 3))
        words = self.text(extra["words"]) * scale
        return {"sum": features + words, "features": features}


class OneDict(nn.Module):
    """Takes a single dict as its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["x"]) + batch["y"]


class Transformer(nn.Module):
    """torch's own encoder layer, fed by an embedding, with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(1))


class Functional(nn.Module):
    """Weights used by functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.matrix = nn.Parameter(torch.randn(4, 5))
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.kernel)
        return self.layer(x.mean((2, 3)) @ self.matrix)


class DataDependent(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.small = nn.Linear(4, 2)
        self.large = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        if x.sum() > 0:  # the line that reports name
            return self.large(x)
        return self.small(x)


# -- each with an example input ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A net and an input for it, both made anew and always alike."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return lively(self.make()).eval()

    def inputs(self) -> Any:
        torch.manual_seed(2)
        return self.example()


def lively(model: nn.Module) -> nn.Module:
    """Give batch norms statistics and factors that matter, as after training."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.3, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
    return model


def _state(batch: int) -> Tensor:
    return torch.randn(1, batch, 12)


CASES = (
    Case("mix", Mix, lambda: torch.randn(2, 4, 16, 16)),
    Case("conv1d3d", Conv1d3d, lambda: (torch.randn(2, 4, 8), torch.randn(2, 2, 4, 4, 4))),
    Case("shared", Shared, lambda: torch.randn(2, 4, 8, 8)),
    Case("attention", Attention, lambda: torch.randn(2, 5, 8)),
    Case("resnet20", ResNet, lambda: torch.randn(2, 3, 32, 32)),
    Case("mobile", Mobile, lambda: torch.randn(2, 3, 16, 16)),
    Case("variants", Variants, lambda: torch.randn(2, 3, 13, 12)),
    Case("folds", Folds, lambda: torch.randn(3, 4, 8)),
    Case("transformer", Transformer, lambda: torch.randint(0, 20, (2, 6))),
    Case("functional", Functional, lambda: torch.randn(2, 3, 6, 6)),
    Case(
        "keywords",
        Keywords,
        lambda: (torch.randn(2, 3, 6, 6), {"scale": torch.randn(2, 1), "extra": {"words": torch.randn(2, 6)}}),
    ),
    Case("one_dict", OneDict, lambda: {"x": torch.randn(2, 6), "y": torch.randn(2, 4)}),
    Case("lstm", lambda: Rnn("LSTM"), lambda: torch.randn(5, 3, 8)),
    Case("lstm_batch_first", lambda: Rnn("LSTM", batch_first=True), lambda: torch.randn(3, 5, 8)),
    Case("lstm_no_bias", lambda: Rnn("LSTM", bias=False), lambda: torch.randn(5, 3, 8)),
    Case("gru", lambda: Rnn("GRU"), lambda: torch.randn(5, 3, 8)),
    Case("gru_batch_first", lambda: Rnn("GRU", batch_first=True), lambda: torch.randn(3, 5, 8)),
    Case("gru_no_bias", lambda: Rnn("GRU", bias=False), lambda: torch.randn(5, 3, 8)),
    Case("rnn", lambda: Rnn("RNN"), lambda: torch.randn(5, 3, 8)),
    Case("lstm_bidirectional", RnnBidirectional, lambda: torch.randn(3, 5, 8)),
    Case(
        "lstm_state",
        lambda: RnnWithState("LSTM", False),
        lambda: (torch.randn(5, 3, 8), {"h": _state(3), "c": _state(3)}),
    ),
    Case(
        "lstm_state_batch_first",
        lambda: RnnWithState("LSTM", True),
        lambda: (torch.randn(3, 5, 8), _state(3), _state(3)),
    ),
    Case("gru_state", lambda: RnnWithState("GRU", False), lambda: (torch.randn(5, 3, 8), _state(3))),
    Case("gru_state_batch_first", lambda: RnnWithState("GRU", True), lambda: (torch.randn(3, 5, 8), _state(3))),
)


def case(name: str) -> Case:
    """The case of that name."""
    return next(item for item in CASES if item.name == name)
