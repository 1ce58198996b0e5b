"""Our reader and writer of binary weights against protobuf itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from amct.caffe.engine.wire import blob_parts, layer_parts, read_blob, read_weights
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ParseError

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
floats = arrays.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False))
names = st.text(max_size=8)


@given(layers=st.lists(st.tuples(names, st.lists(floats, max_size=3)), max_size=4))
def test_reads_what_protobuf_writes(layers):
    message = caffe_pb2.NetParameter(name="net")
    for name, blobs in layers:
        layer = message.layer.add(name=name, type="T", bottom=["a"], phase=1)
        layer.convolution_param.num_output = 3
        for blob in blobs:
            layer.blobs.add(shape={"dim": blob.shape}, data=blob.ravel())
    found = read_weights(message.SerializeToString(), "x")
    assert [layer.name for layer in found] == [name for name, _ in layers]
    for layer, (_, blobs) in zip(found, layers, strict=True):
        assert [stored.shape for stored in layer.blobs] == [blob.shape for blob in blobs]
        for stored, blob in zip(layer.blobs, blobs, strict=True):
            np.testing.assert_array_equal(stored.values, blob.ravel())


@given(layers=st.lists(st.tuples(names, st.lists(floats, max_size=3)), max_size=4), with_diff=st.booleans())
def test_writes_what_protobuf_reads(layers, with_diff):
    parts = [caffe_pb2.NetParameter(name="net").SerializeToString()]
    for name, blobs in layers:
        pieces = [blob_parts(blob.shape, blob, blob * 2 if with_diff else None) for blob in blobs]
        parts += layer_parts(caffe_pb2.LayerParameter(name=name).SerializeToString(), pieces)
    message = caffe_pb2.NetParameter.FromString(b"".join(bytes(part) for part in parts))
    assert [layer.name for layer in message.layer] == [name for name, _ in layers]
    for layer, (_, blobs) in zip(message.layer, layers, strict=True):
        for stored, blob in zip(layer.blobs, blobs, strict=True):
            assert tuple(stored.shape.dim) == blob.shape
            np.testing.assert_array_equal(np.array(stored.data, np.float32), blob.ravel())
            np.testing.assert_array_equal(np.array(stored.diff, np.float32), blob.ravel() * 2 if with_diff else [])


def test_numbers_one_by_one_and_in_several_pieces():
    """Old writers do not pack; protobuf allows a packed field to come in parts."""
    value = np.array([1.5, -2.5], "<f4")
    loose = b"".join(b"\x2d" + number.tobytes() for number in value)
    packed = b"\x2a\x08" + value.tobytes()
    shape = b"\x3a\x02\x08\x04"
    for data in (shape + loose + loose, shape + packed + packed, packed + shape + packed):
        blob = read_blob(data, "x")
        assert blob.shape == (4,)
        assert blob.values.tolist() == [1.5, -2.5, 1.5, -2.5]


def test_integers_of_deployed_models():
    message = caffe_pb2.BlobProto(int8_data=bytes([1, 255, 128]))
    message.shape.dim.append(3)
    assert read_blob(message.SerializeToString(), "x").values.tolist() == [1, -1, -128]
    message = caffe_pb2.BlobProto(int32_data=[5, -7, 2**31 - 1, -(2**31)])
    message.shape.dim.append(4)
    assert read_blob(message.SerializeToString(), "x").values.tolist() == [5, -7, 2**31 - 1, -(2**31)]


def test_a_negative_dimension_is_damage():
    message = caffe_pb2.BlobProto(data=[1])
    message.shape.dim.append(-3)
    with pytest.raises(ParseError, match=r"a blob of negative size \(-3,\)"):
        read_blob(message.SerializeToString(), "x")


def test_a_file_of_more_than_64_megabytes(tmp_path, write):
    """protobuf's old limit; 17 million weights."""
    from amct.caffe import pycaffe as caffe

    path = write(
        'layer { name: "in" type: "Input" top: "d" input_param { shape { dim: 1 dim: 4250 } } }'
        'layer { name: "ip" type: "InnerProduct" bottom: "d" top: "y" inner_product_param { num_output: 4000 } }'
    )
    net = caffe.Net(path, caffe.TEST)
    net.params["ip"][0].data[3999, 4249] = 7
    net.save(str(tmp_path / "big.caffemodel"))
    assert (tmp_path / "big.caffemodel").stat().st_size > 64 * 2**20
    assert caffe.Net(path, caffe.TEST, weights=str(tmp_path / "big.caffemodel")).params["ip"][0].data[3999, 4249] == 7
