"""What the files for the chip lose, beside the file for onnxruntime.

    python benchmarks/accuracy.py [--test 536]

EfficientNet-Lite0 (the Caffe pair in the folder of real models: AMCT_ASSETS, or ../shared/assets beside the project):
of its 600 pictures 64 calibrate, and the others judge, for three calibration sets drawn by a seeded generator. Measured
is the SQNR of the logits against the float model and how often both name the same class: of the simulation, whose
integers and biases deploy and fake-quant file hold, and of the QDQ files for CPUs with and without VNNI, run without
onnxruntime's optimizations. The table is printed and written to ``benchmarks/results/accuracy.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from portable_weights import ASSETS, lite0_images, outputs, sqnr
from rich.console import Console
from rich.table import Table

import amct.caffe

if TYPE_CHECKING:
    from numpy.typing import NDArray

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "accuracy.json"
PICTURES, CALIBRATION, BATCH = 600, 64, 8
SETS = (0, 1, 2)
LEAST_SQNR, LEAST_AGREEMENT, MOST_BEHIND = 24.0, 0.975, 0.5


def lite0_files() -> tuple[Path, Path]:
    """The float model."""
    folder = ASSETS / "caffe_efficientnet_lite0"
    return folder / "deploy.prototxt", folder / "efficientnet_lite0.caffemodel"


def judged(expected: NDArray[np.float32], found: NDArray[np.float32]) -> dict[str, float]:
    """SQNR, and the share of pictures with the class of the float model."""
    wanted, got = (values.reshape(len(expected), -1) for values in (expected, found))
    return {"sqnr": sqnr(wanted, got), "same_class": float((wanted.argmax(1) == got.argmax(1)).mean())}


def measure(pictures: NDArray[np.float32], expected: NDArray[np.float32], seed: int, count: int) -> dict[str, Any]:
    """What each file loses with one calibration set, judged on ``count`` of the other pictures."""
    order = np.random.default_rng(seed).permutation(len(pictures))
    calibration, test = pictures[order[:CALIBRATION]], order[CALIBRATION : CALIBRATION + count]
    batches = list(calibration.reshape(-1, BATCH, *calibration.shape[1:]))
    quantized = amct.caffe.quantize(*lite0_files(), batches)
    steps = [test[start : start + BATCH] for start in range(0, len(test), BATCH)]
    parts = [next(iter(quantized(pictures[part]).values())) for part in steps]
    found = {"deploy, fake-quant": judged(expected[test], np.concatenate(parts))}
    with tempfile.TemporaryDirectory() as folder:
        for target in ("vnni", "portable"):
            quantized.save(Path(folder) / target, ["qdq"], target=target, check=False)
            values = outputs(Path(folder) / f"{target}_qdq_model.onnx", pictures[test])
            found[f"QDQ, {target}"] = judged(expected[test], values)
    return found


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the table of docs/benchmarks.md: means over the calibration sets."""
    chip = [each["deploy, fake-quant"] for each in found]
    rows = []
    for name in found[0]:
        levels, agreement = (mean(each[name][key] for each in found) for key in ("sqnr", "same_class"))
        row = {"what": f"EfficientNet-Lite0, {name}", "measured": f"{levels:.1f} dB, {agreement:.1%}"}
        wanted = f"≥ {LEAST_SQNR:g} dB, ≥ {LEAST_AGREEMENT:.1%}" if name == "deploy, fake-quant" else ""
        kept = levels >= LEAST_SQNR and agreement >= LEAST_AGREEMENT if wanted else None
        rows.append({**row, "wanted": wanted, "kept": kept})
    behind = max(each["QDQ, portable"]["sqnr"] - own["sqnr"] for each, own in zip(found, chip, strict=True))
    what = "EfficientNet-Lite0, deploy below the QDQ file, worst of three calibration sets"
    wanted = f"≤ {MOST_BEHIND:g} dB"
    return [*rows, {"what": what, "measured": f"{behind:.1f} dB", "wanted": wanted, "kept": behind <= MOST_BEHIND}]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--test", type=int, default=PICTURES - CALIBRATION, help="pictures that judge")
    count = parser.parse_args().test
    torch.set_num_threads(1)
    pictures = lite0_images(PICTURES)
    with tempfile.TemporaryDirectory() as folder:
        amct.caffe.export_onnx(*lite0_files(), Path(folder) / "float.onnx")
        expected = outputs(Path(folder) / "float.onnx", pictures)
    found = [measure(pictures, expected, seed, count) for seed in SETS]
    rows = rows_of(found)
    table = Table("what", "measured", "wanted", "kept", title=f"judged by {count} pictures, mean of {len(SETS)} sets")
    for row in rows:
        kept = "" if row["kept"] is None else "yes" if row["kept"] else "no"
        table.add_row(row["what"], row["measured"], row["wanted"], kept)
    Console().print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"sets": found, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
