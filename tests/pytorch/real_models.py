"""The published networks of the real-model tests, with their data; also used by benchmarks/ptq_pytorch.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CIFAR_WEIGHTS = {20: "resnet20-12fca82f.th", 56: "resnet56-4bfd9763.th"}
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
CROP = slice(16, 240)  # 224 of 256 pixels


class Shortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are new."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.added = channels // 4

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added, self.added))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else Shortcut(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """The ResNet of 6n + 2 layers for 32 x 32 pictures."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        count = (depth - 2) // 6
        self.layer1 = _stage(16, 16, 1, count)
        self.layer2 = _stage(16, 32, 2, count)
        self.layer3 = _stage(32, 64, 2, count)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = functional.avg_pool2d(x, x.shape[3])
        return self.linear(x.flatten(1))


def _stage(inputs: int, outputs: int, stride: int, count: int) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs, stride), *(Block(outputs, outputs, 1) for _ in range(count - 1)))


def cifar_resnet(assets: Path, depth: int) -> CifarResNet:
    """With its published weights, ready to run."""
    file = assets / "pytorch_resnet_cifar10" / CIFAR_WEIGHTS[depth]
    state = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    model = CifarResNet(depth)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval()


def cifar_images(assets: Path, name: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Pictures and labels of ``train_10000`` or ``test_6000``, normalized."""
    with np.load(assets / "cifar10" / f"{name}.npz") as data:
        pixels, labels = data["x"][:count], data["y"][:count]
    scaled = (pixels.astype(np.float32) / 255 - MEAN) / DEVIATION
    return torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels.astype(np.int64))


def imagenet_images(assets: Path) -> tuple[Tensor, Tensor]:
    """The 600 pictures, 224 x 224, (x - 127) / 128, and their labels."""
    folder = assets / "imagenet"
    lines = [line.split("\t") for line in (folder / "labels.tsv").read_text().splitlines()]
    pixels = np.stack([np.asarray(Image.open(folder / name).convert("RGB"))[CROP, CROP] for name, _ in lines])
    scaled = (pixels.astype(np.float32) - 127) / 128
    return torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy()), torch.tensor([int(label) for _, label in lines])


def torch_top1(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 250) -> float:
    """Accuracy in percent."""
    # Channels last: the same sums in about half the time on CPUs.
    model = model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = [model(part.contiguous(memory_format=torch.channels_last)).argmax(1) for part in images.split(batch)]
    return 100 * float((torch.cat(found) == labels).double().mean())


def run_onnx(path: Path, inputs: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """The first output of an ONNX file in onnxruntime, for several batches."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feed)[0] for feed in inputs])


def onnx_top1(path: Path, images: Tensor, labels: Tensor, batch: int = 250, name: str = "x") -> float:
    """Accuracy in percent, in onnxruntime."""
    found = run_onnx(path, [{name: part.numpy()} for part in images.split(batch)])
    return 100 * float((found.argmax(1) == labels.numpy()).mean())
