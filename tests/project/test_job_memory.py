"""The peak memory of quantize and save, in multiples of the float parameters, through each front door."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("door", ["pytorch", "onnx", "caffe"])
def test_a_job_needs_few_copies_of_the_weights(benchmark, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP of 20 million parameters: the user's model, the folded one, and the one that is being looked at."""
    # What the C library keeps of freed blocks varies by a third of the parameters: here it keeps no large ones.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    lines = []
    while not lines or (lines[-1].ratio > benchmark.MOST and len(lines) < 3):  # holes in a heap only add to a peak
        lines += benchmark.measure(benchmark.NETWORKS["mlp-20m"], [door])

    assert all(line.parameters_mb > 80 for line in lines)
    assert all(line.peak_mb > line.toy_mb + line.parameters_mb for line in lines)  # the weights are there at least once
    assert min(line.ratio for line in lines) <= benchmark.MOST
