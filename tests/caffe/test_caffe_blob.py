"""Blobs: NumPy views that stay true while the engine moves tensors around underneath."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from amct.caffe.engine.blob import Blob
from amct.errors import ArgumentError


def channels_last(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_data_is_a_writable_view_in_c_order():
    blob = Blob(2, 3, 4, 4)
    value = channels_last(2, 3, 4, 4)
    blob.set_tensor(value)
    array = blob.data
    assert array.flags.c_contiguous
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, value.numpy())
    array[1, 2] = 7
    assert (blob.tensor[1, 2] == 7).all()
    assert blob.data is array


def test_results_are_kept_not_copied_while_nobody_looks():
    blob = Blob(2, 3)
    value = torch.randn(2, 3)
    blob.set_tensor(value)
    assert blob.tensor is value


def test_a_living_view_shows_new_values_a_dead_one_costs_nothing():
    blob = Blob(2, 3, 4, 4)
    array = blob.data
    part = array[0]
    blob.set_tensor(channels_last(2, 3, 4, 4))
    np.testing.assert_array_equal(array, blob.tensor.numpy())
    del array
    gc.collect()
    second = channels_last(2, 3, 4, 4)
    blob.set_tensor(second)
    np.testing.assert_array_equal(part, second[0].numpy())
    del part
    gc.collect()
    third = channels_last(2, 3, 4, 4)
    blob.set_tensor(third)
    assert blob.tensor is third


def test_shrinking_keeps_memory_growing_does_not():
    blob = Blob(2, 3, 5, 5)
    first = blob.data
    blob.reshape(8, 3, 5, 5)
    second = blob.data
    assert not np.shares_memory(first, second)
    second[...] = 4
    blob.reshape(1, 3, 5, 5)
    assert np.shares_memory(second, blob.data)
    assert (blob.data == 4).all()


def test_reshape_keeps_values_in_c_order():
    blob = Blob(2, 3, 4, 4)
    value = channels_last(2, 3, 4, 4)
    blob.set_tensor(value)
    blob.reshape(6, 16)
    np.testing.assert_array_equal(blob.data, value.numpy().reshape(6, 16))


def test_reshape_arguments():
    blob = Blob(2, 3)
    with pytest.raises(RuntimeError, match=r"Blob\.reshape takes no kwargs"):
        blob.reshape(2, 3, a=1)
    for wrong in ((1, 3), 1.5, "1", True):
        with pytest.raises(TypeError, match="whole numbers, one per axis"):
            blob.reshape(wrong)
    with pytest.raises(ArgumentError, match="cannot be negative"):
        blob.reshape(-1)
    with pytest.raises(ArgumentError, match="exceeds 2"):
        blob.reshape(2**20, 2**20)
    with pytest.raises(ArgumentError, match="at most 32 axes"):
        blob.reshape(*[1] * 33)
    blob.reshape(np.int64(4), 5)
    assert blob.shape == (4, 5)


def test_old_axes():
    blob = Blob(7)
    assert (blob.num, blob.channels, blob.height, blob.width) == (7, 1, 1, 1)
    assert blob.legacy_shape() == (1, 1, 1, 7)
    assert Blob().count == 1
    with pytest.raises(ArgumentError, match="at most 4 axes"):
        _ = Blob(1, 1, 1, 1, 1).num


def test_shared_buffers():
    owner, other = Blob(2, 3), Blob(3, 2)
    other.share_values(owner)
    owner.data[...] = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(other.data, np.arange(6).reshape(3, 2))
    other.data[0, 0] = 9
    assert owner.data[0, 0] == 9
    assert not np.shares_memory(owner.diff, other.diff)


def test_released_memory_is_an_error_until_written():
    blob = Blob(2)
    blob.set_tensor(torch.ones(2))
    blob.values.release()
    with pytest.raises(ArgumentError, match="freed after its last use"):
        _ = blob.data
    blob.set_tensor(torch.ones(2))
    assert blob.data.sum() == 2


def test_release_spares_memory_someone_looks_at():
    blob = Blob(2)
    array = blob.data
    blob.values.release()
    assert blob.data is array


def test_initial_values_are_made_on_first_use_only():
    calls = []
    blob = Blob(3)

    def initial():
        calls.append(1)
        return torch.full((3,), 5.0)

    blob.values.initialize_by(initial)
    assert not blob.values.is_allocated
    assert not calls
    assert blob.data.tolist() == [5, 5, 5]
    blob.data[...] = 1
    assert blob.data.tolist() == [1, 1, 1]
    assert calls == [1]


def test_epochs_tell_of_every_possible_change():
    blob = Blob(3)
    seen = [blob.values.epoch]
    for change in (lambda: blob.data, lambda: blob.set_tensor(torch.zeros(3))):
        change()
        seen.append(blob.values.epoch)
    assert seen == sorted(set(seen))
