"""What ``make demo`` runs: train a small network on real handwritten digits, quantize it, and compare the two.

Everything shown is computed here and now: accuracy in onnxruntime of the float and of the INT8 file, their sizes and
their speed, and which layer lost most. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import amct.pytorch as amct

SEED = 0
EPOCHS = 8
CALIBRATION_IMAGES = 64


class DigitNet(nn.Module):
    """A small residual network with batch norms and a depthwise convolution, for images of 16×16."""

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


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1797 real handwritten digits that scikit-learn ships, as training and test images and labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = functional.interpolate(images, scale_factor=2, mode="nearest")
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    images, labels = images[order], labels[order]
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Plain training, a few seconds."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(60):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


def open_session(path: Path) -> onnxruntime.InferenceSession:
    """The file in onnxruntime, one thread, so that two files are measured alike."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def accuracy(session: onnxruntime.InferenceSession, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of test images whose highest score is the right digit, in percent."""
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return float(100 * np.mean(scores.argmax(1) == labels.numpy()))


def top1_accuracy(scores: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The same of one batch, for the report, which runs both models in torch."""
    return float(100 * (scores.argmax(1) == batch[1]).float().mean())


def latency(sessions: dict[str, onnxruntime.InferenceSession], images: torch.Tensor) -> dict[str, float]:
    """Milliseconds for a batch: the best of many runs, taken in turn so that noise meets all alike."""
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(60):
        for name, session in sessions.items():
            feed = {session.get_inputs()[0].name: images.numpy()}
            begin = time.perf_counter()
            session.run(None, feed)
            best[name] = min(best[name], 1000 * (time.perf_counter() - begin))
    return best


def show(rows: dict[str, Path], images: torch.Tensor, labels: torch.Tensor) -> None:
    """One table: accuracy, size and speed of each file."""
    sessions = {name: open_session(path) for name, path in rows.items()}
    times = latency(sessions, images[:64])
    table = Table(title=f"{len(labels)} test digits, onnxruntime, batches of 64")
    for column in ("model", "accuracy", "file", "latency"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, path in rows.items():
        table.add_row(
            name,
            f"{accuracy(sessions[name], images, labels):.2f} %",
            f"{path.stat().st_size / 1024:.1f} kB",
            f"{times[name]:.2f} ms",
        )
    Console().print(table)


def main() -> int:
    """Train, quantize, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="where the files go")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    images, labels, test_images, test_labels = digits()
    model = DigitNet()
    print(f"training DigitNet on {len(labels)} handwritten digits ...")
    train(model, images, labels)

    print(f"quantizing it with {CALIBRATION_IMAGES} of them ...")
    batch_open = amct.IoOptions(input_names=["image"], output_names=["scores"], dynamic_axes={"image": {0: "batch"}})
    quantized = amct.quantize(model, list(images[:CALIBRATION_IMAGES].split(32)), io=batch_open)
    print(quantized.summary())
    files = quantized.save(output / "digits")
    float_file = output / "digits_float.onnx"
    torch.onnx.export(
        model, (images[:32],), float_file, input_names=["image"], output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), external_data=False, verbose=False,
    )  # fmt: skip
    show({"float": float_file, "INT8 (QDQ)": output / "digits_qdq_model.onnx"}, test_images, test_labels)

    worst = min(quantized.compare(test_images[:200]), key=lambda layer: layer.sqnr)
    print(f"most harmed layer: {worst.layer} (SQNR {worst.sqnr:.1f} dB, cosine {worst.cosine:.5f})")
    print("files:", *(f"  {path}" for path in [float_file, *files]), sep="\n")
    test_batches = list(zip(test_images.split(100), test_labels.split(100), strict=True))
    report = quantized.report(output / "report.html", test_batches, top1_accuracy, files=[float_file, *files])
    print(f"report: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
