"""What the tests of the PTQ flow share: small nets, the four functions in a row, files in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import amct_pytorch as amct
from amct.pytorch.inputs import example_inputs


class Small(nn.Module):
    """A convolution with batch norm, one without, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.c2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.c(x)))
        return self.fc(torch.relu(self.c2(x)).mean((2, 3)))


def small() -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    model.bn.running_mean.normal_(0, 0.3)
    model.bn.running_var.uniform_(0.5, 2)
    return model.eval()


def images(seed: int = 0, count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class Flow:
    """The four functions with their files in one folder."""

    def __init__(self, folder: Any, model: nn.Module | None = None, example: Any = None) -> None:
        self.folder = folder
        self.model = small() if model is None else model
        self.example = images() if example is None else example
        self.config = folder / "c.json"
        self.onnx = folder / "m.onnx"
        self.record = folder / "r.txt"

    def configure(self, **arguments: Any) -> Flow:
        amct.create_quant_config(self.config, self.model, self.example, **arguments)
        return self

    def simple(self, text: str) -> Flow:
        (self.folder / "q.cfg").write_text(text)
        return self.configure(config_defination=str(self.folder / "q.cfg"))

    def quantize(self, **arguments: Any) -> nn.Module:
        return amct.quantize_model(self.config, self.onnx, self.record, self.model, self.example, **arguments)

    def save(self, path: Any = None) -> None:
        amct.save_model(self.onnx, self.record, self.folder / "out" / "q" if path is None else path)


def run_onnx(path: Any, model: nn.Module, inputs: Any, level: str = "ORT_ENABLE_ALL") -> list[np.ndarray]:
    """What onnxruntime computes for the same inputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tensors = example_inputs(model, inputs).tensors()
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})


def run_torch(model: nn.Module, inputs: Any) -> list[np.ndarray]:
    """What a torch model computes, its outputs one after the other."""
    given = example_inputs(model, inputs)
    with torch.no_grad():
        return [leaf.numpy() for leaf in pytree.tree_leaves(model(*given.args, **given.kwargs))]


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    assert len(ours) == len(theirs)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
