"""What the tests of quantization-aware training share: small nets, a training loop, files in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional

import amct_pytorch as amct

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden" / "amct"


class Net(nn.Module):
    """Convolutions with and without batch norm, a branch, dropout, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(8, eps=1e-3, momentum=0.2)
        self.c2 = nn.Conv2d(8, 8, 3, padding=1)
        self.c3 = nn.Conv2d(8, 8, 1, bias=False)
        self.b3 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.c2(x) + self.b3(self.c3(x)))
        return self.fc(self.drop(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


def net(seed: int = 0) -> Net:
    """A net whose batch norms have uneven statistics and gammas of both signs."""
    torch.manual_seed(seed)
    model = Net()
    for norm in (model.b1, model.b3):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, -1, 1)
        nn.init.normal_(norm.bias, 0, 0.2)
    return model


def images(seed: int = 0, count: int = 8) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(seed: int = 0, count: int = 8) -> Tensor:
    return torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Steps of SGD on the batches of these seeds, in train mode; returns the losses."""
    model.train()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images(step)), labels(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Flow:
    """AMCT's functions with their files in one folder."""

    def __init__(
        self, folder: Path, cfg: str | None = None, model: nn.Module | None = None, example: Any = None
    ) -> None:
        self.folder, self.model = folder, net() if model is None else model
        self.example = images() if example is None else example
        self.config, self.record, self.state = folder / "c.json", folder / "r.txt", folder / "state.pth"
        definition = None
        if cfg is not None:
            definition = folder / "q.cfg"
            definition.write_text(cfg)
        amct.create_quant_retrain_config(self.config, self.model, self.example, definition)

    def create(self) -> Any:
        return amct.create_quant_retrain_model(self.config, self.model, self.record, self.example)

    def restore(self, name: str | None = None, state: Path | None = None) -> Any:
        return amct.restore_quant_retrain_model(
            self.config, self.model, self.record, self.example, state or self.state, state_dict_name=name
        )

    def save(self, model: nn.Module, **arguments: Any) -> Path:
        amct.save_quant_retrain_model(
            self.config, model, self.record, self.folder / "out" / "net", self.example, **arguments
        )
        return self.folder / "out"


def run_onnx(path: Path, *inputs: Tensor, optimize: bool = True) -> np.ndarray:
    """The first output of a file in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))[0]


def evaluate(model: nn.Module, *inputs: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return model(*inputs)
