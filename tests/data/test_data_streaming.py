"""Data as a stream: pictures from all over a folder, batches read ahead in a thread, nothing is kept."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from amct.calibration import Ranks
from amct.data import AheadIterator, InBackground, Preparation, StoredBatches, images, list_images, open_samples
from amct.data.arrays import open_rows
from amct.data.samples import spread_order
from amct.data.stored_batches import AHEAD
from amct.errors import ArgumentError, FileError, ParseError
from amct.pipeline.batches import Batches, FirstBatches

THREAD = "read-ahead"


EARLIER = set()
"""Threads of nets of earlier tests, which read ahead until they are collected."""


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests():
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in EARLIER]


def picture(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value, value, value)).save(path)


# -- folders -----------------------------------------------------------------------------------------------------------

NAMES = st.lists(st.sampled_from(["a", "b", "a.b", "A", "é", "10", "9"]), min_size=1, max_size=3)


@given(st.lists(NAMES, max_size=8))
def test_pictures_come_in_the_order_of_sorted_paths(tmp_path_factory, paths):
    folder = tmp_path_factory.mktemp("pictures")
    for path in paths:
        file = folder.joinpath(*[f"{part}_" for part in path[:-1]], f"{path[-1]}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.with_suffix(".txt").touch()
    wanted = sorted(path for path in folder.rglob("*.png") if path.is_file())
    if wanted:
        assert list_images(folder) == wanted
    else:
        with pytest.raises(FileError, match="no pictures"):
            list_images(folder)


def test_links_to_folders_are_not_followed(tmp_path):
    picture(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in", target_is_directory=True)
    (tmp_path / "in" / "b.png").symlink_to(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "gone.png").symlink_to(tmp_path / "nothing")
    assert [path.name for path in list_images(tmp_path / "in")] == ["a.png", "b.png"]


def test_a_batch_of_a_folder_decodes_only_its_own_pictures(tmp_path, monkeypatch):
    for folder in range(5):
        for number in range(3):
            picture(tmp_path / str(folder) / f"{number}.png")
    decoded = []
    read = images.read_bytes
    monkeypatch.setattr(images, "read_bytes", lambda path, what: decoded.append(path) or read(path, what))
    source = StoredBatches(tmp_path, 2)
    next(iter(source))
    assert len(decoded) == 2
    assert len(source) == 8
    assert len(decoded) == 2


def test_labels_are_those_of_subfolders_with_pictures(tmp_path):
    for name in ("b/1.png", "b/deep/2.png", "d/3.png", "top.png"):
        picture(tmp_path / name)
    (tmp_path / "a").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").touch()
    found = {os.path.relpath(sample.name, tmp_path): sample.label for sample in open_samples(tmp_path)}
    assert found == {"b/1.png": 0, "b/deep/2.png": 0, "d/3.png": 1, "top.png": None}


def test_the_first_pictures_are_from_all_over_the_folder_and_the_same_in_every_process(tmp_path):
    """Of 8 classes with 16 pictures each, 8 pictures are of 8 classes, 32 pictures four of each."""
    for number in range(128):
        picture(tmp_path / f"class{number // 16}" / f"{number:03d}.png")
    source = open_samples(tmp_path)
    found = [(sample.name, sample.label) for sample in source]
    assert len({name for name, _ in found}) == 128
    assert sorted(label for _, label in found[:8]) == list(range(8))
    assert Counter(label for _, label in found[:32]) == dict.fromkeys(range(8), 4)
    assert len({name[-6:] for name, _ in found[:8]}) > 4  # not the first picture of each class
    code = f"from amct.data import open_samples; print([sample.name for sample in open_samples({str(tmp_path)!r})])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str([name for name, _ in found])


@given(count=st.integers(0, 300), first=st.integers(1, 300), classes=st.integers(1, 9))
def test_any_first_samples_have_their_share_of_every_class(count, first, classes):
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    labels = np.arange(count) * classes // max(count, 1)
    shares = np.bincount(labels[order[:first]], minlength=classes) / max(min(first, count), 1)
    expected = np.bincount(labels, minlength=classes) / max(count, 1)
    # n numbers that are nested halves of a list differ from n even ones by less than log2(n) + 2 at each border
    assert np.abs(shares - expected).max(initial=0) <= 2 * (np.log2(max(min(first, count), 1)) + 2) / min(
        first, max(count, 1)
    )


def test_links_to_folders_are_followed_once(tmp_path):
    picture(tmp_path / "store" / "cat" / "1.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "store" / "cat")
    (tmp_path / "data" / "dog").symlink_to(tmp_path / "store")  # its cat is known already
    (tmp_path / "store" / "round").symlink_to(tmp_path / "data")
    found = [os.path.relpath(sample.name, tmp_path / "data") for sample in open_samples(tmp_path / "data")]
    assert found == ["cat/1.png"]


# -- batches -----------------------------------------------------------------------------------------------------------


def array_file(folder, count=11):
    np.save(folder / "x.npy", np.arange(count * 2, dtype=np.float32).reshape(count, 2))
    return folder / "x.npy"


@pytest.mark.parametrize("most", [None, 2, 9])
def test_parts_and_length(tmp_path, most):
    path = array_file(tmp_path)
    whole = [batch.tolist() for batch in StoredBatches(path, 2, most=most)]
    source = StoredBatches(path, 2, most=most)
    assert len(source) == len(whole) == min(6, most or 6)
    assert source.samples == sum(map(len, whole))
    for first in range(8):
        for step in (1, 2, 3):
            assert [batch.tolist() for batch in source.part(first, step)] == whole[first::step]
    for size, skip in ((1, 3), (2, 1), (3, 1)):
        batches = Batches(source, lambda x: x.tolist())
        for rank in range(size):
            found = list(batches.limited(5, Ranks(rank, size), skip=skip))
            assert found == whole[:5][rank::size][skip:]


def test_numbers_that_are_not_positive(tmp_path):
    with pytest.raises(ArgumentError, match="at least one sample, got size 0"):
        StoredBatches(array_file(tmp_path), 0)
    with pytest.raises(ArgumentError, match="at least one batch, got 0"):
        StoredBatches(array_file(tmp_path), most=0)


def test_the_identity_of_data(tmp_path):
    """The same for the same files; another one if a file, the preprocessing or the batches differ."""
    for number in range(3):
        picture(tmp_path / "a" / f"{number}.png", number)
    path = array_file(tmp_path)

    def of_folder(**options):
        return StoredBatches(tmp_path / "a", 2, **options).identity()

    first = of_folder()
    assert first == of_folder()
    mean = np.zeros(3, np.float32)
    other = [
        of_folder(most=1),
        of_folder(prepare=Preparation(scale=2.0)),
        of_folder(prepare=Preparation(mean=mean)),
        of_folder(prepare=Preparation(mean=mean + 1)),
        StoredBatches(tmp_path / "a", 1).identity(),
        StoredBatches(path, 2).identity(),
    ]
    os.utime(tmp_path / "a" / "1.png", ns=(1, 1))
    other.append(of_folder())
    (tmp_path / "a" / "1.png").rename(tmp_path / "a" / "11.png")
    other.append(of_folder())
    assert len({first, *other}) == len(other) + 1


# -- reading ahead -----------------------------------------------------------------------------------------------------


def test_no_more_than_two_batches_are_read_ahead():
    read = []

    def numbers():
        for number in range(20):
            read.append(number)
            yield number

    ahead = AheadIterator(numbers())
    for wanted in range(5):
        assert next(ahead) == wanted
        for _ in range(100):  # the thread has time to read more than it may
            if len(read) > wanted + 1 + AHEAD:
                break
            time.sleep(0.001)
        assert len(read) <= wanted + 1 + AHEAD
    assert list(ahead) == list(range(5, 20))
    ahead.close()
    assert reading_threads() == []


def a_line_of_the_user():
    yield 1
    raise ZeroDivisionError("in the user's line")


def test_an_exception_comes_out_with_the_line_that_raised_it():
    ahead = AheadIterator(a_line_of_the_user())
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError) as caught:
        next(ahead)
    assert "a_line_of_the_user" in {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    with pytest.raises(ZeroDivisionError):
        next(ahead)


def test_a_pass_that_is_abandoned_ends_its_thread():
    ahead = AheadIterator(iter(range(1000)))
    next(ahead)
    assert len(reading_threads()) == 1
    del ahead
    gc.collect()
    assert reading_threads() == []


class Remembering:
    """Data of a user's own that knows in which thread it is read."""

    def __init__(self):
        self.threads = set()

    def __iter__(self):
        for _ in range(4):
            self.threads.add(threading.current_thread().name)
            yield torch.rand(1)


