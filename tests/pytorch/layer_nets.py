"""Small nets whose layers are functional calls on parameters, or modules called several times."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class OneLinear(nn.Module):
    """``functional.linear`` on parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class WindowAttention(nn.Module):
    """As in Swin: the weights of linear modules that are never called, and a bias joined from parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.q_bias = nn.Parameter(torch.randn(8))
        self.v_bias = nn.Parameter(torch.randn(8))
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros(8), self.v_bias))
        q, k, v = functional.linear(x, self.qkv.weight, bias).chunk(3, dim=-1)
        attention = torch.softmax(q @ k.transpose(1, 2), dim=-1)
        return functional.linear(attention @ v, self.proj.weight, self.proj.bias)


class Conv1D(nn.Module):
    """As in GPT-2: a linear layer whose weight is stored ``[in, out]``."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size)


class Attention(nn.Module):
    """nn.MultiheadAttention on one, two or three inputs."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **settings)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        key = query if key is None else key
        return self.attn(query, key, key if value is None else value)[0]


class Tied(nn.Module):
    """One matrix in both directions, and the embedding as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.matrix = nn.Parameter(torch.randn(8, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(tokens) @ self.matrix)
        return functional.linear(functional.linear(x, self.matrix), self.embedding.weight)


class Convolutions(nn.Module):
    """Every kind of functional convolution that can be quantized; one of them has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.k1 = nn.Parameter(torch.randn(4, 3, 3))
        self.k2 = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.k3 = nn.Parameter(torch.randn(4, 2, 3, 3, 3))
        self.up1 = nn.Parameter(torch.randn(3, 4, 2))
        self.up2 = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.bias = nn.Parameter(torch.randn(4))
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.normal_(0, 0.3)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        plane = self.norm(functional.conv2d(b, self.k2, bias=self.bias, stride=2, groups=2))
        return (
            functional.conv1d(a, self.k1, self.bias, padding=1),
            functional.conv_transpose1d(a, self.up1, stride=2),
            functional.conv_transpose2d(plane, self.up2, None, 2, 1, 1),
            functional.conv3d(c, self.k3, self.bias, padding="same"),
        )


class Branch(nn.Module):
    """Convolution with batch norm, convolution, linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.normal_(0, 0.3)
        self.norm.running_var.uniform_(0.5, 2)
        self.c2 = nn.Conv2d(8, 8, 3, stride=2)
        self.fc = nn.Linear(72, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.c1(x)))
        return self.fc(torch.relu(self.c2(x)).flatten(1))


class Siamese(nn.Module):
    """One branch for two pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.relu(self.branch(x) - self.branch(y)))


class SharedEncoder(nn.Module):
    """As in ALBERT: one transformer layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


class AllChildren(nn.Module):
    """A forward that calls every child, whatever its name, and a functional call as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return functional.linear(x, self.weight)
