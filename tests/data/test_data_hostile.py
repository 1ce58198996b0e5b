"""Small data files that announce or expand to very much, and files that refer to other files."""

from __future__ import annotations

import gzip
import io
import struct
import time
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest
from PIL import Image

from amct.caffe.engine.hdf5 import Hdf5File
from amct.data import arrays, open_samples, read_arrays, read_idx, read_image
from amct.data.lmdb import LmdbReader, write_lmdb
from amct.errors import AmctError, FileError, ParseError


def npz(header_shape, content, name="data.npy"):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": header_shape})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, head.getvalue() + content)
    return stream.getvalue()


@pytest.fixture
def small_limit(monkeypatch):
    """A limit that tests reach without using much memory."""
    monkeypatch.setattr(arrays, "FREE_BYTES", 2**16)


@pytest.mark.usefixtures("small_limit")
def test_an_archive_that_expands_more_than_a_hundred_times(tmp_path):
    path = tmp_path / "bomb.npz"
    path.write_bytes(npz((250_000,), bytes(10**6)))
    with pytest.raises(ParseError, match=r"1000000 bytes of data in \d+ bytes, more than 100 times.*without compressi"):
        read_arrays(path)
    np.savez(tmp_path / "plain.npz", np.zeros(250_000, np.float32))
    assert read_arrays(tmp_path / "plain.npz")["arr_0"].nbytes == 10**6


@pytest.mark.usefixtures("small_limit")
def test_many_arrays_of_one_archive_count_together(tmp_path):
    np.savez_compressed(tmp_path / "many.npz", **{f"a{index}": np.zeros(15_000, np.float32) for index in range(40)})
    with pytest.raises(ParseError, match="more than 100 times"):
        read_arrays(tmp_path / "many.npz")


