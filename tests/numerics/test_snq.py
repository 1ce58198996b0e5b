"""SNQ: tables on the int8 grid, nearest indices, packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grid_optimum import optimal_centres
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.numerics import snq as snq_module
from amct.numerics.affine import SMALLEST_SCALE, SymmetricScale
from amct.numerics.arq import WeightKind, arq, channels_first, from_channels_first
from amct.numerics.integer import integer_linear
from amct.numerics.qparams import QParams
from amct.numerics.settings import SnqSettings
from amct.numerics.snq import (
    CLUSTERS,
    ClusteredWeight,
    absorb_multiplier,
    decode,
    half_step_moments,
    pack_nibbles,
    snq,
    unpack_nibbles,
)

CONV, TRANSPOSE, LINEAR = WeightKind.CONV, WeightKind.CONV_TRANSPOSE, WeightKind.LINEAR
STARTS = ("uniform", "gaussian", "d2sampling")
every_start = pytest.mark.parametrize("start", STARTS)

LAYOUTS = [
    pytest.param((6, 40), LINEAR, 1, id="linear"),
    pytest.param((5, 6, 3, 3), CONV, 1, id="conv"),
    pytest.param((6, 1, 5, 5), CONV, 6, id="depthwise"),
    pytest.param((4, 5, 3, 3), TRANSPOSE, 1, id="deconv"),
    pytest.param((8, 3, 3, 3), TRANSPOSE, 2, id="deconv-g2"),
]


def heavy_tailed(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_t(4, shape).astype(np.float32))


def dequantize_clusters(clustered, kind, groups=1):
    integers = decode(clustered.indices, clustered.table, kind, groups)
    rows = channels_first(integers, kind, groups).float() * clustered.qparams.scale.reshape(-1, 1)
    return from_channels_first(rows, integers.shape, kind, groups)


def cost(weight, clustered, kind, groups=1):
    return ((dequantize_clusters(clustered, kind, groups).double() - weight.double()) ** 2).sum().item()


@every_start
@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize(("shape", "kind", "groups"), LAYOUTS)
def test_every_weight_gets_the_nearest_of_16_int8_values(shape, kind, groups, channel_wise, start):
    weight = heavy_tailed(shape)
    settings = SnqSettings(init_algo=start, channel_wise=channel_wise)
    result = snq(weight, kind=kind, groups=groups, settings=settings)
    rows = channels_first(weight, kind, groups)
    tables = len(rows) if channel_wise else 1
    factors = arq(
        weight, kind=kind, channel_wise=channel_wise, groups=groups, symmetric_scale=SymmetricScale.FULL_RANGE
    )
    assert torch.equal(result.qparams.scale, factors.scale)
    assert result.table.dtype is torch.int8
    assert result.table.shape == (tables, CLUSTERS)
    assert (result.table[:, 1:].int() - result.table[:, :-1].int() > 0).all()
    assert result.indices.shape == weight.shape
    assert result.indices.dtype is torch.uint8
    steps = rows.double().numpy() / np.broadcast_to(factors.scale.double().numpy()[:, None], (len(rows), 1))
    table = np.broadcast_to(result.table.numpy().astype(np.float64), (len(rows), CLUSTERS))
    chosen = np.take_along_axis(table, channels_first(result.indices, kind, groups).long().numpy(), axis=1)
    best = np.abs(steps[:, :, None] - table[:, None]).min(axis=2)
    np.testing.assert_array_equal(np.abs(steps - chosen), best)
    integers = decode(result.indices, result.table, kind, groups)
    np.testing.assert_array_equal(channels_first(integers, kind, groups).numpy(), chosen)


@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_beats_the_optimum(channel_wise, seed):
    weight = heavy_tailed((7, 90), seed)
    found = {
        start: snq(weight, kind=LINEAR, settings=SnqSettings(init_algo=start, channel_wise=channel_wise))
        for start in STARTS
    }
    costs = [cost(weight, clustered, LINEAR) for clustered in found.values()]
    factors = found["uniform"].qparams
    rows = weight.reshape(factors.scale.numel(), -1).numpy()
    tables = [
        optimal_centres(half_step_moments(row, scale), CLUSTERS)
        for row, scale in zip(rows, factors.scale.tolist(), strict=True)
    ]
    real = factors.scale.double().numpy()[:, None] * np.array(tables)
    best = (np.abs(rows.astype(np.float64)[:, :, None] - real[:, None]).min(axis=2) ** 2).sum()
    assert all(best <= other * (1 + 1e-12) for other in costs)
    assert min(costs) < 1.5 * best  # the iterations are no nonsense either


def test_iterating_longer_helps():
    weight = heavy_tailed((1, 4000))
    costs = [
        cost(weight, snq(weight, kind=LINEAR, settings=SnqSettings(max_iteration=count)), LINEAR) for count in (1, 1000)
    ]
    assert costs[1] < costs[0]


@every_start
def test_channels_are_clustered_apart(start):
    weight = heavy_tailed((3, 50))
    together = snq(weight, kind=LINEAR, settings=SnqSettings(init_algo=start))
    if start == "d2sampling":  # each channel has draws of its own
        first = snq(weight[:1], kind=LINEAR, settings=SnqSettings(init_algo=start))
        assert torch.equal(together.table[0], first.table[0])
        return
    for channel in range(3):
        alone = snq(weight[channel : channel + 1], kind=LINEAR, settings=SnqSettings(init_algo=start))
        assert torch.equal(together.table[channel], alone.table[0])
        assert torch.equal(together.indices[channel], alone.indices[0])


@every_start
def test_the_same_twice(start):
    weight = heavy_tailed((3, 200))
    settings = SnqSettings(init_algo=start)
    first, second = (snq(weight, kind=LINEAR, settings=settings) for _ in range(2))
    assert torch.equal(first.table, second.table)
    assert torch.equal(first.indices, second.indices)


@every_start
@given(
    weight=hnp.arrays(np.float32, (2, 24), elements=st.floats(-1, 1, width=16)),
    power=st.integers(-3, 3),
    order=st.permutations(range(24)),
)
def test_laws(start, weight, power, order):
    tensor = torch.from_numpy(weight) + 0.0
    tensor[:, 0] = 1.0  # a scale well above epsilon
    settings = SnqSettings(init_algo=start)
    result = snq(tensor, kind=LINEAR, settings=settings)
    scaled = snq(tensor * 2.0**power, kind=LINEAR, settings=settings)
    assert torch.equal(scaled.qparams.scale, result.qparams.scale * 2.0**power)
    assert torch.equal(scaled.table, result.table)
    assert torch.equal(scaled.indices, result.indices)
    shuffled = snq(tensor[:, order], kind=LINEAR, settings=settings)
    # Sums in another order may decide between equally good tables, but not on the cost.
    assert cost(tensor[:, order], shuffled, LINEAR) == pytest.approx(cost(tensor, result, LINEAR), rel=1e-9, abs=1e-12)


def test_weights_of_16_grid_values_are_kept():
    """By the start that finds them; the others may end in a poorer place."""
    grid = np.array([-127, -90, -64, -50, -33, -20, -11, -5, 0, 4, 9, 21, 40, 77, 100, 127])
    integers = np.concatenate([grid, np.random.default_rng(0).choice(grid, 500)])
    weight = torch.from_numpy((integers * 2.0**-9).astype(np.float32)).reshape(1, -1)
    result = snq(weight, kind=LINEAR, settings=SnqSettings(init_algo="d2sampling"))
    assert result.table[0].tolist() == grid.tolist()
    np.testing.assert_array_equal(decode(result.indices, result.table, LINEAR)[0].numpy(), integers)


# ---- degenerate data


@every_start
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-12, 0.3, -5.0])
def test_constant_weights(value, start):
    weight = torch.full((2, 9), value)
    result = snq(weight, kind=LINEAR, settings=SnqSettings(init_algo=start))
    error = (dequantize_clusters(result, LINEAR) - weight).abs().max().item()
    tiny = abs(value) < 127 * SMALLEST_SCALE
    assert error <= weight.abs().max().item() * (1.0 if tiny else 2.0**-22)
    assert len(set(result.table[0].tolist())) == CLUSTERS


@every_start
def test_one_element(start):
    result = snq(torch.tensor([[-2.0]]), kind=LINEAR, settings=SnqSettings(init_algo=start))
    assert decode(result.indices, result.table, LINEAR).item() == -127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_are_clustered_as_float32(dtype):
    weight = heavy_tailed((3, 40)).to(dtype)
    result, expected = (snq(each, kind=LINEAR) for each in (weight, weight.float()))
    assert torch.equal(result.table, expected.table)
    assert torch.equal(result.indices, expected.indices)


def test_illegal_weights_stop():
    weight = heavy_tailed((2, 5))
    weight[1, 2] = torch.nan
    with pytest.raises(CalibrationError, match="channel 1: minimum nan"):
        snq(weight, kind=LINEAR)
    weight[1, 2] = 1e30
    with pytest.raises(CalibrationError, match="too large"):
        snq(weight, kind=LINEAR)
    with pytest.raises(ArgumentError, match="at least 2 dimensions and one value"):
        snq(weight[:0], kind=LINEAR)
    with pytest.raises(ArgumentError, match="recurrent layer"):
        snq(weight, kind=WeightKind.RNN)


def test_large_tensors_are_summed_up_first(monkeypatch):
    weight = heavy_tailed((1, 20000))
    settings = SnqSettings(init_algo="gaussian")
    exact = cost(weight, snq(weight, kind=LINEAR, settings=settings), LINEAR)
    monkeypatch.setattr(snq_module, "_SORTED_POINTS", 1000)
    binned = cost(weight, snq(weight, kind=LINEAR, settings=settings), LINEAR)
    assert binned == pytest.approx(exact, rel=0.01)  # centres move by 1/256 step at most before they are snapped


# ---- decoding, multiplying, packing


def test_clustered_weights_compute_in_integers():
    weight, x = heavy_tailed((4, 30)), torch.randint(-128, 128, (5, 30), dtype=torch.int8)
    clustered = snq(weight, kind=LINEAR)
    integers = decode(clustered.indices, clustered.table, LINEAR)
    expected = x.numpy().astype(np.int64) @ integers.numpy().astype(np.int64).T
    np.testing.assert_array_equal(integer_linear(x, integers).numpy(), expected)


def test_a_table_must_fit():
    indices = torch.zeros(3, 4, dtype=torch.uint8)
    for shape in ((2, 16), (3, 15), (16,)):
        with pytest.raises(ArgumentError, match=r"table: expected \[1, 16\] or \[3, 16\], got"):
            decode(indices, torch.zeros(shape, dtype=torch.int8), LINEAR)


@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize("multiplier", [[0.5, 2.0, 1.0], [-0.5, 2.0, -3.0], [0.0, -1.0, 1e-9]])
def test_a_multiplier_is_absorbed(channel_wise, multiplier):
    weight = heavy_tailed((3, 50))
    clustered = snq(weight, kind=LINEAR, settings=SnqSettings(channel_wise=channel_wise))
    factor = torch.tensor(multiplier)
    result = absorb_multiplier(clustered, factor)
    assert torch.equal(result.indices, clustered.indices)
    assert (result.qparams.scale >= SMALLEST_SCALE).all()
    assert result.qparams.scale.shape == (3,)
    expected = dequantize_clusters(clustered, LINEAR).double() * factor[:, None].double()
    # Two float32 roundings of a product, or a channel that counts as zero.
    slack = 2 * 2.0**-24 * expected.abs() + 127 * SMALLEST_SCALE * (factor.abs() < 1e-6)[:, None]
    assert ((dequantize_clusters(result, LINEAR).double() - expected).abs() <= slack).all()
    if channel_wise or min(multiplier) > 0:
        assert result.table.shape == clustered.table.shape


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=5), elements=st.integers(0, 15)))
def test_packing_goes_there_and_back(indices):
    rows = torch.from_numpy(indices).reshape(len(indices), -1)
    packed = pack_nibbles(torch.from_numpy(indices))
    assert packed.shape == (len(indices), (rows.shape[1] + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, rows.shape[1]), rows)


def test_the_low_nibble_comes_first_and_rows_are_padded():
    packed = pack_nibbles(torch.tensor([[1, 2, 3], [15, 0, 4]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x03], [0x0F, 0x04]]


def test_what_cannot_be_packed():
    with pytest.raises(ArgumentTypeError, match=r"indices: expected torch\.uint8, got torch\.int8"):
        pack_nibbles(torch.zeros(1, 2, dtype=torch.int8))
    with pytest.raises(ArgumentError, match=r"indices: expected 0..15, got 16"):
        pack_nibbles(torch.tensor([[1, 16]], dtype=torch.uint8))
    with pytest.raises(ArgumentTypeError, match=r"packed: expected torch\.uint8"):
        unpack_nibbles(torch.zeros(1, 2), 3)
    with pytest.raises(ArgumentError, match=r"expected \[R, 2\] for rows of 3 indices, got \[1, 3\]"):
        unpack_nibbles(torch.zeros(1, 3, dtype=torch.uint8), 3)


def test_a_clustered_weight_is_plain_data():
    clustered = ClusteredWeight(
        QParams.of([0.5]),
        torch.arange(16, dtype=torch.int8).reshape(1, -1),
        torch.tensor([[3, 15]], dtype=torch.uint8),
    )
    assert dequantize_clusters(clustered, LINEAR).tolist() == [[1.5, 7.5]]
