"""Caffe's LeNet: train it with its solver, quantize it for the chip, run the INT8 files. No Caffe is installed.

Run alone it is the shortest example of ``amct.caffe``::

    python examples/caffe_lenet.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import digits
import numpy as np
from measuring import Example

import amct.caffe as amct
from amct_caffe import caffe

if TYPE_CHECKING:
    from digits import Digits
    from numpy.typing import NDArray

LENET = Path(__file__).parent / "lenet"
DEPLOY = LENET / "deploy.prototxt"


def load_digits() -> Digits:
    """Digits of 28×28 with a margin, the image size of LeNet."""
    return digits.load(enlarge=3, margin=2)


def train(data: Digits, folder: Path) -> Path:
    """Train as ``caffe train --solver solver.prototxt`` does, with images from memory; returns the caffemodel."""
    solver_file = folder / "lenet_solver.prototxt"
    text = (LENET / "solver.prototxt").read_text()
    # Caffe resolves the net's path from the working folder.
    solver_file.write_text(text.replace("train.prototxt", (LENET / "train.prototxt").as_posix()))
    solver = caffe.get_solver(str(solver_file))
    solver.net.set_input_arrays(data.images, data.labels.astype(np.float32))
    solver.solve()
    weights = folder / "lenet.caffemodel"
    solver.net.save(str(weights))
    return weights


def top1_accuracy(
    outputs: dict[str, NDArray[np.float32]], batch: tuple[NDArray[np.float32], NDArray[np.int64]]
) -> float:
    """The accuracy of one batch; the report calls it for the float and the quantized net."""
    return float(100 * np.mean(outputs["prob"].argmax(1) == batch[1]))


def quantize(weights: Path, data: Digits, folder: Path) -> Example:
    """Calibrate with 64 images, write the files, compare, write the report."""
    quantized = amct.quantize(DEPLOY, weights, data.calibration_batches())
    files = quantized.save(folder / "lenet")

    tests = data.test_batches()
    worst = min(quantized.compare(tests), key=lambda layer: layer.sqnr)
    float_file = folder / "lenet_float.onnx"
    amct.export_onnx(DEPLOY, weights, float_file)  # for comparison only
    report = quantized.report(folder / "lenet.html", tests, top1_accuracy, files=[weights, *files])
    return Example(
        title="Caffe LeNet",
        data=data,
        float_file=float_file,
        int8_file=folder / "lenet_qdq_model.onnx",
        report=report,
        most_harmed=f"{worst.layer} ({worst.sqnr:.1f} dB)",
    )


def main() -> int:
    """Write everything to ``out/demo``."""
    folder = Path("out/demo")
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    print(quantize(train(data, folder), data, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
