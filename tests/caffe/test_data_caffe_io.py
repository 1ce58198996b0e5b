"""caffe.io: pictures, the Transformer and arrays in messages, as the probes of a real pycaffe showed them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from amct.caffe import pycaffe as caffe
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ArgumentError, ParseError


def transformer(**settings):
    made = caffe.io.Transformer({"data": (1, 3, 4, 4)})
    for name, value in settings.items():
        getattr(made, f"set_{name}")("data", value)
    return made


FULL = {
    "transpose": (2, 0, 1), "channel_swap": (2, 1, 0), "raw_scale": 255.0, "mean": np.array([1.0, 2.0, 3.0]),
    "input_scale": 0.5,
}  # fmt: skip


def test_the_transformer_works_in_pycaffes_order_and_back():
    picture = np.random.default_rng(0).random((4, 4, 3))
    made = transformer(**FULL)
    prepared = made.preprocess("data", picture)
    wanted = (picture.transpose(2, 0, 1)[[2, 1, 0]] * 255 - np.array([1, 2, 3]).reshape(3, 1, 1)) * 0.5
    assert (prepared.shape, prepared.dtype) == ((3, 4, 4), np.float32)
    np.testing.assert_allclose(prepared, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made.deprocess("data", prepared), picture, atol=1e-6)


def test_the_callers_picture_stays_as_it_is():
    picture = np.random.default_rng(0).random((4, 4, 3)).astype(np.float32)
    before = picture.copy()
    transformer(raw_scale=2.0).preprocess("data", picture)
    np.testing.assert_array_equal(picture, before)


def test_pictures_of_another_size_are_resized():
    assert transformer(transpose=(2, 0, 1)).preprocess("data", np.random.rand(8, 6, 3)).shape == (3, 4, 4)


def test_means_of_every_form():
    ones = np.ones((4, 4, 3), np.float32)
    by_picture = transformer(transpose=(2, 0, 1), mean=np.full((3, 4, 4), 0.25))
    np.testing.assert_allclose(by_picture.preprocess("data", ones), 0.75)
    flat = transformer(transpose=(2, 0, 1), mean=np.full((4, 4), 0.5))
    np.testing.assert_allclose(flat.preprocess("data", ones), 0.5)
    resized = transformer(transpose=(2, 0, 1), mean=np.full((3, 9, 8), 0.125))
    np.testing.assert_allclose(resized.preprocess("data", ones), 0.875)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.set_mean("foo", np.zeros(3)), r"foo is not one of the net inputs: \{'data': \(1, 3, 4, 4\)\}"),
        (lambda t: t.preprocess("foo", np.zeros((4, 4, 3))), "foo is not one of the net inputs"),
        (lambda t: t.deprocess("foo", np.zeros((4, 4, 3))), "foo is not one of the net inputs"),
        (lambda t: t.set_raw_scale("foo", 1), "foo is not one of the net inputs"),
        (lambda t: t.set_input_scale("foo", 1), "foo is not one of the net inputs"),
        (lambda t: t.set_mean("data", np.zeros(4)), r"Mean channels incompatible with input."),
        (lambda t: t.set_mean("data", np.zeros((1, 1, 4, 4))), "Mean shape invalid"),
        (lambda t: t.set_mean("data", np.zeros((2, 4, 4))), "Mean shape invalid"),
        (
            lambda t: t.set_transpose("data", (1, 0)),
            "Transpose order needs to have the same number of dimensions as the",
        ),
        (
            lambda t: t.set_channel_swap("data", (1, 0)),
            "Channel swap needs to have the same number of dimensions as the",
        ),
    ],
)
def test_transformers_refuse_what_does_not_fit(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(transformer())


def test_images_load_as_floats_of_0_to_1(tmp_path):
    rgb = np.random.default_rng(1).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    Image.fromarray(rgb).save(tmp_path / "rgb.png")
    loaded = caffe.io.load_image(tmp_path / "rgb.png")
    assert (loaded.shape, loaded.dtype) == ((4, 5, 3), np.float32)
    np.testing.assert_allclose(loaded, rgb / 255, rtol=1e-6)
    gray = caffe.io.load_image(tmp_path / "rgb.png", color=False)
    np.testing.assert_allclose(gray[:, :, 0], (rgb / 255) @ [0.2125, 0.7154, 0.0721], rtol=1e-5)
    Image.fromarray(rgb[:, :, 0]).save(tmp_path / "gray.png")
    np.testing.assert_array_equal(caffe.io.load_image(tmp_path / "gray.png")[:, :, 2], np.float32(rgb[:, :, 0]) / 255)
    assert caffe.io.load_image(tmp_path / "gray.png", color=False).shape == (4, 5, 1)
    Image.fromarray(np.dstack([rgb, rgb[:, :, :1]])).save(tmp_path / "alpha.png")
    np.testing.assert_array_equal(caffe.io.load_image(tmp_path / "alpha.png"), loaded)
    Image.fromarray(rgb).quantize(8).save(tmp_path / "palette.png")
    assert caffe.io.load_image(tmp_path / "palette.png").shape == (4, 5, 3)
    Image.fromarray(rgb[:, :, 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    np.testing.assert_allclose(caffe.io.load_image(tmp_path / "deep.png")[:, :, 0], rgb[:, :, 0] / 255, rtol=1e-6)


def test_images_that_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file: 'none.png'"):
        caffe.io.load_image("none.png")
    noise = np.random.default_rng(0).integers(0, 256, (50, 50, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    (tmp_path / "x.png").write_bytes((tmp_path / "x.png").read_bytes()[:3000])
    with pytest.raises(ParseError, match=r"x.png: the picture is damaged"):
        caffe.io.load_image(tmp_path / "x.png")


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_resizing_any_number_of_channels(channels):
    picture = np.random.default_rng(2).uniform(-3, 9, (8, 6, channels))
    resized = caffe.io.resize_image(picture, (4, 5))
    assert (resized.shape, resized.dtype) == ((4, 5, channels), np.float32)
    np.testing.assert_allclose(
        caffe.io.resize_image(picture, (4, 3)), picture.reshape(4, 2, 3, 2, -1).mean((1, 3)), atol=1e-5
    )
    constant = caffe.io.resize_image(np.ones((8, 6, channels)), (4, 5))
    np.testing.assert_array_equal(constant, 1)
    with pytest.raises(ArgumentError, match=r"interpolation order must be"):
        caffe.io.resize_image(picture, (4, 5), interp_order=2)


def test_ten_crops():
    picture = np.arange(8 * 10 * 1.0).reshape(8, 10, 1)
    crops = caffe.io.oversample([picture, picture + 1], (4, 6))
    assert (crops.shape, crops.dtype) == ((20, 4, 6, 1), np.float32)
    for index, (top, left) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)]):
        window = picture[top : top + 4, left : left + 6]
        np.testing.assert_array_equal(crops[index], window)
        np.testing.assert_array_equal(crops[index + 5], window[:, ::-1])
        np.testing.assert_array_equal(crops[index + 10], window + 1)
    with pytest.raises(ArgumentError, match=r"oversample: no pictures given"):
        caffe.io.oversample([], (4, 4))
    with pytest.raises(ArgumentError, match=r"a crop of 9 x 4 does not fit into a picture of 8 x 10"):
        caffe.io.oversample([picture], (9, 4))


def test_arrays_in_blob_messages():
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    blob = caffe.io.array_to_blobproto(values, diff=values * 2)
    assert list(blob.shape.dim) == [1, 2, 3]
    assert caffe.io.blobproto_to_array(blob).dtype == np.float64
    np.testing.assert_array_equal(caffe.io.blobproto_to_array(blob), values)
    np.testing.assert_array_equal(caffe.io.blobproto_to_array(blob, return_diff=True), values * 2)
    legacy = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=3, data=range(6))
    assert caffe.io.blobproto_to_array(legacy).shape == (1, 1, 2, 3)
    vector = caffe.io.arraylist_to_blobprotovector_str([values, values + 1])
    np.testing.assert_array_equal(caffe.io.blobprotovector_str_to_arraylist(vector), [values, values + 1])
    blob.data.append(1)
    with pytest.raises(ParseError, match=r"7 values do not match its shape \(1, 2, 3\)"):
        caffe.io.blobproto_to_array(blob)


def test_arrays_in_datums():
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    datum = caffe.io.array_to_datum(values.astype(np.uint8), 5)
    assert (datum.channels, datum.height, datum.width, len(datum.data), datum.label) == (1, 2, 3, 6, 5)
    assert caffe.io.datum_to_array(datum).dtype == np.uint8
    datum = caffe.io.array_to_datum(values)
    assert list(datum.float_data) == [0, 1, 2, 3, 4, 5]
    assert not datum.HasField("label")
    assert caffe.io.datum_to_array(datum).dtype == np.float64
    np.testing.assert_array_equal(caffe.io.datum_to_array(datum), values)
    with pytest.raises(ValueError, match=r"Incorrect array shape."):
        caffe.io.array_to_datum(values[0])
    datum.height = 9
    with pytest.raises(ParseError, match=r"Datum of shape \(1, 9, 3\): it holds 6 values"):
        caffe.io.datum_to_array(datum)
    with pytest.raises(ParseError, match=r"it holds an encoded picture, which must be decoded first"):
        caffe.io.datum_to_array(caffe_pb2.Datum(encoded=True, data=b"abc", channels=3, height=2, width=2))


def test_the_names_of_amct_caffe_are_these():
    from amct_caffe.caffe import io

    assert io.Transformer is caffe.io.Transformer
    assert set(io.__all__) == set(caffe.io.__all__)
