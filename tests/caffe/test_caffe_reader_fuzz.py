"""Any bytes into every reader of files: our error or success, never another exception."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from caffe_nets import A
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import read_net_message
from amct.caffe.engine.solvers.definition import read_solver
from amct.caffe.engine.solvers.snapshot import read_state
from amct.caffe.engine.wire import read_blob, read_weights
from amct.caffe.proto_merge import load_custom_schema
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.data.arrays import read_arrays, read_idx
from amct.data.images import read_image
from amct.data.lmdb import parse_datum
from amct.data.samples import read_image_list, read_mean
from amct.errors import AmctError
from amct.record.conversion import read_tensor_qparams

OLD_NET = """
input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2 weight_decay: 1
  convolution_param { num_output: 2 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layers { name: "pool" type: POOLING bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layers { name: "norm" type: LRN bottom: "pool" top: "norm" lrn_param { local_size: 3 alpha: 5e-05 beta: 0.75 } }
"""
SOLVER = """
net: "net.prototxt" test_iter: 100 test_interval: 500 base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 # comment
lr_policy: "inv" gamma: 0.0001 power: 0.75 display: 100 max_iter: 10000 solver_type: ADAM solver_mode: CPU
"""
CUSTOM = """
syntax = "proto2"; package caffe;
message LayerParameter { optional MyParameter my_param = 4000; }
message MyParameter { /* sizes */ optional float slope = 1 [default = -1e-3]; repeated int64 dim = 2 [packed = true];
  enum Kind { LEFT = 0; RIGHT = 1; } optional Kind kind = 3 [default = RIGHT];
  oneof which { string a = 4; bytes b = 5; }
  message Inner { required bool yes = 1; } optional Inner inner = 6; extensions 100 to max; reserved 7, 9 to 11; }
"""
SPOILED = ["", "{", "}", '"', ",", ":", ";", "=", "1e999", "nan", "-5", "true", "9" * 40, "\x00", "é", "/*", "inf", "0"]


def build_net(path):
    net = caffe.Net(path, caffe.TEST)
    net.forward()


TEXTS = {
    "net": (A, build_net),
    "old net": (OLD_NET, build_net),
    "net message": (A, lambda path: read_net_message(path)),
    "solver": (SOLVER, read_solver),
    "custom.proto": (CUSTOM, load_custom_schema),
    "list of images": ("a.png 3\nfolder/b.jpg 1\n", read_image_list),
    "tensor factors": ('{"version": 1, "tensors": {"a": {"scale": 0.1, "zero_point": 3}}}', read_tensor_qparams),
}


def from_file(read):
    def reader(path):
        return read(Path(path).read_bytes(), path)

    return reader


def npz() -> bytes:
    content = io.BytesIO()
    np.savez(content, a=np.arange(6.0).reshape(2, 3), b=np.zeros(2, np.int8))
    return content.getvalue()


def png() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(content, "PNG")
    return content.getvalue()


BLOB = caffe_pb2.BlobProto(data=[1.0, 2.0], shape={"dim": [1, 2, 1]})
STATE = caffe_pb2.SolverState(iter=3, learned_net="a.caffemodel", history=[BLOB], current_step=1)
MODEL = caffe_pb2.NetParameter(name="n", layer=[{"name": "conv", "type": "Convolution", "blobs": [BLOB, BLOB]}])
DATUM = caffe_pb2.Datum(channels=1, height=2, width=2, data=b"\0\1\2\3", label=4)
BINARIES = {
    "caffemodel": (MODEL.SerializeToString(), from_file(read_weights)),
    "blob": (BLOB.SerializeToString(), from_file(read_blob)),
    "mean file": (BLOB.SerializeToString(), read_mean),
    "solver state": (STATE.SerializeToString(), read_state),
    "datum": (DATUM.SerializeToString(), from_file(parse_datum)),
    "IDX": (b"\0\0\x08\x02\0\0\0\2\0\0\0\3abcdef", read_idx),
    "arrays": (npz(), read_arrays),
    "image": (png(), read_image),
}
NAMES = {"mean file": "mean.binaryproto", "arrays": "a.npz", "image": "a.png", "tensor factors": "a.json"}
READERS = {**{name: (text.encode(), read) for name, (text, read) in TEXTS.items()}, **BINARIES}


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")

    def feed(name: str, data: bytes) -> bool:
        path = folder / NAMES.get(name, "file.bin")
        path.write_bytes(data)
        try:
            READERS[name][1](str(path))
        except AmctError:
            return False  # anything else fails the test
        return True

    return feed


@pytest.mark.parametrize("name", READERS)
def test_the_samples_themselves_are_read(name, feed):
    assert feed(name, READERS[name][0])


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=120))
def test_any_bytes(name, feed, data):
    feed(name, data)


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_cut_and_spoiled_text(name, feed, data):
    text = TEXTS[name][0]
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    feed(name, (text[:start] + data.draw(st.sampled_from(SPOILED)) + text[start + length :]).encode())
    feed(name, text[:start].encode())


@pytest.mark.parametrize("name", BINARIES)
@settings(max_examples=100)
@given(data=st.data())
def test_cut_and_damaged_bytes(name, feed, data):
    content = bytearray(BINARIES[name][0])
    feed(name, bytes(content[: data.draw(st.integers(0, len(content)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    feed(name, bytes(content))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["{" * 10_000, "a { " * 10_000, "message A { " * 10_000, "[" * 10_000, "9" * 100_000])
def test_hostile_text(name, feed, text):
    assert not feed(name, text.encode()) or name == "list of images"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_wrong_encodings(name, feed, encoding):
    feed(name, (TEXTS[name][0] + "# ä").encode(encoding))
