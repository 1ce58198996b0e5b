"""IFMR against a float64 NumPy formula, its price on a histogram, its laws, and odd data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from observer_storage import STORAGES, storage

from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError
from amct.numerics.affine import SymmetricScale, dequantize, quantize
from amct.numerics.ifmr import IfmrObserver, SortedValues, rank_of
from amct.numerics.observer import MinMaxObserver
from amct.numerics.settings import IfmrSettings

if TYPE_CHECKING:
    from amct.numerics.qparams import Observed

MODES = [pytest.param(True, id="asymmetric"), pytest.param(False, id="symmetric")]
MODERATE = hnp.arrays(np.float32, st.integers(2, 200), elements=st.floats(-100, 100, width=32))


def observed(
    *batches: torch.Tensor, scale: SymmetricScale = SymmetricScale.NEGATIVE_SIDE, **settings: object
) -> Observed:
    observer = IfmrObserver(IfmrSettings(**settings), symmetric_scale=scale)
    for batch in batches:
        observer.observe(batch)
    return observer.result()


class Formula:
    """The search written down once more, in float64, from its description."""

    def __init__(self, x: np.ndarray, *, bits: int = 8, asymmetric: bool = True, percentile: float = 0.999999) -> None:
        self.x, self.bits, self.asymmetric = x.astype(np.float64).reshape(-1), bits, asymmetric
        rank = 1 if 1 - percentile < 1.192092896e-7 else x.size - int(percentile * x.size)
        ordered = np.sort(self.x)
        self.maximum, self.minimum = max(0.0, ordered[-rank]), min(0.0, ordered[rank - 1])
        self.bound = max(self.maximum, -self.minimum)
        self.levels = 2**bits - 1
        self.half = 2 ** (bits - 1) - (self.maximum >= -self.minimum)

    def scale_of(self, ratio: float) -> float:
        if self.asymmetric:
            return (ratio * self.maximum - self.minimum) / self.levels
        return ratio * self.bound / self.half

    def loss_of(self, scale: float) -> float:
        upper = scale * self.levels + self.minimum if self.asymmetric else scale * self.half
        lower = self.minimum if self.asymmetric else -upper
        error = np.clip(self.x, lower, upper)
        error /= scale
        np.round(error, out=error)
        error *= scale
        error -= self.x
        return float(np.dot(error, error)) / self.x.size

    def best(self) -> tuple[float, int, float]:
        scales = [self.scale_of(0.7 + 0.01 * step) for step in range(60)]
        losses = [self.loss_of(scale) for scale in scales]
        scale = scales[int(np.argmin(losses))]
        return scale, self.offset_of(scale), min(losses)

    def offset_of(self, scale: float) -> int:
        return int(-np.round(self.minimum / scale) - 2 ** (self.bits - 1)) if self.asymmetric else 0


def data(name: str, count: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    if name == "heavy-tailed":  # Student's t with 2 degrees of freedom
        return normal / torch.randn(count, 2, generator=generator).square().mean(1).sqrt()
    if name == "99 % zero":
        return normal * (torch.rand(count, generator=generator) > 0.99)
    if name == "bimodal":
        return torch.where(torch.rand(count, generator=generator) > 0.5, normal * 0.3 + 4, normal * 0.5 - 2)
    if name == "one huge outlier":
        normal[count // 3] = 1e30
    if name == "rectified":
        return normal.relu()
    return normal


@pytest.mark.parametrize("asymmetric", MODES)
@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "99 % zero", "bimodal", "rectified"])
def test_exact_search_equals_the_formula(name, bits, asymmetric):
    x = data(name, 20_000)
    formula = Formula(x.numpy(), bits=bits, asymmetric=asymmetric)
    factors = observed(*x.split(7_000), num_bits=bits, asymmetric=asymmetric)
    scale, offset, loss = formula.best()
    # Losses of neighbouring candidates may agree to float32 precision; then either choice is right.
    if factors.scale.item() != pytest.approx(scale, rel=1e-6):
        assert formula.loss_of(factors.scale.item()) <= loss * (1 + 1e-4)
    else:
        assert factors.offset.item() == offset


@pytest.mark.parametrize("asymmetric", MODES)
@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "99 % zero", "bimodal", "one huge outlier"])
def test_on_a_histogram_the_choice_costs_at_most_one_percent(name, bits, asymmetric):
    x = data(name, 1_200_000)
    observer = IfmrObserver(IfmrSettings(num_bits=bits, asymmetric=asymmetric))
    observer.observe(x)
    assert not observer.exact
    formula = Formula(x.numpy(), bits=bits, asymmetric=asymmetric)
    _, offset, best = formula.best()
    factors = observer.result()
    assert formula.loss_of(factors.scale.double().item()) <= 1.01 * best
    if bits == 8:
        # With more bits an offset counts in finer steps, and a neighbouring ratio, just as good, is many steps away.
        assert abs(factors.offset.item() - offset) <= 1


@pytest.mark.parametrize(("bits", "asymmetric"), [(8, True), (8, False), (16, True)])
@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "99 % zero", "bimodal", "one huge outlier", "rectified"])
@pytest.mark.parametrize("batches", [1, 8])
def test_a_part_of_a_large_batch_is_enough_for_one_percent(name, bits, asymmetric, batches):
    x = data(name, 1_200_000)
    observer = IfmrObserver(IfmrSettings(num_bits=bits, asymmetric=asymmetric))
    observer.sample_for(batches)
    for batch in x.chunk(batches):
        observer.observe(batch)
    factors = observer.result()
    formula = Formula(x.numpy(), bits=bits, asymmetric=asymmetric)
    _, offset, best = formula.best()
    assert formula.loss_of(factors.scale.double().item()) <= 1.01 * best
    if bits == 8:
        assert abs(factors.offset.item() - offset) <= 1


@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "99 % zero", "bimodal", "one huge outlier"])
def test_on_a_histogram_percentiles_are_exact(name):
    x = data(name, 1_200_000)
    settings = {"num_bits": 16, "search_range": (1.0, 1.005), "search_step": 0.005}
    streamed = observed(x, **settings)
    formula = Formula(x.numpy(), bits=16)
    assert streamed.scale.item() == pytest.approx(formula.scale_of(1.0), rel=1e-6)
    assert streamed.offset.item() == formula.offset_of(streamed.scale.item())


def test_on_a_histogram_one_outlier_does_not_hide_the_rest():
    # The loss of all data is the outlier's; what matters is that the others keep their resolution.
    x = data("one huge outlier", 1_200_000)
    assert observed(x).clip_max.item() < 10


@pytest.mark.parametrize("bits", [8, 12])
def test_per_channel_histograms_cost_at_most_one_percent(bits):
    x = torch.stack([data(name, 300_000) for name in ("normal", "heavy-tailed", "rectified", "bimodal")], dim=1)
    observer = IfmrObserver(IfmrSettings(num_bits=bits), channel_axis=-1)
    observer.observe(x)
    assert not observer.exact
    factors = observer.result()
    assert factors.scale.shape == factors.offset.shape == factors.clip_min.shape == (4,)
    for channel in range(4):
        formula = Formula(x[:, channel].numpy(), bits=bits)
        _, _, best = formula.best()
        assert formula.loss_of(factors.scale[channel].double().item()) <= 1.01 * best


@given(MODERATE, st.integers(-20, 20), st.booleans(), st.sampled_from(STORAGES))
def test_factors_follow_the_data_by_powers_of_two(values, exponent, asymmetric, kind):
    x = torch.from_numpy(values)
    assume(x.abs().max() > 1e-2)
    with storage(kind):
        plain, scaled = (observed(v, asymmetric=asymmetric) for v in (x, x * 2.0**exponent))
    assume(not plain.near_zero and not scaled.near_zero)
    assert scaled.scale.item() == plain.scale.item() * 2.0**exponent
    assert scaled.offset.item() == plain.offset.item()


@given(MODERATE, st.booleans())
def test_zero_stays_zero(values, asymmetric):
    factors = observed(torch.from_numpy(values), asymmetric=asymmetric)
    zero = torch.zeros(1)
    integers = quantize(zero, factors.scale, factors.offset, 8)
    assert dequantize(integers, factors.scale, factors.offset).item() == 0.0
    assert factors.clip_min.item() <= 0 <= factors.clip_max.item()


@given(MODERATE, st.booleans())
def test_the_choice_is_never_worse_than_keeping_the_percentile(values, asymmetric):
    assume(np.abs(values).max() > 1e-3)
    formula = Formula(values, asymmetric=asymmetric)
    factors = observed(torch.from_numpy(values), asymmetric=asymmetric)
    # The scale, the quotient and the product are rounded to float32, 2^-24 each: errors move by that part of the bound.
    allowed = (formula.loss_of(formula.scale_of(1.0)) ** 0.5 + 3 * 2**-24 * formula.bound) ** 2
    assert formula.loss_of(factors.scale.double().item()) <= allowed


@given(st.lists(MODERATE, min_size=1, max_size=4), st.permutations(range(4)), st.sampled_from(STORAGES))
def test_pieces_order_and_merging_do_not_matter(batches, order, kind):
    tensors = [torch.from_numpy(batch) for batch in batches]
    with storage(kind):
        once = IfmrObserver()
        once.observe(torch.cat(tensors))
        merged = IfmrObserver()
        for place in order:
            if place < len(tensors):
                shard = IfmrObserver()
                shard.observe(tensors[place])
                merged.merge(shard)
        assert merged.batches == len(tensors)
        assert merged.exact == once.exact
        first, second = merged.result(), once.result()
    assert first.scale.item() == second.scale.item()
    assert first.offset.item() == second.offset.item()


def test_a_merge_of_values_and_histograms_gives_a_histogram():
    few, many = torch.linspace(-1, 2, 1000), data("normal", 1_100_000)
    results = []
    for first, second in ((few, many), (many, few)):
        observer, other = IfmrObserver(), IfmrObserver()
        observer.observe(first)
        other.observe(second)
        observer.merge(other)
        assert not observer.exact
        results.append(observer.result().scale.item())
    together = observed(torch.cat([few, many])).scale.item()
    assert results == [together, together]


def test_more_than_the_limit_of_small_batches_becomes_a_histogram():
    x = data("normal", 1_048_577)
    observer = IfmrObserver()
    observer.observe(x[:-1])
    assert observer.exact
    observer.observe(x[-1:])
    assert not observer.exact
    assert observer.result().scale.item() == observed(x).scale.item()


def test_percentiles_leave_values_out():
    x = torch.cat([torch.linspace(-1, 1, 1000), torch.tensor([50.0, -50.0])])
    cut = observed(x, max_percentile=0.99, min_percentile=0.99, search_range=(1.0, 1.005), search_step=0.005)
    assert cut.clip_max.item() < 1.0
    assert cut.clip_min.item() > -1.0
    assert observed(x, max_percentile=1.0, min_percentile=1.0).clip_max.item() > 30


@pytest.mark.parametrize(("percentile", "count", "rank"), [(1.0, 10, 1), (0.9, 10, 1), (0.5, 10, 5), (0.999999, 3, 1)])
def test_rank_of_a_percentile(percentile, count, rank):
    assert rank_of(percentile, count) == rank


def test_the_symmetric_scale_follows_its_policy():
    x = torch.tensor([-1.0, 0.25])
    settings = {"asymmetric": False, "search_range": (1.0, 1.005), "search_step": 0.005}
    assert observed(x, **settings).scale.item() == pytest.approx(1 / 128)
    full = observed(x, scale=SymmetricScale.FULL_RANGE, **settings)
    assert full.scale.item() == pytest.approx(1 / 127)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("value", [0.7, -0.7, 3e-4, 1234.5])
def test_constant_data_is_kept_exactly(value, kind):
    x = torch.full((37,), value)
    with storage(kind):
        factors = observed(x)
    kept = dequantize(quantize(x, factors.scale, factors.offset, 8), factors.scale, factors.offset)
    assert kept.numpy() == pytest.approx(x.numpy(), rel=1e-6)


@pytest.mark.parametrize("x", [torch.zeros(9), torch.full((5,), 1e-40), torch.tensor([-1e-12, 1e-12])])
@pytest.mark.parametrize("kind", STORAGES)
def test_data_as_good_as_zero_gets_scale_one(x, kind):
    with storage(kind):
        asymmetric, symmetric = observed(x), observed(x, asymmetric=False)
    assert (asymmetric.scale.item(), asymmetric.offset.item()) == (1.0, -128)
    assert (symmetric.scale.item(), symmetric.offset.item()) == (1.0, 0)
    assert asymmetric.near_zero.item() is symmetric.near_zero.item() is True


def test_one_element():
    factors = observed(torch.tensor([2.0]))
    assert factors.scale.ndim == factors.offset.ndim == 0
    assert factors.clip_max.item() == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", STORAGES)
def test_other_precisions_count_as_their_values(dtype, kind):
    x = data("normal", 4_000).to(dtype)
    with storage(kind):
        assert observed(x).scale.item() == observed(x.float()).scale.item()


@pytest.mark.parametrize("kind", STORAGES)
def test_an_outlier_that_no_scale_can_cover_is_reported(kind):
    x = torch.tensor([1.0, 1e30])
    with (
        storage(kind),
        pytest.raises(CalibrationError, match=r"too large for 8 bits.*maximum [\d.]+e\+"),
    ):
        observed(x)


def test_a_refused_batch_leaves_the_observer_as_it_was():
    observer = IfmrObserver()
    observer.observe(torch.tensor([1.0, 2.0]))
    with pytest.raises(CalibrationError, match=r"holds 1 NaN and 2 infinite values among 4 \(finite values: minimum 3"):
        observer.observe(torch.tensor([np.nan, np.inf, -np.inf, 3.0]))
    with pytest.raises(CalibrationError, match="finite values: none"):
        observer.observe(torch.tensor([np.nan]))
    assert observer.batches == 1
    assert observer.result().clip_max.item() < 2.7


def test_empty_batches_count_but_add_nothing():
    observer = IfmrObserver()
    observer.observe(torch.empty(0, 3))
    assert observer.batches == 1
    with pytest.raises(CalibrationError, match="no activation values were observed in 1 batches"):
        observer.result()
    with pytest.raises(CalibrationError, match="in 0 batches"):
        IfmrObserver(channel_axis=1).result()


def test_integers_are_not_activations():
    with pytest.raises(ArgumentTypeError, match=r"expects floating-point activations, got torch\.int64"):
        IfmrObserver().observe(torch.ones(3, dtype=torch.int64))


def test_channels_must_stay_the_same():
    observer = IfmrObserver(channel_axis=1)
    observer.observe(torch.ones(2, 3, 4))
    with pytest.raises(ArgumentError, match="3 before, now 4"):
        observer.observe(torch.ones(2, 4, 4))
    with pytest.raises(ArgumentError, match=r"channel_axis 1 does not exist in a tensor of shape \[5\]"):
        observer.observe(torch.ones(5))


def test_only_like_observers_merge():
    with pytest.raises(ArgumentError, match="IfmrObserver and MinMaxObserver"):
        IfmrObserver().merge(MinMaxObserver())
    with pytest.raises(ArgumentError, match=r"bits 8 and 16, search_step 0\.01 and 0\.02"):
        IfmrObserver().merge(IfmrObserver(IfmrSettings(num_bits=16, search_step=0.02)))


def test_a_single_bit_is_refused():
    with pytest.raises(ArgumentError, match="bits"):
        IfmrObserver(IfmrSettings(num_bits=1))


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize("kind", ["normal", "half", "tailed", "whole numbers", "on the grid"])
def test_many_values_are_searched_as_one_by_one(kind, asymmetric):
    """With many values for each integer their sums are used; the choice is that of every value by itself, ties too."""
    random = np.random.default_rng(3)
    count = 64 * 256 + 1000
    made = {
        "normal": random.standard_normal(count) * 30,
        "half": np.abs(random.standard_normal(count)),
        "tailed": np.maximum(random.standard_t(3, count), 0),
        "whole numbers": random.integers(-100, 150, count),
        "on the grid": random.integers(0, 4, count) * 0.5,
    }[kind]
    values = np.sort(made.astype(np.float32))
    candidates = IfmrObserver(IfmrSettings(asymmetric=asymmetric))._candidates(
        min(0.0, float(values[0])), float(values[-1])
    )
    limits = [limit.astype(np.float32) for limit in (candidates.lower, candidates.upper, candidates.scale)]
    lower, upper, scale = (limit[:, None] for limit in limits)
    rounded = np.rint(np.clip(values, lower, upper) / scale) * scale
    wanted = ((rounded - values).astype(np.float64) ** 2).mean(axis=1)
    losses = SortedValues(values[values != 0], int((values == 0).sum())).losses(candidates)
    # float64 sums of 17 000 squares, and a float32 rounding (2^-24) of each clipped difference
    np.testing.assert_allclose(losses, wanted, rtol=2**-22, atol=2.0**-40 * float((values**2).mean()))
    assert losses[np.argmin(losses)] == pytest.approx(wanted.min(), rel=2**-40, abs=1e-30)
    if kind == "on the grid":
        assert np.argmin(losses) == np.argmin(wanted)