def test_only_data_that_says_so_is_read_in_a_thread():
    """The user's own iteration may draw random numbers or use what another thread must not touch."""
    own, wrapped = Remembering(), Remembering()
    assert len(list(Batches(own, lambda x: x).limited(None))) == 4
    assert own.threads == {threading.current_thread().name}
    batches = Batches(InBackground(wrapped), lambda x: x)
    assert batches.length is None
    assert len(list(batches.limited(3))) == 3
    assert wrapped.threads == {THREAD}


def test_wrapped_data_keeps_its_length_and_parts(tmp_path):
    source = InBackground(StoredBatches(array_file(tmp_path), 2))
    assert len(source) == 6
    assert [len(batch) for batch in source.part(4, 1)] == [2, 1]
    assert not hasattr(InBackground([1]), "part")
    assert len(InBackground([1, 2])) == 2


def test_no_batch_is_kept(tmp_path):
    """However long the stream is, only the batch in use and those ahead exist."""
    for number in range(40):
        picture(tmp_path / f"{number:02}.png", number)
    made, most = [], 0

    def seen(array):
        made.append(weakref.ref(array))
        return array

    data = StoredBatches(tmp_path, 1)

    class Counted:
        reads_ahead = True

        def __iter__(self):
            return map(seen, data)

    for batch in Batches(Counted(), lambda x: x).limited(None):
        most = max(most, sum(reference() is not None for reference in list(made)))
        del batch
    assert len(made) == 40
    assert most <= 1 + AHEAD + 1  # in use, ready, and the one that is being made


