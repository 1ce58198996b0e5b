"""Accuracy, size and speed of an ONNX file in onnxruntime, for the demo's table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

if TYPE_CHECKING:
    from pathlib import Path

    from digits import Digits

LATENCY_BATCH = 64
TURNS = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """The files and results of an example."""

    title: str
    data: Digits
    float_file: Path
    int8_file: Path
    report: Path
    most_harmed: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one file."""

    accuracy: float
    """Percentage of test images whose highest score is the right digit."""
    size: int
    """Bytes."""
    latency: float
    """Milliseconds for a batch of 64 on one thread."""


def measure(example: Example) -> tuple[Figures, Figures]:
    """Measure the float and the INT8 file of an example on all test images."""
    digits, files = example.data, (example.float_file, example.int8_file)
    sessions = [_open(path) for path in files]
    first, second = (
        Figures(accuracy=_accuracy(session, digits), size=path.stat().st_size, latency=latency)
        for path, session, latency in zip(files, sessions, _latencies(sessions, digits), strict=True)
    )
    return first, second


def _open(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # makes both files comparable on a busy machine
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _accuracy(session: onnxruntime.InferenceSession, digits: Digits) -> float:
    (scores,) = session.run(None, {session.get_inputs()[0].name: digits.test_images})
    return float(100 * np.mean(scores.argmax(1) == digits.test_labels))


def _latencies(sessions: list[onnxruntime.InferenceSession], digits: Digits) -> list[float]:
    """The best of many runs, measured alternately so that noise affects all equally."""
    best = [float("inf")] * len(sessions)
    for _ in range(TURNS):
        for place, session in enumerate(sessions):
            feed = {session.get_inputs()[0].name: digits.test_images[:LATENCY_BATCH]}
            begin = time.perf_counter()
            session.run(None, feed)
            best[place] = min(best[place], 1000 * (time.perf_counter() - begin))
    return best
