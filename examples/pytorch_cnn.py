"""A PyTorch network with residual, batch norms and a depthwise convolution: train it, quantize it, look at the loss.

Run alone it is the shortest example of ``amct.pytorch``::

    python examples/pytorch_cnn.py
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import digits
import torch
from measuring import Example
from torch import nn
from torch.nn import functional

import amct.pytorch as amct

if TYPE_CHECKING:
    from digits import Digits

SEED = 0
EPOCHS = 6


class DigitNet(nn.Module):
    """A small network similar to MobileNet and ResNet, for images of 16×16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(32)
        self.wide = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.wide_norm = nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(64)
        self.pointwise = nn.Conv2d(64, 64, 1, bias=False)
        self.pointwise_norm = nn.BatchNorm2d(64)
        self.deep = nn.Conv2d(64, 128, 3, padding=1, bias=False)
        self.deep_norm = nn.BatchNorm2d(128)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ten scores per image."""
        x = functional.relu(self.stem_norm(self.stem(x)))
        x = functional.relu(self.wide_norm(self.wide(x)))
        y = functional.relu(self.depthwise_norm(self.depthwise(x)))
        x = functional.relu(x + self.pointwise_norm(self.pointwise(y)))
        x = functional.relu(self.deep_norm(self.deep(x)))
        return self.classifier(x.mean((2, 3)))


def load_digits() -> Digits:
    """Digits of 16×16."""
    return digits.load(enlarge=2)


def train(data: Digits) -> nn.Module:
    """Train for a few seconds; the result is in eval mode."""
    torch.manual_seed(SEED)
    model = DigitNet()
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(60):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def top1_accuracy(scores: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The accuracy of one batch; the report calls it for the float and the quantized model."""
    return float(100 * (scores.argmax(1) == batch[1]).float().mean())


def quantize(model: nn.Module, data: Digits, folder: Path) -> Example:
    """Calibrate with 64 images, write the files, compare, write the report."""
    calibration = [torch.from_numpy(batch) for batch in data.calibration_batches()]
    open_batch = amct.IoOptions(input_names=["image"], output_names=["scores"], dynamic_axes={"image": {0: "batch"}})
    quantized = amct.quantize(model, calibration, io=open_batch)
    files = quantized.save(folder / "cnn")

    tests = [(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in data.test_batches()]
    worst = min(quantized.compare(tests), key=lambda layer: layer.sqnr)
    float_file = export_float(model, calibration[0], folder / "cnn_float.onnx")
    report = quantized.report(folder / "cnn.html", tests, top1_accuracy, files=[float_file, *files])
    return Example(
        title="PyTorch CNN",
        data=data,
        float_file=float_file,
        int8_file=folder / "cnn_qdq_model.onnx",
        report=report,
        most_harmed=f"{worst.layer} ({worst.sqnr:.1f} dB)",
    )


def export_float(model: nn.Module, example: torch.Tensor, path: Path) -> Path:
    """The float model as ONNX, for comparison only."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # warns that torchvision is not installed
    open_batch = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # raised inside torch
        settings = {"dynamo": True, "dynamic_shapes": open_batch, "external_data": False, "verbose": False}
        torch.onnx.export(model, (example,), path, **settings)
    return path


def main() -> int:
    """Write everything to ``out/demo``."""
    folder = Path("out/demo")
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    print(quantize(train(data), data, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