# -- the first batches -------------------------------------------------------------------------------------------------


def test_a_small_data_set_is_read_once(tmp_path):
    for number in range(5):
        picture(tmp_path / f"{number}.png", number)
    data = FirstBatches(StoredBatches(tmp_path, 2))
    wanted = [batch.tolist() for batch in data]
    (tmp_path / "0.png").write_bytes(b"damaged")
    assert [batch.tolist() for batch in data] == wanted
    assert [batch.tolist() for batch in data.first()] == wanted
    assert [batch.tolist() for batch in data.part(1, 2)] == wanted[1::2]
    assert not data.reads_ahead
    with pytest.raises(ParseError):
        list(StoredBatches(tmp_path, 2))


@pytest.mark.parametrize("read_before", [0, 1, 2, 4, 6])
def test_the_first_batches_do_not_depend_on_what_was_read(tmp_path, read_before):
    path = array_file(tmp_path)  # batches of 16 bytes
    data = FirstBatches(StoredBatches(path, 2), most=3 * 16)
    for _, _ in zip(range(read_before), data, strict=False):
        pass
    wanted = [batch.tolist() for batch in StoredBatches(path, 2, most=3)]
    assert [batch.tolist() for batch in data.first()] == wanted
    assert [len(batch) for batch in data] == [2, 2, 2, 2, 2, 1]
    assert data.reads_ahead
    assert len(FirstBatches(StoredBatches(path, 2), most=1).first()) == 1


# -- arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["u1", "i2", "<f4", ">f4", "f8", "f2", "?"])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 4, 5), (3, 1, 1)])
def test_rows_of_a_file_are_those_of_the_array(tmp_path, kind, shape):
    values = np.random.default_rng(0).integers(0, 100, shape).astype(kind)
    np.save(tmp_path / "x.npy", values)
    rows = open_rows(tmp_path / "x.npy")
    assert (rows.shape, rows.dtype, rows.ndim, rows.size, len(rows)) == (
        shape,
        values.dtype,
        len(shape),
        values.size,
        shape[0],
    )
    for index in (0, len(values) - 1, 1):
        assert np.array_equal(rows[index], values[index])
    samples = [sample.values for sample in open_samples(tmp_path / "x.npy")]
    assert all(
        np.array_equal(found.reshape(shape[1:]), row.astype(np.float32))
        for found, row in zip(samples, values, strict=True)
    )


def test_an_array_larger_than_memory_is_read_row_by_row(tmp_path):
    """A file with a hole: 2 TiB, of which only the rows that are asked for are read."""
    count, row = 1 << 21, 1 << 20
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count, row)})
        start = file.tell()
        try:
            file.truncate(start + count * row)
        except OSError:
            pytest.skip("the file system has no file as large as that")
        file.seek(start + (count - 1) * row)
        file.write(b"\7" * row)
    batches = StoredBatches(tmp_path / "x.npy", 2)
    assert len(batches) == count // 2
    assert next(iter(batches)).sum() == 0
    rows = open_rows(tmp_path / "x.npy")
    assert (rows[count - 1] == 7).all()


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path):
    path = array_file(tmp_path)
    source = iter(StoredBatches(path, 1))
    next(source)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileError, match="row 10 is missing: the file was changed"):
        list(source)


def test_files_without_rows_are_read_as_before(tmp_path):
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.arange(6.0).reshape(3, 2)))
    np.savez(tmp_path / "two.npz", data=np.arange(6.0).reshape(3, 2))
    (tmp_path / "damaged.npy").write_bytes(b"no array")
    for name in ("columns.npy", "two.npz"):
        assert open_rows(tmp_path / name) is None
        assert [sample.values.tolist() for sample in open_samples(tmp_path / name)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ParseError, match="not an array file"):
        open_samples(tmp_path / "damaged.npy")


def test_the_end_of_data_keeps_nothing_of_the_caller_alive():
    """A caller holds sessions of onnxruntime, whose threads must not be joined in a process that is forked later."""

    class Held:
        pass

    def use(items):
        held = Held()
        for _ in items:
            pass
        return weakref.ref(held)

    items = AheadIterator(iter(range(3)))
    gc.disable()
    try:
        assert use(items)() is None
    finally:
        gc.enable()
        items.close()
