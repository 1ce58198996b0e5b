"""Pictures: decoded and resized as OpenCV does (recorded from OpenCV 4), and against scipy's interpolation."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from amct.data import decode_image, list_images, read_image, resize
from amct.data.lmdb import to_bgr
from amct.data.samples import read_mean
from amct.errors import ArgumentError, FileError, ParseError
from amct.schema import message_class


@pytest.fixture(scope="module")
def opencv(golden):
    return np.load(golden / "data" / "opencv.npz")


def png(values):
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("name", ["jpeg", "jpeg_gray", "jpeg_turned", "png", "png_alpha", "png_16"])
@pytest.mark.parametrize(("mode", "color"), [("color", True), ("gray", False), ("stored", None)])
def test_pictures_are_opencvs(opencv, name, mode, color):
    if (name, mode) == ("png_16", "stored"):
        return  # OpenCV keeps 16 bits here, a Datum of Caffe cannot
    decoded = decode_image(opencv[f"file:{name}"].tobytes(), name, color=color, upright=color is not None)
    wanted = opencv[f"{mode}:{name}"]
    ours = to_bgr(decoded).transpose(1, 2, 0).reshape(wanted.shape)
    # gray of a colored PNG: both round weighted sums, one in 15 bits, one in 16
    largest = 1 if mode == "gray" and name.startswith("png") else 0
    assert np.abs(ours.astype(int) - wanted.astype(int)).max() <= largest


def test_linear_resizing_is_opencvs_to_the_last_bit(opencv):
    sizes = [key for key in opencv.files if key.startswith("linear:")]
    assert len(sizes) == 6
    for key in sizes:
        height, width = (int(size) for size in key[7:].split("x"))
        np.testing.assert_array_equal(resize(opencv["image"], (height, width)), opencv[key])


def by_scipy(image, size, order):
    """Interpolation at pixel centres with continued edges, channel by channel, in float64."""
    rows = (np.arange(size[0]) + 0.5) * image.shape[0] / size[0] - 0.5
    columns = (np.arange(size[1]) + 0.5) * image.shape[1] / size[1] - 0.5
    grid = np.meshgrid(rows, columns, indexing="ij")
    planes = [
        ndimage.map_coordinates(image[:, :, c].astype(float), grid, order=order, mode="nearest")
        for c in range(image.shape[2])
    ]
    return np.stack(planes, axis=2)


@given(old=st.tuples(st.integers(1, 12), st.integers(1, 12)), new=st.tuples(st.integers(1, 25), st.integers(1, 25)))
def test_linear_resizing_of_floats_and_bytes(old, new):
    image = np.random.default_rng(sum(old)).uniform(-5, 5, (*old, 2)).astype(np.float32)
    np.testing.assert_allclose(resize(image, new), by_scipy(image, new, 1), atol=1e-5)
    picture = np.random.default_rng(sum(new)).integers(0, 256, (*old, 3)).astype(np.uint8)
    resized = resize(picture, new)
    assert resized.dtype == np.uint8
    # shares in 1/2048 and two roundings: at most one level from the exact value
    assert np.abs(resized - by_scipy(picture, new, 1)).max() <= 1


def test_nearest_takes_pixels_and_cubic_keeps_parabolas():
    image = np.arange(12.0, dtype=np.float32).reshape(3, 4, 1)
    np.testing.assert_array_equal(resize(image, (6, 8), order=0), np.repeat(np.repeat(image, 2, 0), 2, 1))
    # Keys' kernel reproduces second-degree polynomials away from the edges
    line = (np.arange(20.0, dtype=np.float32) ** 2)[None, :, None]
    places = (np.arange(40) + 0.5) / 2 - 0.5
    resized = resize(line, (1, 40), order=3)[0, :, 0]
    np.testing.assert_allclose(resized[6:-6], places[6:-6] ** 2, rtol=1e-5)
    assert resize(np.full((2, 2), 200, np.uint8), (5, 5), order=3).max() == 200


def test_resizing_refuses_nonsense():
    image = np.zeros((2, 2, 1), np.float32)
    with pytest.raises(ArgumentError, match=r"order must be 0 \(nearest\), 1 \(linear\) or 3 \(cubic\), got 2"):
        resize(image, (3, 3), order=2)
    with pytest.raises(ArgumentError, match=r"cannot resize a picture of shape \(2, 2, 1\) to 0 x 3"):
        resize(image, (0, 3))
    with pytest.raises(ArgumentError, match=r"cannot resize a picture of shape"):
        resize(image[:0], (1, 1))


def test_files_that_are_no_pictures(tmp_path):
    with pytest.raises(FileError, match=r"Could not load .*none.png: the picture cannot be read"):
        read_image(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no picture at all")
    with pytest.raises(ParseError, match=r"text.png: not a picture, or of a kind that cannot be read"):
        read_image(tmp_path / "text.png")
    whole = png(np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8))
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ParseError, match=r"cut.png: the picture is damaged"):
        read_image(tmp_path / "cut.png")


def test_folders_of_pictures(tmp_path):
    for name in ("b.png", "a.PNG", "sub/c.jpg", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(np.zeros((2, 2, 3), np.uint8)))
    assert [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)] == ["a.PNG", "b.png", "sub/c.jpg"]
    with pytest.raises(FileError, match=r"there is no such folder of pictures"):
        list_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"no pictures in this folder"):
        list_images(tmp_path / "empty")


def blob(shape, count, legacy=False):
    message = message_class("caffe.BlobProto", schema="caffe")()
    message.data.extend(range(count))
    if legacy:
        message.num, message.channels, message.height, message.width = shape
    else:
        message.shape.dim.extend(shape)
    return message.SerializeToString()


@pytest.mark.parametrize("legacy", [False, True])
def test_mean_files(tmp_path, legacy):
    (tmp_path / "mean.binaryproto").write_bytes(blob((1, 3, 2, 2), 12, legacy))
    np.testing.assert_array_equal(read_mean(tmp_path / "mean.binaryproto"), np.arange(12.0).reshape(3, 2, 2))
    np.save(tmp_path / "mean.npy", np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(read_mean(tmp_path / "mean.npy"), [1, 2, 3])


def test_files_that_are_no_means(tmp_path):
    path = tmp_path / "mean.binaryproto"
    with pytest.raises(FileError, match=r"the mean file cannot be read"):
        read_mean(path)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ParseError, match=r"not a mean file .a serialized BlobProto."):
        read_mean(path)
    path.write_bytes(blob((1, 3, 2, 2), 11))
    with pytest.raises(ParseError, match=r"shape \(1, 3, 2, 2\) with 11 values"):
        read_mean(path)
    path.write_bytes(blob((2, 3, 2, 2), 24))
    with pytest.raises(ParseError, match=r"this one has shape \(2, 3, 2, 2\)"):
        read_mean(path)
