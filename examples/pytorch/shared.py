"""What the examples of this folder share: handwritten digits, a network that has learned them, its accuracy."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")  # the examples print their own lines
sys.path.append(str(Path(__file__).parent.parent))  # where digits.py and pytorch_cnn.py are

import onnxruntime
import pytorch_cnn
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from digits import Digits
    from torch import Tensor, nn

OUTPUT = Path("out/examples")


@functools.cache
def digits() -> Digits:
    """1200 images of 16×16 for training, 597 for testing."""
    return pytorch_cnn.load_digits()


def calibration_batches() -> list[Tensor]:
    """64 training images in two batches; labels are not needed."""
    return [torch.from_numpy(batch) for batch in digits().calibration_batches()]


@functools.cache
def trained_network() -> nn.Module:
    """A convolutional network that has learned the digits, in a few seconds."""
    return pytorch_cnn.train(digits())


def train(
    model: nn.Module, run: Callable[[Tensor], Tensor], epochs: int, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Teach a network the digits; ``run`` gives its scores for images."""
    images, labels = torch.from_numpy(digits().images), torch.from_numpy(digits().labels)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 3e-3)
    for batch in torch.cat([torch.randperm(len(labels)) for _ in range(epochs)]).split(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(network: Callable[[Tensor], Tensor]) -> float:
    """The percentage of test digits that a network recognizes."""
    images, labels = torch.from_numpy(digits().test_images), torch.from_numpy(digits().test_labels)
    return float(100 * (network(images).argmax(1) == labels).float().mean())


def in_onnxruntime(file: Path) -> Callable[[Tensor], Tensor]:
    """The network in an ONNX file, run by onnxruntime."""
    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])
