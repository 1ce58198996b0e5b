"""What each file loses in each runtime: onnxruntime at every level of its optimizations, OpenVINO, our integers.

    python benchmarks/runtimes.py                          ResNet-20, SqueezeNet, EfficientNet-Lite0, MiniLM, LeNet
    python benchmarks/runtimes.py LeNet                    only names that contain one of these words
    python benchmarks/runtimes.py --table docs/runtimes.md     write the tables of the page

Needs what ``qdq_speed.py`` needs, and the extra ``bench``. Each network is quantized once and saved as every kind of
QDQ file, as fake-quant and as deploy file; the last runs in our integer executor. Each file runs in each runtime on the
same unseen data. Measured are: the convolutions and matrix products that run in integers, the SQNR and the classes
(the place of the largest output) beside the float model, the SQNR of the outputs beside onnxruntime without
optimizations, and the first tensor in which a runtime parts from it. Results are kept in
``benchmarks/results/runtimes.json``.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from qdq_speed import ASSETS, NETWORKS

import amct.caffe
from amct.cli.compare import PARTED, first_parting
from amct.errors import AmctError
from amct.export.check.integers import standard_model
from amct.export.onnx.runtimes import PLAIN, RUNTIMES, count_integer_kernels, load
from amct.onnx_model.comparing import measure_runtime
from amct.search.choices import INT4, plan_with
from amct_caffe import caffe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from amct.pipeline.quantized_model import QuantizedModel

    Feeds = dict[str, NDArray[Any]]

RESULTS = Path(__file__).parent / "results" / "runtimes.json"
INTEGERS = "our integer executor"
QDQ: dict[str, dict[str, str]] = {
    "QDQ, the default": {},
    "QDQ, `exact`": {"placement": "exact"},
    "QDQ, `exact` and `exact8`": {"placement": "exact", "target": "exact8"},
    "QDQ, `vnni`": {"target": "vnni"},
}
W4, FAKE, DEPLOY = "QDQ, weights of 4 bits", "fake-quant", "deploy"
SAMPLES, BATCH = 256, 8
START, END = "<!-- runtimes -->\n", "<!-- end -->"


def lenet() -> tuple[QuantizedModel, Sequence[Feeds], Sequence[Feeds]]:
    """The published LeNet on MNIST."""
    folder = ASSETS / "caffe_lenet_mnist"
    raw = gzip.decompress((ASSETS / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    pictures = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28)[: 2 * SAMPLES].astype(np.float32) / 256
    batches = [{"data": pictures[start : start + BATCH]} for start in range(0, len(pictures), BATCH)]
    half = len(batches) // 2
    files = folder / "lenet.prototxt", folder / "lenet_iter_10000.caffemodel"
    return amct.caffe.quantize(*files, batches[:half]), batches[:half], batches[half:]


def files_of(quantized: QuantizedModel, folder: Path) -> dict[str, Path]:
    """Every file of one network."""
    files = {}
    for number, (name, options) in enumerate(QDQ.items()):
        quantized.save(folder / str(number), ["qdq"], check=False, **options)
        files[name] = folder / f"{number}_qdq_model.onnx"
    prepared = quantized.prepared
    plan = plan_with(prepared.plan, dict.fromkeys(prepared.layers, INT4), prepared.freedom())
    quantized.variant(plan).save(folder / "w4", ["qdq"], check=False)
    files[W4] = folder / "w4_qdq_model.onnx"
    quantized.save(folder / "net", ["fake_quant", "deploy"], check=False)
    if (folder / "net_fake_quant_model.onnx").exists():  # of Caffe nets both are pairs of Caffe's files
        files[FAKE] = folder / "net_fake_quant_model.onnx"
    return files


def deployed(folder: Path, data: Sequence[Feeds]) -> NDArray[Any]:
    """The outputs of the deploy file in our integer executor, of a Caffe pair in our engine."""
    file = folder / "net_deploy_model.onnx"
    if file.exists():
        return outputs(standard_model(onnx.load(file)), PLAIN, data)
    net = caffe.Net(
        str(folder / "net_deploy_model.prototxt"), str(folder / "net_deploy_weights.caffemodel"), caffe.TEST
    )
    parts = []
    for feeds in data:
        for name, values in feeds.items():
            net.blobs[name].reshape(*values.shape)
        parts.append(next(iter(net.forward(**feeds).values())).copy())
    found = np.concatenate(parts)
    return found.reshape(len(found), -1)


def sqnr(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Decibels."""
    exact = expected.astype(np.float64)
    noise = float(np.square(found - exact).sum())
    return 10 * math.log10(float(np.square(exact).sum()) / noise) if noise else math.inf


def outputs(model: onnx.ModelProto, runtime: str, data: Sequence[Feeds]) -> NDArray[Any]:
    """The first output of all batches, a row for each sample."""
    loaded = load(model, runtime)
    taken = {value.name for value in model.graph.input}
    parts = [loaded.run({k: v for k, v in feeds.items() if k in taken})[loaded.outputs[0]] for feeds in data]
    found = np.concatenate(parts)
    return found.reshape(len(found), -1)


