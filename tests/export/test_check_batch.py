"""The batch of a check: kept beside the record, read with distrust, replaced by random inputs."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from export_nets import residual
from onnx import TensorProto, helper

from amct.errors import ModelError
from amct.export.check import batch
from amct.export.check.batch import (
    batch_beside,
    batch_path,
    declared_inputs,
    encode_batch,
    first_samples,
    kept_inputs,
    seeded_batch,
)
from amct.export.onnx.messages import MODEL_LIMIT_VARIABLE

RECORD = b"record {\n}\n"
IMAGES = np.arange(2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "record.txt"
    path.write_bytes(RECORD)
    return path


@pytest.fixture(scope="module")
def model():
    return residual()[1]


def test_the_kept_batch_is_read_again(record, model, caplog):
    caplog.set_level("INFO", logger="amct")
    batch_path(record).write_bytes(encode_batch({"x": IMAGES}, RECORD))
    found, origin = batch_beside(record, declared_inputs(model))
    np.testing.assert_array_equal(found["x"], IMAGES)
    assert origin == "a calibration batch"
    assert "checked on the calibration batch in" in caplog.text


@pytest.mark.parametrize(("sizes", "kept"), [(["batch", 3, 8, 8], 16), ([40, 3, 8, 8], 40)], ids=["any", "fixed"])
def test_first_samples_are_enough_where_the_model_takes_any_number(record, sizes, kept):
    images = np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32)
    batch_path(record).write_bytes(encode_batch({"x": images}, RECORD))
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    found, _ = batch_beside(record, declared_inputs(helper.make_model(helper.make_graph([], "net", [value], []))))
    np.testing.assert_array_equal(found["x"], images[:kept])


def pickled():
    stream = io.BytesIO()
    np.savez(stream, record_sha256=np.array([object()]), names=np.array(["x"]), input_0=IMAGES)
    return stream.getvalue()


def with_input(change):
    """A kept batch whose input was changed; its checksum is right."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(encode_batch({"x": IMAGES}, RECORD))) as source,
        zipfile.ZipFile(stream, "w") as archive,
    ):
        for name in source.namelist():
            entry = source.read(name)
            archive.writestr(name, change(entry) if name.startswith("input_") else entry)
    return stream.getvalue()


def compressed():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("names.npy", b"0" * 10_000_000)
    return stream.getvalue()


UNUSABLE = {
    "no file": (None, "record.txt.check.npz does not exist"),
    "another record": (encode_batch({"x": IMAGES}, b"other"), "belongs to another record"),
    "another input": (encode_batch({"y": IMAGES}, RECORD), "does not fit the inputs of the model"),
    "another shape": (encode_batch({"x": IMAGES[:1]}, RECORD), "does not fit the inputs of the model"),
    "another type": (encode_batch({"x": IMAGES.astype(np.float64)}, RECORD), "does not fit the inputs of the model"),
    "text": (encode_batch({"x": np.array(["a"])}, RECORD), "is not a kept batch"),
    "half a file": (encode_batch({"x": IMAGES}, RECORD)[:-300], "is not a kept batch"),
    "damaged header": (with_input(lambda entry: entry.replace(b"8)", b"8 ")), "is not a kept batch"),
    "no array": (with_input(lambda _: b"no array"), "is not a kept batch"),
    "objects": (pickled(), "is not a kept batch"),
    "compressed": (compressed(), "is not a kept batch"),
    "too large": (b"0" * 2000, "is larger than a kept batch can be"),
}


@pytest.mark.parametrize(("content", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_without_a_usable_file_inputs_are_random_and_that_is_said(record, model, content, reason, caplog, monkeypatch):
    caplog.set_level("INFO", logger="amct")
    if reason.startswith("is larger"):
        monkeypatch.setattr(batch, "LARGEST_BATCH", 1000)
        monkeypatch.setattr(batch, "_LARGEST_HEADERS", 0)
    if content is not None:
        batch_path(record).write_bytes(content)
    found, origin = batch_beside(record, declared_inputs(model))
    assert origin == "random inputs"
    assert found["x"].shape == (2, 3, 8, 8)

    assert reason in caplog.text


def test_random_inputs_are_the_same_every_time():
    wanted = {"x": ([0, 3], np.dtype(np.float32)), "ids": ([2, 5], np.dtype(np.int64)), "b": ([2], np.dtype(bool))}
    first, second = seeded_batch(wanted), seeded_batch(wanted)
    assert first["x"].shape == (1, 3)
    assert set(first["ids"].reshape(-1)) <= {0, 1}
    for name, (_, dtype) in wanted.items():
        assert first[name].dtype == dtype
        np.testing.assert_array_equal(first[name], second[name])


def test_random_inputs_are_limited(monkeypatch):
    monkeypatch.setenv(MODEL_LIMIT_VARIABLE, "1000")
    seeded_batch({"x": ([100], np.dtype("f4")), "y": ([25], np.dtype("f4"))})
    with pytest.raises(ModelError, match=rf'input "y" has shape \[26\]: .*{MODEL_LIMIT_VARIABLE}'):
        seeded_batch({"x": ([100], np.dtype("f4")), "y": ([26], np.dtype("f4"))})
    monkeypatch.delenv(MODEL_LIMIT_VARIABLE)
    with pytest.raises(ModelError, match=r'input "x" has shape \[1, 1099511627776\]'):
        seeded_batch({"x": ([0, 2**40], np.dtype("f4"))})


def test_only_samples_within_the_limit_are_kept():
    inputs = {"a": np.zeros((4, 10), np.float32), "b": np.zeros((4, 2), np.int64)}
    assert {name: len(array) for name, array in first_samples(inputs, largest=112).items()} == {"a": 2, "b": 2}
    assert first_samples(inputs, largest=55) is None
    assert first_samples({**inputs, "c": np.zeros(3)}, largest=112) is None
    assert len(kept_inputs(inputs, divisible=True)["a"]) == 4
