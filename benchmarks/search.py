"""How many evaluations a search for settings takes, how small its results are, and how often a certificate is wrong.

    python benchmarks/search.py                 all lines
    python benchmarks/search.py certificates    only lines whose name contains this

ResNet-20 on CIFAR-10 from the folder of real models (AMCT_ASSETS, or ../shared/assets beside the project): 256 training
pictures calibrate, the test pictures are searched on and certify. Evaluations are the samples scored divided by the
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "pytorch"))

from real_models import cifar_images, cifar_resnet  # noqa: E402  tests are no package

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
EIGHT, FOUR_OR_EIGHT, LEARNED = ("float", "int8"), ("int8", "int4"), ("int8", "int4", "adaround4")


class Cifar:
    """ResNet-20 and its pictures."""

    def __init__(self) -> None:
        self.model = cifar_resnet(ASSETS, 20)
        images, _ = cifar_images(ASSETS, "train_10000", CALIBRATION)
        self.calibration = list(images.split(32))
        self.labelled = cifar_images(ASSETS, "test_6000")
        self.eight_bits = file_bytes(amct.quantize(self.model, self.calibration))

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
            found = amct.quantize_to(self.model, self.calibration, self.labelled, **options)
        finally:
            SampleJudge.prepare = prepare  # type: ignore[method-assign]
        return found, judges[0].evaluations, time.process_time() - begin


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


def searched(cifar: Cifar, name: str, most: float, share: float | None, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """The rows of one search."""
    found, evaluations, seconds = cifar.search(**options)
    certificate = found.certificate
    assert certificate is not None
    size, eight = weight_bytes(found)
    files = file_bytes(found) / cifar.eight_bits
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


def certificates(cifar: Cifar) -> list[dict[str, Any]]:
    """How often the bound is wrong, and how far it is from what was measured."""
    found = amct.quantize(
        cifar.model,
        cifar.calibration,
        amct.QuantConfig(common=amct.LayerConfig(weights=amct.ArqSettings(num_bits=4))),
        io=amct.IoOptions(dynamic_axes={"x": [0]}),
    )
    import torch

    images, labels = cifar.labelled
    with torch.no_grad():
        hits = [
            torch.cat([model(part).argmax(1) for part in images.split(250)]).eq(labels).double().numpy()
            for model in (cifar.model, found.model)
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
    cifar = Cifar()
    lines: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "ResNet-20, 4 or 8 bits, drop ≤ 1.0": lambda: searched(
            cifar, "ResNet-20, 4 or 8 bits, drop ≤ 1.0", 6, 0.62, max_drop=1.0, choices=FOUR_OR_EIGHT
        ),
        "ResNet-20, with learned rounding, drop ≤ 1.0": lambda: searched(
            cifar, "ResNet-20, with learned rounding, drop ≤ 1.0", 6, 0.58, max_drop=1.0, choices=LEARNED
        ),
        "ResNet-20, 4 or 8 bits, drop ≤ 0.3": lambda: searched(
            cifar, "ResNet-20, 4 or 8 bits, drop ≤ 0.3", 6, None, max_drop=0.3, choices=FOUR_OR_EIGHT
        ),
        "ResNet-20, 8 bits or float, drop ≤ 1.0": lambda: searched(
            cifar, "ResNet-20, 8 bits or float, drop ≤ 1.0", 2, None, max_drop=1.0, choices=EIGHT
        ),
        "certificates": lambda: certificates(cifar),
    }
    rows = [each for name, line in lines.items() if wanted in name for each in line()]
    for each in rows:
        kept = {True: "", False: "MISSED", None: ""}[each["kept"]]
        sys.stdout.write(f"{each['what']:<62} {each['measured']:>14}  {each['wanted']:<14} {kept}\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows, "partial": bool(wanted)}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:2])
