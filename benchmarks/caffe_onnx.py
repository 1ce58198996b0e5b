"""A quantized Caffe net as a QDQ file in onnxruntime, beside the float ONNX file and the float engine, in one run.

    python benchmarks/caffe_onnx.py                   on one thread, in CPU time: right on a busy machine too
    python benchmarks/caffe_onnx.py --rounds 40       longer

SqueezeNet and open_nsfw, calibrated with 16 pictures from the folder of real models (AMCT_ASSETS, or ../shared/assets
beside the project). The three take turns; the median of the ratios counts. The table is printed and written to
``benchmarks/results/caffe_onnx.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import amct.caffe
from amct.caffe.engine.net import Net
from amct.caffe.model import read_model
from amct.caffe.onnx.graph import float_onnx
from amct.caffe.ptq.folding import fuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from onnx import ModelProto

RESULTS = Path(__file__).parent / "results" / "caffe_onnx.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))
MEAN = (104, 117, 123)
BATCH, BATCHES = 4, 4
WANTED = 1.4


@dataclass(frozen=True)
class Model:
    """A net and the size of its input."""

    name: str
    prototxt: str
    caffemodel: str
    size: int


MODELS = (
    Model(
        "SqueezeNet 1.0",
        "caffe_squeezenet_v1.0_dc/SqueezeNet_deploy.prototxt",
        "caffe_squeezenet_v1.0_dc/squeezenet_v1.0_dc.caffemodel",
        227,
    ),
    Model("open_nsfw", "caffe_open_nsfw/deploy.prototxt", "caffe_open_nsfw/resnet_50_1by2_nsfw.caffemodel", 224),
)


@dataclass(frozen=True)
class Line:
    """The results of one net; CPU milliseconds per image."""

    model: str
    integer_kernels: str
    engine: float
    float_onnx: float
    qdq: float
    faster_than_float_onnx: float
    faster_than_engine: float
    cosine: float


def pictures(size: int, count: int) -> NDArray[np.float32]:
    """Centre crops, BGR, minus the mean."""
    rows = (ASSETS / "imagenet" / "labels.tsv").read_text().splitlines()[:count]
    start = (256 - size) // 2
    crops = []
    for row in rows:
        path = next((ASSETS / "imagenet").rglob(row.split("\t")[0]))
        colours = np.asarray(Image.open(path).convert("RGB"), np.float32)[start : start + size, start : start + size]
        crops.append((colours[..., ::-1] - MEAN).transpose(2, 0, 1))
    return np.stack(crops).astype(np.float32)


def exported(model: Model, data: NDArray[np.float32]) -> tuple[ModelProto, ModelProto]:
    """The ONNX model of the float net, and the QDQ model that ``amct.caffe.quantize`` saves."""
    files = ASSETS / model.prototxt, ASSETS / model.caffemodel
    batches = list(data.reshape(BATCHES, BATCH, *data.shape[1:]))
    with tempfile.TemporaryDirectory() as folder:
        amct.caffe.quantize(*files, batches).save(Path(folder) / "net", formats=["qdq"], check=False)
        quantized = onnx.load(Path(folder) / "net_qdq_model.onnx")
    fused = read_model(*files)
    fuse(fused)
    return float_onnx(fused.build()).model, quantized


def runner(model: ModelProto, picture: NDArray[np.float32]) -> Callable[[], Any]:
    """A forward pass in onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"data": picture})[0]


def measure(model: Model, rounds: int) -> Line:
    """The times of the three, measured alternately."""
    data = pictures(model.size, BATCH * BATCHES + 1)
    picture = data[-1:]
    floating, quantized = exported(model, data[:-1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qdq.onnx"
        path.write_bytes(quantized.SerializeToString())
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from amct.export.onnx.runtimes import count_integer_kernels

        kernels = count_integer_kernels(path)
    lean = Net.from_file(ASSETS / model.prototxt, keep_blobs=False)
    lean.load_weights(ASSETS / model.caffemodel)
    lean.blob("data").set_tensor(torch.from_numpy(picture))
    calls: list[Callable[[], Any]] = [lean.forward, runner(floating, picture), runner(quantized, picture)]
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 2):
        for call, seen in zip(calls, times, strict=True):
            before = time.process_time()
            call()
            call()
            if number >= 2:
                seen.append((time.process_time() - before) / 2 * 1000)
    one, two = calls[1]().ravel(), calls[2]().ravel()
    engine, floats, qdq = times
    return Line(
        model=model.name,
        integer_kernels=f"{kernels.integer} of {kernels.total}",
        engine=statistics.median(engine),
        float_onnx=statistics.median(floats),
        qdq=statistics.median(qdq),
        faster_than_float_onnx=statistics.median(a / b for a, b in zip(floats, qdq, strict=True)),
        faster_than_engine=statistics.median(a / b for a, b in zip(engine, qdq, strict=True)),
        cosine=float(np.dot(one, two) / np.linalg.norm(one) / np.linalg.norm(two)),
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    lines = [measure(model, rounds) for model in MODELS if (ASSETS / model.caffemodel).exists()]
    table = Table(title="One picture on one thread, ms of CPU time")
    for column in (
        "net",
        "integer kernels",
        "engine",
        "float ONNX",
        "QDQ",
        f"float / QDQ (≥ {WANTED})",
        "engine / QDQ",
    ):
        table.add_column(column, justify="left" if column == "net" else "right")
    for line in lines:
        cells = [f"{value:.1f}" for value in (line.engine, line.float_onnx, line.qdq)]
        ratios = f"{line.faster_than_float_onnx:.2f}", f"{line.faster_than_engine:.2f}"
        table.add_row(line.model, line.integer_kernels, *cells, *ratios)
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"cores": os.cpu_count(), "lines": [asdict(line) for line in lines]}, indent=1))


if __name__ == "__main__":
    main()