def measure(file: Path, data: Sequence[Feeds], exact: NDArray[Any]) -> dict[str, Any]:
    """One file in every runtime."""
    model, found = onnx.load(file), dict[str, Any]()
    plain: NDArray[Any] | None = None
    for runtime in RUNTIMES:
        try:
            values = outputs(model, runtime, data)
            kernels = count_integer_kernels(file, runtime)
            parts_at = None if runtime == PLAIN else first_parting(measure_runtime(file, data[:4], runtime))
        except AmctError as error:
            found[runtime] = {"error": str(error)}
            continue
        plain = values if plain is None else plain
        found[runtime] = {
            **judged(exact, values),
            "integer": kernels.integer,
            "products": kernels.total,
            "beside_plain": min(sqnr(plain, values), 200.0),
            "parts_at": parts_at,
        }
    return found


def judged(exact: NDArray[Any], values: NDArray[Any]) -> dict[str, float]:
    """SQNR, and the share of samples with the class of the float model."""
    return {"sqnr": sqnr(exact, values), "same_class": float((values.argmax(1) == exact.argmax(1)).mean())}


def network(quantized: QuantizedModel, data: Sequence[Feeds]) -> dict[str, Any]:
    """All files of one network."""
    exact = outputs(quantized.prepared.float_model(None), PLAIN, data)
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(quantized, Path(folder))
        found = {name: measure(file, data, exact) for name, file in files.items()}
        try:
            found[DEPLOY] = {INTEGERS: judged(exact, deployed(Path(folder), data))}
        except AmctError as error:
            found[DEPLOY] = {INTEGERS: {"error": str(error)}}
    return {"samples": len(exact), "files": found}


def tables(results: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = []
    for name, found in results.items():
        lines += [f"### {name}", "", f"{found['samples']} unseen samples.", ""]
        lines += ["| file | " + " | ".join(f"`{each}`" for each in RUNTIMES) + " |"]
        lines += ["| --- |" + " --- |" * len(RUNTIMES)]
        for file, runs in found["files"].items():
            if file != DEPLOY:
                lines.append(f"| {file} | " + " | ".join(cell(runs[each]) for each in RUNTIMES) + " |")
        ours = found["files"][DEPLOY][INTEGERS]
        lines += ["", f"The deploy file in our integer executor: {cell(ours)}.", ""]
        parted = partings(found["files"])
        lines += [*parted, ""] if parted else []
    return "\n".join(lines)


def partings(files: dict[str, Any]) -> list[str]:
    """Where runtimes whose outputs differ from those without optimizations begin to differ; equal ones in one line."""
    lines = []
    for file, runs in files.items():
        found: dict[tuple[str, str], list[str]] = {}
        for runtime, run in runs.items():
            if run.get("parts_at") and run["beside_plain"] < PARTED:
                found.setdefault((run["parts_at"], f"{run['beside_plain']:.0f} dB"), []).append(f"`{runtime}`")
        lines += [f"- {file}, {', '.join(names)}: first at `{at}`; outputs {level} beside `{PLAIN}`"
                  for (at, level), names in found.items()]  # fmt: skip
    return lines


def cell(run: dict[str, Any]) -> str:
    """One file in one runtime."""
    if "error" in run:
        return "does not run"
    count = f"{run['integer']} of {run['products']}, " if "products" in run else ""
    return f"{count}{run['sqnr']:.1f} dB, {run['same_class']:.1%}"


def main() -> None:
    """Measure, print, write."""
    words = sys.argv[1:]
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if words[:1] == ["--table"]:
        page = Path(words[1])
        before, _, rest = page.read_text().partition(START)
        page.write_text(f"{before}{START}{tables(kept['networks'])}{END}{rest.partition(END)[2]}")
        return
    if not ASSETS.is_dir():
        print(f"left out: the real models are not in {ASSETS} (set AMCT_ASSETS)")
        return
    torch.set_num_threads(1)
    results = kept.get("networks", {})
    for name, (make, package) in {**NETWORKS, "LeNet": (lenet, "torch")}.items():
        if (words and not any(word in name for word in words)) or importlib.util.find_spec(package) is None:
            continue
        print(name, flush=True)
        quantized, _, unseen = make()
        results[name] = network(quantized, unseen)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"rows": rows(results), "networks": results}, indent=1) + "\n")
    print(tables(results))


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals: the default file runs in integers in onnxruntime and OpenVINO, and means the same there."""
    found = []
    for name, each in results.items():
        for runtime in ("onnxruntime", "openvino"):
            run = each["files"]["QDQ, the default"][runtime]
            kept = "error" not in run and run["integer"] == run["products"]
            found.append({"what": f"{name}: the default QDQ file in {runtime}", "measured": cell(run),
                          "wanted": "all in integers", "kept": kept})  # fmt: skip
    return found


if __name__ == "__main__":
    main()
