"""Which weights onnxruntime's kernels add in 16 bits: the order that ``paired_weights.py`` is written for.

A NumPy model of ``vpmaddubsw`` with the pairs of the product must give what onnxruntime gave on a CPU without VNNI
(``pair_kernels.py`` says how that was recorded), and with other pairs it must not.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from pair_kernels import CASES, run

from amct.numerics.rounding import adds_pairs, paired

GOLDEN = Path(__file__).parents[1] / "golden" / "export" / "pair_kernels.npz"
IDS = [case.name for case in CASES]
PAIRED = [case for case in CASES if "depthwise" not in case.name]


def patches(case, values):
    """The inputs of every output element ``[batch, groups, elements, Cin/groups · positions]``, inputs first."""
    kernel = case.weight[2:]
    values = values.astype(np.int64)
    if not kernel:
        return values[:, np.newaxis, np.newaxis]
    windows = np.lib.stride_tricks.sliding_window_view(values, kernel, axis=tuple(range(2, values.ndim)))
    positions, elements = int(np.prod(kernel)), int(np.prod(windows.shape[2 : values.ndim]))
    by_input = windows.reshape(len(values), case.groups, case.weight[1], elements, positions)
    return by_input.swapaxes(2, 3).reshape(len(values), case.groups, elements, -1)


def kernel_output(case, pairs, *, saturates=True):
    """What a kernel gives that adds ``pairs`` in 16 bits: indices into the row of an output, one past it for a zero."""
    weight, values = case.integers()
    rows = weight.reshape(case.groups, case.weight[0] // case.groups, -1).astype(np.int64)
    rows = np.pad(rows, ((0, 0), (0, 0), (0, 1)))
    inputs = np.pad(patches(case, values), ((0, 0), (0, 0), (0, 0), (0, 1)))
    products = inputs[:, :, np.newaxis] * rows[np.newaxis, :, :, np.newaxis]
    sums = products[..., pairs].sum(-1)
    total = np.clip(sums, -(2**15), 2**15 - 1).sum(-1) if saturates else sums.sum(-1)
    quantized = np.clip(np.rint(total / case.step) + 128, 0, 255).astype(int)
    return quantized.reshape(len(values), case.weight[0], -1)


def product_pairs(case):
    """The pairs of ``paired_weights``: ``[pairs, 2]``."""
    count = int(np.prod(case.weight[1:]))
    numbers = paired(torch.arange(1, count + 1).reshape(1, *case.weight[1:]))[0].numpy() - 1
    return np.where(numbers < 0, count, numbers)


def other_pairs(case):
    """Orders that one could expect: inputs first; from the second weight on; each with its neighbour's neighbour."""
    count = int(np.prod(case.weight[1:]))
    own = product_pairs(case)
    orders = {
        "inputs first": np.arange(count + count % 2).reshape(-1, 2),
        "from the second on": np.roll(own.ravel(), -1).reshape(-1, 2),
        "first and third": np.pad(own.ravel(), (0, -own.size % 4), constant_values=count).reshape(-1, 2, 2),
    }
    orders["first and third"] = orders["first and third"].swapaxes(1, 2).reshape(-1, 2)
    return {name: order for name, order in orders.items() if not np.array_equal(order, own)}


def recorded(case):
    with np.load(GOLDEN) as golden:
        return golden[case.name].astype(int).reshape(case.input[0], case.weight[0], -1)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_pairs_are_those_of_the_kernels(case):
    saturates = adds_pairs(case.weight, case.groups)
    difference = np.abs(kernel_output(case, product_pairs(case), saturates=saturates) - recorded(case))
    # A sum on a half may be rounded to the other side; a wrong order is off by several steps.
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("case", PAIRED, ids=[case.name for case in PAIRED])
def test_other_pairs_are_not(case):
    orders = other_pairs(case)
    assert "from the second on" in orders
    for name, order in orders.items():
        assert np.abs(kernel_output(case, order) - recorded(case)).max() > 1, name
    exact = kernel_output(case, product_pairs(case), saturates=False)
    assert np.abs(exact - recorded(case)).max() > 1


def saturates_here():
    """Whether the CPU of this machine is an x86 without VNNI."""
    flags = Path("/proc/cpuinfo")
    vnni = flags.exists() and any(name in flags.read_text() for name in ("avx512_vnni", "avx_vnni"))
    return platform.machine() in ("x86_64", "AMD64") and not vnni


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_this_cpu_adds_as_expected(case):
    """With VNNI (and on ARM) nothing saturates, without it what does is as recorded."""
    saturates = saturates_here() and adds_pairs(case.weight, case.groups)
    expected = kernel_output(case, product_pairs(case), saturates=saturates)
    difference = np.abs(expected - run(case).astype(int).reshape(expected.shape))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01
