"""What bounded pairs gain over 7-bit weights in the QDQ file for every CPU.

    python benchmarks/portable_weights.py

ResNet-20 (512 images calibrate it, 1024 others judge) and EfficientNet-Lite0 (16 and 64), from the folder of real
models (AMCT_ASSETS, or ../shared/assets beside the project): the SQNR of the file's outputs against the float model,
with weights of 7 bits, with 8 bits and bounded pairs (target "portable"), and with 8 bits (target "vnni", which needs
VNNI). The files are run without onnxruntime's optimizations, so the CPU does not matter. The table is printed
and written to ``benchmarks/results/portable_weights.json``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import amct.caffe
import amct.pytorch
from amct.export.onnx.layer import OnnxLayer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))

from real_models import cifar_images, cifar_resnet  # noqa: E402  found through the path above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "portable_weights.json"
FILES = {"7 bits": "portable", "bounded pairs": "portable", "8 bits (VNNI)": "vnni"}


@contextmanager
def seven_bits() -> Iterator[None]:
    """Weights are rounded again to 7 bits, which need no bound."""
    own = OnnxLayer.requantized_weight

    def narrow(
        self: OnnxLayer, bits: int, *, bounded_pairs: bool = False
    ) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        del bits, bounded_pairs
        return own(self, 7)

    OnnxLayer.requantized_weight = narrow  # type: ignore[method-assign]
    try:
        yield
    finally:
        OnnxLayer.requantized_weight = own  # type: ignore[method-assign]


def lite0_images(count: int) -> NDArray[np.float32]:
    """Centre crops, RGB, (x - 127) / 128."""
    rows = (ASSETS / "imagenet" / "labels.tsv").read_text().splitlines()[:count]
    paths = [next((ASSETS / "imagenet").rglob(row.split("\t")[0])) for row in rows]
    crops = [np.asarray(Image.open(path).convert("RGB"), np.float32)[16:240, 16:240] for path in paths]
    return ((np.stack(crops).transpose(0, 3, 1, 2) - 127) / 128).astype(np.float32)


def resnet20() -> tuple[Any, NDArray[np.float32], NDArray[np.float32]]:
    """The quantized model, the images that judge it, and the float outputs."""
    model = cifar_resnet(ASSETS, 20)
    data = cifar_images(ASSETS, "train_10000", 512)[0]
    images = cifar_images(ASSETS, "test_6000", 1024)[0]
    with torch.no_grad():
        expected = model(images).numpy()
    return amct.pytorch.quantize(model, data.split(64)), images.numpy(), expected


def lite0() -> tuple[Any, NDArray[np.float32], NDArray[np.float32]]:
    """The same for EfficientNet-Lite0."""
    folder = ASSETS / "caffe_efficientnet_lite0"
    images = lite0_images(80)
    files = folder / "deploy.prototxt", folder / "efficientnet_lite0.caffemodel"
    quantized = amct.caffe.quantize(*files, list(images[:16].reshape(4, 4, *images.shape[1:])))
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "float.onnx"
        amct.caffe.export_onnx(*files, path)
        return quantized, images[16:], outputs(path, images[16:])


def outputs(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """The first output of an ONNX file for images of any number."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    step = given.shape[0] if isinstance(given.shape[0], int) else 16
    parts = [images[start : start + step] for start in range(0, len(images), step)]
    return np.concatenate([session.run(None, {given.name: part})[0] for part in parts])


def sqnr(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Decibels."""
    wide = expected.astype(np.float64)
    return 10 * math.log10(np.square(wide).sum() / np.square(found - wide).sum())


def measure(make: Callable[[], tuple[Any, NDArray[np.float32], NDArray[np.float32]]]) -> dict[str, Any]:
    """SQNR and agreement of the first class with the float model, by file."""
    quantized, images, expected = make()
    found: dict[str, Any] = {}
    for name, target in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            prefix = str(Path(folder) / "net")
            if name == "7 bits":
                with seven_bits():
                    quantized.save(prefix, ["qdq"], target=target)
            else:
                quantized.save(prefix, ["qdq"], target=target)
            values = outputs(Path(folder) / "net_qdq_model.onnx", images)
        same = float((values.argmax(1) == expected.argmax(1)).mean())
        found[name] = {"sqnr": sqnr(expected, values), "same_class": same}
    return found


def rows_of(net: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of one net in the table of docs/benchmarks.md."""
    rows = []
    for name, each in found.items():
        measured = f"{each['sqnr']:.2f} dB, the float model's class for {each['same_class']:.1%}"
        better = each["sqnr"] >= found["7 bits"]["sqnr"] if name == "bounded pairs" else None
        wanted = "" if better is None else "≥ with 7 bits"
        rows.append({"what": f"{net}, weights with {name}", "measured": measured, "wanted": wanted, "kept": better})
    return rows


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    results = {"ResNet-20": measure(resnet20), "EfficientNet-Lite0": measure(lite0)}
    table = Table("net", *FILES, title="SQNR of the QDQ file's outputs, dB (same first class)")
    for net, found in results.items():
        cells = [f"{each['sqnr']:.2f} ({each['same_class']:.1%})" for each in found.values()]
        table.add_row(net, *cells)
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    rows = [row for net, found in results.items() for row in rows_of(net, found)]
    RESULTS.write_text(json.dumps({"nets": results, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
