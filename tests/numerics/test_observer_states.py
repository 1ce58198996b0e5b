"""The law of shared observers: however batches are divided, the merged observers are the one that saw them all."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from observer_storage import STORAGES, storage

from amct.errors import CalibrationError
from amct.numerics.counts.histogram import SHORT_TAIL
from amct.numerics.counts.samples import SAMPLING_TARGET, ObservedValues
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.layer_inputs import ExactSum, LayerInputObserver
from amct.numerics.observer import MergeableObserver, MinMaxObserver, TensorRangeObserver
from amct.numerics.settings import HfmgSettings, IfmrSettings


def sampling(observer):
    observer.sample_for(4)
    return observer


WEIGHT = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
KINDS = {
    "ifmr": lambda: IfmrObserver(),
    "ifmr per channel": lambda: IfmrObserver(channel_axis=-1),
    "ifmr symmetric 16 bit": lambda: IfmrObserver(IfmrSettings(num_bits=16, asymmetric=False)),
    "ifmr of Caffe's layers": lambda: sampling(IfmrObserver(keeps_few=True)),
    "hfmg": lambda: HfmgObserver(HfmgSettings(num_of_bins=1024)),
    "hfmg per channel": lambda: HfmgObserver(HfmgSettings(num_of_bins=1024), channel_axis=-1),
    "min-max": MinMaxObserver,
    "range of a tensor between layers": TensorRangeObserver,
    "inputs of a linear layer": lambda: LayerInputObserver(channel_axis=-1, weight=WEIGHT),
    "inputs of a convolution": lambda: LayerInputObserver(channel_axis=1),
}
VALUES = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, -0.0, 1.0, 2.5, 7.0]))
BATCH = st.integers(1, 40).flatmap(lambda rows: hnp.arrays(np.float32, (rows, 3), elements=VALUES))


def same(first, second):
    """Equal to the bit, zeros with their signs."""
    names = ("scale", "offset", "clip_min", "clip_max", "balance", "mean")
    pairs = [(getattr(first, name), getattr(second, name)) for name in names]
    return all(a is b is None or a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


def as_file(state):
    """A state as an array file without pickle holds it."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def sharded(make, batches, owners, order):
    """Each batch seen by the observer that owns it, all merged in an order of their own."""
    shards = [make() for _ in order]
    for number, (x, owner) in enumerate(zip(batches, owners, strict=True)):
        shards[owner].begin_batch(number)
        shards[owner].observe(x)
    merged = make()
    for place in order:
        restored = make()
        restored.restore(as_file(shards[place].state()))
        merged.merge(restored)
    return merged


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    st.lists(BATCH, min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.permutations(range(3)),
    st.sampled_from(STORAGES),
)
def test_shards_merge_to_the_observer_of_all_batches(kind, batches, owners, order, held):
    tensors = [torch.from_numpy(x) for x in batches]
    with storage(held):
        whole = KINDS[kind]()
        for x in tensors:
            whole.observe(x)
        merged = sharded(KINDS[kind], tensors, owners[: len(tensors)], order)
        assert isinstance(merged, MergeableObserver)
        assert (merged.batches, merged.count) == (whole.batches, whole.count)
        assert same(merged.result(), whole.result())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_observer_goes_on_as_if_nothing_had_happened(kind):
    batches = [torch.randn(20, 3, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(4)]
    for held in STORAGES:
        with storage(held):
            whole, first, second = KINDS[kind](), KINDS[kind](), KINDS[kind]()
            for x in batches:
                whole.observe(x)
            for x in batches[:2]:
                first.observe(x)
            second.restore(as_file(first.state()))
            for x in batches[2:]:
                second.observe(x)
            assert same(second.result(), whole.result())


def test_large_batches_of_pixels_and_of_numbers_are_sampled_the_same_in_every_order():
    """Pixels have few distinct values and are counted completely, whatever came before them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4 * SAMPLING_TARGET,), generator=generator).float()
    numbers = torch.randn(5 * SAMPLING_TARGET, generator=generator)
    make = KINDS["ifmr of Caffe's layers"]
    results = []
    for batches in ([pixels, numbers, pixels], [numbers, pixels, pixels]):
        observer = make()
        for x in batches:
            observer.observe(x)
        results.append(observer.result())
    results.append(sharded(make, [numbers, pixels, pixels], [0, 1, 1], [1, 0]).result())
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_stored_values_keep_the_order_of_their_batches():
    whole, shards = ObservedValues(), [ObservedValues(), ObservedValues(), ObservedValues()]
    for number in range(7):
        x = torch.full((number + 1,), float(number))
        whole.add(x)
        shards[number % 3].begin_batch(number)
        shards[number % 3].add(x)
    merged = ObservedValues()
    for shard in reversed(shards):
        merged.merge(shard)
    assert [piece.tolist() for piece in merged.batches_of(0)] == [piece.tolist() for piece in whole.batches_of(0)]


def test_a_histogram_of_much_data_is_the_same_from_shards():
    batches = [torch.randn(400_000, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(5)]
    for make in (KINDS["ifmr"], KINDS["ifmr of Caffe's layers"], KINDS["hfmg"]):
        whole = make()
        for x in batches:
            whole.observe(x)
        assert not whole.exact
        assert same(sharded(make, batches, [0, 1, 2, 0, 1], [2, 0, 1]).result(), whole.result())


@pytest.mark.parametrize("held", STORAGES)
def test_a_state_does_not_grow_with_the_number_of_batches(held):
    sizes = []
    for count in (4, 40):
        with storage(held):
            observer = HfmgObserver(HfmgSettings(num_of_bins=1024))
            for seed in range(count):
                generator = torch.Generator().manual_seed(seed)
                observer.observe(torch.randint(-40, 40, (3000,), generator=generator).float())
            sizes.append(sum(array.nbytes for array in observer.state().values()))
    if held == "values":  # the limit of stored values is 40 times as many as here
        assert sizes[1] == pytest.approx(10 * sizes[0], rel=0.01)
    else:
        assert sizes[1] <= sizes[0] + 2 * SHORT_TAIL * 4  # each of the two tails is somewhere below its limit


DAMAGES = {
    "an array is missing": lambda state: state.pop("seen"),
    "another type": lambda state: state.update(minimum=state["minimum"].astype(np.float64)),
    "another shape": lambda state: state.update(seen=np.zeros(3, np.int64)),
    "a negative count": lambda state: state.update(seen=-state["seen"]),
    "a block that does not exist": lambda state: state.update(blocks=state["blocks"] + 512),
    "a table too short": lambda state: state.update(tables=state["tables"][:, 1:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused(damage):
    with storage("histogram"):
        observer = IfmrObserver()
        observer.observe(torch.randn(500))
        state = dict(observer.state())
        DAMAGES[damage](state)
        with pytest.raises(CalibrationError, match="does not fit"):
            IfmrObserver().restore(state)


def test_stored_values_whose_sizes_do_not_add_up_are_refused():
    observer = IfmrObserver()
    observer.observe(torch.randn(5))
    with pytest.raises(CalibrationError, match="the sizes of its batches"):
        IfmrObserver().restore({**observer.state(), "sizes": np.array([4], np.int64)})


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=30), st.integers(0, 30))
def test_exact_sums_are_exact(rows, cut):
    values = np.array(rows, np.float32)
    parts = [ExactSum(2), ExactSum(2)]
    for number, row in enumerate(values):
        parts[number >= cut].add(row)
    parts[0].merge(parts[1])
    for found, column in zip(parts[0].value(), values.T, strict=True):
        exact = sum((Fraction(float(value)) for value in column), Fraction(0))
        assert abs(Fraction(float(found)) - exact) <= abs(exact) / 2**50
