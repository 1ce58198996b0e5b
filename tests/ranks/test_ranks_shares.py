"""Who runs which batches, and what of the data each process reads; in one process, without torch.distributed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from amct.calibration import ALONE, Ranks, all_ranks
from amct.calibration.ranks import LOCAL, TIMEOUT, _timeout, pack, unpack
from amct.data import Preparation, batches, open_samples
from amct.data.lmdb import write_lmdb
from amct.errors import ArgumentError, CalibrationError, ParseError
from amct.numerics.adaround.learning import AdaRoundLayer, CachedData, RowShare, adaround
from amct.numerics.adaround.rounding import Learning
from amct.numerics.integer import ConvolutionGeometry
from amct.pipeline.batches import Batches


@given(st.integers(1, 9), st.integers(0, 60))
def test_shares_are_a_partition_in_order(size, count):
    numbers = [
        [each.number(own) for own in range(each.share(count))] for each in (Ranks(rank, size) for rank in range(size))
    ]
    assert sorted(number for own in numbers for number in own) == list(range(count))
    assert all(number % size == rank for rank, own in enumerate(numbers) for number in own)


def test_alone_without_distributed_and_by_the_switch(monkeypatch):
    assert all_ranks() == ALONE
    monkeypatch.setenv(LOCAL, "yes")
    with pytest.raises(ArgumentError, match='AMCT_LOCAL_CALIBRATION: expected "0" or "1", got "yes"'):
        all_ranks()


def test_too_few_batches_are_refused():
    Ranks(1, 3).need_a_batch_each(3)
    with pytest.raises(CalibrationError, match="batch_num is 2, but 3 processes"):
        Ranks(1, 3).need_a_batch_each(2)


@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_a_timeout_that_is_none(text, monkeypatch):
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ArgumentError, match="expected a number of seconds"):
        _timeout()


def test_packed_arrays_come_back():
    arrays = {"0/a": np.arange(3, dtype=np.uint32), "scalar": np.array(2.5, np.float32), "none": np.empty((2, 0))}
    found = unpack(pack(arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


FORMS = {
    "a list": lambda: [torch.full((1,), float(n)) for n in range(7)],
    "a generator": lambda: (torch.full((1,), float(n)) for n in range(7)),
    "a data loader": lambda: DataLoader(TensorDataset(torch.arange(7.0)), batch_size=1, collate_fn=lambda b: b[0][0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [None, 5, 1])
def test_each_process_gets_its_own_batches(form, count):
    for size in (2, 3):
        parts = [
            [int(x) for x in Batches(FORMS[form](), lambda x: x).limited(count, Ranks(rank, size))]
            for rank in range(size)
        ]
        assert parts == [list(range(7 if count is None else count))[rank::size] for rank in range(size)]


def data_files(folder):
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 4, 4)).astype(np.uint8)
    np.save(folder / "images.npy", images)
    write_lmdb(folder / "images_lmdb", [(image, 0) for image in images])
    return folder / "images.npy", folder / "images_lmdb"


def test_files_are_read_in_parts(tmp_path):
    for path in data_files(tmp_path):
        source = open_samples(path, Preparation())
        whole = [values for values, _ in batches(source, 2)]
        for step in (1, 2, 3):
            for first in range(step):
                part = [values for values, _ in batches(source, 2, first=first, step=step)]
                assert len(part) == len(whole[first::step])
                assert all(map(np.array_equal, part, whole[first::step]))


def test_pictures_of_other_processes_are_not_decoded(tmp_path):
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"damaged")
    source = open_samples(tmp_path, Preparation())
    assert len(list(batches(source, 1, first=1, step=2))) == 2
    with pytest.raises(ParseError, match=r"2\.png"):
        list(batches(source, 1, first=0, step=2))


LAYERS = {
    "a linear layer": (torch.Size([70, 24]), None, (40, 24)),
    "a convolution, odd inputs": (torch.Size([80, 3, 3, 3]), ConvolutionGeometry(), (6, 3, 8, 8)),
    "a depthwise convolution": (torch.Size([70, 1, 3, 3]), ConvolutionGeometry(groups=70), (6, 70, 6, 6)),
    "a small layer": (torch.Size([5, 24]), None, (40, 24)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("count", [2, 3])
def test_adaround_learns_the_same_integers_in_parts(kind, count):
    shape, geometry, inputs = LAYERS[kind]
    generator = torch.Generator().manual_seed(0)
    layer = AdaRoundLayer(weight=torch.randn(shape, generator=generator), geometry=geometry)
    x = torch.randn(inputs, generator=generator)
    data = CachedData(x, layer.forward(x, layer.weight))
    settings = Learning(num_bits=4, num_iteration=50, fast=True)
    whole = adaround(layer, data, settings)
    parts, rows = [], []
    for index in range(count):
        share = RowShare(index, count, lambda learned: parts.append(learned) or [whole_rows(layer, whole)])
        adaround(layer, data, settings, share=share)
        rows.append(share.rows(*layer.rows().shape, layer.groups))
    assert rows[0].start == 0
    assert rows[-1].stop == shape[0]
    assert all(before.stop == after.start for before, after in pairwise(rows))
    if shape[0] > 64:
        assert sum(part.shape[0] > 0 for part in parts) > 1
    assert torch.equal(torch.cat(parts), whole_rows(layer, whole))


def whole_rows(layer, result):
    from amct.numerics.arq import channels_first

    return channels_first(result.integers.float(), layer.kind, layer.groups)
