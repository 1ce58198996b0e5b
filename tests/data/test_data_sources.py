"""Samples from every kind of file, the databases and formats behind them, and reading ahead."""

from __future__ import annotations

import gc
import gzip
import struct
import threading
import weakref
from pathlib import Path

import lmdb
import numpy as np
import pytest
from PIL import Image

from amct.data import Preparation, ReadAhead, batches, open_samples, read_array, read_arrays, read_idx
from amct.data.lmdb import LmdbReader, make_datum, parse_datum, write_lmdb
from amct.errors import ArgumentError, FileError, ParseError
from amct.schema import message_class


def pictures(count=5, shape=(3, 4, 6), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def save_png(path, values):
    """``values`` are (channels, height, width) in blue, green, red order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(values[::-1].transpose(1, 2, 0))).save(path)


def idx(values, code):
    return bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


# ---------------------------------------------------------------------- one face


def test_a_folder_of_pictures(tmp_path):
    values = pictures(3)
    for index, value in enumerate(values):
        save_png(tmp_path / f"{index}.png", value)
    source = open_samples(tmp_path)
    assert len(source) == 3
    samples = {Path(sample.name).stem: sample for sample in source}
    for index, value in enumerate(values):  # ``save_png`` takes BGR
        np.testing.assert_array_equal(samples[str(index)].values, value[::-1])
        assert (samples[str(index)].values.dtype, samples[str(index)].label) == (np.float32, None)
    bgr = {Path(sample.name).stem: sample for sample in open_samples(tmp_path, Preparation(color="bgr"))}
    np.testing.assert_array_equal(bgr["0"].values, values[0])
    assert next(iter(open_samples(tmp_path, Preparation(color="gray")))).values.shape == (1, 4, 6)


def test_sub_folders_are_labels(tmp_path):
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        save_png(tmp_path / name, pictures(1)[0])
    assert sorted(sample.label for sample in open_samples(tmp_path)) == [0, 1, 1]


def test_a_list_of_pictures_and_a_single_one(tmp_path):
    save_png(tmp_path / "in" / "with blank.png", pictures(1)[0])
    (tmp_path / "in" / "list.txt").write_text("with blank.png 7\nwith blank.png\n\n")
    assert [sample.label for sample in open_samples(tmp_path / "in" / "list.txt")] == [7, None]
    assert len(open_samples(tmp_path / "in" / "with blank.png")) == 1
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ParseError, match=r"File is empty: the list names no picture"):
        open_samples(tmp_path / "empty.txt")


def test_preparation_resizes_crops_subtracts_and_scales(tmp_path):
    values = pictures(1, (3, 8, 10))
    np.save(tmp_path / "x.npy", values)
    prepare = Preparation(crop=(4, 6), mean=np.array([1, 2, 3], np.float32), scale=0.5)
    (sample,) = open_samples(tmp_path / "x.npy", prepare)
    wanted = (values[0, :, 2:6, 2:8].astype(np.float32) - np.array([1, 2, 3]).reshape(3, 1, 1)) * 0.5
    np.testing.assert_allclose(sample.values, wanted, rtol=1e-6)
    (sample,) = open_samples(tmp_path / "x.npy", Preparation(size=(16, 20)))
    assert sample.values.shape == (3, 16, 20)
    mean = np.full((3, 8, 10), 2, np.float32)
    (sample,) = open_samples(tmp_path / "x.npy", Preparation(mean=mean))
    np.testing.assert_array_equal(sample.values, values[0] - 2.0)
    (sample,) = open_samples(tmp_path / "x.npy", Preparation(mean=np.array([5], np.float32)))
    np.testing.assert_array_equal(sample.values, values[0] - 5.0)


def test_one_scale_for_each_channel(tmp_path):
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    prepare = Preparation(mean=np.array([1, 2, 3], np.float32), scale=(0.5, 2.0, 4.0))
    got = np.stack([sample.values for sample in open_samples(tmp_path / "x.npy", prepare)])
    want = (values - np.float32([1, 2, 3]).reshape(3, 1, 1)) * np.float32([0.5, 2, 4]).reshape(3, 1, 1)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ArgumentError, match=r"a scale of shape \(2,\) does not fit an input of shape \(3, 4, 5\)"):
        list(open_samples(tmp_path / "x.npy", Preparation(scale=(0.5, 2.0))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 3)}, r"size: expected a height and a width of at least 1, got \(0, 3\)"),
        ({"crop": (3,)}, "crop: expected a height and a width"),
        ({"color": "hsv"}, 'color: expected "bgr", "rgb" or "gray"'),
    ],
)
def test_preparations_that_make_no_sense(options, message):
    with pytest.raises(ArgumentError, match=message):
        Preparation(**options)


def test_preparations_that_do_not_fit(tmp_path):
    np.save(tmp_path / "x.npy", pictures(1))
    with pytest.raises(ArgumentError, match=r"a crop of 5 x 5 does not fit into a picture of 4 x 6"):
        list(open_samples(tmp_path / "x.npy", Preparation(crop=(5, 5))))
    with pytest.raises(ArgumentError, match=r"a mean of shape \(2,\) does not fit an input of shape \(3, 4, 6\)"):
        list(open_samples(tmp_path / "x.npy", Preparation(mean=np.zeros(2, np.float32))))


def test_arrays_with_labels(tmp_path):
    values = pictures(4)
    np.savez(tmp_path / "x.npz", images=values, labels=np.arange(4)[:, None])
    samples = list(open_samples(tmp_path / "x.npz"))
    assert [sample.label for sample in samples] == [0, 1, 2, 3]
    np.testing.assert_array_equal(samples[2].values, values[2])
    np.savez(tmp_path / "bad.npz", images=values, labels=np.arange(3))
    with pytest.raises(ParseError, match=r"4 samples but labels of shape \(3,\)"):
        open_samples(tmp_path / "bad.npz")
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    with pytest.raises(ParseError, match=r"no samples: the array has shape \(0, 3\)"):
        open_samples(tmp_path / "none.npy")
    np.save(tmp_path / "text.npy", np.array(["a"]))
    with pytest.raises(ParseError, match=r"holds <U1, not numbers"):
        open_samples(tmp_path / "text.npy")


def test_batches(tmp_path):
    np.save(tmp_path / "x.npy", pictures(5))
    source = open_samples(tmp_path / "x.npy")
    assert [len(values) for values, _ in batches(source, 2)] == [2, 2, 1]
    assert [len(values) for values, _ in batches(source, 2, drop_last=True)] == [2, 2]
    with pytest.raises(ArgumentError, match=r"a batch has at least one sample, got size 0"):
        next(batches(source, 0))
    for index, size in enumerate((3, 4)):
        save_png(tmp_path / "mixed" / f"{index}.png", pictures(1, (3, size, size))[0])
    with pytest.raises(ArgumentError, match=r"they cannot be in one batch. Give a size to resize to"):
        list(batches(open_samples(tmp_path / "mixed"), 2))


def test_nothing_there(tmp_path):
    with pytest.raises(FileError, match=r"there is no such file or folder of data"):
        open_samples(tmp_path / "none")


# ---------------------------------------------------------------------- arrays, idx


def test_which_array_of_a_file(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros(1), b=np.ones(1))
    assert set(read_arrays(tmp_path / "x.npz")) == {"a", "b"}
    assert read_array(tmp_path / "x.npz", "b") == 1
    with pytest.raises(ArgumentError, match=r'no array called "c".* It has: a, b'):
        read_array(tmp_path / "x.npz", "c")
    with pytest.raises(ArgumentError, match=r"several arrays \(a, b\)"):
        read_array(tmp_path / "x.npz")
    np.savez(tmp_path / "one.npz", only=np.ones(1))
    assert read_array(tmp_path / "one.npz") == 1


def test_arrays_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"there is no such file"):
        read_arrays(tmp_path / "none.npy")
    with pytest.raises(FileError, match=r"cannot be read"):
        read_arrays(tmp_path)
    np.save(tmp_path / "object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ParseError, match=r"not an array file of NumPy .*allow_pickle"):
        read_arrays(tmp_path / "object.npy")
    np.savez(tmp_path / "cut.npz", x=np.arange(1000))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:500])
    with pytest.raises(ParseError, match=r"damaged"):
        read_arrays(tmp_path / "cut.npz")


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("code", "dtype"), [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")]
)
def test_idx_files(tmp_path, ending, code, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    content = idx(values, code)
    path = tmp_path / f"x-idx3-ubyte{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    read = read_idx(path)
    np.testing.assert_array_equal(read, values)
    assert read.dtype.isnative


def test_idx_samples_find_their_labels(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(pictures(2, (4, 5)), 8))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([3, 9], np.uint8), 8))
    samples = list(open_samples(tmp_path / "train-images-idx3-ubyte"))
    assert [sample.label for sample in samples] == [3, 9]
    assert samples[0].values.shape == (1, 4, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file: it begins with nothing"),
        (b"\0\0\x07\1", "not an idx file: it begins with 00 00 07 01"),
        (b"\0\0\x08\3\0\0", "its head says 3 axes and ends early"),
        (b"\0\0\x08\0", "its head says 0 axes"),
        (b"\0\0\x08\1\0\0\0\5ab", r"an idx file of shape \(5,\) has 5 bytes of data, this one 2"),
        (b"\x1f\x8bnonsense", "a damaged gzip file"),
    ],
)
def test_files_that_are_no_idx(tmp_path, content, message):
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(ParseError, match=message):
        read_idx(tmp_path / "x.idx")


# ---------------------------------------------------------------------- LMDB


def test_an_lmdb_written_and_read(tmp_path):
    values, floats = pictures(5), np.random.default_rng(1).normal(size=(2, 1, 2, 2)).astype(np.float32)
    written = [*zip(values, range(5), strict=True), *zip(floats, (7, -8), strict=True)]
    assert write_lmdb(tmp_path / "db", written) == 7
    reader = LmdbReader(tmp_path / "db")
    assert len(reader) == 7
    for datum, (value, label) in zip(reader.datums(), written, strict=True):
        np.testing.assert_array_equal(datum.values, value)
        assert (datum.values.dtype, datum.label) == (value.dtype, label)
    assert [key for key, _ in reader.items()][:2] == ["00000000", "00000001"]
    samples = list(open_samples(tmp_path / "db"))
    assert [sample.label for sample in samples] == [*range(5), 7, -8]
    with pytest.raises(ArgumentError, match=r"there is an LMDB already"):
        write_lmdb(tmp_path / "db", written)
    with pytest.raises(ArgumentError, match=r"a Datum holds an array of 3 axes .* got shape \(3,\)"):
        write_lmdb(tmp_path / "other", [(np.zeros(3), 0)])


def test_a_large_lmdb_grows_its_map(tmp_path):
    """More than the first map of 16 MB, in more than one transaction."""
    value = np.zeros((1, 160, 160), np.uint8)
    assert write_lmdb(tmp_path / "db", ((value, index) for index in range(1200))) == 1200
    assert len(LmdbReader(tmp_path / "db")) == 1200


def test_a_database_is_read_while_others_have_it_open(tmp_path):
    write_lmdb(tmp_path / "db", [(pictures(1)[0], 0)])
    first, second = LmdbReader(tmp_path / "db"), LmdbReader(tmp_path / "db")
    with lmdb.open(str(tmp_path / "db")):
        assert [len(list(reader.datums())) for reader in (first, second)] == [1, 1]
    with lmdb.open(str(tmp_path / "single"), subdir=False) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"a", make_datum(pictures(1)[0], 4))
    assert [datum.label for datum in LmdbReader(tmp_path / "single").datums()] == [4]


def test_databases_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"cannot open the LMDB: there is no such folder"):
        LmdbReader(tmp_path / "none")
    with pytest.raises(FileError, match=r"the folder has no data.mdb"):
        LmdbReader(tmp_path)
    lmdb.open(str(tmp_path / "empty")).close()
    with pytest.raises(ParseError, match=r"the LMDB is empty: it has no entries"):
        LmdbReader(tmp_path / "empty")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.mdb").write_text("no database" * 1000)
    with pytest.raises(ParseError, match=r"not an LMDB, or damaged"):
        LmdbReader(tmp_path / "text")
    write_lmdb(tmp_path / "db", [(value, 0) for value in pictures(200)])
    content = (tmp_path / "db" / "data.mdb").read_bytes()
    (tmp_path / "db" / "data.mdb").write_bytes(content[: len(content) // 2])
    with pytest.raises(ParseError, match=r"the LMDB is truncated: \d+ bytes where its pages need \d+"):
        LmdbReader(tmp_path / "db")


def test_datums_that_are_damaged(golden):
    good = make_datum(pictures(1)[0], 3)
    assert parse_datum(good, "x").label == 3
    with pytest.raises(ParseError, match=r"entry: not a Datum, or damaged"):
        parse_datum(good[:10], "entry")
    datum = message_class("caffe.Datum", schema="caffe")(channels=3, height=2, width=2, data=b"12345")
    with pytest.raises(ParseError, match=r"a Datum of 3 x 2 x 2 \(channels, height, width\) with 5 values"):
        parse_datum(datum.SerializeToString(), "entry")
    with pytest.raises(ParseError, match=r"a Datum of 0 x 0 x 0"):
        parse_datum(b"", "entry")
    picture = np.load(golden / "data" / "opencv.npz")
    datum = message_class("caffe.Datum", schema="caffe")(encoded=True, label=2, data=picture["file:jpeg"].tobytes())
    decoded = parse_datum(datum.SerializeToString(), "entry")
    np.testing.assert_array_equal(decoded.values.transpose(1, 2, 0), picture["stored:jpeg"])
    assert decoded.was_encoded
    datum.data = datum.data[:-150]
    with pytest.raises(ParseError, match=r"entry: the picture is damaged"):
        parse_datum(datum.SerializeToString(), "entry")


# ---------------------------------------------------------------------- reading ahead


def counter():
    numbers = iter(range(10**9))
    return lambda: next(numbers)


def test_items_come_in_order_and_never_too_many_ahead():
    fetched = []
    source = counter()

    def fetch():
        fetched.append(source())
        return fetched[-1]

    ahead = ReadAhead(fetch, 3)
    assert not fetched
    assert [ahead.take() for _ in range(50)] == list(range(50))
    assert len(fetched) <= 50 + 3 + 1
    ahead.close()
    with pytest.raises(ArgumentError, match=r"reading ahead has been closed"):
        ahead.take()


def test_an_error_comes_where_the_item_would_have_come():
    items = iter([1, 2])

    def fetch():
        try:
            return next(items)
        except StopIteration:
            raise ParseError("the third is damaged") from None

    ahead = ReadAhead(fetch, 4)
    assert [ahead.take(), ahead.take()] == [1, 2]
    for _ in range(2):
        with pytest.raises(ParseError, match=r"the third is damaged"):
            ahead.take()
    ahead.close()


def test_the_thread_ends_with_its_owner():
    class Owner:
        def __init__(self):
            self.ahead = ReadAhead(counter(), 2, "to be ended")

    owner = Owner()
    owner.ahead.take()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "to be ended"]
    watched = weakref.ref(owner)
    del owner
    gc.collect()
    assert watched() is None
    assert not thread.is_alive()