def test_shapes_that_the_content_does_not_have(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(npz((10**15,), b"1234"))
    with pytest.raises(ParseError, match=r"4000000000000000 bytes of data in \d+ bytes"):
        read_arrays(path)
    path.write_bytes(npz((3,), b"1234"))
    with pytest.raises(ParseError, match="has 12 bytes, got 4"):
        read_arrays(path)
    path.write_bytes(npz((1,), b"12345"))
    with pytest.raises(ParseError, match="more bytes than its shape"):
        read_arrays(path)
    path.write_bytes(npz((10**12, 0), b""))
    with pytest.raises(ParseError, match="no samples"):
        open_samples(path)
    path.write_bytes(npz((1,), b"1234", name="readme.txt"))
    with pytest.raises(ParseError, match=r'it contains "readme\.txt", no array'):
        read_arrays(path)


def test_orders_and_types_are_those_of_numpy(tmp_path):
    values = np.arange(24).reshape(2, 3, 4)
    for kind in ("<f4", ">f8", "i2", "?", "<M8[s]", "c8", "S3"):
        for array in (values.astype(kind), np.asfortranarray(values.astype(kind)), values.astype(kind)[:0]):
            np.save(tmp_path / "a.npy", array)
            np.savez_compressed(tmp_path / "a.npz", array, other=array)
            for found in (read_arrays(tmp_path / "a.npy")["data"], *read_arrays(tmp_path / "a.npz").values()):
                np.testing.assert_array_equal(found, array)
                assert found.dtype == array.dtype


@pytest.mark.usefixtures("small_limit")
def test_a_gzip_file_that_expands_more_than_a_hundred_times(tmp_path):
    head = b"\0\0\x08\x01" + (10**6).to_bytes(4, "big")
    (tmp_path / "bomb.idx.gz").write_bytes(gzip.compress(head + bytes(10**6)))
    with pytest.raises(ParseError, match=r"bomb\.idx\.gz: \d+ bytes of data in \d+ bytes, more than 100 times"):
        read_idx(tmp_path / "bomb.idx.gz")


@pytest.mark.usefixtures("small_limit")
def test_a_gzip_bomb_is_stopped_while_it_expands():
    bomb = gzip.compress(bytes(2**26), 9)
    tracemalloc.start()
    with pytest.raises(ParseError, match="more than 100 times"):
        arrays.gunzip(bomb, "bomb.gz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What it may expand to, and one block more; the decoder doubles the buffer of a block while it fills it.
    assert peak < arrays.RATIO * len(bomb) + 4 * arrays._BLOCK_BYTES < 2**24


def test_no_file_expands_to_more_than_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr(arrays, "machine_bytes", lambda: 2**20)
    arrays.check_expansion(2**20, 2**20, "x")
    with pytest.raises(ParseError, match=r"x: .* of data, more than the .* of memory of this machine\. Split the file"):
        arrays.check_expansion(2**20 + 1, 2**20, "x")
    with pytest.raises(ParseError, match=r"bomb\.gz: .* more than the .* of memory"):
        arrays.gunzip(gzip.compress(bytes(2**22)), "bomb.gz")


def test_gzip_members_are_joined_and_damage_is_noticed(tmp_path):
    head, data = b"\0\0\x08\x01\0\0\0\x06", b"abcdef"
    path = tmp_path / "a.idx.gz"
    path.write_bytes(gzip.compress(head) + gzip.compress(data) + bytes(7))
    assert read_idx(path).tobytes() == data
    for content in (gzip.compress(head + data)[:-3], gzip.compress(head + data)[:12], b"\x1f\x8b" + bytes(30)):
        path.write_bytes(content)
        with pytest.raises(ParseError, match="a damaged gzip file"):
            read_idx(path)


def png(size):
    stream = io.BytesIO()
    Image.new("1", size).save(stream, "PNG")
    return stream.getvalue()


def test_a_picture_of_more_pixels_than_its_bytes_can_hold(tmp_path):
    (tmp_path / "flat.png").write_bytes(png((7000, 7000)))
    with pytest.raises(ParseError, match=r"\d+ bytes for a picture of 7000 x 7000 pixels: the file is damaged"):
        read_image(tmp_path / "flat.png")
    (tmp_path / "small.png").write_bytes(png((700, 700)))
    assert read_image(tmp_path / "small.png").shape == (700, 700, 3)


def test_a_format_that_starts_another_program_is_not_read(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(ParseError, match="not a picture"):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a\0b.npy", "a\0b.png", "a\0b.txt", "a\0b.idx", "a\0b.mdb", "a\0b"])
def test_paths_with_a_nul_character(name):
    with pytest.raises(FileError):
        open_samples(name)
    for read in (read_arrays, read_image, read_idx):
        with pytest.raises(FileError):
            read(name)


# ---------------------------------------------------------------------- HDF5


def test_hdf5_data_in_other_files_is_not_read(tmp_path):
    (tmp_path / "secret.txt").write_bytes(b"password")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros(3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("outside", (2,), "i4", external=[(str(tmp_path / "secret.txt"), 0, 8)])
        file["linked"] = h5py.ExternalLink("other.h5", "x")
        file["soft"] = h5py.SoftLink("/linked")
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3,))
        file.create_virtual_dataset("virtual", layout)
        file["own"] = np.arange(3.0)
    with Hdf5File(tmp_path / "a.h5") as file:
        for name, reason in (
            ("outside", "is stored in another file"),
            ("virtual", "is stored in another file"),
            ("linked", "is a link, which is not followed"),
            ("soft", "is a link, which is not followed"),
        ):
            with pytest.raises(ParseError, match=rf"a\.h5: .*{reason}"):
                file.array(name)
        np.testing.assert_array_equal(file.array("own"), np.arange(3.0))
        assert file.array("none") is None
        assert file.names("own") == []


def test_hdf5_datasets_that_announce_too_much(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("huge", (2**40,), "f4", chunks=(2**10,))
        file["text"] = b"words"
        file["empty"] = h5py.Empty("f4")
    with Hdf5File(tmp_path / "a.h5") as file:
        with pytest.raises(ParseError, match=r'dataset "huge": 4398046511104 bytes of data in \d+ bytes'):
            file.array("huge")
        for name in ("text", "empty"):
            with pytest.raises(AmctError, match="must hold numbers"):
                file.array(name)
        assert file.text("text") == "words"


@pytest.mark.parametrize("shape", [(2**32 - 1, 0), (2**32 - 1,) * 4 + (0,), (2**32 - 1, 0, 2**32 - 1, 2**32 - 1)])
def test_idx_header_without_values(tmp_path, shape):
    (tmp_path / "x.idx").write_bytes(bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape))
    with pytest.raises(ParseError, match="there are no values"):
        read_idx(tmp_path / "x.idx")


def test_idx_of_many_gzip_members_is_read_in_time(tmp_path):
    (tmp_path / "x.idx.gz").write_bytes(gzip.compress(b"\0\0\x08\1\0\0\0\0") + gzip.compress(b"") * 100_000)
    start = time.process_time()
    assert read_idx(tmp_path / "x.idx.gz").shape == (0,)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "labels", [np.full(8, np.nan), np.full(8, np.inf), np.array(["cat"] * 8), np.zeros((8, 0)), np.zeros(8, complex)]
)
def test_labels_that_are_no_numbers(tmp_path, labels):
    np.savez(tmp_path / "x.npz", data=np.zeros((8, 3, 4, 4), np.float32), labels=labels)
    with pytest.raises(ParseError, match="labels"):
        list(open_samples(tmp_path / "x.npz"))


@pytest.mark.parametrize("label", ["\u00b2", "--3", "9" * 5000])
def test_list_with_a_label_that_is_no_number(tmp_path, label):
    (tmp_path / "list.txt").write_text(f"a.png {label}\n", encoding="utf-8")
    with pytest.raises(AmctError, match=r"a\.png"):
        list(open_samples(tmp_path / "list.txt"))


def test_lmdb_without_root_but_with_entries(tmp_path):
    write_lmdb(tmp_path / "db", [(np.zeros((1, 2, 2), np.uint8), 0)])
    file = tmp_path / "db" / "data.mdb"
    content = bytearray(file.read_bytes())
    for page in (0, 4096):  # the meta pages: 16 bytes of header, 24 of numbers, two databases that end with their root
        content[page + 16 + 24 + 96 - 8 : page + 16 + 24 + 96] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(ParseError, match="does not have the 1 entries"):
        next(LmdbReader(tmp_path / "db").datums())
