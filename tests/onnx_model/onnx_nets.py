"""What the tests of the ONNX front door share: small models exported by torch or made by hand, and running them."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn


class Residual(nn.Module):
    """Convolutions with batch norms, one of them depthwise, a residual sum, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        y = torch.relu(self.depthwise_norm(self.depthwise(x)))
        x = torch.relu(x + self.pointwise(y))
        return self.fc(self.pool(x).flatten(1))


class Recurrent(nn.Module):
    """An LSTM, a GRU with a first state, and a linear layer over three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x.transpose(0, 1), h)
        return self.fc(x)


class Transposed(nn.Module):
    """Layers over one dimension, and transposed ones, the second in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(3, 8, 3)
        self.wide = nn.ConvTranspose1d(8, 4, 3, bias=False)
        self.grouped = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.wide(torch.relu(self.narrow(x))))
        return self.norm(self.grouped(x[..., None]))


def seeded(model: type[nn.Module]) -> nn.Module:
    """A model in eval mode; batch norms have statistics of their own."""
    torch.manual_seed(0)
    made = model()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return made.eval()


def exported(model: nn.Module, *inputs: torch.Tensor, opset: int = 17) -> onnx.ModelProto:
    """torch's own ONNX of a model, batch norms as they are; nodes are called ``/stem/Conv`` and so on."""
    stream = io.BytesIO()
    names = ["x", "h"][: len(inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer exporter, which takes thirty times as long
        torch.onnx.export(
            model,
            inputs,
            stream,
            dynamo=False,
            opset_version=opset,
            input_names=names,
            output_names=["y"],
            dynamic_axes={name: {0: "batch"} for name in ("x", "y")},
            training=torch.onnx.TrainingMode.PRESERVE,  # otherwise it folds the batch norms
        )
    return onnx.load_from_string(stream.getvalue())


def images(seed: int = 0, count: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def graph_model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    shape: tuple[int | str, ...],
    *,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 17,
    element_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model made by hand, with one input ``x``."""
    graph = helper.make_graph(
        nodes,
        "hand_made",
        [helper.make_tensor_value_info("x", element_type, list(shape))],
        [helper.make_tensor_value_info(name, element_type, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def node(op_type: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), name=name, **attributes)


def normal(*shape: int, seed: int = 1, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def products(*, opset: int = 17, dtype: type = np.float32) -> onnx.ModelProto:
    """``relu(x · w + b) · v``: a MatMul with bias, one whose weight is behind an Identity, none of them named."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Add", "a b", "c"),
        node("Relu", "c", "d"),
        node("Identity", "v", "v2"),
        node("MatMul", "d v2", "y"),
    ]
    weights = {"w": normal(6, 8, dtype=dtype), "b": normal(8, seed=2, dtype=dtype), "v": normal(8, 4, dtype=dtype)}
    kind = TensorProto.FLOAT if dtype is np.float32 else TensorProto.FLOAT16
    return graph_model(nodes, weights, ("batch", 6), opset=opset, element_type=kind)


def run(model: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime computes for a file or a model in memory."""
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
