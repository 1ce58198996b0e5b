"""The share of the check of written files in the whole job, quantize and save, for small networks through each door.

    python benchmarks/check_share.py                      all networks
    python benchmarks/check_share.py Caffe lenet          only names that contain one of these words

The networks are those of ``benchmarks/zoo.py`` that need no other package, and the real models (AMCT_ASSETS, or
shared/assets beside the project); the ONNX door gets the float files of the torch networks. 8 batches, defaults, all
formats. CPU seconds of one thread: each job runs once before it is timed, then its turns alternate with those of the
others; the median counts. The table is printed and written to ``benchmarks/results/check_share.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "pytorch")]
os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")

import numpy as np  # noqa: E402  the networks are found through the path above
import onnx  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo_networks import own, prototxts  # noqa: E402

import amct.caffe  # noqa: E402
import amct.onnx_model  # noqa: E402
import amct.pytorch  # noqa: E402
from amct.caffe.ptq import checking as caffe_checking  # noqa: E402
from amct.export.check import checking  # noqa: E402
from amct.ptq import quantized_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amct.ptq.quantized_model import QuantizedModel

    Build = Callable[[Path], Callable[[], QuantizedModel]]

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "check_share.json"
TURNS = 3
MOST = 0.20
BATCHES = 8
TORCH = ("mlp", "lenet", "cifar_resnet", "unet", "attention", "keyword_spotter")
CAFFE = ("mobilenet", "squeezenet", "resnet", "mtcnn_pnet")
REAL_CAFFE = {
    "LeNet": ("caffe_lenet_mnist/lenet.prototxt", "caffe_lenet_mnist/lenet_iter_10000.caffemodel", (1, 28, 28)),
    "CIFAR-10 quick": ("caffe_cifar10_quick/cifar10_quick.prototxt",
                       "caffe_cifar10_quick/cifar10_quick_iter_5000.caffemodel", (3, 32, 32)),
    "MTCNN det2": ("caffe_mtcnn/det2.prototxt", "caffe_mtcnn/det2.caffemodel", (3, 24, 24)),
    "SqueezeNet": ("caffe_squeezenet_v1.0_dc/SqueezeNet_deploy.prototxt",
                   "caffe_squeezenet_v1.0_dc/squeezenet_v1.0_dc.caffemodel", (3, 227, 227)),
}  # fmt: skip


class Stopwatch:
    """CPU seconds inside the functions of the check; a call inside another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._watch(quantized_model, "reference")
        self._watch(checking.OnnxCheck, "check")
        self._watch(caffe_checking, "check_save")
        self._watch(caffe_checking, "check_onnx")

    def _watch(self, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            begin = time.process_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begin

        setattr(owner, name, watched)


def torch_job(build: Callable[[Path], Any], folder: Path) -> Callable[[], QuantizedModel]:
    """A network of the zoo, made anew: a model that was seen before is not captured again."""
    return build(folder).quantize  # type: ignore[no-any-return]


def onnx_job(build: Callable[[Path], Any], folder: Path) -> Callable[[], QuantizedModel]:
    """The same network as an ONNX file."""
    subject, path = build(folder), folder / "float.onnx"
    model = subject.float_onnx(subject.quantize())
    onnx.save(model, path)
    names = [value.name for value in model.graph.input]
    batches = [subject.feeds(batch, names) for batch in subject.calibration]
    return lambda: amct.onnx_model.quantize(path, batches)


def caffe_job(prototxt: Path, caffemodel: Path, shape: tuple[int, ...], _: Path) -> Callable[[], QuantizedModel]:
    """A real Caffe net, with random pixels."""
    rng = np.random.default_rng(0)
    batches = [{"data": rng.uniform(-1, 1, (1, *shape)).astype(np.float32)} for _ in range(BATCHES)]
    return lambda: amct.caffe.quantize(prototxt, caffemodel, batches)


def resnet20_job(_: Path) -> Callable[[], QuantizedModel]:
    """The trained ResNet-20."""
    from real_models import cifar_images, cifar_resnet

    model, data = cifar_resnet(ASSETS, 20), list(cifar_images(ASSETS, "train_10000", 8 * BATCHES)[0].split(8))
    return lambda: amct.pytorch.quantize(model, data)


def jobs() -> Iterator[tuple[str, Build]]:
    """All jobs by name."""
    zoo = {network.name.partition("/")[2]: network.build for network in own.networks()}
    for name in TORCH:
        yield f"PyTorch: {name}", partial(torch_job, zoo[name])
    for name in TORCH:
        yield f"ONNX: {name}", partial(onnx_job, zoo[name])
    zoo = {network.name.partition("/")[2]: network.build for network in prototxts.networks()}
    for name in CAFFE:
        yield f"Caffe: {name}", partial(torch_job, zoo[name])
    if not ASSETS.is_dir():
        print(f"left out: the real models are not in {ASSETS} (set AMCT_ASSETS)")
        return
    yield "PyTorch: ResNet-20, batches of 8", resnet20_job
    for name, (prototxt, caffemodel, shape) in REAL_CAFFE.items():
        yield f"Caffe: {name}", partial(caffe_job, ASSETS / prototxt, ASSETS / caffemodel, shape)


def turn(build: Build, watch: Stopwatch) -> tuple[float, float]:
    """CPU seconds of one job, and of the check in it."""
    with tempfile.TemporaryDirectory() as text:
        quantize = build(Path(text))
        watch.seconds, begin = 0.0, time.process_time()
        quantize().save(Path(text) / "net")
        return time.process_time() - begin, watch.seconds


def main() -> None:
    """Measure, print, write."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    words = sys.argv[1:]
    chosen = {name: build for name, build in jobs() if not words or any(word in name for word in words)}
    watch, found = Stopwatch(), {name: list[tuple[float, float]]() for name in chosen}
    for number in range(TURNS + 1):
        for name, build in chosen.items():
            measured = turn(build, watch)
            if number:  # what is loaded on first use belongs to no network
                found[name].append(measured)
    rows = []
    table = Table("what", "measured", "wanted", "kept", title="the check's share of quantize and save")
    for name, turns in found.items():
        share, whole = median(check / job for job, check in turns), median(job for job, _ in turns)
        text = f"{share * whole:.2f} of {whole:.2f} CPU s = {share:.0%}"
        rows.append({"what": name, "measured": text, "wanted": f"<= {MOST:.0%}", "kept": share <= MOST})
        table.add_row(name, text, f"<= {MOST:.0%}", "yes" if share <= MOST else "[red]NO[/red]")
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows, "partial": bool(words)}, indent=1) + "\n")
    sys.exit(0 if all(row["kept"] for row in rows) else 1)


if __name__ == "__main__":
    main()
